"""Tuning: before and after on the same prompts, what a changed target cost, and the share of it that came back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from simulated_rows import make_cells, make_maps

from components.contract import Context, Measurements, UserError
from components.refusals import PROMPTS
from components.rows import AcceptanceChange, AcceptanceMap, QualityFlag, SampledRun, read_rows
from components.speedup import choose_depth, measure_tuning

Rows = Callable[[list[object]], Measurements]
NewCtx = Callable[..., Context]
CAME, TUNED, OLDER = "c" * 64, "t" * 64, "o" * 64


def maps(p: float, seed: int, key: str, num: int = 64, depth: int = 3, workload: str = "code") -> list[Any]:
    return list(
        make_maps([p] * depth, num_prompts=num, num_tokens=129, seed=seed, spread=0.1, workload=workload, draft_key=key)
    )


def on_older(rows: list[AcceptanceMap]) -> list[Any]:
    return [dataclasses.replace(row, target_key="older".ljust(64, "0")) for row in rows]


def by_what(made: Measurements, workload: str = "all") -> dict[str, AcceptanceChange]:
    return {row.what: row for row in read_rows(made.path, AcceptanceChange) if row.workload == workload}


@pytest.mark.parametrize(("p", "verdict"), [(0.7, "undecided"), (0.85, "higher"), (0.5, "lower")])
def test_what_tuning_did_is_seen_and_nothing_is_not(
    p: float, verdict: str, measurements: Rows, new_ctx: NewCtx
) -> None:
    same = maps(0.7, 1, TUNED) if verdict == "undecided" else maps(p, 2, TUNED)
    made = measure_tuning(measurements(maps(0.7, 1, CAME)), measurements(same), ctx=new_ctx())
    (row,) = by_what(made).values()
    assert (row.what, row.verdict, row.num_prompts, row.depth_k) == ("tuning", verdict, 64, 3)
    assert row.change == pytest.approx(row.al_after - row.al_before) and row.lo <= row.change <= row.hi
    assert (row.before_draft_key, row.draft_key) == (CAME, TUNED) and row.came_back is None
    conclusion = {"undecided": "no difference shown", "higher": "made it better", "lower": "made it worse"}[verdict]
    assert conclusion in made.info["change_lines"]["tuning"]


def test_what_a_changed_target_cost_and_what_came_back_add_up(measurements: Rows, new_ctx: NewCtx) -> None:
    sources = (maps(0.5, 1, CAME), maps(0.7, 2, TUNED), on_older(maps(0.8, 3, OLDER)))
    made = measure_tuning(*map(measurements, sources), ctx=new_ctx())
    rows = by_what(made)
    assert {what: row.verdict for what, row in rows.items()} == {"target": "lower", "tuning": "higher", "both": "lower"}
    assert rows["target"].change + rows["tuning"].change == pytest.approx(rows["both"].change)
    back = rows["tuning"]
    assert back.came_back == pytest.approx(-back.change / rows["target"].change)
    assert back.came_back is not None and back.came_back_lo is not None and back.came_back_hi is not None
    assert 0 < back.came_back_lo < back.came_back < back.came_back_hi < 1
    assert rows["target"].before_target_key != rows["target"].target_key == back.before_target_key
    assert "still missing" in made.info["change_lines"]["both"] and "% [" in made.info["change_lines"]["tuning"]


def test_of_a_loss_that_was_not_shown_no_share_came_back(measurements: Rows, new_ctx: NewCtx) -> None:
    sources = (maps(0.7, 1, CAME), maps(0.8, 2, TUNED), on_older(maps(0.7, 1, OLDER)))
    rows = by_what(measure_tuning(*map(measurements, sources), ctx=new_ctx()))
    assert rows["target"].verdict == "undecided" and rows["tuning"].verdict == "higher"
    assert rows["tuning"].came_back is None and rows["both"].came_back is None


def test_a_pair_is_compared_prompt_by_prompt(measurements: Rows, new_ctx: NewCtx) -> None:
    """Every prompt gains alike, so the change is surer than either length; unpaired it could not be."""
    before = maps(0.6, 1, CAME)
    after = [
        dataclasses.replace(m, draft_key=TUNED, accepted=[min(m.k_max, a + (i % 2)) for i, a in enumerate(m.accepted)])
        for m in before
    ]
    row = by_what(measure_tuning(measurements(before), measurements(after), ctx=new_ctx()))["tuning"]
    assert row.verdict == "higher" and row.hi - row.lo < row.after_hi - row.after_lo


def test_workloads_stand_beside_all_and_only_shared_prompts_count(measurements: Rows, new_ctx: NewCtx) -> None:
    before = [*maps(0.6, 1, CAME), *maps(0.6, 2, CAME, workload="chat"), *maps(0.9, 3, CAME, workload="maths")]
    after = [*maps(0.8, 4, TUNED), *maps(0.3, 5, TUNED, num=30, workload="chat")]
    made = measure_tuning(measurements(before), measurements(after), ctx=new_ctx())
    rows = {row.workload: row for row in read_rows(made.path, AcceptanceChange)}
    assert {name: row.num_prompts for name, row in rows.items()} == {"all": 94, "chat": 30, "code": 64}
    assert rows["code"].verdict == "higher" and rows["chat"].verdict == "lower"
    assert not read_rows(made.path, QualityFlag)


def test_it_is_compared_at_the_depth_that_was_chosen_for_the_tuned_one(measurements: Rows, new_ctx: NewCtx) -> None:
    before, after = measurements(maps(0.9, 1, CAME)), measurements(maps(0.9, 2, TUNED))
    cells = [dataclasses.replace(cell, draft_key=TUNED) for cell in make_cells(3.0, [3.2, 9.0, 20.0], [0.2, 0.4, 0.6])]
    policy = choose_depth([after], [measurements(list(cells))], ctx=new_ctx())
    assert measure_tuning(before, after, policy=policy, ctx=new_ctx()).info["depth_k"] == 1
    assert measure_tuning(before, after, policy=policy, depth_k=2, ctx=new_ctx()).info["depth_k"] == 2
    shallow = measurements(maps(0.9, 2, TUNED, depth=2))
    assert measure_tuning(before, shallow, depth_k=9, ctx=new_ctx()).info["depth_k"] == 2


def sampled(rows: list[AcceptanceMap], num_rounds: int) -> list[Any]:
    shared = ("target_key", "draft_key", "method", "prompt_id", "workload", "dtype")
    facts = {"depth_k": 2, "temperature": 1.0, "seed": 0, "num_rounds": num_rounds, "num_tokens": 128}
    return [SampledRun(**{name: getattr(row, name) for name in shared}, **facts) for row in rows]


def test_sampled_answers_stand_beside_greedy_ones_of_the_same_depth(measurements: Rows, new_ctx: NewCtx) -> None:
    came, after = maps(0.8, 1, CAME), maps(0.8, 2, TUNED)
    made = measure_tuning(
        measurements([*came, *sampled(came, 100)]), measurements([*after, *sampled(after, 64)]), ctx=new_ctx()
    )
    rows = by_what(made)
    assert rows.keys() == {"tuning", "sampled", "sampled_tuned"} == by_what(made, "code").keys()
    greedy = by_what(measure_tuning(measurements(came), measurements(after), depth_k=2, ctx=new_ctx()))["tuning"]
    assert [rows["sampled"].al_after, rows["sampled_tuned"].al_after] == pytest.approx([1.28, 2.0])
    assert [rows["sampled"].al_before, rows["sampled_tuned"].al_before] == [greedy.al_before, greedy.al_after]
    assert (rows["sampled"].draft_key, rows["sampled"].before_draft_key, rows["sampled"].depth_k) == (CAME, CAME, 2)
    assert rows["sampled"].verdict == "lower" and "less of sampled answers" in made.info["change_lines"]["sampled"]


def test_few_prompts_are_flagged_and_decide_nothing(measurements: Rows, new_ctx: NewCtx) -> None:
    few = PROMPTS.decide - 1
    sources = (maps(0.1, 1, CAME, num=few), maps(0.97, 2, TUNED, num=few))
    made = measure_tuning(*map(measurements, sources), ctx=new_ctx())
    assert by_what(made)["tuning"].verdict == "undecided"
    assert [(flag.code, flag.value) for flag in read_rows(made.path, QualityFlag)] == [("few_prompts", float(few))]


def test_what_cannot_be_compared_is_told(measurements: Rows, new_ctx: NewCtx) -> None:
    before, after = measurements(maps(0.7, 1, CAME)), measurements(maps(0.7, 2, TUNED))
    with pytest.raises(UserError, match="on two targets"):
        measure_tuning(before, measurements(on_older(maps(0.7, 2, TUNED))), ctx=new_ctx())
    with pytest.raises(UserError, match="several drafters"):
        measure_tuning(measurements([*maps(0.7, 1, CAME), *maps(0.7, 2, TUNED)]), after, ctx=new_ctx())
    with pytest.raises(UserError, match="share no prompt"):
        measure_tuning(before, measurements(maps(0.7, 2, TUNED, workload="chat")), ctx=new_ctx())
    with pytest.raises(UserError, match=r"older \(.*no usable acceptance maps"):
        measure_tuning(before, after, measurements([]), ctx=new_ctx())
