"""The threads and kernels with which a run measures target and drafters, as `bench.autotune` chose them.

The choice is itself a measurement: processes that choose for themselves seldom take the same kernels, and in a noisy
moment other threads, so that predictions would be of another engine than the one that decodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from components.contract import Context, Draft, Machine, Measurements, Target, UserError


class Tuning(NamedTuple):
    """The chosen threads and kernels.

    num_threads: of torch. kernel: the `kernel` of an opened target; see targets/load.py. rival: whether the plain
    kernels are a second baseline. draft_kernels: draft_key -> the `kernel` of an opened drafter.
    tried: [{"num_threads", "kernel", "plain_step_ms"}]; see calibration.py.
    """

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
    """Read the choice of `bench.autotune` for this target, dtype and machine; None for tuning None.

    num_threads: the step's own setting, 0 for none.
    Raises UserError for a choice made for something else, or one beside the step's own num_threads.
    """
    if tuning is None:
        return None
    label, facts = f"tuning ({tuning.key[:12]})", tuning.info
    needed = {"target_key": target.key, "dtype": dtype, "device": ctx.device, "machine_id": machine.machine_id}
    if not {*needed, "num_threads", "kernel", "rival"} <= facts.keys():
        raise UserError(f"{label}: these measurements choose no threads: give what bench.autotune makes")
    if num_threads:
        raise UserError(
            f"num_threads: {num_threads} is asked for, and {label} chose {facts['num_threads']}: leave one of them out"
        )
    for name, value in needed.items():
        if facts[name] != value:
            stated_text, needed_text = str(facts[name])[:12], str(value)[:12]
            raise UserError(
                f"{label}: it was made for {name} {stated_text}, and this step has {needed_text}: "
                f"give a bench.autotune of the same {name}"
            )
    if facts["num_threads"] > ctx.num_threads:
        raise UserError(
            f"{label}: it chose {facts['num_threads']} threads, and this step may use {ctx.num_threads}: allow as many"
        )
    kernels = dict(facts.get("draft_kernels", {}))
    for draft in drafts:
        if draft.key not in kernels:
            ctx.note(f"{label} chose no kernels for {draft.key[:12]}: each process picks its own; give it to autotune")
    return Tuning(int(facts["num_threads"]), str(facts["kernel"]), bool(facts["rival"]), kernels, [])


def resolve_tuning(
    tuning: Measurements | None,
    target: Target,
    drafts: Sequence[Draft],
    context: Sequence[int],
    dtype: Literal["float32", "bfloat16"],
    num_threads: int,
    ctx: Context,
    machine: Machine,
) -> Tuning:
    """The choice read from `tuning`, or else one timed here, decoding after the token ids of `context`."""
    from components.bench.calibration import choose_engine
    from components.bench.clock import quiet_interpreter

    tuned = read_tuning(tuning, target, drafts, dtype, num_threads, ctx, machine)
    if tuned is not None:
        return tuned
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
