"""Runs that would mislead raise a flag, runs that would not raise none."""

from __future__ import annotations

import dataclasses

from components.bench.arms import PLAIN, Arm
from components.bench.run_flags import plain_drift, run_flags
from components.bench.subjects import EncodedPrompt
from components.bench.timed_runs import TimedRun
from components.decoding.chain import Decoded, RoundFacts
from components.drafts.ngram import Ngram

PROMPT = EncodedPrompt("p", "w", [1, 2, 3])
TEXT = list(range(40))


def run(arm: Arm, rep: int = 0, decode_ns: int = 1000, tokens: list[int] = TEXT, overshoot: int = 0) -> TimedRun:
    raw = [*tokens, *[0] * overshoot]
    rounds = [RoundFacts(i, 0, 0, 1, 3 + i) for i in range(len(tokens) - 1)]
    return TimedRun(arm, PROMPT, rep, 0, False, Decoded(tokens, raw, rounds, "ok", 3, 10, decode_ns))


def codes(runs: list[TimedRun], load: float | None = 1.0) -> set[str]:
    return {flag.code for flag in run_flags(runs, "s", load, 2)}


def test_a_quiet_session_raises_nothing() -> None:
    assert codes([run(PLAIN, 0), run(PLAIN, 1, 1010)]) == set()


def test_drift_of_plain_decoding_is_flagged() -> None:
    drifted = [run(PLAIN, 0, 1000), run(PLAIN, 1, 1200)]
    assert codes(drifted) == {"plain_drift"}
    assert plain_drift(drifted) is not None
    assert plain_drift(drifted[:1]) is None


def test_other_work_on_the_machine_is_flagged() -> None:
    assert codes([run(PLAIN)], load=6.0) == {"loaded_machine"}
    assert codes([run(PLAIN)], load=None) == set()


def test_looping_text_is_flagged() -> None:
    assert codes([run(PLAIN, tokens=[1, 2] * 20)]) == {"looping_output"}


def test_overshoot_and_untrained_depth_are_flagged_for_their_arm() -> None:
    lookup = Ngram(max_depth=16)
    lookup.num_steps = 4
    arm = Arm("eagle3", "", 6, lookup)
    flags = run_flags([run(PLAIN), run(arm, overshoot=5)], "s", None, 2)
    assert {(f.code, f.method) for f in flags} == {("overshoot", "eagle3"), ("beyond_trained_depth", "eagle3")}
    assert not run_flags([run(PLAIN), run(dataclasses.replace(arm, depth=4))], "s", None, 2)
    for untrained in ("ngram", "lookahead"):
        assert not run_flags([run(PLAIN), run(dataclasses.replace(arm, method=untrained))], "s", None, 2)
