"""Every gate fires on what it is for, with its value, and stays silent one step short of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from simulated_rows import DRAFT, make_cells, make_maps, make_request

from components.contract import Context, DepthPolicy, Measurements
from components.policy import Winner, read_policy
from components.rows import AcceptanceMap, CostCell, QualityFlag
from components.speedup import choose_depth, confirm_depth
from components.speedup.prediction.flags import (
    baseline_flags,
    baseline_issues,
    depth_issues,
    looping_issues,
    sample_issues,
    thread_flags,
)

Rows = Callable[[list[object]], Measurements]
NewCtx = Callable[..., Context]

P = [0.8, 0.8, 0.8]


def maps(**changes: object) -> list[AcceptanceMap]:
    made = make_maps(P, num_prompts=64, num_tokens=96, seed=1)
    return [dataclasses.replace(m, **changes) for m in made]  # type: ignore[arg-type]


def cells() -> list[CostCell]:
    return make_cells(10.0, [11.0, 11.5, 12.0], [0.5, 1.0, 1.5])


@pytest.fixture
def flags(measurements: Rows, new_ctx: NewCtx) -> Callable[..., dict[str, QualityFlag]]:
    """Flags by code of a choice, without those that only inform."""

    def run(acceptance: list, cost: list) -> dict[str, QualityFlag]:
        policy = read_policy(choose_depth([measurements(acceptance)], [measurements(cost)], ctx=new_ctx()).path)
        return {f.code: f for f in policy.flags if f.severity != "info"}

    return run


def test_a_clean_study_raises_nothing(flags: Callable[..., dict[str, QualityFlag]]) -> None:
    assert flags(maps(), cells()) == {}


@pytest.mark.parametrize(
    ("ratio", "severity"), [(1.001, None), (0.999, "warning"), (0.981, "warning"), (0.979, "fault")]
)
def test_a_speedup_above_its_length_is_doubted_and_beyond_noise_refused(ratio: float, severity: str | None) -> None:
    found = baseline_issues(ratio, 3)
    assert [d.severity for d in found] == ([severity] if severity else [])
    assert all((d.code, d.value) == ("bad_baseline", ratio) for d in found)


def test_bounds_of_counts_depth_and_loops() -> None:
    assert [d.code for d in sample_issues(63, 199, 3)] == ["few_prompts", "few_rounds"]
    assert sample_issues(64, 200, 3) == []
    assert [(d.code, d.value) for d in depth_issues(8, 7)] == [("beyond_trained_depth", 8)]
    assert depth_issues(7, 7) == []
    assert [(d.code, d.value) for d in looping_issues(0.51)] == [("looping_output", 0.51)]
    assert looping_issues(0.5) == []


def test_costs_that_cannot_be_or_that_one_process_timed_are_flagged(
    flags: Callable[..., dict[str, QualityFlag]], measurements: Rows, new_ctx: NewCtx
) -> None:
    below = make_cells(10.0, [11.0, 9.9, 12.0], [0.5, 1.0, 1.5])
    assert flags(maps(), below)["verify_below_plain"].value == pytest.approx(0.99)
    falling = make_cells(10.0, [11.0, 14.0, 11.6], [0.5, 1.0, 1.5], noise=0.002)
    found = flags(maps(), falling)["cost_cell_contradicts"]
    assert found.value == 3 and "measure it again" in found.detail
    alone = make_cells(10.0, [11.0, 11.5, 12.0], [0.5, 1.0, 1.5], num_processes=1)
    (flag,) = flags(maps(), alone).values()
    assert flag.code == "one_session" and "leave out how fresh processes differ" in flag.detail


def test_a_few_prompts_that_hold_most_rounds_are_flagged(flags: Callable[..., dict[str, QualityFlag]]) -> None:
    rows = maps()
    long = make_maps(P, num_prompts=1, num_tokens=4000, seed=3)[0]
    found = flags([*rows[1:], dataclasses.replace(long, prompt_id=rows[0].prompt_id)], cells())
    assert set(found) == {"few_prompts_weigh"} and found["few_prompts_weigh"].value < 10


def test_drafters_timed_beside_another_plain_step_are_flagged() -> None:
    def codes(*timed: tuple[int, float]) -> list[tuple[str, str]]:
        plain = {(name, "mtp"): one for name, one in zip("abc", timed, strict=False)}
        return [(f.draft_key, f.code) for f in baseline_flags("s", plain)]

    assert codes((0, 4.24), (1, 5.33)) == [("b", "other_baseline")]
    assert codes((0, 4.24), (1, 4.3)) == codes((0, 4.24), (0, 5.33)) == codes() == []


def test_depth_beyond_the_trained_one_and_loops_come_from_the_maps(
    flags: Callable[..., dict[str, QualityFlag]],
) -> None:
    found = flags(maps(trained_depth=1, repeated_bigrams=0.7), cells())
    assert set(found) == {"beyond_trained_depth", "looping_output"}
    assert found["looping_output"].value == pytest.approx(0.7)


def test_length_that_falls_with_depth_is_flagged_beyond_chance_only(
    flags: Callable[..., dict[str, QualityFlag]],
) -> None:
    """A map on which a third draft lands badly: two by two it takes two rounds, three at once then one by one three."""
    found = flags(maps(accepted=[3, 0, 0, 2, 0, 0] * 16, num_tokens=97), cells())
    assert found["al_falls_with_depth"].value == 3
    assert "(no interval: nothing varied)" in found["al_falls_with_depth"].detail, "every prompt fell alike"
    long = [[3, 0, 0, 2, 0, 0] * 16, [3, 0, 0, 2, 0, 0] * 8 + [1] * 48]
    varied = [dataclasses.replace(m, accepted=long[i % 2]) for i, m in enumerate(maps(num_tokens=97))]
    detail = flags(varied, cells())["al_falls_with_depth"].detail
    numbers = re.search(r"by (\d\.\d+) \(95 % interval \[(\d\.\d+), (\d\.\d+)\]\)", detail)
    assert numbers, detail
    fall, lo, hi = map(float, numbers.groups())
    assert 0.0 < lo < fall < hi, "an interval of the fall, around it"
    flat = make_maps([0.8, 0.02, 0.02], num_prompts=64, num_tokens=96, seed=9)
    assert "al_falls_with_depth" not in flags(flat, cells())


def test_training_accuracy_far_from_replay_is_told(measurements: Rows, new_ctx: NewCtx) -> None:
    flattered = [dataclasses.replace(m, proxy_accepted=[3] * 95) for m in maps()]
    policy = read_policy(choose_depth([measurements(flattered)], [measurements(cells())], ctx=new_ctx()).path)
    (flag,) = [f for f in policy.flags if f.code == "proxy_gap"]
    al = next(e.al for e in policy.evals if e.depth_k == policy.choices[0].depth_k)
    assert flag.value == pytest.approx(4.0 / al - 1.0)


@pytest.fixture
def chosen(measurements: Rows, new_ctx: NewCtx) -> DepthPolicy:
    """Depth 1 is predicted to be 1.5x: AL 1.97, a round costs 4/3 of a plain step."""
    one = make_maps([0.97], num_prompts=64, num_tokens=65, seed=1)
    return choose_depth([measurements(one)], [measurements(make_cells(3.0, [3.5], [0.5]))], ctx=new_ctx())


def decoded(depth: int, speedup: float, **changes: object) -> list[object]:
    """Plain and speculative requests on 64 prompts, in three processes."""
    rows: list[object] = []
    for n in range(64):
        seconds = 1.0 + 0.3 * (n % 5)
        rows.append(make_request("none", 0, n, 65, seconds, process=1 + n % 3))
        rows.append(make_request("eagle3", depth, n, 65, seconds / speedup, process=1 + n % 3, **changes))
    return rows


@pytest.mark.parametrize(
    ("measured", "code"),
    [(1.49, None), (1.33, "prediction_gap"), (1.68, "prediction_gap")],
    ids=["as-predicted", "slower", "faster"],
)
def test_a_prediction_more_than_ten_percent_off_is_flagged(
    measured: float, code: str | None, chosen: DepthPolicy, measurements: Rows, new_ctx: NewCtx
) -> None:
    policy = read_policy(confirm_depth(chosen, measurements(decoded(1, measured)), ctx=new_ctx()).path)
    assert {f.code for f in policy.flags if f.severity == "warning"} == ({code} if code else set())
    # The gate's own limit is a setting (15 %): what is flagged may still pass.
    assert policy.gate is not None and policy.gate.passed


def test_step_costs_of_other_threads_than_most_are_flagged(measurements: Rows, new_ctx: NewCtx) -> None:
    assert thread_flags("s", {}) == thread_flags("s", {("a", "mtp"): 2, ("b", "hass"): 2}) == []
    (only,) = thread_flags("s", {("a", "mtp"): 1, ("b", "hass"): 2, ("c", "eagle3"): 1})
    assert (only.code, only.draft_key, only.method, only.value) == ("other_threads", "b", "hass", 2)
    both = [maps(), maps(draft_key="e" * 64, method="hass")]
    costs = [cells(), [dataclasses.replace(c, draft_key="e" * 64, method="hass", num_threads=4) for c in cells()]]
    made = choose_depth([measurements(m) for m in both], [measurements(c) for c in costs], ctx=new_ctx())  # type: ignore[arg-type]
    policy = read_policy(made.path)
    assert policy.threads == {DRAFT: 2, "e" * 64: 4}
    assert [(f.draft_key, f.value) for f in policy.flags if f.code == "other_threads"] == [("e" * 64, 4)]


def test_the_threads_of_a_drafter_are_those_that_its_chains_were_timed_on(measurements: Rows, new_ctx: NewCtx) -> None:
    """Its trees were measured by themselves, on other threads; chains are what is decoded and served."""
    trees = [dataclasses.replace(m, tree_budget=8) for m in maps()]
    grown = [
        dataclasses.replace(c, tree_budget=8 if c.phase != "target_step" else None, num_threads=1)
        for c in cells()
        if c.phase == "target_step" or c.depth_k == 3
    ]
    both = [measurements([*maps(), *trees])]
    policy = read_policy(choose_depth(both, [measurements(cells()), measurements(grown)], ctx=new_ctx()).path)  # type: ignore[arg-type]
    assert policy.threads == {DRAFT: 2}


def test_a_drafter_that_decoded_on_other_threads_is_flagged_once_whatever_the_batch_sizes(
    measurements: Rows, new_ctx: NewCtx
) -> None:
    one = make_maps([0.97], num_prompts=64, num_tokens=65, seed=1)
    sizes = [dataclasses.replace(c, batch_size=size) for size in (1, 8) for c in make_cells(3.0, [3.5], [0.5])]
    chosen = choose_depth([measurements(one)], [measurements(sizes)], ctx=new_ctx())  # type: ignore[arg-type]
    rows = [
        dataclasses.replace(row, num_threads=1, batch_size=size)  # type: ignore[type-var]
        for size in (1, 8)
        for row in decoded(1, 1.49)
    ]
    policy = read_policy(confirm_depth(chosen, measurements(rows), ctx=new_ctx()).path)  # type: ignore[arg-type]
    assert {c.batch_size for c in policy.choices if c.depth_k > 0} == {1, 8}
    assert [f.code for f in policy.flags].count("predicted_on_other_threads") == 1


@pytest.mark.parametrize(("threads", "flagged"), [(2, False), (1, True)])
def test_decoding_on_other_threads_than_predicted_for_is_flagged(
    threads: int, flagged: bool, chosen: DepthPolicy, measurements: Rows, new_ctx: NewCtx
) -> None:
    rows = [dataclasses.replace(row, num_threads=threads) for row in decoded(1, 1.49)]  # type: ignore[type-var]
    policy = read_policy(confirm_depth(chosen, measurements(rows), ctx=new_ctx()).path)  # type: ignore[arg-type]
    found = [f.value for f in policy.flags if f.code == "predicted_on_other_threads"]
    assert found == ([2] if flagged else [])


@pytest.mark.parametrize(("speed", "taxed"), [(0.93, True), (0.98, False), (1.04, False)])
def test_a_drafter_that_is_loaded_and_drafts_nothing_pays_a_tax(
    speed: float, taxed: bool, chosen: DepthPolicy, measurements: Rows, new_ctx: NewCtx
) -> None:
    """Rows of the arm that is loaded but off: the drafter's method and key, depth 0, a round a token."""
    off = [r for r in decoded(0, speed, num_rounds=64, num_accepted=0, num_drafted=0) if r.method != "none"]  # type: ignore[attr-defined]
    made = confirm_depth(chosen, measurements([*decoded(1, 1.49), *off]), ctx=new_ctx())
    policy = read_policy(made.path)
    found = {f.code: f for f in policy.flags if f.severity != "info"}
    assert set(found) == ({"loaded_tax"} if taxed else set())  # and no speedup above a length of 1
    if taxed:
        assert found["loaded_tax"].value == pytest.approx(1.0 - speed)
    arm = next(a for a in policy.arms if (a.method, a.depth_k, a.workload) == ("eagle3", 0, "all"))
    assert arm.speedup == pytest.approx(speed)
    assert policy.winner == Winner(DRAFT, "eagle3", 1)


