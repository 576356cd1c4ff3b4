"""Step `bench.compare_stop`: chains that end by confidence against the best fixed depth, decoding in turns.

For every rule of the policy (speedup.choose_stop) four arms decode the same prompts in turns, in several fresh
processes: plain decoding, chains of the best fixed depth, chains that the rule ends, and chains that a single threshold
ends (llama.cpp's `p_min`). Batch sizes are measured one after the other, since each has rules of its own. Times are as
the clock had them: the arms share what disturbs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from components.bench import clock
from components.bench.calibration import resolve_tuning
from components.bench.end_to_end.arms import PLAIN, Arm
from components.bench.end_to_end.request_rows import Conditions, request_rows
from components.bench.end_to_end.timed_runs import Study, StudyPlan, timed_runs
from components.bench.measurement.process import Measuring
from components.bench.measurement.stopping import check_settled
from components.bench.prompts import fitting_prompts, spread, warm_up_prompts
from components.bench.settings import Dtype
from components.contract import Context, DepthPolicy, Draft, Machine, Measurements, Prompts, Target, UserError
from components.policy import StopChoice, read_policy
from components.positions import LEAST_SHARE, ROOM_FOR_GUESSES
from components.rows import StopRun, write_rows
from components.stop_rule import StopRule
from components.targets.load import open_target


def compare_stop(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    policy: DepthPolicy,
    tuning: Measurements | None,
    *,
    num_prompts: int,
    max_new_tokens: int,
    precision: float,
    seconds: float,
    num_processes: int,
    num_warm_up: int,
    dtype: Dtype,
    num_threads: int,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """The step `bench.compare_stop`; its settings are explained in components/bench/steps.py."""
    keys = {draft.key for draft in drafts}
    stops = [stop for stop in read_policy(policy.path).stops if stop.draft_key in keys]
    if not stops:
        raise UserError("policy: it has no rule for any of these drafters: run speedup.choose_stop before this step")
    room = max_new_tokens + ROOM_FOR_GUESSES
    timed_prompts = spread(fitting_prompts(target, prompts, "test", room, ctx, least_share=LEAST_SHARE), num_prompts)
    if max(stop.batch_size for stop in stops) > len(timed_prompts):
        raise UserError(
            f"num_prompts: {max(stop.batch_size for stop in stops)} side by side need as many prompts, and there are "
            f"{len(timed_prompts)}"
        )
    warm_up = warm_up_prompts(target, prompts, timed_prompts, num_warm_up, room, ctx)
    tuned = resolve_tuning(tuning, target, drafts, timed_prompts[0].ids, dtype, num_threads, ctx, machine)
    sizes = sorted({stop.batch_size for stop in stops})

    def study_of(number: int, size: int) -> Study:
        arms = list(arms_of([stop for stop in stops if stop.batch_size == size]))
        ctx.note(f"batch size {size}: {', '.join(arm.label for arm in arms)}")
        study = Study(
            StudyPlan(arms, frozenset(), timed_prompts, warm_up, [size], max_new_tokens),
            open_process=lambda process: Measuring(process, target, drafts, arms, tuned, dtype, ctx),
            find_open_arms=lambda group_runs: check_settled(group_runs, (), precision),
            progress=lambda done, total: ctx.progress(
                number * total + done, len(sizes) * total, "seconds of measuring"
            ),
            note=ctx.note,
        )
        study.run(seconds / len(sizes), num_processes)
        return study

    studies = [study_of(number, size) for number, size in enumerate(sizes)]
    shared = Conditions(ctx.key[:16], target.key, dtype, tuned.num_threads)
    names = arms_of(stops)
    rows = [row for study in studies for row in _stop_runs(study, names, target, tuned.kernel, shared, ctx)]
    write_rows(ctx.out, rows)
    facts = {"kernel": tuned.kernel, "num_threads": tuned.num_threads, "machine_id": machine.machine_id}
    return Measurements.of_step(
        ctx,
        {
            **facts,
            "num_prompts": len({row.prompt_id for row in rows}),
            "ended": [study.stop_reason for study in studies],
            **(studies[-1].conditions or {}),
        },
    )


def arms_of(stops: Sequence[StopChoice]) -> dict[Arm, str]:
    """Plain decoding and, for each rule, the arms of StopRun; arm -> its name there."""
    arms = {PLAIN: "plain"}
    for s in stops:
        arms[Arm(s.method, s.draft_key, s.fixed_depth)] = "fixed"
        arms[Arm(s.method, s.draft_key, s.rule.depth, stop=s.rule)] = "stop"
        arms[Arm(s.method, s.draft_key, s.p_min_depth, stop=StopRule.of_least(s.p_min, s.p_min_depth))] = "p_min"
    return arms


def _stop_runs(
    study: Study, names: Mapping[Arm, str], target: Target, kernel: str, shared: Conditions, ctx: Context
) -> list[StopRun]:
    runs = timed_runs(study.group_runs)
    with clock.threads(shared.num_threads):
        model = open_target(target, device=ctx.device, dtype=shared.dtype, kernel=kernel)
        requests = request_rows(runs, model, shared)
    return [
        StopRun(
            session_id=r.session_id,
            target_key=r.target_key,
            draft_key=r.draft_key,
            method=r.method,
            arm=names[run.arm],
            depth_k=r.depth_k,
            prompt_id=r.prompt_id,
            workload=r.workload,
            batch_size=r.batch_size,
            process=r.process,
            rep=r.rep,
            tokens=r.timed_tokens,
            elapsed_ns=r.elapsed_ns or r.decode_ns,
            num_rounds=r.num_rounds,
            num_drafted=r.num_drafted,
            num_accepted=r.num_accepted,
            identical=r.identical,
            tie=r.tie,
            dtype=r.dtype,
            kernel=r.kernel,
            num_threads=r.num_threads,
        )
        for run, r in zip(runs, requests, strict=True)
    ]
