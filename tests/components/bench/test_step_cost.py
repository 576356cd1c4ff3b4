"""Cost rows are complete for every drafter, against one plain baseline; and a measurement says why it ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_subjects import LOOKAHEAD_CANNOT, lookahead_of
from made_runs import arm_run, decoded

from components.bench import measure_step_cost
from components.bench.end_to_end.arms import PLAIN, Arm
from components.bench.measurement import process as measuring_process
from components.bench.step_cost import MEMORY_SHARE, MIN_TOKENS, CostStudy, Grid, Setting, plan_arms
from components.contract import Context, Draft, Machine, Measurements, Prompts, Target, UserError
from components.rows import CostCell, read_rows
from components.speedup.prediction import costs

DEEP = Arm("mtp", "m", 4)
SMALL: dict[str, Any] = {"tokens_per_block": 16, "kv_lengths": [32], "seconds": 0.1, "num_processes": 1}
PHASES = ["verify", "draft", "host", "prefill", "draft_prefill"]
PLAIN_PHASES = ["target_step", "host", "prefill"]


@pytest.fixture(scope="module")
def measured(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, tmp_path_factory: pytest.TempPathFactory
) -> Measurements:
    """Both drafters alone and side by side, as chains and trees, at two lengths, in two real processes."""
    folder = tmp_path_factory.mktemp("cost")
    ctx = Context(key="c" * 64, out=folder, scratch=folder, num_threads=1)
    sizes: dict[str, Any] = {"batch_sizes": [3, 1], "kv_lengths": [48, 32], "trees": [5], "max_depth": 3}
    asked: dict[str, Any] = {**SMALL, **sizes, "num_processes": 2}
    return measure_step_cost(target, drafts, prompts, **asked, ctx=ctx, machine=machine)


@pytest.fixture(scope="module")
def cells(measured: Measurements) -> list[CostCell]:
    return read_rows(measured.path, CostCell)


def test_every_phase_of_every_arm_is_timed_in_every_block_of_every_process(
    measured: Measurements, cells: list[CostCell], drafts: list[Draft]
) -> None:
    eagle, mtp = (draft.key for draft in drafts)
    arms = [(eagle, k, None) for k in (1, 2, 3)] + [(mtp, k, None) for k in (1, 2)] + [(eagle, 4, 5), (mtp, 2, 5)]
    expected = set(itertools.product([*arms], PHASES)) | set(itertools.product([("", 0, None)], PLAIN_PHASES))
    num_processes = measured.info["num_processes"]  # two, and a third where a cost contradicts its neighbours
    places = list(itertools.product((1, 3), (32, 48), range(1, num_processes + 1)))
    found: dict[tuple[int, int, int], dict[int, list[Any]]] = {place: {} for place in places}
    for c in cells:
        blocks = found[c.batch_size, c.kv_len, c.process]
        blocks.setdefault(c.block, []).append(((c.draft_key, c.depth_k, c.tree_budget), c.phase))
    for place, blocks in found.items():
        assert sorted(blocks) == list(range(1, len(blocks) + 1)) and blocks, place
        for rows in blocks.values():
            assert len(rows) == len(set(rows)) == len(expected) and set(rows) == expected, place
    assert measured.info["num_blocks"] == sum(
        len(blocks) for (size, kv_len, _), blocks in found.items() if (size, kv_len) == (1, 32)
    )
    assert num_processes in (2, 3) and measured.info["left_out"] == []


def test_rows_say_what_was_timed_and_how(measured: Measurements, cells: list[CostCell], drafts: list[Draft]) -> None:
    methods = {"": "none", **{draft.key: draft.info["method"] for draft in drafts}}
    for c in cells:
        assert c.median_ns > 0 and c.mad_ns >= 0 and c.reps_in_block >= 1
        rows_of_pass = 1 + (c.tree_budget or c.depth_k)
        if c.phase.endswith("prefill"):
            # The context ends half a block before its middle; a block is shorter where the machine is slow.
            assert c.kv_len - c.num_rows in range(MIN_TOKENS // 2, SMALL["tokens_per_block"] // 2 + 1)
        else:
            assert c.num_rows == rows_of_pass - (c.phase == "draft")
        assert c.method == methods[c.draft_key] and c.load_average is not None
        assert (c.kernel, c.num_threads) == (measured.info["kernel"], measured.info["num_threads"])
    assert measured.info["timer_overhead_ns"] < min(c.median_ns for c in cells)
    assert {"eagle3 verify k=4 tree=5 batch=3 kv=48", "target_step batch=1 kv=32"} <= set(measured.info["medians_ms"])
    assert measured.info["draft_keys"] == [draft.key for draft in drafts]
    assert measured.info["methods"] == ["eagle3", "mtp"]


def test_all_drafters_have_one_plain_baseline(cells: list[CostCell], drafts: list[Draft]) -> None:
    tables = [costs.cost_table(cells, costs.Setting(draft.key, 1)) for draft in drafts]
    assert tables[0].times.target == tables[1].times.target > 0
    assert [table.depths for table in tables] == [[0, 1, 2, 3], [0, 1, 2]]
    assert all(table.num_processes in (2, 3) for table in tables)


def test_a_block_is_short_enough_for_a_slow_target_and_says_how_many_there_is_time_for(
    context: Callable[[str], Context],
) -> None:
    """Two arms of a second a token each, at two settings: four seconds for a token of all."""
    notes: list[str] = []
    ctx = context("cost")
    ctx.send = lambda event: notes.append(str(event.get("message", "")))
    course = Course([{}], ctx)
    course.grid, course.num_processes = Grid((PLAIN, DEEP), (Setting(1, 32), Setting(1, 64)), 64), 1
    run = arm_run(PLAIN, [[10**9] * 11])._replace(decoded=[decoded(11, 11 * 10**9)])
    each = 11 / 12  # seconds a token of an arm, the one of the prefill counted
    for share, tokens in ((2 * 64 * 4.0, 64), (2 * 20.5 * 4.0 * each, 20), (1.0, MIN_TOKENS)):
        assert course._fitted_grid([run, run._replace(arm=DEEP)], share).tokens == tokens
    assert notes[-1].startswith("a block of 8 tokens takes about 29.3 s for all arms, so 1 s of each process")


def test_how_well_costs_are_known_is_said(measured: Measurements) -> None:
    reached = measured.info["precision_reached"]
    assert set(reached) == {*(f"eagle3 k={k}" for k in (1, 2, 3)), "mtp k=1", "mtp k=2", "eagle3 k=4 tree of 5",
                            "mtp k=2 tree of 5"}  # fmt: skip
    assert all(width > 0 for width in reached.values())


def measure(
    target: Target, drafts: list[Draft], prompts: Prompts, ctx: Context, machine: Machine, **changes: Any
) -> Measurements:
    return measure_step_cost(target, drafts, prompts, **{**SMALL, **changes}, ctx=ctx, machine=machine)


@pytest.mark.usefixtures("here_instead")
def test_recorded_passes_are_timed_like_others(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, context: Callable[[str], Context]
) -> None:
    """On a CPU the static passes run without being recorded; cells are complete, and the kernel says what was timed."""
    ctx = context("cost")
    made = measure(target, drafts[:1], prompts, ctx, machine, batch_sizes=[1, 2], max_depth=2, graphs=True)
    cells = read_rows(ctx.out, CostCell)
    assert made.info["kernel"].endswith("+graphs") and made.info["left_out"] == []
    assert {c.kernel for c in cells} == {made.info["kernel"]}
    assert {(c.phase, c.batch_size) for c in cells if c.depth_k == 2} == set(itertools.product(PHASES, (1, 2)))


def test_recorded_passes_have_no_second_baseline(drafts: list[Draft]) -> None:
    with_rival, without = (plan_arms(drafts, 1, [], rival=rival) for rival in (True, False))
    assert [arm.label for arm in with_rival] == ["plain", "plain on plain kernels", "eagle3 k=1", "mtp k=1"]
    assert [arm.label for arm in without] == ["plain", "eagle3 k=1", "mtp k=1"]


def test_a_chain_is_as_deep_as_it_was_trained_for_unless_asked_within_reach(drafts: list[Draft]) -> None:
    def depths(max_depth: int) -> list[int]:
        return [arm.depth for arm in plan_arms(drafts, max_depth, [], rival=False) if arm.method == "mtp"]

    assert depths(0) == [1, 2] and depths(1) == [1] and depths(64) == list(range(1, drafts[1].info["max_depth"] + 1))


class Course(CostStudy):
    """A study whose processes take exactly their share, and whose costs are known as it is told, process by process."""

    def __init__(self, widths: list[dict[str, float]], ctx: Context) -> None:
        nothing: Any = None
        super().__init__(nothing, [], nothing, [], nothing, "float32", False, ctx)
        self.known, self.shares = widths, list[float]()

    def _one_process(self, share: float, spent: float, seconds: float) -> float:
        self.num_processes += 1
        self.shares.append(share)
        return share

    def half_widths(self) -> dict[str, float]:
        return self.known[min(self.num_processes, len(self.known)) - 1]


def test_a_measurement_ends_when_every_cost_is_known(context: Callable[[str], Context]) -> None:
    course = Course([{}, {"mtp k=1": 0.01}, {"mtp k=1": 0.08, "mtp k=2": 0.01}], context("cost"))
    course.run(120.0, 3, 0.03)
    assert course.stop_reason == "time is spent; not known to 3.0%: mtp k=1 to 8.0%", "five in the time that was given"
    assert course.shares == [24.0] * 5
    early = Course([{"mtp k=1": 0.02}], context("early"))
    early.run(120.0, 3, 0.03)
    assert early.stop_reason == "every cost is known to 2.0%" and early.num_processes == 3, "never from fewer processes"
    alone = Course([{}], context("alone"))
    alone.run(120.0, 1, 0.03)
    assert alone.stop_reason == "time is spent; not known to 3.0%: anything, one process only"


def test_a_cost_that_contradicts_its_neighbours_is_measured_once_more(
    context: Callable[[str], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.bench.step_cost.cells_to_measure_again", lambda cells: {("m", 2): "stands out"})
    for width, ended, num_processes in (
        (0.01, "every cost is known to 1.0%", 4),
        (0.08, "time is spent; not known to 3.0%: mtp k=1 to 8.0%", 5),
    ):
        course = Course([{"mtp k=1": width}], context(ended[:5]))
        course.run(120.0, 3, 0.03)
        assert (course.stop_reason, course.shares) == (ended, [24.0] * num_processes)


@pytest.mark.usefixtures("here_instead")
def test_cells_that_do_not_fit_the_memory_are_left_out_and_said(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    machine: Machine,
    context: Callable[[str], Context],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx = context("cost")
    token = 7 * 2 * 2 * 8 * 4  # layers, keys and values, heads, their size, float32
    room_for_one = round(4 * (32 + 4 + 16 + 2) * token / MEMORY_SHARE) + 1
    monkeypatch.setattr(measuring_process, "free_memory", lambda device: room_for_one)
    sizes: dict[str, Any] = {"batch_sizes": [1, 4], "kv_lengths": [32, 64], "max_depth": 1}
    made = measure(target, drafts[:1], prompts, ctx, machine, **sizes)
    assert made.info["left_out"] == ["batch 4 kv 64"]
    cells = {
        (c.batch_size, c.kv_len, c.phase) for c in read_rows(ctx.out, CostCell) if c.phase in ("verify", "target_step")
    }
    places = [(1, 32), (1, 64), (4, 32)]
    assert cells == {(*place, phase) for place in places for phase in ("verify", "target_step")}
    monkeypatch.setattr(measuring_process, "free_memory", lambda device: 1000)
    with pytest.raises(UserError, match="no cell fits"):
        measure(target, drafts[:1], prompts, context("none"), machine, **sizes)


def test_other_work_on_the_machine_is_flagged(context: Callable[[str], Context]) -> None:
    course = Course([{}], context("cost"))
    for load, codes in ((1.0, []), (2.9, []), (3.2, ["loaded_machine"]), (None, [])):
        course.conditions = {"load_average": load}
        assert [flag.code for flag in course.flags(num_cores=2)] == codes


def test_a_cache_longer_than_the_target_is_refused(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, context: Callable[[str], Context]
) -> None:
    with pytest.raises(UserError, match="the target has 192: ask for at most 111"):
        measure(target, drafts, prompts, context("cost"), machine, kv_lengths=[180])


@pytest.mark.parametrize(("settings", "said"), LOOKAHEAD_CANNOT)
def test_what_lookahead_cannot_do_is_refused_before_anything_runs(
    settings: dict[str, list[int]],
    said: str,
    target: Target,
    prompts: Prompts,
    machine: Machine,
    tmp_path: Path,
    context: Callable[[str], Context],
) -> None:
    missing, drafts = lookahead_of(target, tmp_path)
    with pytest.raises(UserError, match=said):
        measure(missing, drafts, prompts, context("cost"), machine, **settings)