def test_a_tax_within_chance_is_no_tax_and_nothing_was_predicted(
    chosen: DepthPolicy, measurements: Rows, new_ctx: NewCtx
) -> None:
    """Six per cent slower on the whole, but prompts scatter by thirty: the interval reaches 1."""
    off = [
        dataclasses.replace(r, decode_ns=int(r.decode_ns * (1.36 if n % 2 else 0.76)))  # type: ignore[type-var, attr-defined]
        for n, r in enumerate(r for r in decoded(0, 1.0, num_rounds=64) if r.method != "none")  # type: ignore[attr-defined]
    ]
    made = confirm_depth(chosen, measurements([*decoded(1, 1.49), *off]), ctx=new_ctx())
    policy = read_policy(made.path)
    arm = next(a for a in policy.arms if (a.method, a.depth_k, a.workload) == ("eagle3", 0, "all"))
    assert arm.speedup < 0.97 < arm.hi
    assert "loaded_tax" not in {f.code for f in policy.flags}
    assert arm.speedup_pred is None, "a drafter that is off was not predicted"


def test_a_tree_at_the_same_depth_is_an_arm_of_its_own(
    chosen: DepthPolicy, measurements: Rows, new_ctx: NewCtx
) -> None:
    tree = [
        dataclasses.replace(r, tree_budget=8, decode_ns=r.decode_ns * 3)  # type: ignore[type-var, attr-defined]
        for r in decoded(1, 1.49)
        if r.method != "none"  # type: ignore[attr-defined]
    ]
    policy = read_policy(confirm_depth(chosen, measurements([*decoded(1, 1.49), *tree]), ctx=new_ctx()).path)
    arms = {a.tree_budget: a for a in policy.arms if a.workload == "all"}
    assert arms[None].speedup == pytest.approx(1.49) and arms[8].speedup == pytest.approx(1.49 / 3)
    assert policy.choices[0].speedup_meas == pytest.approx(1.49)
    assert arms[8].speedup_pred is None
