"""Drift: the champion on new traffic against its release, flagged when the interval of the change excludes zero."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
from simulated_rows import make_cells, make_maps

from components.contract import Context, Measurements, UserError
from components.refusals import PROMPTS
from components.rows import Drift, QualityFlag, read_rows
from components.speedup import choose_depth, measure_drift

Rows = Callable[[list[object]], Measurements]
NewCtx = Callable[..., Context]


def maps(p: float, seed: int, workload: str = "code", num: int = 64, depth: int = 3) -> list[object]:
    return list(make_maps([p] * depth, num_prompts=num, num_tokens=65, seed=seed, spread=0.1, workload=workload))


@pytest.mark.parametrize(("p", "drifted"), [(0.8, False), (0.4, True), (0.97, True)])
def test_a_change_of_traffic_is_seen_and_none_is_not(
    p: float, drifted: bool, measurements: Rows, new_ctx: NewCtx
) -> None:
    made = measure_drift(measurements(maps(0.8, 1)), measurements(maps(p, 2)), ctx=new_ctx())
    row = read_rows(made.path, Drift)[0]
    assert row.drifted is drifted and made.info["drifted"] is drifted
    assert row.change == pytest.approx(row.al_now - row.al_then) and row.lo < row.change < row.hi
    assert (row.lo > 0 or row.hi < 0) is drifted
    assert bool(read_rows(made.path, QualityFlag)) is drifted
    assert (row.num_prompts_then, row.num_prompts_now, row.depth_k) == (64, 64, 3)
    assert ("drifted" in made.info["drift"]) is drifted


@pytest.mark.parametrize(("num", "drifted"), [(1, False), (PROMPTS.decide, True)])
def test_so_few_prompts_show_no_drift(num: int, drifted: bool, measurements: Rows, new_ctx: NewCtx) -> None:
    """One new prompt against one old one always differs, and its interval has no width."""
    made = measure_drift(measurements(maps(0.97, 1, num=num)), measurements(maps(0.1, 2, num=num)), ctx=new_ctx())
    row = read_rows(made.path, Drift)[0]
    assert row.hi < 0 and row.drifted is drifted and made.info["drifted"] is drifted
    assert "few_prompts" in {flag.code for flag in read_rows(made.path, QualityFlag)}


def test_each_workload_is_held_against_its_own_past(measurements: Rows, new_ctx: NewCtx) -> None:
    then = measurements([*maps(0.8, 1, "code"), *maps(0.5, 2, "chat")])
    now = measurements([*maps(0.8, 3, "code"), *maps(0.9, 4, "chat"), *maps(0.2, 5, "maths")])
    made = measure_drift(then, now, ctx=new_ctx())
    rows = {row.workload: row for row in read_rows(made.path, Drift)}
    assert list(rows) == ["all", "chat", "code", "maths"]
    assert {name: row.workload_then for name, row in rows.items()} == {
        "all": "all",
        "chat": "chat",
        "code": "code",
        "maths": "all",
    }
    assert rows["chat"].lo > 0 and rows["maths"].hi < 0 and not rows["code"].drifted
    flags = [flag for flag in read_rows(made.path, QualityFlag) if flag.code == "traffic_drift"]
    assert {flag.severity for flag in flags} == {"warning"}
    assert made.info["drifted_workloads"] == [name for name, row in rows.items() if row.drifted]


def test_it_is_compared_at_the_depth_that_is_served(measurements: Rows, new_ctx: NewCtx) -> None:
    then, now = measurements(maps(0.9, 1)), measurements(maps(0.9, 2))
    cells = measurements(list(make_cells(3.0, [3.2, 9.0, 20.0], [0.2, 0.4, 0.6])))
    policy = choose_depth([then], [cells], ctx=new_ctx())
    assert json.loads((policy.path / "policy.json").read_text())["winner"]["depth_k"] == 1
    assert measure_drift(then, now, policy, ctx=new_ctx()).info["depth_k"] == 1
    assert measure_drift(then, now, policy, depth_k=2, ctx=new_ctx()).info["depth_k"] == 2
    assert measure_drift(then, measurements(maps(0.9, 2, depth=2)), depth_k=9, ctx=new_ctx()).info["depth_k"] == 2


def test_the_flag_is_raised_at_about_its_rate_when_nothing_changed(measurements: Rows, new_ctx: NewCtx) -> None:
    """60 studies without drift: 5 % false alarms are expected, 20 % would be a wrong interval."""
    alarms = 0
    for study in range(60):
        then, now = measurements(maps(0.7, 2 * study, num=30)), measurements(maps(0.7, 2 * study + 1, num=30))
        alarms += bool(measure_drift(then, now, num_draws=300, ctx=new_ctx()).info["drifted"])
    assert alarms <= 12


def test_trees_are_no_part_of_drift(measurements: Rows, new_ctx: NewCtx) -> None:
    then, now = maps(0.8, 1), maps(0.8, 2)
    trees = [dataclasses.replace(m, tree_budget=8, accepted=[3] * 64) for m in then]  # type: ignore[type-var]
    alone = measure_drift(measurements(then), measurements(now), ctx=new_ctx())
    beside = measure_drift(measurements([*trees, *then]), measurements(now), ctx=new_ctx())
    assert beside.info == alone.info
    with pytest.raises(UserError, match="no usable acceptance maps"):
        measure_drift(measurements(list(trees)), measurements(now), ctx=new_ctx())


def test_a_handful_of_prompts_is_flagged(measurements: Rows, new_ctx: NewCtx) -> None:
    made = measure_drift(measurements(maps(0.8, 1)), measurements(maps(0.8, 2, num=8)), ctx=new_ctx())
    assert [(f.code, f.value) for f in read_rows(made.path, QualityFlag) if f.code == "few_prompts"] == [
        ("few_prompts", 8.0)
    ]


def test_what_cannot_be_compared_is_told(measurements: Rows, new_ctx: NewCtx) -> None:
    then = measurements(maps(0.8, 1))
    with pytest.raises(UserError, match=r"now \(.*no usable acceptance maps"):
        measure_drift(then, measurements([]), ctx=new_ctx())
    other = list(make_maps([0.8], num_prompts=5, num_tokens=65, seed=1, draft_key="x" * 64))
    with pytest.raises(UserError, match="two drafters"):
        measure_drift(then, measurements(other), ctx=new_ctx())


def test_the_same_measurements_give_the_same_rows(measurements: Rows, new_ctx: NewCtx) -> None:
    then, now = maps(0.8, 1), maps(0.7, 2)
    np.random.default_rng(0).shuffle(now)
    first = measure_drift(measurements(then), measurements(now), ctx=new_ctx())
    second = measure_drift(measurements(then), measurements(sorted(now, key=str)), ctx=new_ctx())
    assert first.info == second.info


def test_the_policy_of_a_champion_released_by_an_older_version_is_read(measurements: Rows, new_ctx: NewCtx) -> None:
    then = measurements(maps(0.9, 1))
    cells = measurements(list(make_cells(3.0, [3.2, 9.0, 20.0], [0.2, 0.4, 0.6])))
    policy = choose_depth([then], [cells], ctx=new_ctx())
    file = policy.path / "policy.json"
    old = json.loads(file.read_text())
    for row in old["prompts"]:
        del row["workload"]
    file.write_text(json.dumps({name: value for name, value in old.items() if name not in ("roles", "comparisons")}))
    assert measure_drift(then, then, policy, ctx=new_ctx()).info["depth_k"] == 1
