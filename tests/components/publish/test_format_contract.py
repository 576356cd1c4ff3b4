"""What every format keeps: a drafter goes out, is exactly what the layout says, comes back and guesses as before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_formats import FORMS, VOCAB, drafter_state
from torch import Tensor

from components.contract import UserError
from components.drafts.interface import AbstractDraft, Batch
from components.publish.formats.exact_check import Checkpoint
from components.publish.formats.interface import DrafterState, Source, whole_vocabulary
from components.publish.formats.registry import (
    FORMATS,
    check_checkpoint,
    layout_of,
    read_folder,
    reopen_drafter,
    write_format,
)
from components.targets.interface import AbstractTarget

Networks = Callable[[str, dict[str, Any]], AbstractDraft]
IDS = [f"{name}-{method}-{'-'.join(map(str, settings)) or 'plain'}" for name, method, settings in FORMS]


def a_batch(target: AbstractTarget) -> Batch:
    ids = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(2))
    out = target.forward(ids, target.new_cache(1, 20), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    return Batch(ids, torch.ones(1, 20, dtype=torch.bool), out.taps, out.last, torch.tensor([20]))


def logits_of(draft: AbstractDraft, batch: Batch) -> list[Tensor]:
    """Of every step from the first columns, over the tokens that the fixture's drafters can guess."""
    forced: Any = draft
    teacher_forced = forced.teacher_forced(batch, torch.arange(12)[None])
    kept = torch.arange(3, VOCAB, 2)
    return [step[..., kept] if step.shape[-1] == VOCAB else step for step in teacher_forced]


@pytest.mark.parametrize(("name", "method", "given_settings"), FORMS, ids=IDS)
def test_what_goes_out_comes_back_with_the_same_logits(
    name: str,
    method: str,
    given_settings: dict[str, Any],
    networks: Networks,
    source: Source,
    opened: AbstractTarget,
    tmp_path: Path,
) -> None:
    network = networks(method, given_settings)
    facts = write_format(name, drafter_state(network, given_settings), source, tmp_path / "out")
    assert read_folder(tmp_path / "out")[0] == name, "it is recognised for what it is"
    again = reopen_drafter(tmp_path / "out", opened, source, draft_ids=network.draft_ids)  # type: ignore[arg-type]
    batch = a_batch(opened)
    ours, theirs = logits_of(network, batch), logits_of(again, batch)
    for mine, back in zip(ours, theirs, strict=False):
        torch.testing.assert_close(back, mine, rtol=1e-5, atol=1e-5)
    guesses = [
        draft.propose_at_every_position(batch.ids[0], batch.taps[0], batch.last[0], 2) for draft in (network, again)
    ]
    assert torch.equal(*guesses)
    stored = load_file(tmp_path / "out" / layout_of(name).weights_file)
    assert facts["num_tensors"] == len(stored)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_takes_half_precision_and_mixes_none(
    name: str, networks: Networks, source: Source, tmp_path: Path
) -> None:
    method, given_settings = next((method, settings) for form, method, settings in FORMS if form == name)
    own = drafter_state(networks(method, given_settings), given_settings)
    halved = {n: t.bfloat16() if t.is_floating_point() else t for n, t in own.tensors.items()}
    facts = write_format(name, DrafterState(method, given_settings, halved), source, tmp_path / "out")
    assert facts["dtype"] == "bfloat16"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    first = next(n for n, t in halved.items() if t.is_floating_point())
    with pytest.raises(UserError, match="mix"):
        mixed = halved | {first: halved[first].float()}
        write_format(name, DrafterState(method, given_settings, mixed), source, tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists(), "nothing is written before the check has passed"


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_of_another_target_is_refused_when_the_target_is_known(
    name: str, networks: Networks, source: Source
) -> None:
    from dataclasses import replace

    method, given_settings = next((method, settings) for form, method, settings in FORMS if form == name)
    checkpoint = layout_of(name).lay_out(drafter_state(networks(method, given_settings), given_settings), source)
    check_checkpoint(layout_of(name), checkpoint, "here", source.shape)
    check_checkpoint(layout_of(name), checkpoint, "here")
    for change in ({"vocab_size": VOCAB + 1}, {"max_position_embeddings": 128}, {"hidden_size": 64}):
        if (name, *change) in (("medusa", "max_position_embeddings"), ("causal-lm", "hidden_size")):
            continue  # heads have no positions; a draft model may have its own width
        with pytest.raises(UserError, match=r"here/config\.json") as error:
            check_checkpoint(layout_of(name), checkpoint, "here", replace(source.shape, **change))  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, "the last layer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, "the last layer"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, "3 ascending"),
        ({"eagle_aux_hidden_state_layer_ids": "2,4,5"}, "3 ascending"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
            },
            r"the same layers there are \[1, 3, 4\]",
        ),
    ],
)
def test_tapped_layers_that_engines_would_read_differently_are_refused(
    inside: dict[str, Any], why: str, networks: Networks, source: Source
) -> None:
    layout = layout_of("eagle3")
    checkpoint = layout.lay_out(drafter_state(networks("eagle3", {}), {}), source)
    both = {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }
    check_checkpoint(layout, Checkpoint(checkpoint.config | both, checkpoint.tensors), "here", source.shape)
    with pytest.raises(UserError, match=why):
        check_checkpoint(layout, Checkpoint(checkpoint.config | inside, checkpoint.tensors), "here", source.shape)


def test_eagle1_goes_out_with_the_scale_of_its_embeddings_multiplied_in(
    networks: Networks, source: Source, opened: AbstractTarget, tmp_path: Path
) -> None:
    network: Any = networks("eagle1", {})
    assert abs(network.token_scale - 1) > 0.1, "nothing would be shown"
    write_format("eagle1", drafter_state(network, {}), source, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")["fc.weight"]
    token = opened.embedding[5].float()
    hidden = opened.shape.hidden_size
    theirs = stored[:, :hidden] @ token  # what an engine computes: no scale
    ours = network.fc.weight[:, :hidden] @ (token * network.token_scale)
    torch.testing.assert_close(theirs, ours)


def test_eagle1_without_a_bias_gets_one_of_zeros_and_says_none_in_its_config(
    networks: Networks, source: Source, tmp_path: Path
) -> None:
    write_format(
        "eagle1", drafter_state(networks("hass", {"fc_bias": False}), {"fc_bias": False}), source, tmp_path / "out"
    )
    assert not load_file(tmp_path / "out" / "model.safetensors")["fc.bias"].any()
    assert "bias" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_draft_model_brings_the_tokenizer_of_its_target(networks: Networks, source: Source, tmp_path: Path) -> None:
    write_format(
        "causal-lm", drafter_state(networks("draft-model", {"num_layers": 1}), {"num_layers": 1}), source, tmp_path
    )
    assert source.folder is not None
    assert (tmp_path / "tokenizer.json").read_bytes() == (source.folder / "tokenizer.json").read_bytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-3.0, 3.0))
def test_a_head_over_the_whole_vocabulary_has_the_argmax_of_the_cut_one(seed: int, shift: float) -> None:
    """Also where every drafted logit is negative, which rows of zeros would win."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(40, generator=generator)[:9].sort().values
    rows = torch.randn(9, 6, generator=generator) + shift
    hidden = torch.randn(50, 6, generator=generator)
    whole = whole_vocabulary(rows, ids - torch.arange(9), 40)
    assert torch.equal((hidden @ whole.T).argmax(-1), ids[(hidden @ rows.T).argmax(-1)])
    assert torch.equal(whole[ids], rows)
