"""A drafter that goes out in a format of ours and is imported again drafts the same, and goes out again the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from foreign_drafts import CUT, FORMS, IDS, OWN_BLOCK, VOCAB, WHOLE, Pair, change, context, make_pair
from safetensors.torch import load_file, save_file
from tiny_drafts import ODD_TAPS, write_features
from tiny_targets import save_with_words, tiny_llama
from torch import Tensor

from components.contract import Draft, UserError
from components.drafts import quantise_draft, train_draft
from components.drafts.importing.eagle import SHORT_TAPS
from components.drafts.importing.imported_draft import READERS
from components.drafts.steps import DraftLayout, import_draft_fingerprint
from components.drafts.storage.files import read_record, save_draft
from components.publish.formats.eagle3 import TAPS
from components.publish.formats.registry import read_drafter_state, reopen_drafter, write_format
from components.publish.release.convert import convert_folder
from components.targets.shape import TapLayers


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(("form", "method", "settings", "draft_ids"), FORMS, ids=IDS)
def test_an_imported_drafter_is_the_one_that_was_exported(
    form: str, method: str, settings: dict[str, Any], draft_ids: Tensor, pair: Pair, tmp_path: Path
) -> None:
    network: Any = pair.network(method, settings, draft_ids)
    pair.write(form, network, settings, tmp_path / "out")
    draft = pair.adopt(tmp_path / "out", tmp_path / "draft")
    assert (draft.info["method"], draft.info["imported_layout"]) == (method, form)
    again = pair.opens(draft)
    assert torch.equal(again.draft_ids, draft_ids)
    mine, theirs = pair.guesses(network), pair.guesses(again)
    assert torch.equal(mine[0], theirs[0]) and mine[1] == theirs[1]
    text = pair.text()[0]
    depth = min(3, network.max_depth)
    assert torch.equal(pair.run(again, text, depth), theirs[0][:, :depth]), "its cached decoding drafts the same"
    write_format(form, read_drafter_state(draft.path), pair.source, tmp_path / "again")
    (before,), (after,) = ((tmp_path / name).glob("*.safetensors") for name in ("out", "again"))
    first, second = load_file(before), load_file(after)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("taps", [*ODD_TAPS, (3, 5, 6)], ids=str)
@pytest.mark.parametrize(
    ("form", "method", "settings"),
    [
        ("eagle3", "eagle3", {"fc_norm": True}),
        ("speculators", "eagle3", {"norm_before_fc": True}),
        ("speculators", "p-eagle", {"parallel_depth": 3}),
    ],
)
def test_a_drafter_of_other_layers_goes_out_and_comes_back_with_them(
    form: str, method: str, settings: dict[str, Any], taps: TapLayers, pair: Pair, tmp_path: Path
) -> None:
    network = pair.network(method, settings, taps=taps)
    pair.write(form, network, settings, tmp_path / "out")
    draft = pair.adopt(tmp_path / "out", tmp_path / "draft")
    again = pair.opens(draft)
    assert draft.info["tap_layers"] == read_record(draft.path)["tap_layers"] == list(taps) == list(again.needs_features)
    ids = pair.text()[0]
    out = pair.opened.forward(ids[None], pair.opened.new_cache(1, 64), logits="none", features=taps)
    guesses = [
        one.propose_at_every_position(ids, out.taps[0], out.last[0], 3).tokens.tolist() for one in (network, again)
    ]
    assert guesses[0] == guesses[1]
    state = read_drafter_state(draft.path)
    write_format(form, state, pair.source, tmp_path / "again")
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "again"))
    assert first == second and state.tap_layers == taps
    reopened = reopen_drafter(tmp_path / "again", pair.opened, pair.source)
    assert reopened.propose_at_every_position(ids, out.taps[0], out.last[0], 3).tokens.tolist() == guesses[0]
    converted = convert_folder(tmp_path / "out", "speculators", str(pair.source.folder), tmp_path / "converted")
    assert any(str(list(taps)) in line for line in converted)
    assert json.loads((tmp_path / "converted" / "config.json").read_text())[TAPS] == list(taps)
    change(tmp_path / "converted", lambda config: config.update({SHORT_TAPS: config.pop(TAPS)}))
    assert pair.adopt(tmp_path / "converted", tmp_path / "short").info["tap_layers"] == list(taps)


def test_what_is_no_drafter_is_said_in_one_line(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "config.json").write_text('{"model_type": "llama"}')
    save_file({"weights": torch.ones(3)}, tmp_path / "table" / "model.safetensors")
    with pytest.raises(UserError, match="no drafter in a format that is read here") as error:
        pair.adopt(tmp_path / "table", tmp_path / "draft")
    assert "\n" not in str(error.value)


def test_a_layout_can_be_named_and_every_one_of_them_has_a_reader() -> None:
    assert [reader.layout for reader in READERS] == list(get_args(DraftLayout))[1:]


def flat(config: dict[str, Any]) -> None:
    """A config of speculators as SpecForge writes it: the Llama fields at the top, none of speculators' own."""
    section = config.pop("transformer_layer_config")
    for name in [name for name in config if name.startswith("speculators")]:
        del config[name]
    config.update(section, architectures=["PEagleDraftModel"])


