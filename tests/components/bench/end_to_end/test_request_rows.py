"""Runs that would mislead raise a flag, runs that would not raise none."""

from __future__ import annotations

import dataclasses

import pytest
from made_runs import decoded, timed_run

from components.bench.end_to_end.arms import PLAIN, RIVAL, Arm
from components.bench.end_to_end.request_rows import (
    difference_of_processes,
    disturbed_share,
    run_flags,
    sha256_of_tokens,
)
from components.bench.end_to_end.timed_runs import TimedRun

EAGLE = Arm("eagle3", "e", 6)


def plain(decode_ns: int = 1000, *, process: int = 1, share: float = 1.0) -> TimedRun:
    return timed_run(PLAIN, decoded(39, decode_ns), process=process, share=share)


def codes(runs: list[TimedRun], load: float | None = 1.0) -> set[str]:
    return {flag.code for flag in run_flags(runs, "s", load, 2, {})}


def test_a_quiet_session_raises_nothing() -> None:
    assert codes([plain(), plain(1010, process=2), plain(1090, process=3)]) == set()


def test_processes_that_differ_are_named_with_how_much() -> None:
    differing = [plain(), plain(1300), plain(1200, process=2), plain(1100, process=2)]
    assert difference_of_processes(differing) == pytest.approx(0.0)
    assert codes(differing) == set(), "prompts differ, processes do not"
    differing += [plain(1400, process=3)]
    assert codes(differing) == {"processes_differ"}
    assert difference_of_processes(differing) == pytest.approx(1400 / 1150 - 1)
    assert difference_of_processes(differing[:2]) is None, "one process alone differs from nothing"


def test_only_the_smallest_batch_tells_how_processes_differ() -> None:
    batch = dataclasses.replace(plain(4000, process=2), batch_size=4, batch_id=1)
    assert difference_of_processes([plain(), plain(1100, process=2), batch]) == pytest.approx(0.1)


def test_time_that_other_work_added_is_flagged() -> None:
    assert disturbed_share([plain(1000, share=0.9), plain(3000, share=0.7)]) == pytest.approx(0.25)
    assert codes([plain(share=0.9)]) == set() and codes([plain(share=0.8)]) == {"disturbed"}
    rival = timed_run(RIVAL, decoded(39, 1000), share=0.1)
    assert codes([plain(), rival]) == set(), "the baseline alone is asked"


def test_other_work_on_the_machine_is_flagged() -> None:
    assert codes([plain()], load=6.0) == {"loaded_machine"}
    assert codes([plain()], load=None) == set()


def test_looping_text_is_flagged() -> None:
    looping = dataclasses.replace(decoded(39, 1000), tokens=[1, 2] * 20)
    assert codes([timed_run(PLAIN, looping)]) == {"looping_output"}


def test_overshoot_and_untrained_depth_are_flagged_for_their_arm() -> None:
    run = timed_run(EAGLE, decoded(13, 1000, emitted=3, overshoot=5))
    flags = run_flags([plain(), run], "s", None, 2, {"e": 4})
    assert {(f.code, f.method, f.draft_key) for f in flags} == {
        ("overshoot", "eagle3", "e"),
        ("beyond_trained_depth", "eagle3", "e"),
    }
    calm = dataclasses.replace(run, decoded=decoded(13, 1000, emitted=3))
    assert not run_flags([plain(), calm], "s", None, 2, {"e": 6})
    for untrained in ("ngram", "lookahead"):
        arm = dataclasses.replace(EAGLE, method=untrained)
        assert not run_flags([plain(), dataclasses.replace(calm, arm=arm)], "s", None, 2, {"e": 4})


def test_a_digest_depends_on_every_token() -> None:
    assert len(sha256_of_tokens([1, 2])) == 64
    assert sha256_of_tokens([1, 2]) != sha256_of_tokens([2, 1])
