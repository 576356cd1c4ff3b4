"""How a target is to be run wherever a run measures it: the threads and kernels that `bench.autotune` settled on.

Which threads and which kernels are quickest is itself a measurement: two processes that each ask for themselves hardly
ever take the same kernels, and in a noisy moment other threads, and then one predicts what another does not decode.
"""

from __future__ import annotations

from typing import NamedTuple

from components.contract import Context, Machine, Measurements, Target, UserError


class Tuning(NamedTuple):
    """num_threads: of torch. kernel: what an opened target says in its `kernel`; see targets/load.py. rival: whether
    the plain kernels are a second baseline; see calibration.py."""

    num_threads: int
    kernel: str
    rival: bool


def read_tuning(
    tuning: Measurements | None, target: Target, dtype: str, num_threads: int, ctx: Context, machine: Machine
) -> Tuning | None:
    """What `bench.autotune` chose for this target, dtype and machine; None where no choice was given.

    num_threads: the step's own setting, 0 where it leaves the choice to others.
    Raises UserError for a choice that was made for something else, and where two answers are given to one question.
    """
    if tuning is None:
        return None
    said, facts = f"tuning ({tuning.key[:12]})", tuning.info
    ours = {"target_key": target.key, "dtype": dtype, "device": ctx.device, "machine_id": machine.machine_id}
    if not {*ours, "num_threads", "kernel", "rival"} <= facts.keys():
        raise UserError(f"{said}: these measurements choose no threads: give what bench.autotune makes")
    if num_threads:
        raise UserError(
            f"num_threads: {num_threads} is asked for, and {said} chose {facts['num_threads']}: leave one of them out"
        )
    for name, value in ours.items():
        if facts[name] != value:
            theirs, mine = str(facts[name])[:12], str(value)[:12]
            raise UserError(
                f"{said}: it was made for {name} {theirs}, and this step has {mine}: "
                f"give a bench.autotune of the same {name}"
            )
    if facts["num_threads"] > ctx.num_threads:
        raise UserError(
            f"{said}: it chose {facts['num_threads']} threads, and this step may use {ctx.num_threads}: allow as many"
        )
    return Tuning(int(facts["num_threads"]), str(facts["kernel"]), bool(facts["rival"]))
