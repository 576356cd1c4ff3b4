"""Runs of made-up length, for what is computed from runs: slices, groups and timed generations with known truth."""

from __future__ import annotations

from collections.abc import Sequence

from components.bench.end_to_end.arms import Arm
from components.bench.end_to_end.timed_runs import GroupRun, TimedRun
from components.bench.measurement.slices import ArmRun, Slice
from components.bench.prompts import EncodedPrompt
from components.decoding.chain import Decoded, RoundFacts

KERNELS = {False: "mixed", True: "plain"}


def prompt(name: str, workload: str = "w") -> EncodedPrompt:
    return EncodedPrompt(name, workload, [1, 2, 3])


def decoded(num_rounds: int, decode_ns: int, *, emitted: int = 1, overshoot: int = 0) -> Decoded:
    """A generation whose rounds all keep `emitted` tokens."""
    tokens = list(range(1 + num_rounds * emitted))
    rounds = [RoundFacts(i * emitted, emitted - 1, emitted - 1, emitted, 3 + i * emitted) for i in range(num_rounds)]
    return Decoded(tokens, [*tokens, *[0] * overshoot], rounds, "ok", 3, 10, decode_ns)


def arm_run(
    arm: Arm,
    slices: Sequence[Sequence[int]],
    *,
    emitted: int = 1,
    size: int = 1,
    left: int = 0,
    drafted: Sequence[int] = (),
) -> ArmRun:
    """slices: ns of every round; half of it is the target's, a quarter the drafter's. left: last rounds of each slice
    in which one of the `size` sequences was gone. drafted: tokens drafted in each round, two where nothing is said.
    """
    taken = []
    for number, rounds in enumerate(slices, start=1):
        sizes = [size] * (len(rounds) - left) + [size - 1] * left
        drafts = [ns // 4 if arm.depth else 0 for ns in rounds]
        taken.append(Slice(number, list(rounds), [ns // 2 for ns in rounds], drafts, sizes))
    num_rounds, total = sum(map(len, slices)), sum(map(sum, slices))
    made = [decoded(num_rounds, total, emitted=emitted) for _ in range(size)]
    counts = drafted or [2] * num_rounds
    for one in made:
        one.rounds[:] = [facts._replace(drafted=count) for facts, count in zip(one.rounds, counts, strict=True)]
    return ArmRun(arm, made, taken, 7)


def group_run(process: int, number: int, names: Sequence[str], runs: Sequence[ArmRun]) -> GroupRun:
    return GroupRun(process, number, [prompt(name) for name in names], list(runs), KERNELS)


def timed_run(arm: Arm, decoded_: Decoded, *, name: str = "p", process: int = 1, share: float = 1.0) -> TimedRun:
    """A generation alone, whose steady time is this share of what it took."""
    return TimedRun(arm, prompt(name), 0, 0, decoded_, process, "plain", decoded_.decode_ns * share)
