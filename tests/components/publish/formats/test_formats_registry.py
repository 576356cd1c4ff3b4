"""What every format keeps: a drafter goes out, is exactly what the layout says, comes back and guesses as before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_formats import FORMS, VOCAB, drafter_state
from torch import Tensor

from components.contract import UserError
from components.drafts.interface import AbstractDraft, Batch
from components.publish.formats.interface import DrafterState, Source
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
    network = networks(method, given_settings, name)
    facts = write_format(name, drafter_state(network, given_settings), source, tmp_path / "out")
    assert read_folder(tmp_path / "out")[0] == name, "it is recognised for what it is"
    again = reopen_drafter(tmp_path / "out", opened, source, draft_ids=network.draft_ids)  # type: ignore[arg-type]
    batch = a_batch(opened)
    ours, theirs = logits_of(network, batch), logits_of(again, batch)
    for mine, back in zip(ours, theirs, strict=False):
        torch.testing.assert_close(back, mine, rtol=1e-5, atol=1e-5)
    guesses = [
        draft.propose_at_every_position(batch.ids[0], batch.taps[0], batch.last[0], 2).tokens
        for draft in (network, again)
    ]
    assert torch.equal(*guesses)
    stored = load_file(tmp_path / "out" / layout_of(name).weights_file)
    assert facts["num_tensors"] == len(stored)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_takes_half_precision_and_mixes_none(
    name: str, networks: Networks, source: Source, tmp_path: Path
) -> None:
    method, given_settings = next((method, settings) for form, method, settings in FORMS if form == name)
    own = drafter_state(networks(method, given_settings, name), given_settings)
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
    checkpoint = layout_of(name).lay_out(drafter_state(networks(method, given_settings, name), given_settings), source)
    check_checkpoint(layout_of(name), checkpoint, "here", source.shape)
    check_checkpoint(layout_of(name), checkpoint, "here")
    for change in ({"vocab_size": VOCAB + 1}, {"max_position_embeddings": 128}, {"hidden_size": 64}):
        if (name, *change) in (("medusa", "max_position_embeddings"), ("causal-lm", "hidden_size")):
            continue  # heads have no positions; a draft model may have its own width
        with pytest.raises(UserError, match=r"here/config\.json") as error:
            check_checkpoint(layout_of(name), checkpoint, "here", replace(source.shape, **change))  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
