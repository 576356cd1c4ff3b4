"""Every family decodes with a drafter as it decodes alone, in ragged batches and at every depth.

A drafter of EAGLE-3 trains for a few steps on each family's own greedy text, so that some of its guesses are accepted
and some are not. The other methods take turns over the families, untrained, as chains and as trees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_decoding import LENGTH, PROMPTS, Alone, said_alone, trained_on_own_text
from tiny_families import FAMILIES, MULTIMODAL, RECURRENT, VOCAB_SIZE, make_family

from components.contract import Context, UserError
from components.decoding.batch import decode_batch
from components.decoding.chain import decode
from components.decoding.tree_shapes import DynamicShape
from components.drafts import train_draft
from components.drafts.storage.files import build_draft
from components.methods import METHODS
from components.targets import load_target
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

LIKE_OTHERS = (
    *("afmoe", "apertus", "arcee", "cohere", "deepseek_v2", "dots1", "ernie4_5", "exaone4", "gemma", "gemma4", "glm4"),
    *("gpt_neox", "hunyuan_v1_dense", "internvl", "lfm2_moe", "mimo_v2_flash", "ministral", "ministral3", "mistral3"),
    *("nanochat", "olmoe", "phimoe", "qwen3_vl_moe", "seed_oss", "solar_open", "starcoder2", "vaultgemma"),
)
"""Families whose kinds of layers another one has as well: they decode in the campaign of all families alone."""
EVERY = [family for family in (*FAMILIES, *MULTIMODAL) if family not in LIKE_OTHERS]
OTHERS = [method for method in METHODS if method != "eagle3"]
STEPS = 20


@pytest.fixture(scope="module", params=EVERY)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    yield said_alone(request.param, tmp_path_factory.mktemp(request.param))


def passes_of(alone: Alone) -> list[AbstractTarget]:
    """The model as transformers runs it, and as our own forward pass does where it knows the family."""
    assert alone.target.folder is not None
    ours = open_target(alone.target.folder, kernel="plain")
    return [alone.target, ours] if ours.kernel == "plain" else [alone.target]


def test_eagle3_trains_on_and_drafts_for_every_family(alone: Alone) -> None:
    draft = trained_on_own_text(alone, "eagle3", {"ttt_steps": 4}, STEPS)
    drafted = accepted = 0
    for target, depth in itertools.product(passes_of(alone), range(1, 5)):
        run = decode_batch(target, draft, PROMPTS, max_new_tokens=LENGTH, depth=depth, ignore_eos=True)
        assert not alone.first_fault([one.tokens for one in run])
        drafted += sum(r.drafted for one in run for r in one.rounds)
        accepted += sum(r.accepted for one in run for r in one.rounds)
    assert 0 < accepted < drafted, "some guesses are right, and some are dropped"


def test_other_methods_draft_for_the_families_in_turn(alone: Alone) -> None:
    """One method each, so that all methods meet all kinds of layers; the whole matrix is a campaign."""
    method = OTHERS[EVERY.index(alone.family) % len(OTHERS)]
    if method == "lookahead" and alone.family in RECURRENT:
        method = "ngram"
    draft = build_draft(method, alone.target, {}, torch.arange(0, VOCAB_SIZE, 2))
    if isinstance(draft, torch.nn.Module):
        draft.prepare_decoding()  # type: ignore[operator]
    depth = min(3, draft.max_depth)
    for target in passes_of(alone):
        answers = [
            decode(target, draft, prompt, max_new_tokens=LENGTH, depth=depth, ignore_eos=True).tokens
            for prompt in PROMPTS
        ]
        assert not alone.first_fault(answers)


@pytest.mark.parametrize(("family", "refused"), [("qwen3_next", True), ("qwen3", False)])
def test_lookahead_is_refused_before_anything_else_runs(family: str, refused: bool, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    ctx = Context(key="t" * 64, out=tmp_path / "target", scratch=tmp_path, num_threads=1)
    target = load_target(model=str(make_family(family, tmp_path / family)), ctx=ctx)
    (tmp_path / "draft").mkdir()
    with pytest.raises(UserError, match="keep a state") if refused else nullcontext():
        train_draft(target, method="lookahead", ctx=replace(ctx, out=tmp_path / "draft"))


def test_trees_are_verified_or_refused_by_name(alone: Alone) -> None:
    draft = build_draft("eagle3", alone.target, {}, torch.arange(VOCAB_SIZE))
    draft.prepare_decoding()
    arguments: dict[str, Any] = {"max_new_tokens": LENGTH, "shape": DynamicShape(3, 3, 8), "ignore_eos": True}
    if alone.family in RECURRENT:
        with pytest.raises(UserError, match="leave trees empty"):
            decode_batch(alone.target, draft, PROMPTS, **arguments)
    else:
        for target in passes_of(alone):
            answers = decode_batch(target, draft, PROMPTS, **arguments)
            assert not alone.first_fault([answer.tokens for answer in answers])
