"""Engines beside our own loop: the same rounds are equal, a drafter loaded wrongly is a named fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from simulated_rows import DRAFT, make_maps, make_request

from components.contract import Context, Measurements, UserError
from components.rows import AcceptanceMap, EngineAcceptance, EngineComparison, QualityFlag, Request, read_rows
from components.speedup import compare_engines
from components.speedup.prediction.replay import count

Rows = Callable[[list[Any]], Measurements]
NewCtx = Callable[..., Context]
DEPTH, KEPT = 3, 41


def maps(seed: int = 1, num: int = 12) -> list[AcceptanceMap]:
    return make_maps([0.7, 0.6, 0.5], num_prompts=num, num_tokens=65, seed=seed)


def served(of: list[AcceptanceMap], **changes: Any) -> list[Request]:
    """What an engine that drafts as the maps say reports for answers of KEPT tokens, plain decoding beside it."""
    rows = []
    engine = {"engine": "vllm", "engine_version": "1", "concurrency": 1, "first_chunk_tokens": 1}
    for number, one in enumerate(of):
        found = count(one.accepted, DEPTH, KEPT)
        rows.append(make_request("none", 0, number, KEPT, 8.0, **engine))
        drafting = {**engine, "num_rounds": found.rounds, "prompt_id": one.prompt_id, **changes}
        rows.append(make_request("eagle3", DEPTH, number, KEPT, 4.0, **drafting))
    return rows


def compared(made: Measurements) -> EngineComparison:
    return next(row for row in read_rows(made.path, EngineComparison) if row.workload == "all")


def test_an_engine_that_keeps_our_rounds_is_equal_to_the_replayed_maps(measurements: Rows, new_ctx: NewCtx) -> None:
    made = compare_engines([measurements(served(maps()))], acceptance=[measurements(list(maps()))], ctx=new_ctx())
    row = compared(made)
    assert (row.verdict, row.num_different, row.num_paired, row.our_rounds_from) == ("equal", 0, 12, "maps")
    assert row.al_engine == row.al_ours and row.engine_rounds == row.our_rounds > 0
    assert row.speedup_engine == pytest.approx(2.0) and row.speedup_ours is None
    assert read_rows(made.path, QualityFlag) == [] and made.info["num_mismatches"] == 0


def test_our_timed_rounds_go_before_maps(measurements: Rows, new_ctx: NewCtx) -> None:
    ours = [dataclasses.replace(row, engine=None) for row in served(maps()) if row.depth_k]
    other = measurements(list(maps(seed=9)))
    made = compare_engines([measurements(served(maps()))], measurements(ours), [other], ctx=new_ctx())
    assert (compared(made).verdict, compared(made).our_rounds_from) == ("equal", "end_to_end")


@pytest.mark.parametrize("shift", [-1, 1])
def test_acceptance_that_is_off_in_either_direction_is_a_named_fault(
    shift: int, measurements: Rows, new_ctx: NewCtx
) -> None:
    """A drafter loaded wrongly may even accept more: it is another drafter."""
    rows = [dataclasses.replace(row, num_rounds=max(1, row.num_rounds + shift * 2)) for row in served(maps())]
    made = compare_engines([measurements(rows)], acceptance=[measurements(list(maps()))], ctx=new_ctx())
    (flag,) = read_rows(made.path, QualityFlag)
    assert compared(made).verdict == "mismatch" and compared(made).num_different == 12
    assert (flag.code, flag.severity, flag.draft_key) == ("engine_mismatch", "fault", DRAFT)
    assert (flag.value < 0) is (shift > 0) and "mismatch" in flag.detail


def test_a_near_tie_of_the_drafter_is_close_and_no_fault(measurements: Rows, new_ctx: NewCtx) -> None:
    rows = served(maps())
    rows[1] = dataclasses.replace(rows[1], num_rounds=rows[1].num_rounds + 1)
    made = compare_engines([measurements(rows)], acceptance=[measurements(list(maps()))], ctx=new_ctx())
    assert (compared(made).verdict, compared(made).num_different) == ("close", 1)
    assert read_rows(made.path, QualityFlag) == []
    strict = {"tolerance": 0.0, "acceptance": [measurements(list(maps()))], "ctx": new_ctx()}
    assert compared(compare_engines([measurements(rows)], **strict)).verdict == "mismatch"  # type: ignore[arg-type]


def test_another_text_is_a_fault_unless_two_tokens_were_equally_likely(measurements: Rows, new_ctx: NewCtx) -> None:
    rows, ours = served(maps()), [measurements(list(maps()))]
    rows[1] = dataclasses.replace(rows[1], identical=False, tie=True)
    made = compare_engines([measurements(rows)], acceptance=ours, ctx=new_ctx())
    assert (compared(made).verdict, compared(made).num_ties, compared(made).num_paired) == ("equal", 1, 11)
    rows[3] = dataclasses.replace(rows[3], identical=False, tie=False)
    made = compare_engines([measurements(rows)], acceptance=ours, ctx=new_ctx())
    assert compared(made).verdict == "mismatch" and compared(made).num_divergences == 1
    assert [flag.code for flag in read_rows(made.path, QualityFlag)] == ["engine_mismatch"]


def test_rounds_that_nobody_knows_are_not_compared(measurements: Rows, new_ctx: NewCtx) -> None:
    row = compared(compare_engines([measurements(served(maps()))], ctx=new_ctx()))
    assert (row.verdict, row.al_engine, row.al_ours, row.num_paired) == ("not_compared", None, None, 0)
    short = measurements([dataclasses.replace(one, num_tokens=KEPT - 1) for one in maps()])
    row = compared(compare_engines([measurements(served(maps()))], acceptance=[short], ctx=new_ctx()))
    assert row.verdict == "not_compared"


def test_a_program_that_drafts_one_token_out_of_phase_has_its_own_tolerance(
    measurements: Rows, new_ctx: NewCtx
) -> None:
    """It emits the first token from a round as well, and runs past the limit by what it accepted last."""
    counted = EngineAcceptance(
        "e", "t", DRAFT, "eagle3", DEPTH, "code", 1, "llama.cpp", "1", "program", 1, 1, 3, 1, [1], None
    )
    rows = [
        dataclasses.replace(row, engine="llama.cpp", tokens_raw=KEPT + 1, first_chunk_tokens=None)
        for row in served(maps())
    ]
    ours = [measurements(list(maps()))]
    row = compared(compare_engines([measurements([*rows, counted])], acceptance=ours, ctx=new_ctx()))
    assert row.verdict == "equal" and row.engine_tokens == 12 * (KEPT + 1) and row.tolerance == 0.1
    row = compared(compare_engines([measurements([*rows, counted])], acceptance=ours, out_of_phase=0.01, ctx=new_ctx()))
    assert row.verdict == "mismatch"


def test_look_ups_are_compared_by_text_alone(measurements: Rows, new_ctx: NewCtx) -> None:
    rows = [dataclasses.replace(row, method="ngram") if row.depth_k else row for row in served(maps())]
    row = compared(compare_engines([measurements(rows)], acceptance=[measurements(list(maps()))], ctx=new_ctx()))
    assert (row.verdict, row.num_identical, row.num_paired) == ("not_compared", 12, 0)


def test_measurements_without_an_engine_are_told(measurements: Rows, new_ctx: NewCtx) -> None:
    with pytest.raises(UserError, match="no greedy request of a serving engine"):
        compare_engines([measurements(list(maps()))], ctx=new_ctx())
    plain = [row for row in served(maps()) if not row.depth_k]
    with pytest.raises(UserError, match="no request drafted anything"):
        compare_engines([measurements(plain)], ctx=new_ctx())
