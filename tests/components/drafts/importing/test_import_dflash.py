"""DFlash and DSpark as four projects write them draft the same here; what is another network is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_drafts import CUT, VOCAB, WHOLE, Pair, change, make_pair
from safetensors.torch import save_file
from torch import Tensor

from components.contract import UserError
from components.drafts.network.layers import head_rows
from components.drafts.network.vocabulary import membership_of, offsets_of

TAPS = (1, 4, 6)
SIZES = {"block_size": 4, "num_layers": 2, "mask_token_id": 95, "num_key_value_heads": 1, "head_dim": 12}
Config = dict[str, Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    return make_pair(tmp_path_factory.mktemp("pair"))


def block_of(network: Any) -> Config:
    """Its fields as Qwen3's configuration has them."""
    shape, target = network.shape, network.target.shape
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    block = {name: getattr(shape, name) for name in (*names, "rms_norm_eps")}
    rope = {"rope_theta": target.rope_theta, "max_position_embeddings": target.max_position_embeddings}
    count, size = network.settings.num_layers, network.settings.window
    kinds = {"layer_types": ["sliding_attention"] * count, "sliding_window": size, "use_sliding_window": True}
    rope |= kinds if size else {}
    return {"model_type": "qwen3", "vocab_size": VOCAB, "num_hidden_layers": count, "hidden_act": "silu"} | block | rope


def speculators(network: Any) -> Config:
    """As the speculators library writes them: ids of inputs, the block in a section."""
    heads = {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}
    return {
        "speculators_model_type": network.method,
        "transformer_layer_config": block_of(network),
        "block_size": 4,
        "mask_token_id": 95,
        "aux_hidden_state_layer_ids": list(TAPS),
        "sample_from_anchor": network.settings.sample_from_anchor,
        "sliding_window_non_causal": True,
        **(heads if network.method == "dspark" else {}),
    }


def inner(network: Any) -> Config:
    """As z-lab and SpecForge write them: ids of outputs, inside `dflash_config`."""
    heads = {"markov_rank": 8, "markov_head_type": "vanilla"} if network.method == "dspark" else {}
    own = {"mask_token_id": 95, "target_layer_ids": [one - 1 for one in TAPS], **heads}
    return {**block_of(network), "architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": own}


def flat(network: Any) -> Config:
    """As DeepSpec writes DSpark: everything at the top."""
    config = inner(network)
    own = config.pop("dflash_config")
    return {**config, **own, "architectures": ["Qwen3DSparkModel"]}


def written(network: Any, config: Config, folder: Path, **more: Tensor) -> Path:
    """With copies of the target's embedding and head, as speculators and DeepSpec have them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    tensors["embed_tokens.weight"] = network.target.embedding.clone()
    tensors["lm_head.weight"] = head_rows(network.target, network.draft_ids).clone()
    if len(network.draft_ids) < VOCAB:
        tensors |= {"d2t": offsets_of(network.draft_ids), "t2d": membership_of(network.draft_ids, VOCAB)}
    save_file(tensors | more, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("method", "form", "from_anchor", "draft_ids"),
    [
        ("dflash", speculators, False, CUT),
        ("dflash", speculators, True, WHOLE),
        ("dflash", inner, False, WHOLE),
        ("dspark", speculators, False, CUT),
        ("dspark", inner, True, WHOLE),
        ("dspark", flat, True, WHOLE),
    ],
)
def test_an_imported_block_drafter_is_the_one_that_was_written(
    method: str, form: Callable[[Any], Config], from_anchor: bool, draft_ids: Tensor, pair: Pair, tmp_path: Path
) -> None:
    more = {"markov_rank": 8} if method == "dspark" else {"window": 5 * (form is speculators)}
    network = pair.network(method, {**SIZES, **more, "sample_from_anchor": from_anchor}, draft_ids, TAPS)
    draft = pair.adopt(written(network, form(network), tmp_path / "there"), tmp_path / "here")
    again = pair.opens(draft)
    assert (draft.info["method"], draft.info["imported_layout"]) == (method, "dflash")
    assert torch.equal(again.draft_ids, draft_ids) and again.needs_features == TAPS
    assert again.num_steps == network.num_steps == 4 - (not from_anchor)
    ids = pair.text()[0]
    out = pair.opened.forward(ids[None], pair.opened.new_cache(1, 64), logits="none", features=TAPS)
    mine, theirs = (one.propose_at_every_position(ids, out.taps[0], out.last[0], 4) for one in (network, again))
    assert torch.equal(mine.tokens, theirs.tokens)
    torch.testing.assert_close(mine.confidence, theirs.confidence)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated': another network than dspark's"),
        ({"enable_confidence_head": False}, "enable_confidence_head is False: another network"),
        ({"mask_token_id": None}, "mask_token_id is None, no number"),
        ({"aux_hidden_state_layer_ids": [1, 4, 8]}, "of a target of 8 layers"),
        ({"block_size": 40}, "block_size is 40"),
        ({"mask_token_id": 400}, "mask_token_id 400 is none of the target's 96 tokens"),
        ({"aux_hidden_state_layer_ids": [1, 4]}, r"fc.weight is \[32, 96\], must be \[32, 64\]"),
    ],
)
def test_another_network_is_refused_in_one_line(edit: Config, fault: str, pair: Pair, tmp_path: Path) -> None:
    network = pair.network("dspark", {**SIZES, "markov_rank": 8, "sample_from_anchor": True}, CUT, TAPS)
    folder = written(network, speculators(network), tmp_path / "there")
    change(folder, lambda config: config.update(edit))
    with pytest.raises(UserError, match=fault) as refused:
        pair.adopt(folder, tmp_path / "here")
    assert "\n" not in str(refused.value)


def test_a_window_over_masked_blocks_and_a_head_of_its_own_are_refused(pair: Pair, tmp_path: Path) -> None:
    network = pair.network("dflash", {**SIZES, "window": 4}, CUT, TAPS)
    config = speculators(network) | {"sliding_window_non_causal": False}
    folder = written(network, config, tmp_path / "there", **{"lm_head.weight": torch.ones(len(CUT), 32)})
    with pytest.raises(UserError, match="a window without sliding_window_non_causal") as refused:
        pair.adopt(folder, tmp_path / "here")
    assert "lm_head.weight is its own" in str(refused.value)
