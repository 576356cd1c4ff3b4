"""One choice of threads and kernels is what every measuring step then runs on; a choice made for others is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen_depths import policy_of_depths

from components.bench import autotune, calibration, compare_end_to_end, measure_step_cost
from components.bench.calibration import (
    Tuning,
    choose_engine,
    clearly_faster,
    peak_of_choice,
    read_tuning,
    resolve_tuning,
)
from components.bench.measurement import process as measuring_process
from components.contract import Context, DepthPolicy, Draft, Machine, Measurements, Prompts, Target, UserError
from components.rows import CostCell, Request, read_rows
from components.targets.forward.compiled import compiled_functions

COLUMNS = "mixed[32x32:tc,32x64:cp,64x32:cc,128x32:cp]"
"""Kernels that no timing picks on its own: 2 rows at most, and then the last."""


DRAFT_COLUMNS = "mixed[64x32:tc,128x32:cp]"


@pytest.fixture
def made(target: Target, drafts: list[Draft], machine: Machine) -> Measurements:
    """A choice of one thread and of kernels that can be told from any other, for the target and one drafter."""
    facts = {"target_key": target.key, "dtype": "float32", "device": "cpu", "machine_id": machine.machine_id}
    chosen = {"num_threads": 1, "kernel": COLUMNS, "rival": True, "draft_kernels": {drafts[1].key: DRAFT_COLUMNS}}
    return Measurements("t" * 64, Path("nowhere"), {**facts, **chosen})


@pytest.fixture
def opened_with(monkeypatch: pytest.MonkeyPatch, here_instead: None) -> list[tuple[str, str, int]]:
    """(draft_key, kernel it was told, threads) of every drafter that a measuring process opens, in this process."""
    found: list[tuple[str, str, int]] = []
    really = measuring_process.open_drafter

    def open_drafter(draft: Draft, opened: Any, kernel: str = "auto") -> Any:
        found.append((draft.key, kernel, torch.get_num_threads()))
        return really(draft, opened, kernel)

    monkeypatch.setattr(measuring_process, "open_drafter", open_drafter)
    return found


def test_more_threads_are_taken_only_where_they_win_in_quiet_and_in_noise() -> None:
    alone = [100.0, 101.0, 102.0, 103.0, 140.0]
    assert clearly_faster([90.0, 91.0, 92.0, 93.0, 200.0], alone)
    assert not clearly_faster([98.0, 98.0, 98.0, 98.0, 98.0], alone), "a gain within the noise"
    assert not clearly_faster([90.0, 95.0, 160.0, 300.0, 500.0], alone), "quick, but only while nobody else works"
    assert not clearly_faster([99.0, 99.0, 99.0, 99.0, 99.0], [100.0, 150.0, 150.0, 150.0, 150.0]), "a noisy moment"


def test_what_is_chosen_is_what_was_tried(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, context: Callable[[str], Context]
) -> None:
    ctx = dataclasses.replace(context("tuning"), num_threads=2)
    info = autotune(target, prompts, drafts, seconds=0.0, ctx=ctx, machine=machine).info
    tried = {one["num_threads"]: one for one in info["engines_tried"][:2]}
    assert set(tried) == {1, 2} and tried[info["num_threads"]]["kernel"] == info["kernel"]
    assert set(info["draft_kernels"]) == {draft.key for draft in drafts}
    given = read_tuning(Measurements("t", ctx.out, info), target, drafts, "float32", 0, ctx, machine)
    assert given == Tuning(**{name: info[name] for name in Tuning._fields[:-1]}, tried=[])


@pytest.mark.parametrize("has_compiler", [True, False])
def test_thread_counts_of_a_large_target_are_compared_on_one_kernel(
    has_compiler: bool, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's product of one row gains nothing by a second thread, where our kernel gains a quarter."""
    if has_compiler and compiled_functions() is None:
        pytest.skip("needs a C compiler")
    if not has_compiler:
        monkeypatch.setattr(calibration, "compiled_functions", lambda: None)
    monkeypatch.setattr(calibration, "HELD_TWICE", 0)
    chosen = choose_engine(target, [], [1, 2, 3], dtype="float32", device="cpu", max_threads=2)
    compared = [(trial["num_threads"], trial["kernel"]) for trial in chosen.tried[:2]]
    kernel = "streamed" if has_compiler else "plain"
    assert compared == [(1, kernel), (2, kernel)]
    assert not chosen.rival, "it is held once"


