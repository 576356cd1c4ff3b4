"""Which prompts come next, which arms, when it ends; and the steady time of what was decoded, on runs of known truth.

The process is made up, and so is the clock, which only it moves: what it says of itself and of its arms is all that the
study sees.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import arm_run, decoded, group_run, prompt

from components.bench.end_to_end import timed_runs as room
from components.bench.end_to_end.arms import PLAIN, RIVAL, Arm
from components.bench.end_to_end.timed_runs import (
    MIN_GROUPS,
    MIN_GROUPS_IN_ALL,
    SIDE_GROUPS,
    GroupRun,
    Study,
    StudyPlan,
    batches,
    steady_kinds,
    steady_round_ns,
    steady_share,
    timed_runs,
)
from components.bench.measurement.slices import ArmRun

GOOD, DEEP, LOOKUP = Arm("mtp", "m", 2), Arm("mtp", "m", 4), Arm("ngram", "", 4)
ARMS = [PLAIN, RIVAL, GOOD, DEEP, LOOKUP]
SECOND = 10**9


class MadeUpProcess:
    """Takes a second for every group, whatever it is asked, and remembers what that was."""

    def __init__(self, number: int, clock: list[float]) -> None:
        self.number, self.clock, self.is_open = number, clock, False
        self.asked: list[tuple[list[list[int]], list[Arm], dict[str, Any]]] = []
        self.kernels = {False: f"kernel {number}", True: "plain"}

    def __enter__(self) -> Self:
        self.is_open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.is_open = False

    def turns(self, contexts: list[list[int]], arms: Collection[Arm], **asked: Any) -> list[ArmRun]:
        assert self.is_open
        self.asked.append((contexts, list(arms), asked))
        self.clock[0] += 1.0
        return [arm_run(arm, [[1000] * 4] * 2, size=len(contexts)) for arm in ARMS if arm in arms]

    def conditions(self) -> dict[str, Any]:
        return {"load_average": float(self.number)}


class Course:
    """A study over made-up processes. answers: what `unsettled` says, in turn; then that all is settled."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        num_prompts: int = 6,
        batch_sizes: Sequence[int] = (1,),
        answers: Sequence[Collection[Arm]] = (),
    ) -> None:
        self.clock, self.processes, self.notes = [0.0], list[MadeUpProcess](), list[str]()
        self.told, self.answers = list[tuple[float, float]](), list(answers)
        monkeypatch.setattr(room.time, "monotonic", lambda: self.clock[0])
        asked = StudyPlan(
            ARMS,
            frozenset([LOOKUP]),
            [prompt(f"p{number}") for number in range(num_prompts)],
            [prompt("warm")],
            list(batch_sizes),
            32,
        )
        progress = lambda done, total: self.told.append((done, total))  # noqa: E731
        self.study = Study(asked, self.opened, self.unsettled, progress, self.notes.append)

    def opened(self, number: int) -> Any:
        self.processes.append(MadeUpProcess(number, self.clock))
        return self.processes[-1]

    def unsettled(self, found: Sequence[GroupRun]) -> tuple[Collection[Arm], str]:
        assert found
        return (self.answers.pop(0), "mtp k=2 +1 % +- 5 %") if self.answers else ([], "mtp k=2 is the fastest")

    def groups(self, number: int) -> list[GroupRun]:
        return [one for one in self.study.group_runs if one.process == number]


def test_a_settled_study_stops_with_the_processes_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(monkeypatch)
    course.study.run(30.0, 3)
    assert course.study.stop_reason == "settled: mtp k=2 is the fastest" == course.notes[-1]
    assert course.study.num_processes == 3 and [len(course.groups(n)) for n in (1, 2, 3)] == [6, 6, 6]
    assert not any(process.is_open for process in course.processes)
    assert course.study.conditions == {"load_average": 3.0} and course.told[-1] == (18.0, 30.0)
    assert all(done <= total == 30.0 for done, total in course.told)
    assert {group.kernels[False] for group in course.groups(2)} == {"kernel 2"}


