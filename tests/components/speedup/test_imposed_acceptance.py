"""Imposed acceptance beside the speedup model: rounds counted as dice throw them, speeds as the rounds cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from simulated_rows import make_request

from components.contract import Context, Measurements
from components.rows import EngineAcceptance, EngineComparison, QualityFlag, read_rows
from components.speedup import compare_engines
from components.speedup.imposed_acceptance import expected_rounds, imposed_al, verdict

Rows = Callable[[list[Any]], Measurements]
NewCtx = Callable[..., Context]
RATES, TOKENS = (0.9, 0.7, 0.4), 60
PLAIN_S, ROUND_S = 0.010, 0.014


def thrown_rounds(rates: Sequence[float], num_tokens: int, dice: random.Random) -> int:
    """Rounds until so many tokens are there."""
    rounds, tokens = 0, 0
    while tokens < num_tokens:
        chance = dice.random()
        tokens += 1 + sum(chance < rate for rate in rates)
        rounds += 1
    return rounds


@pytest.mark.parametrize("rates", [RATES, (0.3,), (0.9,) * 8, (0.6, 0.36, 0.216, 0.13)])
@pytest.mark.parametrize("num_tokens", [1, 5, 60])
def test_expected_rounds_are_the_mean_of_what_dice_throw(rates: tuple[float, ...], num_tokens: int) -> None:
    dice = random.Random(1)
    mean = sum(thrown_rounds(rates, num_tokens, dice) for _ in range(4000)) / 4000
    assert expected_rounds(rates, num_tokens) == pytest.approx(mean, rel=0.02)


def test_all_refused_is_a_round_for_each_token_and_all_kept_the_whole_depth() -> None:
    assert expected_rounds((0.0, 0.0), 17) == 17.0
    assert expected_rounds((1.0, 1.0), 17) == 6.0  # 17 tokens, three a round, the last one cut
    assert imposed_al((1.0, 1.0), [make_request("imposed", 2, 0, 18, 1.0)]) == pytest.approx(17 / 6)
    assert imposed_al((1.0, 1.0), []) is None


def engine_rows(round_s: float, dice: random.Random) -> list[Any]:
    """Plain, all refused, and RATES: 30 answers each; a round takes ROUND_S where all is refused, else `round_s`."""
    rows: list[Any] = []
    engine = {"engine": "vllm", "engine_version": "1", "concurrency": 1, "first_chunk_tokens": 1, "draft_key": ""}
    for number in range(30):
        rows.append(make_request("none", 0, number, TOKENS + 1, TOKENS * PLAIN_S, **engine))
        for method, rates, seconds in (("imposed 1.00", (0.0,) * 3, ROUND_S), ("imposed 3.00", RATES, round_s)):
            rounds = thrown_rounds(rates, TOKENS, dice)
            counted = {**engine, "num_rounds": rounds, "identical": None}
            rows.append(make_request(method, 3, number, TOKENS + 1, rounds * seconds, **counted))
    for method, rates in (("imposed 1.00", (0.0,) * 3), ("imposed 3.00", RATES)):
        counts = ("s", "t", "", method, 3, "code", 1, "vllm", "1", "prometheus", 30, 100, 300, 0, [0, 0, 0], None)
        rows.append(EngineAcceptance(*counts, imposed=list(rates)))
    return rows


@pytest.mark.parametrize(("round_s", "found"), [(ROUND_S, "close"), (ROUND_S * 1.3, "mismatch")])
def test_the_verdict_is_whether_a_round_costs_the_same_however_much_of_it_is_kept(
    round_s: float, found: str, measurements: Rows, new_ctx: NewCtx
) -> None:
    made = compare_engines([measurements(engine_rows(round_s, random.Random(3)))], ctx=new_ctx())
    zero, row = (one for one in read_rows(made.path, EngineComparison) if one.workload == "all")
    assert (zero.method, zero.al_pred, zero.speedup_pred, zero.verdict) == ("imposed 1.00", 1.0, None, "not_compared")
    assert zero.speedup_engine == pytest.approx(PLAIN_S / ROUND_S)
    assert row.al_pred is not None and row.al_pred == pytest.approx(TOKENS / expected_rounds(RATES, TOKENS))
    assert row.speedup_pred == pytest.approx(row.al_pred * PLAIN_S / ROUND_S)
    assert row.al_engine == pytest.approx(row.al_pred, rel=0.05) and row.verdict == found
    assert read_rows(made.path, QualityFlag) == [], "no drafter is at fault"
    assert any("3.00 at depth 3" in line and found in line for line in made.info["verdicts"])


def test_without_a_server_at_rate_zero_nothing_is_predicted(measurements: Rows, new_ctx: NewCtx) -> None:
    rows = [row for row in engine_rows(ROUND_S, random.Random(3)) if row.method != "imposed 1.00"]
    made = compare_engines([measurements(rows)], ctx=new_ctx())
    (row,) = (one for one in read_rows(made.path, EngineComparison) if one.workload == "all")
    assert (row.speedup_pred, row.verdict) == (None, "not_compared") and row.speedup_engine


def test_speedups_off_by_more_than_a_tenth_are_a_mismatch() -> None:
    assert [verdict(1.5, measured) for measured in (1.5, 1.4, 1.3, None)] == [
        "close",
        "close",
        "mismatch",
        "not_compared",
    ]
