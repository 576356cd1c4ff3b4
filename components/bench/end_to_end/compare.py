"""Step `bench.compare_end_to_end`: plain decoding against speculative decoding, end to end.

All arms have the same prompts, engine, dtype, threads and kept tokens. They take turns of some tens of milliseconds, in
several fresh processes, until it is settled which depth to serve or the time is spent. Every output is compared with
plain decoding token by token. Prompt lookup, which needs no training, runs on the same engine, since a drafter has to
beat it too. Each drafter also runs loaded but off: the cost of speculation for requests that do not use it. The phases
of every round are kept as cost cells, so that predictions can be compared with costs of the same moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from components.bench import clock
from components.bench.calibration import Tuning, resolve_tuning
from components.bench.end_to_end.arms import (
    PLAIN,
    RIVAL,
    Arm,
    check_loop_supports,
    depths_to_run,
    read_policy_depths,
    tree_arms,
)
from components.bench.end_to_end.request_rows import Conditions, request_rows, round_rows, rounded, run_flags
from components.bench.end_to_end.timed_runs import GroupRun, Study, StudyPlan, timed_runs
from components.bench.measurement.process import Measuring
from components.bench.measurement.stopping import check_settled
from components.bench.prompts import fitting_prompts, spread, warm_up_prompts
from components.bench.settings import BatchSizes, DepthsToRun, Dtype, LookupDepths, TreeBudgets
from components.bench.step_cost import BlockConditions, Setting, TimedBlock, cost_cells
from components.contract import Context, DepthPolicy, Draft, Machine, Measurements, Prompts, Target, UserError
from components.data.formats.prompts import read_prompts
from components.definitions import al_of, best_plain, counts, speedup, tokens_per_s
from components.drafts.storage.files import read_record
from components.methods import decoding_loop_of
from components.outside_json import JsonObject
from components.positions import LEAST_SHARE, ROOM_FOR_GUESSES
from components.rows import CostCell, Request, grouped, write_rows
from components.targets.load import open_target


def compare_end_to_end(
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
    depths: DepthsToRun,
    lookup_depths: LookupDepths,
    loaded_off: bool,
    batch_sizes: BatchSizes,
    trees: TreeBudgets,
    num_warm_up: int,
    dtype: Dtype,
    num_threads: int,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """The step `bench.compare_end_to_end`; its settings are explained in components/bench/steps.py."""
    for draft in drafts:
        check_loop_supports(draft, batch_sizes, trees)
    room = max_new_tokens + ROOM_FOR_GUESSES
    fitting = fitting_prompts(target, prompts, "test", room, ctx, least_share=LEAST_SHARE)
    timed_prompts = spread(fitting, num_prompts)
    if max(batch_sizes) > len(timed_prompts):
        raise UserError(
            f"batch_sizes: {max(batch_sizes)} side by side need as many prompts, and there are {len(timed_prompts)}"
        )
    warm_up = warm_up_prompts(target, prompts, timed_prompts, num_warm_up, room, ctx)
    tuned = resolve_tuning(tuning, target, drafts, timed_prompts[0].ids, dtype, num_threads, ctx, machine)
    arms, side_arms = plan_arms(
        drafts, read_policy_depths(policy), depths, lookup_depths, loaded_off, trees, rival=tuned.rival
    )
    ctx.note(
        f"{len(arms)} arms on {len(timed_prompts)} prompts in {num_processes} processes or more, for {seconds:.0f} s, "
        f"or until settled to {precision:.0%}: {', '.join(arm.label for arm in arms)}"
    )
    study = Study(
        StudyPlan(arms, side_arms, timed_prompts, warm_up, sorted(set(batch_sizes)), max_new_tokens),
        open_process=lambda number: Measuring(number, target, drafts, arms, tuned, dtype, ctx),
        find_open_arms=lambda group_runs: check_settled(group_runs, side_arms, precision),
        progress=lambda done, total: ctx.progress(done, total, "seconds of measuring"),
        note=ctx.note,
    )
    study.run(seconds, num_processes)
    return Measurements.of_step(
        ctx,
        {
            "num_prompts": len(timed_prompts),
            "num_prompts_left_out": len(read_prompts(prompts, "test")) - len(fitting),
            **_write_rows(study, tuned, target, drafts, dtype, machine, ctx),
        },
    )


def plan_arms(
    drafts: Sequence[Draft],
    policy_depths: Mapping[str, frozenset[int]],
    depths: Literal["around", "all"] | list[int],
    lookup_depths: Sequence[int],
    loaded_off: bool,
    trees: Sequence[int],
    *,
    rival: bool,
) -> tuple[list[Arm], frozenset[Arm]]:
    """All arms (plain decoding, prompt lookup, every drafter off, at its depths and as trees), and the side arms.

    Side arms are shown in the results, but take no part in the decision which depth to serve.
    """
    lookup = [Arm("ngram", "", depth) for depth in lookup_depths]
    arms, side = [PLAIN, *([RIVAL] if rival else []), *lookup], set(lookup)
    for draft in drafts:
        record = read_record(draft.path)
        method, trained, reach = str(record["method"]), int(record["num_steps"]), int(record["max_depth"])
        deepest = max(depths) if isinstance(depths, list) and depths else trained
        within_reach = [depth for depth in policy_depths.get(draft.key, ()) if depth <= reach]
        if loaded_off and not decoding_loop_of(method):  # such a method drafts with the target itself: no drafter
            arms.append(Arm(method, draft.key, 0))
            side.add(arms[-1])
        arms += [Arm(method, draft.key, depth) for depth in depths_to_run(depths, within_reach, min(deepest, reach))]
        arms += tree_arms(method, draft.key, trained, trees)
    return arms, frozenset(side)


def _write_rows(
    study: Study,
    tuned: Tuning,
    target: Target,
    drafts: Sequence[Draft],
    dtype: Dtype,
    machine: Machine,
    ctx: Context,
) -> JsonObject:
    """Write the rows: requests compared with plain decoding, rounds, costs, quality flags. Returns facts for `info`."""
    assert study.conditions is not None, "nothing was measured"
    runs, load = timed_runs(study.group_runs), study.conditions["load_average"]
    shared = Conditions(ctx.key[:16], target.key, dtype, tuned.num_threads)
    with clock.threads(tuned.num_threads):
        model = open_target(target, device=ctx.device, dtype=dtype, kernel=tuned.kernel)
        requests = request_rows(runs, model, shared)
    trained = {draft.key: int(read_record(draft.path)["num_steps"]) for draft in drafts}
    flags = run_flags(runs, shared.session_id, load, machine.num_cores, trained)
    cells = study_cost_cells(study.group_runs, target.key, dtype, tuned.num_threads, load)
    write_rows(ctx.out, [*requests, *round_rows(runs, shared), *cells, *flags])
    decoded = len({run.prompt.prompt_id for run in runs})
    if decoded < len(study.plan.prompts):
        ctx.note(f"the time was enough for {decoded} of {len(study.plan.prompts)} prompts")
    return {
        "dtype": dtype,
        "num_threads": tuned.num_threads,
        "kernel": tuned.kernel,
        "draft_kernels": {draft.key: tuned.kernel_of(draft) for draft in drafts},
        "engines_tried": tuned.tried,
        "machine_id": machine.machine_id,
        "num_prompts_decoded": decoded,
        "generation_remark": target.info.get("generation_remark", ""),
        "num_processes": study.num_processes,
        "ended": study.stop_reason,
        **study.conditions,
        "arms": summary(requests),
    }


def study_cost_cells(
    group_runs: Sequence[GroupRun], target_key: str, dtype: str, num_threads: int, load: float | None
) -> list[CostCell]:
    """The phases of every arm's rounds as cost cells: one block for each prompt, kv_len the mean context of all."""
    contexts = [
        len(prompt.ids) + len(decoded.tokens) / 2
        for group_run in group_runs
        for run in group_run.runs[:1]
        for prompt, decoded in zip(group_run.group, run.decoded, strict=True)
    ]
    kv_len = round(sum(contexts) / len(contexts))
    return cost_cells(
        [
            TimedBlock(
                run.runs,
                Setting(len(run.group), kv_len),
                BlockConditions(target_key, dtype, num_threads, run.kernels, run.process, run.number, load),
            )
            for run in group_runs
        ]
    )


def summary(requests: Sequence[Request]) -> list[JsonObject]:
    """One record an arm, pooled over prompts: decode tokens/s, speedup over plain, acceptance length, identity."""
    timed = [r for r in requests if counts(r)]
    groups = grouped(timed, lambda r: (r.method, r.draft_key, r.depth_k, r.kernel, r.tree_budget or 0, r.batch_size))
    plain = {size: best_plain(r for r in timed if r.batch_size == size) for size in {key[5] for key in groups}}
    return [
        {
            "method": key[0],
            "draft_key": key[1],
            "depth_k": key[2],
            "kernel": key[3],
            "tree_budget": key[4] or None,
            "batch_size": key[5],
            "tokens_per_s": rounded(tokens_per_s(rows), 2),
            "speedup": rounded(speedup(rows, plain[key[5]]), 4),
            "al": rounded(al_of(rows), 4),
            "identical": None if key[0] == "none" else sum(r.identical is True for r in rows),
            "ties": sum(r.tie is True for r in rows),
            "requests": len(rows),
        }
        for key, rows in sorted(groups.items(), key=lambda item: (item[0][0] != "none", item[0]))
    ]
