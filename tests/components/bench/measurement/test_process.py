"""What a process of a measurement decodes: the target's own texts, every arm's turns, on the kernels it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bench_subjects import order_of

from components.bench.calibration import Tuning
from components.bench.end_to_end.arms import PLAIN, RIVAL, Arm
from components.bench.measurement.process import Measuring, MeasuringProcess
from components.bench.prompts import open_drafter
from components.contract import Context, Draft, Target, UserError
from components.decoding.chain import decode
from components.drafts import train_draft
from components.targets.interface import AbstractTarget

COLUMNS = "mixed[32x32:tc,32x64:cp,64x32:cc,128x32:cp]"


PROMPTS = [[4, 9, 30], [7, 8], [12, 3, 40, 2, 5]]


EAGLE, MTP = Arm("eagle3", "e" * 64, 3), Arm("mtp", "m" * 64, 2)


TREE, OFF, LOOKUP = Arm("eagle3", "e" * 64, 4, tree_budget=6), Arm("mtp", "m" * 64, 0), Arm("ngram", "", 4)


ARMS = [PLAIN, RIVAL, EAGLE, MTP, TREE, OFF, LOOKUP]


ASKED: dict[str, Any] = {"num_tokens": 16, "tokens_a_slice": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def process(target: Target, drafts: list[Draft]) -> MeasuringProcess:
    return MeasuringProcess(order_of(target, drafts, ARMS, kernel=COLUMNS, rival=True))


def turns(process: MeasuringProcess, contexts: list[list[int]], arms: list[int]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = process({"do": "turns", "contexts": contexts, "arms": arms, **ASKED})
    return found


def test_what_two_processes_say_is_the_targets_own_text_and_the_same(
    target: Target, drafts: list[Draft], opened: AbstractTarget, context: Callable[[str], Context]
) -> None:
    """Really two, opened on what was tuned: drafters too, whose kernels no timing picks on its own."""
    kernels = {draft.key: f"mixed[{kernel}]" for draft, kernel in zip(drafts, ("128x32:tc", "32x64:pt"), strict=True)}
    tuning = Tuning(1, COLUMNS, True, kernels, [])
    answers = []
    for number in (1, 2):
        with Measuring(number, target, drafts, ARMS, tuning, "float32", context(f"process {number}")) as measuring:
            facts = measuring.facts
            assert (facts["kernel"], facts["rival_kernel"]) == (COLUMNS, "plain")
            for draft in drafts:
                ours = facts["draft_kernels"][draft.key]
                assert ours == open_drafter(draft, opened, kernels[draft.key]).kernel != "plain"
            assert facts["bytes_per_token"] == 7 * 2 * 2 * 8 * 4, "layers, keys and values, heads, their size, float32"
            assert facts["free_bytes"] > 0 and "load_average" in measuring.conditions()
            texts = measuring.texts(PROMPTS, 12)
            runs = measuring.turns(PROMPTS[:1], ARMS, **ASKED)
            again = measuring.turns(PROMPTS[:1], [MTP, PLAIN], **ASKED)
        assert [run.arm for run in runs] == ARMS and [run.arm for run in again] == [PLAIN, MTP], "in one order, always"
        assert all(run.decoded[0].tokens == runs[0].decoded[0].tokens for run in [*runs, *again])
        answers.append((texts, [run.decoded[0].rounds for run in runs]))
    assert answers[0] == answers[1]
    for prompt, text in zip(PROMPTS, answers[0][0], strict=True):
        assert text == [*prompt, *decode(opened, None, prompt, max_new_tokens=12, ignore_eos=True).tokens]


def test_a_drafter_that_is_off_drafts_nothing_and_verifies_one_row(process: MeasuringProcess) -> None:
    (off,) = turns(process, PROMPTS[:1], [ARMS.index(OFF)])
    assert all(
        (drafted, accepted, emitted) == (0, 0, 1) for _, drafted, accepted, emitted, _ in off["decoded"][0]["rounds"]
    )
    assert (OFF.rows_of_pass, OFF.depth_of_loop) == (1, 1) and (TREE.rows_of_pass, EAGLE.rows_of_pass) == (7, 4)
    assert (PLAIN.rows_of_pass, PLAIN.depth_of_loop, RIVAL.rows_of_pass) == (1, 0, 1)


def test_arms_that_are_no_longer_asked_give_up_their_caches(process: MeasuringProcess) -> None:
    everyone = list(range(len(ARMS)))
    turns(process, PROMPTS[:1], everyone)
    assert set(process._sessions) == set(ARMS) - {TREE}, "trees take a cache for each generation"
    kept = process._sessions[EAGLE]
    turns(process, PROMPTS[1:2], [0, ARMS.index(EAGLE)])
    assert set(process._sessions) == {PLAIN, EAGLE} and process._sessions[EAGLE] is kept
    turns(process, PROMPTS, [ARMS.index(MTP)])
    assert process._sessions == {}, "batches take a cache for each generation too"


def test_a_batch_is_decoded_side_by_side(process: MeasuringProcess, opened: AbstractTarget) -> None:
    plain = [decode(opened, None, prompt, max_new_tokens=16, ignore_eos=True).tokens for prompt in PROMPTS]
    for reply in turns(process, PROMPTS, [0, 1, 2, 3, 4, 5, 6]):
        assert [one["tokens"] for one in reply["decoded"]] == plain
        assert reply["slices"][0][4][0] == len(PROMPTS), "sequences in the first round"


def test_trees_of_guesses_that_do_not_branch_are_refused_when_it_is_opened(
    target: Target, context: Callable[[str], Context]
) -> None:
    lookup = train_draft(target, method="ngram", ctx=context("draft"))
    with pytest.raises(UserError, match="the guesses of ngram do not branch: leave trees empty"):
        MeasuringProcess(order_of(target, [lookup], [PLAIN, Arm("ngram", lookup.key, 4, tree_budget=5)]))


def test_recorded_passes_need_a_target_that_can_be_recorded(target: Target) -> None:
    with pytest.raises(UserError, match="the kernel transformers cannot be recorded"):
        MeasuringProcess(order_of(target, [], [PLAIN], kernel="transformers", graphs=True))
