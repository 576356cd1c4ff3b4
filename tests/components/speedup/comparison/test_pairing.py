"""Which rows are held against which: the same process first, one measurement before two, the newest that is alike."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest
from simulated_rows import make_maps

from components.promotion import ArmPrompt, Margins, MeasuredRows, ServingSetup
from components.speedup.comparison.pairing import Comparison, compare_ways

A, B = ServingSetup("new", "a", 3), ServingSetup("old", "b", 2)
ROW = ArmPrompt(
    artifact_key="run",
    session_id="s",
    machine_id="m",
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
    target_key="t",
    dtype="float32",
    batch_size=1,
    method="mtp",
    draft_key="",
    depth_k=0,
    tree_budget=None,
    kernel="k",
    process=1,
    prompt_id="",
    workload="code",
    requests=1,
    tokens=60,
    decode_ns=0,
    ns_per_token=[],
    rounds=30,
    compared=1,
    divergences=0,
)


def arm(way: ServingSetup | None, ms: float, prompts: range = range(8), **changes: object) -> list[ArmPrompt]:
    """60 tokens in `ms` a prompt; plain decoding without a way."""
    who = {"method": "none"} if way is None else {"draft_key": way.draft_key, "depth_k": way.depth_k}
    times = {n: int(1e6 * ms * (1 + n)) for n in prompts}
    spent = [{"prompt_id": f"p{n}", "decode_ns": ns, "ns_per_token": [ns / 60]} for n, ns in times.items()]
    facts = [{**one, **who, **changes} for one in spent]
    return [dataclasses.replace(ROW, **one) for one in facts]  # type: ignore[arg-type]


def compared(*arms: list[ArmPrompt], same_target: bool = True) -> Comparison:
    return compare_ways(
        MeasuredRows([row for rows in arms for row in rows], []), A, B, Margins(), same_target=same_target
    )


def test_what_a_process_does_to_both_cancels_before_prompts_are_summed() -> None:
    """Process 2 is three times slower, and B ran only half of its prompts there."""
    found = compared(arm(A, 10.0), arm(B, 10.0), arm(A, 30.0, process=2), arm(B, 30.0, range(4), process=2))
    (speed,) = found.of("decode_speed")
    assert speed.ratio == pytest.approx(1.0) and speed.num_prompts == 8
    old = {"artifact_key": "old", "session_id": "o"}
    apart = compared(
        arm(A, 10.0),
        arm(None, 20.0),
        arm(A, 30.0, range(4), process=2),
        arm(None, 60.0, process=2),
        arm(B, 5.0, **old),
        arm(None, 10.0, **old),
    )
    (speed,) = apart.of("speedup")
    assert (speed.a, speed.b) == (pytest.approx(2.0), pytest.approx(2.0)) and speed.verdict == "not_worse"


def test_repetitions_and_kernels_of_plain_decoding() -> None:
    """Of two repetitions the steady one counts; the baseline is the plain kernel that decodes fastest."""
    plain = arm(None, 20.0), arm(None, 18.0, kernel="slow at times"), arm(None, 90.0, kernel="slow at times")
    found = compare_ways(
        MeasuredRows([*arm(A, 10.0), *arm(A, 20.0), *plain[0], *plain[1], *plain[2]], []),
        A,
        ServingSetup("plain", "", 0),
        Margins(),
    )
    (speed,) = found.of("decode_speed")
    assert speed.ratio == pytest.approx(20.0 / 10.0), "the slower repetition is other work on the machine"
    assert not found.of("acceptance_length"), "plain decoding has none, and no map says it"


def test_sessions_of_one_artifact_are_not_mixed_and_the_newest_counts() -> None:
    newer = {"session_id": "later", "created_at": datetime(2026, 2, 1, tzinfo=UTC)}
    found = compared(arm(A, 10.0), arm(B, 20.0), arm(A, 30.0, **newer), arm(B, 30.0, **newer))
    assert found.of("decode_speed")[0].ratio == pytest.approx(1.0)
    assert found.timed_in is not None and found.timed_in[0].session_id == found.timed_in[1].session_id == "later"


def test_one_measurement_of_both_counts_before_newer_ones_of_each() -> None:
    newer = {"artifact_key": "newer", "created_at": datetime(2026, 2, 1, tzinfo=UTC)}
    found = compared(arm(A, 10.0), arm(B, 20.0), arm(A, 30.0, **newer), arm(None, 30.0, **newer))
    assert found.of("decode_speed")[0].ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("changes", "same_target", "says"),
    [
        ({"target_key": "u"}, False, "other target"),
        ({"machine_id": "n"}, True, "other machine (m and n)"),
        ({}, True, "did not time plain decoding"),
    ],
)
def test_two_measurements_that_are_not_alike_give_no_ratio_and_the_reason(
    changes: dict[str, object], same_target: bool, says: str
) -> None:
    changes = {**changes, "artifact_key": "old"}
    found = compared(arm(A, 10.0), arm(None, 20.0), arm(B, 10.0, **changes), same_target=same_target)
    assert not found.of("decode_speed", "speedup") and found.timed_in is None
    assert any(says in note for note in found.notes), found.notes


def test_the_newest_map_of_a_prompt_counts_and_a_run_at_one_depth_says_nothing_of_others() -> None:
    new = make_maps([0.9, 0.9, 0.9], num_prompts=6, num_tokens=40, seed=1, draft_key="a")
    old = make_maps([0.1, 0.1, 0.1], num_prompts=6, num_tokens=40, seed=1, draft_key="a")
    theirs = make_maps([0.9, 0.9, 0.9], num_prompts=6, num_tokens=40, seed=1, draft_key="b")
    found = compare_ways(MeasuredRows([], [*new, *old, *theirs]), A, B, Margins())
    assert found.depths == (3, 3) and found.of("acceptance_length")[0].ratio == 1.0
    once = [dataclasses.replace(m, method="lookahead") for m in theirs]
    shallow = dataclasses.replace(A, depth_k=2)
    assert compare_ways(MeasuredRows([], [*new, *once]), shallow, B, Margins()).depths == (3, 3)