def test_p_eagle_is_read_with_flat_fields_too(pair: Pair, tmp_path: Path) -> None:
    settings = {"parallel_depth": 7, "num_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    network: Any = pair.network("p-eagle", settings)
    folder = change(pair.write("speculators", network, settings, tmp_path / "out"), flat)
    draft = pair.adopt(folder, tmp_path / "draft")
    assert (draft.info["method"], draft.info["imported_layout"]) == ("p-eagle", "p-eagle")
    mine, theirs = pair.guesses(network), pair.guesses(pair.opens(draft))
    assert torch.equal(mine[0], theirs[0])


def test_heads_under_the_names_of_vllm_are_the_same_heads(pair: Pair, tmp_path: Path) -> None:
    network: Any = pair.network("medusa", {"num_heads": 2, "num_layers": 1}, WHOLE)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
    folder = pair.write("medusa", network, {"num_heads": 2, "num_layers": 1}, tmp_path / "out")

    def renamed(tensors: dict[str, Tensor]) -> None:
        for head in range(2):
            tensors[f"blocks.{head}.layers.0.weight"] = tensors.pop(f"{head}.0.linear.weight")
            tensors[f"lm_heads.{head}.weight"] = tensors.pop(f"{head}.1.weight")
            del tensors[f"{head}.0.linear.bias"]

    change(folder, lambda config: config.update(medusa_fc_bias=False), renamed)
    draft = pair.adopt(folder, tmp_path / "draft")
    assert "no bias" in draft.info["import_remarks"][0]
    assert torch.equal(pair.guesses(pair.opens(draft))[0], pair.guesses(network)[0])


def test_a_language_model_that_is_not_like_ours_is_used_as_it_is(pair: Pair, tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(3, VOCAB)]
    small = tiny_llama(VOCAB, lambda name: 4.0, num_layers=2, seed=1, head_dim=12)
    save_with_words(small, tmp_path / "small", words)
    draft = pair.adopt(tmp_path / "small", tmp_path / "draft")
    assert draft.info["method"] == "draft-model" and draft.info["trained"] is False
    assert "it cannot be trained here" in draft.info["import_remarks"][0]
    chains = pair.guesses(pair.opens(draft), 2)[0]
    ids = pair.text()[0]
    with torch.no_grad():
        expected = small(ids[None, 1:]).logits[0].argmax(-1)
    assert torch.equal(chains[4:, 0], expected[4:]) or torch.equal(chains[:, 0], expected)
    save_with_words(small, tmp_path / "other", words[::-1])
    with pytest.raises(UserError, match="does not share the target's tokenizer"):
        pair.adopt(tmp_path / "other", tmp_path / "refused")


def test_an_embedding_of_its_own_is_decoded_with_and_a_copy_is_not_stored(pair: Pair, tmp_path: Path) -> None:
    own: Any = pair.network("eagle3", {"own_embedding": True})
    shared: Any = pair.network("eagle3", {})
    shared.load_state_dict({name: t for name, t in own.state_dict().items() if name != "embed_tokens.weight"})
    folder = pair.write("eagle3", own, {"own_embedding": True}, tmp_path / "own")
    draft = pair.adopt(folder, tmp_path / "draft")
    assert "embed_tokens.weight" not in dict(own.named_parameters()), "training leaves it as it is"
    assert "is its own (96 of 96 rows differ" in "; ".join(draft.info["import_remarks"])
    assert not torch.equal(pair.guesses(shared)[0], pair.guesses(pair.opens(draft))[0])
    for dtype in (torch.float32, torch.bfloat16):
        copy = {"embed_tokens.weight": pair.opened.embedding.to(dtype)}
        change(folder, None, lambda tensors, copy=copy: tensors.update(copy))
        again = pair.adopt(folder, tmp_path / f"copy-{dtype}")
        assert "embed_tokens.weight" not in load_file(again.path / "model.safetensors")
        assert torch.equal(pair.guesses(shared)[0], pair.guesses(pair.opens(again))[0])


@pytest.mark.parametrize("mask", [None, "5", [5], 96])
def test_a_mask_token_that_is_no_token_is_said(mask: Any, pair: Pair, tmp_path: Path) -> None:
    folder = pair.write("speculators", pair.network("p-eagle", {}), {}, tmp_path / "out")
    change(folder, lambda config: config.update(mask_token_id=mask))
    with pytest.raises(UserError, match=r"is no row of embed_tokens\.weight"):
        pair.adopt(folder, tmp_path / "draft")


def test_biases_of_zero_in_eight_bits_are_left_out(pair: Pair, tmp_path: Path) -> None:
    folder = pair.write("mimo", pair.network("mtp", {"mtp_modules": 1}, WHOLE), {"mtp_modules": 1}, tmp_path / "out")
    name = "model.mtp_layers.0.self_attn.k_proj.bias"
    change(folder, None, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert f"{name} is all zero and left out" in pair.adopt(folder, tmp_path / "draft").info["import_remarks"]


def test_a_format_that_has_no_norms_of_queries_refuses_them(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eagle3: this drafter's block is Qwen3's \(qk_norm\)"):
        pair.write("eagle3", pair.network("eagle3", {"qk_norm": True}), {"qk_norm": True}, tmp_path / "out")


@pytest.mark.parametrize("form", ["speculators", "eagle1"])
def test_training_goes_on_from_an_imported_drafter(form: str, pair: Pair, tmp_path: Path) -> None:
    method = "eagle3" if form == "speculators" else form
    settings = {"norm_before_residual": True, "qk_norm": True, "own_embedding": True, **OWN_BLOCK}
    settings = settings if method == "eagle3" else {"intermediate_size": 40}
    network = pair.network(method, settings, CUT if method == "eagle3" else WHOLE)
    draft = pair.adopt(pair.write(form, network, settings, tmp_path / "out"), tmp_path / "draft")
    features = write_features(pair.opened, tmp_path / "features")

    def tune(told: dict[str, Any], name: str) -> Draft:
        return train_draft(
            pair.artifact,
            features,
            draft,
            method=method,
            settings={method: told},
            num_steps=2,
            ctx=context(tmp_path / name),
        )

    own = read_record(draft.path)["settings"]
    tuned = tune({}, "tuned")  # what is left at its default is as the imported drafter has it
    assert {**read_record(tuned.path)["settings"], "init_seed": None} == {**own, "init_seed": None}
    assert tuned.info["continued_from"] == draft.key and tuned.info["draft_vocab_size"] == network.draft_ids.numel()
    with pytest.raises(UserError, match="intermediate_size"):
        tune({"intermediate_size": 56}, "no")


@pytest.mark.parametrize(("form", "method"), [("eagle3", "eagle3"), ("speculators", "p-eagle"), ("mtp", "mtp")])
def test_packed_weights_are_read_as_the_numbers_they_stand_for(
    form: str, method: str, pair: Pair, tmp_path: Path
) -> None:
    network: Any = pair.network(method, {}, CUT if method != "mtp" else WHOLE)
    (tmp_path / "own").mkdir()
    facts = {"target_key": "t", "num_steps": network.num_steps, "max_depth": network.max_depth}
    save_draft(tmp_path / "own", method, {}, pair.opened, network.draft_ids, network.state_dict(), facts)
    own = Draft(key="o" * 64, path=tmp_path / "own", info=facts)
    small = quantise_draft(own, weights="int8", group_size=None, keep=["fc"], ctx=context(tmp_path / "small"))
    write_format(form, read_drafter_state(small.path), pair.source, tmp_path / "out")
    draft = pair.adopt(tmp_path / "out", tmp_path / "draft")
    assert "int8" in draft.info["import_remarks"][-1]
    mine, theirs = pair.guesses(pair.opens(small)), pair.guesses(pair.opens(draft))
    assert torch.equal(mine[0], theirs[0]) and mine[1] == theirs[1]


def test_the_key_follows_the_content_of_a_folder_and_the_name_of_a_hub_id(pair: Pair, tmp_path: Path) -> None:
    folder = pair.write("eagle3", pair.network("eagle3", {}), {}, tmp_path / "out")
    before = import_draft_fingerprint({"model": str(folder)})
    assert before.keys() == {"config.json", "model.safetensors"}
    change(folder, None, lambda tensors: tensors["norm.weight"].mul_(2.0))
    after = import_draft_fingerprint({"model": str(folder)})
    assert before["config.json"] == after["config.json"] and before["model.safetensors"] != after["model.safetensors"]
    assert import_draft_fingerprint({"model": "owner/name@main"}) == {}
