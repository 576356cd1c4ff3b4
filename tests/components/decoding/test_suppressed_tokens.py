"""Tokens that a target's generation_config.json suppresses are never said, by any loop, and drafts change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_drafts import draw_wide
from tiny_targets import make_tiny_target
from transformers import AutoModelForCausalLM

from components.bench.acceptance import acceptance_map, tree_acceptance
from components.decoding.batch import decode_batch, decode_tree
from components.decoding.chain import decode
from components.decoding.tree_shapes import DynamicShape
from components.drafts.interface import Sampling
from components.drafts.storage.files import build_draft
from components.drafts.training.losses import teacher_distributions
from components.targets.generate import continue_batch
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

LENGTH = 16
PROMPTS = [[5, 9, 2, 7], [3, 1], [11, 4, 4, 8, 30, 2, 6, 19, 25]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose usual answers are made of suppressed tokens, some of them as bad words."""
    made = make_tiny_target("qwen3", tmp_path_factory.mktemp("suppressed") / "model")
    file = made / "generation_config.json"
    file.unlink(missing_ok=True)
    usual = usual_tokens(made)
    assert len(usual) > 10
    words = [[token] for token in usual[::2]]
    file.write_text(
        json.dumps({"eos_token_id": 0, "pad_token_id": 0, "suppress_tokens": usual[1::2], "bad_words_ids": words})
    )
    return made


def usual_tokens(folder: Path) -> list[int]:
    """What the target says where nothing is suppressed, end tokens apart."""
    target = open_target(folder, kernel="plain")
    runs = continue_batch(target, PROMPTS, max_new_tokens=LENGTH, stop_at_eos=False)
    return sorted({token for run in runs for token in run.ids} - {0})


@pytest.fixture(scope="module")
def suppressed(folder: Path) -> set[int]:
    facts = json.loads((folder / "generation_config.json").read_text())
    return {*facts["suppress_tokens"], *(word[0] for word in facts["bad_words_ids"])}


@pytest.fixture(scope="module", params=["plain", "transformers"])
def quiet(request: pytest.FixtureRequest, folder: Path) -> AbstractTarget:
    torch.set_num_threads(1)
    return open_target(folder, kernel=request.param)


def test_answers_are_those_of_transformers(quiet: AbstractTarget, folder: Path, suppressed: set[int]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = continue_batch(quiet, PROMPTS, max_new_tokens=LENGTH)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
        assert answer.ids == whole[0, len(prompt) :].tolist()
        assert not suppressed & set(answer.ids)


@pytest.mark.parametrize(
    ("quiet", "method"),
    [("plain", "eagle3"), ("plain", "mtp"), ("plain", "ngram"), ("transformers", "eagle3")],
    indirect=["quiet"],
)
def test_drafted_text_is_that_of_plain_decoding(quiet: AbstractTarget, method: str, suppressed: set[int]) -> None:
    """The drafter guesses suppressed tokens too; its acceptance maps count what a live run accepts."""
    drafter: Any = build_draft(method, quiet, {}, torch.arange(0, quiet.shape.vocab_size))
    if isinstance(drafter, torch.nn.Module):
        draw_wide(drafter)
        drafter.prepare_decoding()
    depth = min(3, drafter.max_depth)
    more: dict[str, Any] = {"max_new_tokens": LENGTH, "ignore_eos": True}
    plain = [decode(quiet, None, prompt, **more).tokens for prompt in PROMPTS]
    assert not suppressed & {token for tokens in plain for token in tokens}
    assert [run.tokens for run in decode_batch(quiet, drafter, PROMPTS, depth=depth, **more)] == plain
    shape = DynamicShape(depth, 3, 8)
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        run = decode(quiet, drafter, prompt, depth=depth, **more)
        assert run.tokens == tokens
        long = decode(quiet, None, prompt, max_new_tokens=LENGTH + depth, ignore_eos=True).tokens
        if method != "ngram":
            counted = acceptance_map(quiet, drafter, prompt, long, LENGTH, depth).accepted
            assert [one.accepted for one in run.rounds] == [counted[one.out_pos] for one in run.rounds]
            tree = decode_tree(quiet, drafter, prompt, shape, **more)
            assert tree.tokens == tokens
            in_tree = tree_acceptance(quiet, drafter, prompt, long, LENGTH, shape)
            assert [one.accepted for one in tree.rounds] == [in_tree[one.out_pos] for one in tree.rounds]
        hot = decode(quiet, drafter, prompt, depth=depth, sampling=Sampling(1.5), rng=torch.Generator(), **more)
        assert not suppressed & set(hot.tokens)


def test_a_drafter_learns_what_the_target_says(quiet: AbstractTarget, suppressed: set[int]) -> None:
    last = quiet.forward(torch.tensor(PROMPTS[:1]), quiet.new_cache(1, 8), features=True).last
    assert last is not None
    teacher = teacher_distributions(quiet, last, None)
    mass = teacher.probs.sum(-1)
    assert torch.allclose(mass, torch.ones_like(mass)) and not teacher.probs[..., sorted(suppressed)].any()


def test_a_model_that_only_drafts_says_all_its_tokens(folder: Path) -> None:
    assert open_target(folder, kernel="plain", tapped=False).suppressed is None
