"""The promotion gate: paired prompts of one machine decide; a challenger is let through on evidence only."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paired_runs import timed

from components.promotion import Check
from components.refusals import PROMPTS, WORDS
from components.speedup.comparison.promotion_rule import judge
from storage.history.query import query
from storage.history.write import record_artifact
from storage.registry.promotion_gate import Decision, decide

ROOT = Path(__file__).parents[3]
OLD, NEW = ("old", 3, 6.0, 25), ("new", 4, 5.0, 22)
SHALLOW = [("old", 1, 8.0, 40), ("new", 1, 8.0, 40)]  # a depth that both were run at, as every measurement has one
Ask = Callable[..., Decision]


def tags(draft: str, depth: int, **more: str) -> dict[str, str]:
    return {
        "draftsmith.draft_key": draft,
        "draftsmith.depth_k": str(depth),
        "draftsmith.drafter_bytes": "1000",
        "gate.status": "passed",
        "gate.checks": "[]",
        **more,
    }


@pytest.fixture
def ask(home: Path, make: Any) -> Ask:
    """ask(run, run, ...): runs are lists of rows; the answer for `new` at depth 4 against `old` at depth 3."""

    def decided(*runs: list[Any], machines: tuple[str, ...] = (), new: dict[str, str] | None = None) -> Decision:
        for number, rows in enumerate(runs):
            machine = {"machine_id": machines[number] if machines else "m1"}
            record_artifact(home, make(f"run{number}", rows=rows, machine=machine).path)
        return decide(home, new or tags("new", 4), tags("old", 3), 1, judge)

    return decided


def check(decision: Decision, name: str) -> Check:
    return next(check for check in decision.checks if check.name == name)


def failed(decision: Decision) -> set[str]:
    return {check.name for check in decision.checks if not check.passed}


def test_a_faster_challenger_measured_beside_the_champion_passes(ask: Ask) -> None:
    decision = ask(timed([OLD, NEW, *SHALLOW]))
    speed = check(decision, "speed_against_champion")
    assert decision.passed and speed.value == pytest.approx(1.2, rel=0.02)
    assert speed.lo is not None and speed.hi is not None and 1.1 < speed.lo < speed.value < speed.hi < 1.3
    assert "both in one run" in check(decision, "prompts_measured_for_both").asked
    assert {"acceptance[all]", "acceptance[code]", "acceptance[chat]"} < {check.name for check in decision.checks}
    assert decision.justification().startswith(
        "the promotion gate passed against version 1: decoding speed, as a share of the champion's: measured 1.2"
    )


def test_the_gate_does_not_ask_to_be_faster_only_not_to_be_slower(ask: Ask) -> None:
    assert ask(timed([OLD, ("new", 4, 6.0, 25), *SHALLOW])).passed


def test_a_slower_challenger_is_refused_with_the_numbers(ask: Ask) -> None:
    decision = ask(timed([OLD, ("new", 4, 6.5, 25), *SHALLOW]))
    assert failed(decision) == {"speed_against_champion"}
    told = decision.refusal()
    assert "decoding speed, as a share of the champion's: measured 0.92" in told
    assert "], asked lower bound at least 0.98 (" in told and "train on more conversations" in told


def test_what_the_release_and_the_rule_both_refuse_is_said_once_with_the_number_of_all_measurements(ask: Ask) -> None:
    names = ("speed_against_champion", "acceptance_against_champion[chat]", "prediction_gap")
    own = [{"name": name, "passed": False, "value": 0.7, "limit": ">= 0.98"} for name in names]
    new = tags("new", 4, **{"gate.status": "refused", "gate.checks": json.dumps(own)})
    decision = ask(timed([OLD, ("new", 3, 6.5, 30), ("new", 4, 6.5, 30)]), new=new)
    told = "; ".join(check.summary() for check in decision.checks if not check.passed)
    for once in ("decoding speed, as a share", "champion's on chat prompts", "gap between predicted and measured"):
        assert told.count(once) == 1, told
    assert "champion's: measured 0.92" in told and told.count("measured 0.7,") == 1, "the gap alone is the release's"


def test_outputs_that_nobody_compared_are_not_measured(ask: Ask) -> None:
    (identical,) = [check for check in ask(timed([OLD])).checks if check.name == "identical_output"]
    assert not identical.passed and ": not measured, asked 0 that differ" in identical.summary()


def test_two_runs_on_one_machine_are_compared_through_plain_decoding(ask: Ask) -> None:
    slow_day = timed([NEW, SHALLOW[1]], session="b")
    for row in slow_day:  # everything took twice as long, plain decoding too
        object.__setattr__(row, "decode_ns", 2 * row.decode_ns)
    decision = ask(timed([OLD, SHALLOW[0]], session="a"), slow_day)
    assert decision.passed and check(decision, "speed_against_champion").value == pytest.approx(1.2, rel=0.02)
    assert "each in its own run" in check(decision, "prompts_measured_for_both").asked


@pytest.mark.parametrize(
    ("runs", "machines"),
    [
        ([timed([OLD], session="a"), timed([NEW], session="b")], ("m1", "m2")),
        ([timed([OLD], session="a"), timed([NEW], session="b", target_key="another")], ()),
        ([timed([OLD, NEW], num_prompts=PROMPTS.decide - 1)], ()),
        ([timed([OLD])], ()),
    ],
    ids=["two machines", "two targets", "few prompts", "never measured"],
)
def test_without_evidence_of_one_machine_nothing_is_promoted(ask: Ask, runs: Any, machines: Any) -> None:
    assert "prompts_measured_for_both" in failed(ask(*runs, machines=machines))


def test_one_run_beside_the_champion_is_worth_more_than_a_newer_one_alone(ask: Ask) -> None:
    decision = ask(timed([OLD, NEW, *SHALLOW], session="a"), timed([("new", 4, 9.0, 22)], session="b"))
    assert decision.passed and check(decision, "speed_against_champion").value == pytest.approx(1.2, rel=0.02)


def test_other_text_worse_acceptance_and_fat_weights_are_refused_by_name(ask: Ask) -> None:
    worse = [("new", 3, 5.0, 30), ("new", 4, 5.0, 30)]  # 2.4 -> 2 tokens a round, at the champion's depth
    decision = ask(timed([OLD, *worse], identical=False), new=tags("new", 4, **{"draftsmith.drafter_bytes": "1600"}))
    assert failed(decision) == {
        "identical_output",
        "acceptance[all]",
        "acceptance[chat]",
        "acceptance[code]",
        "size",
    }
    assert "at depth 3" in check(decision, "acceptance[all]").asked
    told = decision.refusal()
    assert told.count("train on more conversations") == 1 and told.endswith(
        "; and 2 more, on the version's page in MLflow"
    )
    assert decision.in_brief().startswith("outputs that differ") and decision.in_brief().endswith(", and 4 more")


def test_without_a_champion_the_releases_own_gate_decides(home: Path) -> None:
    assert decide(home, tags("new", 4), None, None, judge).passed
    checks = json.dumps([{"name": "prediction_gap", "passed": False, "value": 0.22, "limit": "<= 0.15"}])
    refused = decide(home, tags("new", 4, **{"gate.status": "failed", "gate.checks": checks}), None, None, judge)
    assert not refused.passed and refused.refusal() == (
        "gap between predicted and measured speedup, as a share of the measured one: measured 0.22, asked at most 0.15 "
        "(measure it again, best on a machine with nothing else to do)"
    )


def test_every_check_has_words_for_what_it_measures_and_what_to_do_where_it_fails() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for room in ("components", "storage")
        for kind in ("*.py", "*.sql")
        for path in (ROOT / room).rglob(kind)
    ]
    names = {name for text in sources for name in re.findall(r"Check\(\s*f?\"(\w+)|SELECT '(\w+)' AS name", text)}
    assert {one or other for one, other in names} == WORDS.keys()
    assert all(what and todo for what, todo in WORDS.values())


def test_the_answer_is_the_same_every_time(ask: Ask, home: Path) -> None:
    first = ask(timed([OLD, NEW]))
    assert decide(home, tags("new", 4), tags("old", 3), 1, judge) == first
    assert query("SELECT sum(divergences), sum(compared) FROM v_arm_prompt", home)[1] == [(0, 24)]


def test_a_drafter_that_is_loaded_but_drafts_nothing_is_no_evidence(ask: Ask, home: Path) -> None:
    off = [("old", 0, 10.5, 60), ("new", 0, 10.5, 60)]
    decision = ask(timed([OLD, NEW, *off]))
    assert failed(decision) == {"acceptance[all]"}, "no depth in common at which they drafted"
    against_plain = decide(home, tags("new", 4), tags("old", 0), 1, judge)
    assert check(against_plain, "speed_against_champion").value == pytest.approx(2.0, rel=0.05), "not 2.1"
    assert against_plain.passed, "plain decoding has no acceptance to lose"


def served_by(engine: str, rows: list[Any], **changes: Any) -> list[Any]:
    """The same requests as a serving engine's, as bench.measure_server writes them: no machine's threads, no ties."""
    told = {"engine": engine, "kernel": f"{engine} 1", "num_threads": 0, "concurrency": 1, **changes}
    return [dataclasses.replace(row, **told, request_id=f"{engine}-{row.request_id}") for row in rows]


def quicker(rows: list[Any], times: float) -> list[Any]:
    return [dataclasses.replace(row, decode_ns=int(row.decode_ns / times)) for row in rows]


@pytest.mark.parametrize("beside_plain", [True, False])
def test_a_serving_engines_speed_lets_no_slower_challenger_through(ask: Ask, beside_plain: bool) -> None:
    fast = quicker(timed([("new", 4, 6.0, 25)], session="e"), 3.0)
    engine = served_by("vllm", [row for row in fast if beside_plain or row.draft_key])
    decision = ask(timed([OLD, SHALLOW[0]], session="a"), timed([("new", 4, 7.2, 25), SHALLOW[1]], session="b"), engine)
    assert failed(decision) == {"speed_against_champion"}
    assert check(decision, "speed_against_champion").value == pytest.approx(0.83, abs=0.01)


def test_a_newer_run_of_an_engine_without_plain_decoding_does_not_hide_our_own_pair(ask: Ask) -> None:
    engine = served_by("vllm", [row for row in timed([NEW], session="e") if row.draft_key])
    decision = ask(timed([OLD, SHALLOW[0]], session="a"), timed([NEW, SHALLOW[1]], session="b"), engine)
    assert decision.passed and check(decision, "prompts_measured_for_both").value == 12


def test_prompts_that_several_engines_answered_are_counted_once(ask: Ask) -> None:
    rows = timed([OLD, NEW], num_prompts=2)
    decision = ask([*rows, *served_by("vllm", rows), *served_by("sglang", rows)])
    assert check(decision, "prompts_measured_for_both").value == 2
    assert "prompts_measured_for_both" in failed(decision)


def test_only_the_run_that_is_compared_is_asked_for_the_same_text(ask: Ask) -> None:
    mended = [
        timed([NEW], session="old", identical=False, tie=False),
        timed([OLD, NEW], session="bf16", identical=False, tie=False, dtype="bfloat16"),
        served_by("vllm", timed([NEW], session="e", identical=False)),
        timed([OLD, NEW, *SHALLOW], session="mended"),
    ]
    decision = ask(*mended)
    assert decision.passed and "0 of 12 outputs" in check(decision, "identical_output").asked
    again = ask(*mended, timed([OLD, NEW, *SHALLOW], session="again", identical=False, tie=False))
    assert failed(again) == {"identical_output"}


def test_of_several_runs_of_the_challenger_the_newest_counts(ask: Ask) -> None:
    runs = [timed([NEW], session=f"new{number}", identical=False, tie=False) for number in range(3)]
    old, mended = timed([OLD, SHALLOW[0]], session="old"), timed([NEW, SHALLOW[1]], session="mended")
    decision = ask(old, *runs, mended)
    assert decision.passed, decision.refusal()


def test_a_workload_of_few_prompts_is_not_asked_and_all_together_need_enough(ask: Ask, home: Path, make: Any) -> None:
    worse = [("new", 3, 5.0, 30), ("new", 4, 5.0, 30)]
    rows = [
        dataclasses.replace(row, workload="rare" if row.prompt_id in ("p0", "p1", "p2") else "chat")
        for row in timed([OLD, *worse], num_prompts=40)
    ]
    kept = [
        dataclasses.replace(row, num_rounds=25) if row.workload == "chat" and row.draft_key == "new" else row
        for row in rows
    ]
    decision = ask(kept)  # only in the rare workload is it worse
    rare = check(decision, "acceptance[rare]")
    assert decision.passed and rare.asked == "not asked of 3 prompts"
    assert rare.value == pytest.approx(25 / 30, abs=0.01), "it is told all the same"
    rare_alone = [row for row in kept if row.workload == "rare"]
    record_artifact(home, make("rare", rows=[dataclasses.replace(r, session_id="rare") for r in rare_alone]).path)
    few = decide(home, tags("new", 4), tags("old", 3), 1, judge)
    assert failed(few) >= {"acceptance[all]", "prompts_measured_for_both", "speed_against_champion"}
    assert f"of {PROMPTS.decide} prompts" in check(few, "acceptance[all]").asked