@pytest.mark.parametrize(("num_prompts", "decoded"), [(20, 20), (30, 30), (100, 30)])
def test_every_prompt_is_decoded_by_every_arm_while_there_is_time(
    monkeypatch: pytest.MonkeyPatch, num_prompts: int, decoded: int
) -> None:
    course = Course(monkeypatch, num_prompts=num_prompts)
    course.study.run(30.0, 3)
    assert len({group.group[0].prompt_id for group in course.study.group_runs}) == decoded
    assert course.study.num_processes == (4 if num_prompts == 20 else 5) and course.study.stop_reason.startswith(
        "settled"
    )
    assert course.notes[1].startswith(f"{num_prompts - 18} prompts")
    assert all({run.arm for run in one.runs} >= set(ARMS) - {LOOKUP} for one in course.study.group_runs)


def test_what_is_still_open_is_narrowed_down_only_after_every_prompt_was_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = Course(monkeypatch, num_prompts=20, answers=[[GOOD]])
    course.study.run(30.0, 3)
    arms = [{run.arm for group in course.groups(number) for run in group.runs} for number in (4, 5)]
    assert arms == [set(ARMS) - {LOOKUP}, {PLAIN, RIVAL, GOOD}]


def test_arms_beside_the_decision_decode_the_same_prompts_however_fast_the_machine_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prompts_of_lookup(seconds: float) -> list[str]:
        course = Course(monkeypatch, num_prompts=24)
        course.study.run(seconds, 3)
        return [one.group[0].prompt_id for one in course.study.group_runs if LOOKUP in {run.arm for run in one.runs}]

    first = [f"p{number}" for number in range(3 * SIDE_GROUPS)]
    assert all(prompts_of_lookup(seconds) == first for seconds in (16.0, 20.0, 25.0))


def test_an_open_question_is_measured_on_by_the_arms_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(monkeypatch, answers=[[GOOD], [DEEP, GOOD]])
    course.study.run(30.0, 3)
    assert course.study.num_processes == 5 and course.study.stop_reason.startswith("settled")
    arms = [{run.arm for group in course.groups(number) for run in group.runs} for number in (3, 4, 5)]
    assert arms == [set(ARMS), {PLAIN, RIVAL, GOOD}, {PLAIN, RIVAL, GOOD, DEEP}], "plain decoding is always there"
    assert "one more process measures 3 arms" in course.notes[1]


def test_a_question_that_stays_open_ends_after_as_long_again_and_says_what_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = Course(monkeypatch, answers=[[GOOD]] * 100)
    course.study.run(30.0, 3)
    assert course.study.num_processes == 10, "five in the time that was given, five in as much again"
    assert course.study.stop_reason == "not settled in 60 s: mtp k=2 +1 % +- 5 %"