def test_a_choice_that_memory_has_no_room_for_is_refused_before_it_is_made(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    machine: Machine,
    context: Callable[[str], Context],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tail = r" in float32 takes up to .* GB of memory, and .* are free: take dtype: bfloat16, or a machine"
    tuning, cost = context("tuning"), context("cost")
    for of, said in (list[Draft](), "of the target" + tail), (drafts, "of the target and its drafters" + tail):
        free = peak_of_choice(target, of, "float32") - 1
        monkeypatch.setattr("components.bench.calibration.free_ram", lambda free=free: free)
        with pytest.raises(UserError, match=said):
            autotune(target, prompts, of, seconds=0.0, ctx=tuning, machine=machine)
        with pytest.raises(UserError, match=said):
            resolve_tuning(None, target, of, [1], "float32", 1, cost, machine)


def test_measuring_steps_run_on_what_was_chosen(
    made: Measurements,
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    machine: Machine,
    tmp_path: Path,
    context: Callable[[str], Context],
    opened_with: list[tuple[str, str, int]],
) -> None:
    """Both steps, their drafters, and all rows: those of a rival, which is the same threads on plain kernels, too."""
    cost, e2e = (dataclasses.replace(context(name), num_threads=2) for name in ("cost", "e2e"))
    brief: dict[str, Any] = {"seconds": 0.1, "num_processes": 1}
    asked: dict[str, Any] = {**brief, "tokens_per_block": 16, "kv_lengths": [32], "max_depth": 1}
    first = measure_step_cost(target, drafts[1:], prompts, made, **asked, ctx=cost, machine=machine)
    policy = policy_of_depths(tmp_path, [])
    short: dict[str, Any] = {**brief, "num_prompts": 2, "max_new_tokens": 8, "depths": [1]}
    second = compare_end_to_end(target, drafts[1:], prompts, policy, made, **short, ctx=e2e, machine=machine)
    for info in (first.info, second.info):
        assert (info["num_threads"], info["kernel"]) == (1, COLUMNS)
    rows: list[CostCell | Request] = [*read_rows(cost.out, CostCell), *read_rows(e2e.out, Request)]
    assert {row.num_threads for row in rows} == {1}
    assert {row.kernel for row in read_rows(cost.out, CostCell)} == {COLUMNS, "plain"}
    assert {row.kernel for row in read_rows(e2e.out, Request)} == {COLUMNS, "plain"}
    assert set(opened_with) == {(drafts[1].key, DRAFT_COLUMNS, 1)}


def test_a_drafter_that_the_choice_does_not_know_is_noted_and_picks_its_own_kernels(
    made: Measurements, target: Target, drafts: list[Draft], machine: Machine, context: Callable[[str], Context]
) -> None:
    notes: list[str] = []
    ctx = context("cost")
    ctx.send = lambda event: notes.append(str(event.get("message", "")))
    given = read_tuning(made, target, drafts, "float32", 0, ctx, machine)
    assert given is not None
    assert [given.kernel_of(draft) for draft in drafts] == ["auto", DRAFT_COLUMNS]
    (note,) = notes
    assert drafts[0].key[:12] in note and "give it to autotune" in note


def test_without_a_chosen_rival_there_is_none(
    made: Measurements,
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    machine: Machine,
    context: Callable[[str], Context],
    here_instead: None,
) -> None:
    """Whether there is a second baseline is not for each step to find out: they would not agree."""
    alone = dataclasses.replace(made, info={**made.info, "rival": False})
    ctx = dataclasses.replace(context("cost"), num_threads=2)
    asked: dict[str, Any] = {"seconds": 0.1, "num_processes": 1, "tokens_per_block": 16, "kv_lengths": [32]}
    measure_step_cost(target, drafts[1:], prompts, alone, **asked, max_depth=1, ctx=ctx, machine=machine)
    assert {row.kernel for row in read_rows(ctx.out, CostCell)} == {COLUMNS}


@pytest.mark.parametrize(
    ("facts", "num_threads", "said"),
    [
        ({"target_key": "z" * 64}, 0, "made for target_key zzzzzzzzzzzz, and this step has aaaaaaaaaaaa"),
        ({"dtype": "bfloat16"}, 0, "made for dtype bfloat16, and this step has float32"),
        ({"device": "cuda"}, 0, "made for device cuda, and this step has cpu"),
        ({"machine_id": "elsewhere"}, 0, "made for machine_id elsewhere, and this step has test"),
        ({"num_threads": 4}, 0, "it chose 4 threads, and this step may use 1"),
        ({}, 1, "num_threads: 1 is asked for, and tuning .* chose 1: leave one of them out"),
    ],
)
def test_a_choice_for_something_else_is_refused_in_one_line(
    facts: dict[str, Any],
    num_threads: int,
    said: str,
    made: Measurements,
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    machine: Machine,
    context: Callable[[str], Context],
) -> None:
    other = dataclasses.replace(made, info={**made.info, **facts})
    policy = DepthPolicy(key="p" * 64, path=Path("nowhere"))
    with pytest.raises(UserError, match=said) as first:
        measure_step_cost(
            target,
            drafts,
            prompts,
            other,
            kv_lengths=[32],
            num_threads=num_threads,
            ctx=context("cost"),
            machine=machine,
        )
    with pytest.raises(UserError, match=said) as second:
        compare_end_to_end(
            target, drafts, prompts, policy, other, num_threads=num_threads, ctx=context("e2e"), machine=machine
        )
    assert str(first.value) == str(second.value) and "\n" not in str(first.value)


def test_measurements_that_choose_nothing_are_refused(
    target: Target, machine: Machine, context: Callable[[str], Context]
) -> None:
    cost = Measurements("s" * 64, Path("nowhere"), {"dtype": "float32", "num_threads": 1, "kernel": "plain"})
    with pytest.raises(UserError, match=r"choose no threads: give what bench\.autotune makes"):
        read_tuning(cost, target, [], "float32", 0, context("cost"), machine)
