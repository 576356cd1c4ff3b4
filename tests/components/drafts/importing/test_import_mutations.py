"""A changed checkpoint is refused in one line that names the change, or imported as exactly what it says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_drafts import CUT, OWN_BLOCK, WHOLE, Pair, change, make_pair
from safetensors.torch import load_file
from torch import Tensor

from components.contract import UserError

Config = Callable[[dict[str, Any]], object]
Tensors = Callable[[dict[str, Tensor]], object]
TAPS = "eagle_aux_hidden_state_layer_ids"
STRANGE_NORM = torch.linspace(0.5, 1.5, 96)
STRANGE_TABLE = torch.linspace(-2.0, 2.0, 96 * 32).view(96, 32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    return make_pair(tmp_path_factory.mktemp("pair"))


def put(**values: Any) -> Callable[[dict[str, Any]], object]:
    """Set fields of a config, or tensors; dots are written as two underscores."""
    return lambda content: content.update({name.replace("__", "."): value for name, value in values.items()})


def drop(name: str) -> Tensors:
    return lambda tensors: tensors.pop(name)


def edit(name: str, how: Callable[[Tensor], Tensor]) -> Tensors:
    return lambda tensors: tensors.update({name: how(tensors[name])})


def swap(first: str, second: str) -> Tensors:
    return lambda tensors: tensors.update({first: tensors[second].clone(), second: tensors[first].clone()})


def absolute(d2t: Tensor) -> Tensor:
    return d2t + torch.arange(len(d2t))


def absolute_alone(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = absolute(tensors["d2t"])
    del tensors["t2d"]


REFUSED: dict[str, tuple[Config | None, Tensors | None, str]] = {
    "absolute d2t": (None, edit("d2t", absolute), "d2t holds target ids (as t2d shows), must hold offsets"),
    "absolute d2t, no t2d": (None, absolute_alone, "it seems to hold target ids, and must hold offsets"),
    "d2t of floats": (None, edit("d2t", lambda t: t.float()), "d2t is float32 [47], must be a row of integers"),
    "d2t upside down": (None, edit("d2t", lambda t: t.flip(0)), "d2t: the target ids i + d2t[i] do not ascend"),
    "d2t too short": (None, edit("d2t", lambda t: t[:-1]), "t2d and d2t name different tokens"),
    "no d2t": (None, drop("d2t"), "d2t is missing, and lm_head.weight has 47 rows"),
    "another t2d": (None, edit("t2d", lambda t: t.roll(1)), "t2d and d2t name different tokens"),
    "t2d of another vocabulary": (None, edit("t2d", lambda t: t[:90]), "t2d is [90], the target's vocabulary has 96"),
    "outputs as inputs": (
        put(eagle_config={TAPS: [2, 4, 5]}, **{TAPS: [2, 4, 5]}),
        None,
        f"{TAPS} stands for hidden_states[2, 4, 5]; eagle_config.{TAPS} stands for hidden_states[3, 5, 6]",
    ),
    "the last layer": (put(**{TAPS: [2, 4, 8]}), None, "that is hidden_states[2, 4, 8]: of a target of 8 layers"),
    "the embedding": (put(**{TAPS: [0, 4, 5]}), None, "must be different layers from 1 on, ascending"),
    "taps in another order": (put(**{TAPS: [4, 2, 5]}), None, "must be different layers from 1 on, ascending"),
    "four taps": (put(**{TAPS: [2, 4, 5, 6]}), None, "fc.weight is [32, 96], must be [32, 128]"),
    "taps of no number": (put(**{TAPS: "all"}), None, "is 'all', no list of layers"),
    "no hidden_norm": (None, drop("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
    "no input norm": (None, drop("midlayer.input_layernorm.weight"), "midlayer.input_layernorm.weight is missing"),
    "no last norm": (None, drop("norm.weight"), "norm.weight is missing"),
    "a norm too many": (None, put(input_norm__weight=STRANGE_NORM), "norm_before_fc is off and input_norm.weight is"),
    "a norm too few": (put(fc_norm=True), None, "fc_norm is on and fc_norm.0.weight is missing"),
    "a flag of words": (put(norm_before_residual="yes"), None, "norm_before_residual is 'yes', must be true or false"),
    "another first norm": (
        put(eagle_config={"use_input_layernorm_in_first_layer": False}),
        None,
        "eagle_config.use_input_layernorm_in_first_layer is False: another network",
    ),
    "transposed fc": (
        None,
        edit("fc.weight", lambda t: t.T),
        "fc.weight is [96, 32], must be [32, 96] (it is transposed)",
    ),
    "fc of EAGLE-1": (None, edit("fc.weight", lambda t: t[:, :64]), "fc.weight is [32, 64], must be [32, 96]"),
    "narrow q": (
        None,
        edit("midlayer.self_attn.q_proj.weight", lambda t: t[:, :32]),
        "midlayer.self_attn.q_proj.weight",
    ),
    "another vocabulary": (put(vocab_size=97), None, "vocab_size is 97, the target's is 96"),
    "another draft vocabulary": (
        put(draft_vocab_size=50),
        None,
        "draft_vocab_size is 50, and lm_head.weight has 47 rows",
    ),
    "another width": (put(hidden_size=64), None, "hidden_size is 64, the drafter here has the target's 32"),
    "of a wider target": (put(target_hidden_size=64), None, "target_hidden_size is 64, the target's width is 32"),
    "two layers": (put(num_hidden_layers=2), None, "it has 2 layers, an EAGLE-3 drafter here has one"),
    "norms of q": (
        None,
        put(midlayer__self_attn__q_norm__weight=torch.ones(8)),
        "q_norm.weight is no part of an eagle3",
    ),
    "a bias": (
        None,
        put(midlayer__self_attn__q_proj__bias=torch.ones(32)),
        "q_proj.bias is not zero, and that layer has no",
    ),
    "an embedding of another vocabulary": (
        None,
        put(embed_tokens__weight=torch.randn(97, 32)),
        "embed_tokens.weight is [97, 32], the target's is [96, 32]",
    ),
    "NaN": (None, edit("norm.weight", lambda t: t * float("nan")), "norm.weight holds NaN or infinity"),
    "whole numbers": (None, edit("norm.weight", lambda t: t.int()), "norm.weight is int32, no floating-point weights"),
    "another block": (put(model_type="gemma"), None, "model_type is 'gemma', whose block Draftsmith does not have"),
    "a block with norms": (put(model_type="qwen3"), None, "midlayer.self_attn.k_norm.weight is missing"),
    "scaled as it goes": (
        put(rope_scaling={"type": "dynamic", "factor": 4.0}),
        None,
        "rope_scaling is of rope_type dynamic; drafters here have linear or llama3 or yarn",
    ),
    "scaled by yarn and more": (
        put(rope_scaling={"type": "yarn", "factor": 4.0, "short_factor": 2.0}),
        None,
        "rope_scaling: 'short_factor' means nothing for yarn",
    ),
    "scaled by yarn by nothing": (
        put(rope_scaling={"type": "yarn", "factor": 0}),
        None,
        "rope_scaling: factor is 0, must be a positive number",
    ),
    "quantised": (put(quantization_config={"quant_method": "awq"}), None, "its weights are quantised"),
    "code of its own": (put(auto_map={"AutoModel": "eagle.Model"}), None, "auto_map asks for code of its own"),
}
SAID: dict[str, tuple[Config | None, Tensors | None, str]] = {
    "another rotary base": (put(rope_theta=777.0), None, "rope_theta is 777.0, the target's is 10000.0"),
    "positions scaled": (put(rope_scaling={"type": "linear", "factor": 4.0}), None, "positions are scaled (linear)"),
    "positions scaled by yarn": (
        put(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}),
        None,
        "positions are scaled (yarn)",
    ),
    "an embedding of its own": (
        None,
        put(embed_tokens__weight=torch.randn(96, 32, generator=torch.Generator().manual_seed(1))),
        "embed_tokens.weight is its own (96 of 96 rows differ from the target's",
    ),
    "another epsilon": (put(rms_norm_eps=0.5), None, "rms_norm_eps is 0.5, the target's is"),
    "fewer, wider heads": (
        put(num_attention_heads=2, num_key_value_heads=1, head_dim=16),
        None,
        "num_attention_heads is 2, the target's is 4",
    ),
    "norm before residual": (put(norm_before_residual=True), None, ""),
    "doubled hidden_norm": (None, edit("midlayer.hidden_norm.weight", lambda t: 2 * t), ""),
    "norms exchanged": (None, swap("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"), ""),
    "taps in another order": (None, edit("fc.weight", lambda t: t.roll(32, 1)), ""),
    "gate and up exchanged": (None, swap("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"), ""),
    "hidden state first": (None, edit("midlayer.self_attn.v_proj.weight", lambda t: t.roll(32, 1)), ""),
}
SAME: dict[str, tuple[Config | None, Tensors | None, str]] = {
    "a short table": (put(max_position_embeddings=2048), None, "max_position_embeddings is 2048"),
    "biases of zero": (None, put(midlayer__self_attn__q_proj__bias=torch.zeros(32)), "is all zero and left out"),
    "frozen copies": (None, put(verifier_norm__weight=torch.ones(32)), "verifier_norm.weight is a frozen copy"),
    "no t2d": (None, drop("t2d"), "there is no t2d"),
    "both kinds of taps": (put(**{TAPS: [2, 4, 5], "eagle_config": {TAPS: [1, 3, 4]}}), None, ""),
    "positions of images": (put(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}), None, ""),
    "a small d2t": (None, edit("d2t", lambda t: t.int()), ""),
}


FIRST = "model.layers.8."


def section(**values: Any) -> Config:
    """Set fields of the section in which speculators keeps the sizes."""
    return lambda config: put(rope_parameters=None, **values)(config["transformer_layer_config"])


def moved(before: str, after: str) -> Tensors:
    """Give the tensors whose names begin so another beginning."""
    return lambda tensors: [
        tensors.update({after + n[len(before) :]: tensors.pop(n)}) for n in [*tensors] if n.startswith(before)
    ]


SPECULATORS: dict[str, tuple[Config | None, Tensors | None, str]] = {
    "absolute d2t": (None, edit("d2t", absolute), "d2t holds target ids (as t2d shows), must hold offsets"),
    "absolute d2t, no t2d": (None, absolute_alone, "it seems to hold target ids, and must hold offsets"),
    "another t2d": (None, edit("t2d", lambda t: t.roll(1)), "t2d and d2t name different tokens"),
    "the last layer": (put(**{TAPS: [2, 4, 8]}), None, "that is hidden_states[2, 4, 8]: of a target of 8 layers"),
    "two taps": (put(**{TAPS: [2, 4]}), None, "fc.weight is [32, 96], must be [32, 64]"),
    "no hidden_norm": (None, drop("layers.0.hidden_norm.weight"), "layers.0.hidden_norm.weight is missing"),
    "a norm too few": (put(fc_norm=True), None, "fc_norm is on and fc_norm.0.weight is missing"),
    "transposed fc": (None, edit("fc.weight", lambda t: t.T), "fc.weight is [96, 32], must be [32, 96]"),
    "scaled as it goes": (section(rope_scaling={"type": "dynamic", "factor": 4.0}), None, "is of rope_type dynamic"),
    "another vocabulary": (section(vocab_size=97), None, "vocab_size is 97, the target's is 96"),
    "another draft vocabulary": (put(draft_vocab_size=50), None, "draft_vocab_size is 50, and lm_head.weight has 47"),
    "another width": (section(hidden_size=64), None, "hidden_size is 64, the drafter here has the target's 32"),
    "more heads": (section(num_attention_heads=8), None, "layers.0.self_attn.q_proj.weight is ["),
    "another kind": (
        put(speculators_model_type="mlp"),
        None,
        "speculators_model_type is 'mlp'; eagle3, peagle, dflash, dspark and mtp are",
    ),
    "no section": (lambda config: config.pop("transformer_layer_config"), None, "has no transformer_layer_config"),
}
OTHER_REFUSED: dict[str, dict[str, tuple[Config | None, Tensors | None, str]]] = {
    "speculators": SPECULATORS,
    "p-eagle": {
        **SPECULATORS,
        "no mask": (None, drop("mask_hidden"), "mask_hidden is missing"),
        "a mask beyond": (put(mask_token_id=96), None, "mask_token_id 96 is no row of embed_tokens.weight"),
        "norm before residual": (put(norm_before_residual=True), None, "norm_before_residual is on, which a P-EAGLE"),
        "three layers": (section(num_hidden_layers=3), None, "layers.2.input_layernorm.weight is missing"),
    },
    "medusa": {
        "three heads": (put(medusa_num_heads=3), None, "2.0.linear.bias is missing"),
        "one head": (put(medusa_num_heads=1), None, "1.0.linear.bias is no part of a medusa drafter"),
        "heads of words": (put(medusa_num_heads="two"), None, "medusa_num_heads is 'two'; drafters here have 1 to 8"),
        "no layers": (put(medusa_num_layers=0), None, "medusa_num_layers is 0; drafters here have 1 to 4"),
        "two layers": (put(medusa_num_layers=2), None, "0.1.linear.bias is missing"),
        "another vocabulary": (put(vocab_size=97), None, "vocab_size is 97, the target's is 96"),
        "another width": (put(hidden_size=64), None, "hidden_size is 64, the target's is 32"),
        "a gap": (None, moved("1.", "2."), "1.0.linear.bias is missing"),
        "transposed head": (None, edit("0.1.weight", lambda t: t.T), "0.1.weight is [32, 96], must be [96, 32]"),
        "quantised": (put(quantization_config={"quant_method": "awq"}), None, "its weights are quantised"),
        "code of its own": (put(auto_map={"AutoModel": "m.M"}), None, "auto_map asks for code of its own"),
    },
    "mtp": {
        "three modules": (put(num_nextn_predict_layers=3), None, "model.layers.10.eh_proj.weight is missing"),
        "no number": (put(num_nextn_predict_layers=None), None, "num_nextn_predict_layers is None; drafters here have"),
        "another state": (put(mtp_first_hidden="taps"), None, "mtp_first_hidden is 'taps', must be post_norm or pre_"),
        "another depth": (put(num_hidden_layers=7), None, "num_layers is 7, the drafter here has the target's 8"),
        "another place": (None, moved(FIRST, "model.layers.7."), "model.layers.8.eh_proj.weight is missing"),
        "another vocabulary": (put(vocab_size=97), None, "vocab_size is 97, the target's is 96"),
        "another width": (put(hidden_size=64), None, "hidden_size is 64, the drafter here has the target's 32"),
        "more heads": (put(num_attention_heads=8), None, "num_attention_heads is 8, the drafter here has the target's"),
        "another epsilon": (put(rms_norm_eps=0.5), None, "rms_norm_eps is 0.5, the drafter here has the target's"),
        "another rotary base": (put(rope_theta=777.0, rope_parameters=None), None, "rope_theta is 777.0, the drafter"),
        "scaled": (
            put(rope_scaling={"type": "linear", "factor": 4.0}, rope_parameters=None),
            None,
            "its rotary positions are scaled (linear), those of a module here are not",
        ),
        "another block": (put(model_type="qwen3"), None, "model_type is 'qwen3', whose block Draftsmith does not have"),
        "another activation": (put(hidden_act="gelu"), None, "hidden_act is 'gelu'; the block here has silu"),
        "no enorm": (None, drop(f"{FIRST}enorm.weight"), f"{FIRST}enorm.weight is missing"),
        "transposed join": (None, edit(f"{FIRST}eh_proj.weight", lambda t: t.T), "(it is transposed)"),
        "an embedding": (None, put(model__layers__8__embed_tokens__weight=STRANGE_TABLE), "is its own and not the"),
        "a bias": (None, put(model__layers__8__self_attn__q_proj__bias=torch.ones(32)), "q_proj.bias is not zero"),
    },
}


def first_logits(pair: Pair, draft: Any) -> Tensor:
    """Of the first drafting step at every position of a text."""
    ids, taps, last = pair.text()
    features = draft.features(taps[None, :-1], last[None, :-1])
    from components.drafts.methods.training_time_test import Unrolled

    rows = torch.arange(len(ids) - 1)[None]
    with torch.no_grad():
        logits: Tensor = draft.draft_logits(Unrolled(draft, features, ids[None, 1:], rows).step(ids[None, 1:]))
    return logits


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name_in_one_line(name: str, pair: Pair, tmp_path: Path) -> None:
    config, tensors, said = REFUSED[name]
    pair.write("eagle3", pair.network("eagle3", {}), {}, tmp_path / "out")
    change(tmp_path / "out", config, tensors)
    with pytest.raises(UserError) as error:
        pair.adopt(tmp_path / "out", tmp_path / "draft")
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "draft" / "draft.json").exists()


@pytest.mark.parametrize("name", [*SAID, *SAME])
def test_what_fits_is_imported_as_what_it_says(name: str, pair: Pair, tmp_path: Path) -> None:
    config, tensors, said = (SAID | SAME)[name]
    network = pair.network("eagle3", {})
    pair.write("eagle3", network, {}, tmp_path / "out")
    change(tmp_path / "out", config, tensors)
    draft = pair.adopt(tmp_path / "out", tmp_path / "draft")
    assert said in "; ".join(draft.info["import_remarks"])
    before, after = first_logits(pair, network), first_logits(pair, pair.opens(draft))
    if name in SAME:
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    else:
        assert float((after - before).abs().max()) > 1e-3, "nothing is repaired: it drafts as the file says"


def test_every_fault_of_a_checkpoint_stands_in_one_line(pair: Pair, tmp_path: Path) -> None:
    pair.write("speculators", pair.network("eagle3", {}), {}, tmp_path / "out")
    change(
        tmp_path / "out",
        put(norm_before_fc=True, **{TAPS: [3, 5, 8]}),
        lambda tensors: (absolute_alone(tensors), tensors.pop("layers.0.hidden_norm.weight")),
    )
    with pytest.raises(UserError) as error:
        pair.adopt(tmp_path / "out", tmp_path / "draft")
    line = str(error.value)
    assert all(word in line for word in ("d2t", TAPS, "norm_before_fc is on and input_norm.weight is missing"))
    change(
        tmp_path / "out", put(norm_before_fc=False, **{TAPS: [2, 4, 5]}), edit("d2t", lambda _: CUT - torch.arange(47))
    )
    with pytest.raises(UserError, match=r"layers\.0\.hidden_norm\.weight is missing"):
        pair.adopt(tmp_path / "out", tmp_path / "draft2")


FORMS = {
    "eagle3": ("eagle3", {"fc_norm": True}, CUT),
    "speculators": ("eagle3", {"norm_before_fc": True, **OWN_BLOCK}, CUT),
    "p-eagle": ("p-eagle", {"parallel_depth": 3, "num_layers": 2}, CUT),
    "eagle1": ("eagle1", {"fc_bias": True}, WHOLE),
    "medusa": ("medusa", {"num_heads": 2}, WHOLE),
    "mtp": ("mtp", {"mtp_modules": 2}, WHOLE),
    "mimo": ("mtp", {"mtp_modules": 1}, WHOLE),
    "causal-lm": ("draft-model", {"num_layers": 2}, WHOLE),
}
FREE = {"fc.bias", "t2d", "embed_tokens.weight", "model.embed_tokens.weight", "lm_head.weight"}
"""Tensors that some format may lack, or that a change can leave in use by another way."""


def structural(stored: dict[str, Tensor], chosen: random.Random) -> tuple[str, Tensors]:
    """A change of one tensor that no drafter can have: (what the line must name, the change)."""
    weights = sorted(name for name in stored if stored[name].is_floating_point() and name not in FREE)
    weights = [name for name in weights if not name.endswith("_proj.bias")]  # zeros of a block like Qwen2's
    kind = chosen.choice(["drop", "turn", "grow", "cut", "nan", "int", "extra", "rename"])
    name = chosen.choice(weights)
    if kind == "turn":
        name = chosen.choice(
            [one for one in weights if stored[one].ndim == 2 and len({*stored[one].shape}) == 2] or weights
        )
        return name, edit(name, lambda t: t.T if t.ndim == 2 and len({*t.shape}) == 2 else t[:-1])
    changes: dict[str, Tensors] = {
        "drop": drop(name),
        "grow": edit(name, lambda t: torch.cat((t, t[:1]))),
        "cut": edit(name, lambda t: t[:-1]),
        "nan": edit(name, lambda t: torch.full_like(t, float("nan"))),
        "int": edit(name, lambda t: t.to(torch.int32)),
        "rename": lambda tensors: tensors.update({f"{name}_": tensors.pop(name)}),
    }
    if kind == "extra":
        return f"{name}.stranger", lambda tensors: tensors.update({f"{name}.stranger": torch.ones(3)})
    return name, changes[kind]


@pytest.mark.parametrize("form", FORMS)
def test_thirty_changed_tensors_of_each_format_are_refused_by_name(form: str, pair: Pair, tmp_path: Path) -> None:
    method, settings, ids = FORMS[form]
    written = "speculators" if form == "p-eagle" else form
    folder = pair.write(written, pair.network(method, settings, ids), settings, tmp_path / "out")
    (file,) = folder.glob("*.safetensors")
    whole, stored, chosen = file.read_bytes(), load_file(file), random.Random(form)
    for number in range(30):
        named, mutation = structural(stored, chosen)
        change(folder, None, mutation)
        with pytest.raises(UserError) as error:
            pair.adopt(folder, tmp_path / f"draft-{number}", layout=written)
        line = str(error.value)
        assert named in line and "\n" not in line, f"{number}: {named} is not in: {line}"
        file.write_bytes(whole)
    assert pair.adopt(folder, tmp_path / "whole").info["method"] == method


@pytest.mark.parametrize("form", OTHER_REFUSED)
def test_what_other_formats_cannot_mean_is_refused_by_name(form: str, pair: Pair, tmp_path: Path) -> None:
    method, settings, ids = FORMS[form]
    written = "speculators" if form == "p-eagle" else form
    folder = pair.write(written, pair.network(method, settings, ids), settings, tmp_path / "out")
    whole = {file: file.read_bytes() for file in folder.iterdir()}
    for number, (name, (config, tensors, said)) in enumerate(OTHER_REFUSED[form].items()):
        change(folder, config, tensors)
        with pytest.raises(UserError) as error:
            pair.adopt(folder, tmp_path / f"draft-{number}")
        assert said in str(error.value) and "\n" not in str(error.value), f"{name}: {error.value}"
        for file, content in whole.items():
            file.write_bytes(content)


def test_a_checkpoint_without_taps_means_the_usual_ones(tmp_path: Path) -> None:
    shallow = make_pair(tmp_path, num_layers=5)
    folder = shallow.write("eagle3", shallow.network("eagle3", {}), {}, tmp_path / "out")
    assert shallow.adopt(folder, tmp_path / "draft").info["method"] == "eagle3"

    def unnamed(config: dict[str, Any]) -> None:
        del config[TAPS], config["eagle_config"]

    change(folder, unnamed)
    with pytest.raises(UserError, match=f"{TAPS} is missing, and of 5 layers engines have no usual ones"):
        shallow.adopt(folder, tmp_path / "refused")
