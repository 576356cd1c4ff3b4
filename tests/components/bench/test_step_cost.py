"""Cost rows are complete, all positive, plain steps counted as such; a machine that changes fails the step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.bench import cost_blocks
from components.bench.clock import Stopwatch
from components.bench.cost_blocks import Bench
from components.bench.cost_texts import contexts, longest_context
from components.bench.phases import time_phases
from components.bench.step_cost import control_drift, measure_step_cost
from components.bench.subjects import open_drafter
from components.bench.trees import tree_shape
from components.contract import Context, Draft, Machine, Prompts, Target, UserError
from components.decoding.batch import decode_batch
from components.decoding.chain import decode
from components.decoding.session import Session
from components.rows import CostCell, read_rows
from components.targets.model import AbstractTarget


def test_every_phase_of_every_depth_is_timed_in_every_block(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, context: Callable[[str], Context]
) -> None:
    ctx = context("cost")
    made = measure_step_cost(
        target,
        drafts[1],
        prompts,
        kv_lengths=[32, 48],
        num_blocks=5,
        tokens_per_block=16,
        max_drift=50.0,
        ctx=ctx,
        machine=machine,
    )
    cells = read_rows(ctx.out, CostCell)
    kernel = made.info["kernel"]
    ours = [c for c in cells if c.phase != "control" and c.kernel == kernel]
    phases = ["verify", "draft", "host", "prefill", "draft_prefill"]
    expected = set(itertools.product(phases, [1, 2], [32, 48], range(1, 6)))
    expected |= set(itertools.product(["target_step", "host", "prefill"], [0], [32, 48], range(1, 6)))
    assert sorted((c.phase, c.depth_k, c.kv_len, c.block) for c in ours) == sorted(expected)
    assert {c.block for c in cells if c.phase == "control"} == {0, 5}
    for c in cells:
        assert c.median_ns > 0 and c.mad_ns >= 0 and c.reps_in_block >= 1
        once = c.phase.endswith("prefill")
        assert c.num_rows == (c.kv_len - 8 if once else c.depth_k if c.phase == "draft" else c.depth_k + 1)
        assert c.load_average is not None and c.tree_budget is None
        assert (c.draft_key, c.method) == ((drafts[1].key, "mtp") if c.depth_k else ("", "none"))
        assert c.num_threads == made.info["num_threads"]
    assert made.info["timer_overhead_ns"] < min(c.median_ns for c in cells)


def test_batches_and_trees_are_cells_of_their_own(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, context: Callable[[str], Context]
) -> None:
    ctx = context("cost")
    sizes: dict[str, Any] = {"batch_sizes": [3, 1], "kv_lengths": [32], "trees": [5], "num_blocks": 5}
    asked: dict[str, Any] = {**sizes, "tokens_per_block": 16, "max_drift": 50.0}
    made = measure_step_cost(target, drafts[1], prompts, **asked, ctx=ctx, machine=machine)
    cells = [c for c in read_rows(ctx.out, CostCell) if c.kernel == made.info["kernel"] and c.phase != "control"]
    found = {(c.phase, c.batch_size, c.depth_k, c.tree_budget, c.num_rows) for c in cells if "prefill" not in c.phase}
    expected = {("target_step", 0, None, 1), ("host", 0, None, 1), *(("verify", k, None, k + 1) for k in (1, 2))}
    expected |= {(phase, k, None, k + (phase == "host")) for phase in ("draft", "host") for k in (1, 2)}
    expected |= {("verify", 2, 5, 6), ("draft", 2, 5, 5), ("host", 2, 5, 6)}
    assert found == {(phase, size, *rest) for phase, *rest in expected for size in (1, 3)}
    assert "verify k=2 tree=5 batch=3" in made.info["medians_ms"]


def test_recorded_passes_are_timed_like_others(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, context: Callable[[str], Context]
) -> None:
    """On a CPU the static passes run without being recorded; cells are complete, and the kernel says what was timed."""
    ctx = context("cost")
    sizes: dict[str, Any] = {"batch_sizes": [1, 2], "kv_lengths": [32], "num_blocks": 5, "max_depth": 2}
    asked: dict[str, Any] = {**sizes, "tokens_per_block": 16, "max_drift": 50.0, "graphs": True}
    made = measure_step_cost(target, drafts[0], prompts, **asked, ctx=ctx, machine=machine)
    cells = read_rows(ctx.out, CostCell)
    assert made.info["kernel"].endswith("+graphs") and made.info["left_out"] == []
    assert {c.kernel for c in cells} == {made.info["kernel"]}
    assert {(c.phase, c.batch_size) for c in cells if c.depth_k == 2} >= {("verify", 1), ("verify", 2), ("draft", 2)}


def test_cells_that_do_not_fit_the_memory_are_left_out_and_said(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    machine: Machine,
    context: Callable[[str], Context],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx = context("cost")
    sizes: dict[str, Any] = {"batch_sizes": [1, 4], "kv_lengths": [32, 64], "num_blocks": 5, "max_depth": 1}
    asked: dict[str, Any] = {**sizes, "tokens_per_block": 16, "max_drift": 50.0}
    token = 7 * 2 * 2 * 8 * 4  # layers, keys and values, heads, their size, float32
    monkeypatch.setattr(cost_blocks, "free_memory", lambda device: round(4 * (32 + 16 + 4) * token / 0.8) + 1)
    made = measure_step_cost(target, drafts[0], prompts, **asked, ctx=ctx, machine=machine)
    assert made.info["left_out"] == ["batch 4 kv 64"]
    cells = {(c.batch_size, c.kv_len) for c in read_rows(ctx.out, CostCell) if c.phase == "verify"}
    assert cells == {(1, 32), (1, 64), (4, 32)}
    monkeypatch.setattr(cost_blocks, "free_memory", lambda device: 1000)
    with pytest.raises(UserError, match="no cell fits"):
        measure_step_cost(target, drafts[0], prompts, **asked, ctx=context("none"), machine=machine)


@pytest.mark.parametrize("tree", [False, True])
def test_rounds_of_a_batch_that_has_shrunk_are_left_out(
    tree: bool, opened: AbstractTarget, drafts: list[Draft]
) -> None:
    """Sequences that are done leave the batch; passes without them are not passes of that batch."""
    ticks = itertools.count()
    asked: dict[str, Any] = {
        "num_tokens": 20,
        "session": Session(opened),
        "watch": Stopwatch(lambda: next(ticks), list),
    }
    texts = [[5, 6, 7], [9], [30, 31, 2, 8, 40]]
    drafter, shape = open_drafter(drafts[0], opened), tree_shape(3, 5) if tree else None
    chain: dict[str, Any] = {"shape": shape} if tree else {"depth": 3}
    runs = decode_batch(opened, drafter, texts, max_new_tokens=20, ignore_eos=True, **chain)
    whole = min(len(run.rounds) for run in runs)
    assert whole < max(len(run.rounds) for run in runs), "all were done at once: nothing was left out"
    times = time_phases(opened, drafter, texts, depth=3, shape=shape, **asked)
    assert (len(times.target), len(times.draft), len(times.host)) == (whole, whole - 1, whole - 1)
    assert times.num_tokens == 60 and min(*times.target, *times.draft) >= 1 and min(times.host) >= 0
    assert len(time_phases(opened, None, texts, depth=0, **asked).target) == 19


def test_the_phases_of_a_run_add_up_to_its_time(opened: AbstractTarget, drafts: list[Draft]) -> None:
    """A clock that counts its own readings: nothing between two calls is lost or counted twice."""
    ticks = itertools.count()
    watch = Stopwatch(lambda: next(ticks), list)
    drafter = open_drafter(drafts[0], opened)
    rounds = len(decode(opened, drafter, [5, 6, 7], max_new_tokens=20, depth=3, ignore_eos=True).rounds)
    asked: dict[str, Any] = {"num_tokens": 20, "session": Session(opened), "watch": watch}
    times = time_phases(opened, drafter, [[5, 6, 7]], depth=3, **asked)
    # Each call is two readings, hence one tick; a round has two gaps: propose to verify, verify to propose.
    assert (times.target, times.draft, times.host) == ([1] * rounds, [1] * (rounds - 1), [2] * (rounds - 1))
    assert (times.prefill, times.draft_prefill, times.num_tokens) == (1, 1, 20)
    plain = time_phases(opened, None, [[5, 6, 7]], depth=0, **asked)
    assert (plain.target, plain.draft, plain.host) == ([1] * 19, [], [1] * 18)
    assert (plain.prefill, plain.draft_prefill) == (1, None)


def cell(median_ns: float) -> CostCell:
    plain: Any = ("t", "", "none", "control", 0, 1, 1, 128, 0, 63, median_ns, 1.0, "float32", "plain", 1)
    return CostCell(*plain)


def test_drift_is_of_the_quickest_runs_at_both_ends() -> None:
    """A neighbour that disturbs single runs is no drift; a clock that fell is."""
    before = [cell(ns) for ns in (100.0, 180.0, 101.0)]
    assert control_drift(before, [cell(ns) for ns in (400.0, 103.0, 250.0)]) == pytest.approx(0.03)
    assert control_drift(before, [cell(ns) for ns in (131.0, 130.0, 135.0)]) == pytest.approx(0.3)


def test_a_machine_that_changes_is_measured_again_and_then_fails_the_step(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    machine: Machine,
    context: Callable[[str], Context],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control is made to say what a slowing machine would say; blocks are real."""
    pace = itertools.count(1)
    monkeypatch.setattr(Bench, "control", lambda self, block: [cell(1e6 * next(controls))])
    asked: dict[str, Any] = {"num_blocks": 5, "tokens_per_block": 16, "kv_lengths": [32], "drift_retries": 1}
    notes: list[str] = []
    ctx = context("drifts")
    ctx.send = lambda event: notes.append(str(event.get("message", "")))
    controls = (2.0**n for n in pace)
    with pytest.raises(UserError, match=r"\+100.0%, \+100.0% while measuring, in 2 attempts \(bound 10%\)"):
        measure_step_cost(target, drafts[1], prompts, **asked, ctx=ctx, machine=machine)
    assert not (ctx.out / "cost_cell.jsonl").exists()
    controls = iter([1.0, 2.0, 2.1])
    ctx = context("steadies")
    made = measure_step_cost(target, drafts[1], prompts, **asked, ctx=ctx, machine=machine)
    assert made.info["control_drift"] == pytest.approx([1.0, 0.05])
    assert sorted({c.block for c in read_rows(ctx.out, CostCell) if c.phase == "verify"}) == [1, 2, 3, 4, 5]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 9), st.integers(1, 9), st.integers(16, 100))
def test_contexts_are_real_text_of_ragged_lengths_around_the_asked_one(
    sizes: list[int], block: int, batch_size: int, kv_len: int
) -> None:
    texts = [[100 * number + i for i in range(size)] for number, size in enumerate(sizes)]
    found = contexts(texts, block, batch_size, kv_len, 16)
    assert len(found) == batch_size
    lengths = [len(one) for one in found]
    middle = kv_len - 8
    assert lengths == sorted(lengths) and abs(sum(lengths) / batch_size - middle) <= 1
    assert lengths[-1] + 16 <= longest_context([kv_len], [batch_size], 16)
    assert batch_size == 1 or lengths[-1] - lengths[0] == 2 * round(kv_len / 8)
    for one in found:
        for earlier, later in itertools.pairwise(one):
            inside = later == earlier + 1
            assert inside or (later % 100 == 0 and earlier % 100 == sizes[earlier // 100] - 1), "texts follow whole"


def test_a_cache_longer_than_the_target_is_refused(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, context: Callable[[str], Context]
) -> None:
    with pytest.raises(UserError, match="192 positions"):
        measure_step_cost(target, drafts[0], prompts, kv_lengths=[180], ctx=context("cost"), machine=machine)