def test_every_process_decodes_some_prompts_however_short_the_time_is(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(monkeypatch, batch_sizes=[1, 3])
    course.study.run(0.001, 3)
    sizes = [[len(group.group) for group in course.groups(number)] for number in (1, 2, 3)]
    assert sizes[:2] == [[1, 3] * MIN_GROUPS] * 2
    assert sizes[2] == [1, 3] * (MIN_GROUPS_IN_ALL - 2 * MIN_GROUPS), "a verdict needs so many at each size"
    assert course.study.num_processes == 3 and len(course.study.group_runs) == 2 * MIN_GROUPS_IN_ALL


def test_prompts_that_were_decoded_least_often_come_first_over_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(monkeypatch, num_prompts=5, batch_sizes=[1, 2])
    course.study.run(21.0, 3)
    for size in (1, 2):
        names = [
            tuple(p.prompt_id for p in group.group) for group in course.study.group_runs if len(group.group) == size
        ]
        for end in range(1, len(names) + 1):
            counts = Counter(names[:end])
            everyone = 5 if size == 1 else 2
            least = min(counts.values()) if len(counts) == everyone else 0
            assert max(counts.values()) <= least + 1, "one prompt is ahead of another by two"


def test_arms_that_are_shown_beside_the_decision_stop_early(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(monkeypatch)
    course.study.run(20.0, 2)
    for number in (1, 2):
        with_lookup = [LOOKUP in {run.arm for run in group.runs} for group in course.groups(number)]
        assert with_lookup == [True] * SIDE_GROUPS + [False] * (6 - SIDE_GROUPS)


def test_prompts_for_warming_up_are_decoded_before_and_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(monkeypatch, batch_sizes=[1, 3])
    course.study.run(4.0, 1)
    (process,) = course.processes
    warm = [prompt("warm").ids]
    assert [asked[0] for asked in process.asked[:2]] == [warm, warm * 3], "at every batch size, repeated to fill it"
    assert all(asked["ignore_eos"] and arms == ARMS for _, arms, asked in process.asked[:2])
    assert not any(asked["ignore_eos"] for _, _, asked in process.asked[2:])
    assert {asked["num_tokens"] for _, _, asked in process.asked[2:]} == {32}
    assert {p.prompt_id for group in course.study.group_runs for p in group.group} <= {f"p{n}" for n in range(6)}


def test_what_a_prompt_takes_is_said_before_the_long_part_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up arms take 8 rounds of a microsecond for 9 tokens; a prompt is 32 tokens in each of five arms."""
    course = Course(monkeypatch, batch_sizes=[1, 3])
    course.study.run(4.0, 2)
    assert course.notes[0] == "a prompt takes about 0.0 s in all arms: 1 s of each process are enough for all 6"
    assert course.notes[1].startswith("a batch of 3 takes about") and len(course.notes) == 3, "once, not every process"
    short = Course(monkeypatch, batch_sizes=[1])
    short.study.run(0.002, 2)
    assert short.notes[0].endswith(f"are enough for about {round(0.0006 / (5 * 8 / 9 * 1e-6 * 32))} of 6")
    assert not any("at least" in note for note in short.notes)
    shorter = Course(monkeypatch, batch_sizes=[1])
    shorter.study.run(0.0005, 2)
    assert shorter.notes[1].startswith("4 are decoded at least: about"), "4 * 32 * 5 * 8 / 9 microseconds are 0.57 ms"


rounds_of_a_slice = st.lists(st.integers(1000, 2000), min_size=1, max_size=6)


@given(st.lists(rounds_of_a_slice, min_size=1, max_size=8), st.floats(1.0, 1e6))
def test_the_steady_time_of_a_generation_is_its_rounds_times_the_steady_round(
    slices: list[list[int]], steady_ns: float
) -> None:
    run = arm_run(GOOD, slices)
    first, rest = slices[0][0], sum(map(len, slices)) - 1
    expected = first + rest * steady_ns
    assert run.decoded[0].decode_ns * steady_share(run, {2: steady_ns}) == pytest.approx(expected)


def test_rounds_of_an_emptying_batch_and_the_first_one_count_as_they_were() -> None:
    run = arm_run(GOOD, [[500, 100, 100, 70], [100, 100, 60]], size=3, left=1)
    assert [one.round_ns for one in run.whole_slices()] == [[100, 100], [100, 100]]
    assert run.decoded[0].decode_ns * steady_share(run, {6: 50.0}) == pytest.approx(500 + 70 + 60 + 4 * 50)
    assert steady_share(arm_run(GOOD, [[500]]), {2: 50.0}) == 1.0, "nothing but a first round"
    assert steady_share(arm_run(GOOD, []), {2: 50.0}) == 1.0, "all said by the prefill"


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_rounds_that_draft_more_take_longer_and_are_steady_by_themselves(seed: int, factor: int) -> None:
    """Prompt lookup: a round of nothing takes 100 ns, one of four tokens 180; other work hits a few slices."""
    dice = random.Random(seed)
    drafted = [dice.choice((0, 0, 4)) for _ in range(160)]
    times = [180 if count else 100 for count in drafted]
    slices = [times[first : first + 8] for first in range(0, 160, 8)]
    busy = {0, 7, 13}
    loaded = [[ns * (factor if number in busy else 1) for ns in one] for number, one in enumerate(slices)]
    loaded[0][0] = times[0]  # the first round counts as it was
    found = [group_run(1, 1, ["p"], [arm_run(GOOD, loaded, drafted=drafted)])]
    assert steady_kinds(found)[1, GOOD, 1] == {count: 180.0 if count else 100.0 for count in sorted(set(drafted[1:]))}
    assert steady_round_ns(found)[1, GOOD, 1] == pytest.approx(sum(times[1:]) / 159)
    (run,) = timed_runs(found)
    assert run.steady_ns == pytest.approx(sum(times))


@given(st.integers(0, 10**6), st.floats(0.0, 0.49), st.integers(2, 50))
def test_other_work_on_the_machine_changes_no_steady_time(seed: int, busy_share: float, factor: int) -> None:
    """It makes fewer than half of the slices longer; the truth is 100 ns a round."""
    dice = random.Random(seed)
    quiet = [[100] * 4 for _ in range(20)]
    busy = set(dice.sample(range(20), int(busy_share * 20)))
    loaded = [[ns * (factor if number in busy else 1) for ns in one] for number, one in enumerate(quiet)]
    alone, beside = ([group_run(1, 1, ["p"], [arm_run(GOOD, slices)])] for slices in (quiet, loaded))
    assert steady_round_ns(alone) == steady_round_ns(beside) == {(1, GOOD, 1): 100.0}
    slow = [[*one] for one in loaded]
    slow[0][0] = 100  # the first round counts as it was
    (run,) = timed_runs([group_run(1, 1, ["p"], [arm_run(GOOD, slow)])])
    assert run.steady_ns == pytest.approx(80 * 100) and run.decoded.decode_ns == sum(map(sum, slow))


def test_processes_arms_and_batch_sizes_have_steady_times_of_their_own() -> None:
    found = [
        group_run(1, 1, ["a"], [arm_run(PLAIN, [[50, 50]]), arm_run(GOOD, [[90, 80], [84]])]),
        group_run(1, 2, ["a", "b"], [arm_run(PLAIN, [[70, 60]], size=2)]),
        group_run(2, 1, ["b"], [arm_run(PLAIN, [[55, 55]]), arm_run(RIVAL, [[40, 40]])]),
    ]
    known = steady_round_ns(found)
    assert known[1, PLAIN, 1] == 50.0 and known[1, PLAIN, 2] == 60.0 and known[2, PLAIN, 1] == 55.0
    assert known[1, GOOD, 1] == 80.0 and known[2, RIVAL, 1] == 40.0 and len(known) == 5
    runs = timed_runs(found)
    assert [run.order_index for run in runs] == list(range(6))
    assert [run.kernel for run in runs] == ["mixed"] * 5 + ["plain"]
    assert [(run.process, run.prompt.prompt_id, run.batch_size, run.batch_id) for run in runs if run.arm == PLAIN] == [
        (1, "a", 1, None),
        (1, "a", 2, 1),
        (1, "b", 2, 1),
        (2, "b", 1, None),
    ]


def test_a_prompt_decoded_again_by_a_process_is_another_repetition_of_it() -> None:
    again = [
        group_run(process, number, ["a"], [arm_run(PLAIN, [[5, 5]])]) for process, number in ((1, 1), (1, 2), (2, 1))
    ]
    assert [(run.process, run.rep) for run in timed_runs(again)] == [(1, 0), (1, 1), (2, 0)]


@given(st.lists(st.sampled_from("xyz"), max_size=20), st.integers(1, 6), st.booleans())
def test_batches_are_whole_and_of_one_workload_where_that_goes(
    workloads: list[str], batch_size: int, fill: bool
) -> None:
    asked = [prompt(str(number), workload) for number, workload in enumerate(workloads)]
    groups = batches(asked, batch_size, fill)
    assert all(len(group) == batch_size for group in groups)
    used = [one.prompt_id for group in groups for one in group]
    assert len(groups) == max(len(asked) // batch_size, int(fill and bool(asked)))
    assert len(set(used)) == len(used) or len(asked) < batch_size
    mixed = sum(len({one.workload for one in group}) > 1 for group in groups)
    assert mixed <= 2, "at most where one workload ends and the next begins"


def test_a_made_up_generation_is_what_it_says() -> None:
    assert len(decoded(4, SECOND, emitted=2).tokens) == 9
