"""How target and drafters are to be run wherever a run measures them: the threads and kernels of `bench.autotune`.

Which threads and which kernels are quickest is itself a measurement: two processes that each ask for themselves hardly
ever take the same kernels, and in a noisy moment other threads, and then one predicts what another does not decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from components.contract import Context, Draft, Machine, Measurements, Target, UserError


class Tuning(NamedTuple):
    """num_threads: of torch. kernel: what an opened target says in its `kernel`; see targets/load.py. rival: whether
    the plain kernels are a second baseline. draft_kernels: draft_key -> what an opened drafter says in its `kernel`.
    tried: [{"num_threads", "kernel", "plain_step_ms"}]; see calibration.py."""

    num_threads: int
    kernel: str
    rival: bool
    draft_kernels: Mapping[str, str]
    tried: list[dict[str, Any]]

    def kernel_of(self, draft: Draft) -> str:
        """The kernels of a drafter; "auto" where the choice was made without it."""
        return self.draft_kernels.get(draft.key, "auto")


def read_tuning(
    tuning: Measurements | None,
    target: Target,
    drafts: Sequence[Draft],
    dtype: str,
    num_threads: int,
    ctx: Context,
    machine: Machine,
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
    kernels = dict(facts.get("draft_kernels", {}))
    for draft in drafts:
        if draft.key not in kernels:
            ctx.note(f"{said} chose no kernels for {draft.key[:12]}: each process picks its own; give it to autotune")
    return Tuning(int(facts["num_threads"]), str(facts["kernel"]), bool(facts["rival"]), kernels, [])


def tuned_or_chosen(
    tuning: Measurements | None,
    target: Target,
    drafts: Sequence[Draft],
    context: Sequence[int],
    dtype: Literal["float32", "bfloat16"],
    num_threads: int,
    ctx: Context,
    machine: Machine,
) -> Tuning:
    """The choice that was given, or else one made here, after `context`, in the time that a single step has for it."""
    from components.bench.calibration import choose_engine
    from components.bench.clock import quiet_interpreter

    given = read_tuning(tuning, target, drafts, dtype, num_threads, ctx, machine)
    if given is not None:
        return given
    with quiet_interpreter():
        return choose_engine(
            target,
            drafts,
            context,
            dtype=dtype,
            device=ctx.device,
            max_threads=ctx.num_threads,
            num_threads=num_threads,
        )
