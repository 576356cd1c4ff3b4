"""Step `speedup.choose_stop`: does a rule that ends chains by confidence beat the best fixed depth, and by how much?

For each drafter and batch size a rule is fitted (stop_fitting.py) and replayed beside its best fixed depth, over the
same prompts. Each prompt is judged by a rule that was fitted without it, while the fixed depth is the best one of all
the prompts: the comparison favours the fixed depth. Both emit the same tokens, so the gain is the quotient of their
times; prompts and processes are drawn alike for both. The rule pays for every confidence that it reads, as measured.
In a batch all sequences take one length, as in decoding/batch.py, and each round pays for it; drafters that take
sequences one after the other (a draft model, MTP modules of the target's own) end each chain by itself there and are
padded to the longest, which only `confirm_stop` tells.

The rule that is written is fitted to all prompts; one that reads nothing is a fixed depth, and never chosen.
llama.cpp's `p_min` with its best depth is judged in the same way, as what an engine with a single threshold would make
of the confidences.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from components.contract import Context, DepthPolicy, Measurements, UserError
from components.definitions import steady
from components.methods import METHODS
from components.policy import Policy, StopChoice, read_policy
from components.rows import AcceptanceMap, CostCell, StopRun, grouped, read_rows
from components.speedup.bootstrap import Estimate, draw_weights, ratio_influence, sample_of
from components.speedup.choose import Evidence, cells_of, valid_cells, valid_maps
from components.speedup.comparison.paired import speed_ratio
from components.speedup.policy_markdown import policy_summary, write_policy
from components.speedup.prediction.costs import CostTable
from components.speedup.prediction.predict import Rule, cost_factors
from components.speedup.stop_fitting import (
    FOLDS,
    Answer,
    Chains,
    Replayed,
    RoundTimes,
    answers_of,
    best_fixed,
    calibration_error,
    fit_rule,
    fixed_chains,
    held_out_chains,
    oracle,
    reliability,
    replay_chains,
    rows_at,
    rule_chains,
)
from components.stop_rule import StopRule

NUM_LEAST = 12  # thresholds of `p_min` that are tried, spread over the confidences


def choose_stop(
    policy: DepthPolicy,
    acceptance: list[Measurements],
    cost: list[Measurements],
    *,
    confidence: float,
    num_draws: int,
    include_host: bool,
    ctx: Context,
) -> DepthPolicy:
    """The step `speedup.choose_stop`; its settings are explained in components/speedup/steps.py."""
    rule = Rule(0.0, confidence, num_draws, include_host)
    cells_by_source = [valid_cells(source, ctx) for source in cost]
    groups = {key: maps for (key, budget), maps in valid_maps(acceptance, ctx).items() if budget is None}
    able = {key: maps for key, maps in groups.items() if all(m.confidence for m in maps)}
    if not able:
        raise UserError(
            "acceptance: no map holds confidences: they come with a trained drafter; measure its acceptance again"
        )
    stops = []
    for index, maps in enumerate(able[key] for key in sorted(able)):
        session, cells = cells_of(maps[0], cells_by_source)
        evidence = Evidence(maps, cells, None, None, {}, rule, ctx.seed, session)
        for batch_size in evidence.batch_sizes():
            stops.append(stop_choice(evidence, batch_size))
            ctx.note(stops[-1].summary_line)
        ctx.progress(index + 1, len(able), "drafters")
    return _with_rules(read_policy(policy.path), stops, ctx)


def confirm_stop(
    policy: DepthPolicy, measured: Measurements, *, confidence: float, num_draws: int, ctx: Context
) -> DepthPolicy:
    """The step `speedup.confirm_stop`; its settings are explained in components/speedup/steps.py."""
    content, runs = read_policy(policy.path), read_rows(measured.path, StopRun)
    if not content.stops or not runs:
        raise UserError("confirm_stop: takes a policy of speedup.choose_stop and rows of bench.compare_stop")
    stops = [_confirmed(stop, runs, confidence, num_draws, ctx.seed) for stop in content.stops]
    for stop in stops:
        ctx.note(stop.summary_line)
    return _with_rules(content, stops, ctx)


def _with_rules(content: Policy, stops: Sequence[StopChoice], ctx: Context) -> DepthPolicy:
    """Write the policy with these rules in place of its own."""
    content = replace(content, stops=[*stops])
    write_policy(ctx.out, content)
    return DepthPolicy.of_step(ctx, policy_summary(content))


def _is_sure(gain: Estimate, confidence: float) -> bool:
    """Whether a gain above 1 is shown with this probability."""
    p_above = gain.p_above(1.0)
    return gain.is_decisive and p_above is not None and p_above >= confidence


def _confirmed(stop: StopChoice, runs: Sequence[StopRun], confidence: float, num_draws: int, seed: int) -> StopChoice:
    """The rule with its measured gain; as it is where it was not measured."""
    of_drafter = [r for r in runs if (r.draft_key, r.batch_size) == (stop.draft_key, stop.batch_size)]
    stopped, least, fixed = (
        [r for r in of_drafter if (r.arm, r.depth_k) == arm]
        for arm in (("stop", stop.rule.depth), ("p_min", stop.p_min_depth), ("fixed", stop.fixed_depth))
    )
    processes = sorted({r.process for r in of_drafter})
    ratio = speed_ratio(_timed(stopped), _timed(fixed), processes, num_draws, seed)
    least_ratio = speed_ratio(_timed(least), _timed(fixed), processes, num_draws, seed)
    if ratio is None or least_ratio is None:
        return stop
    low, high = ratio.ratio.interval()
    least_low, least_high = least_ratio.ratio.interval()
    return replace(
        stop,
        gain_meas=ratio.ratio.value,
        meas_lo=low,
        meas_hi=high,
        num_prompts_meas=len(ratio.prompts),
        p_min_gain_meas=least_ratio.ratio.value,
        p_min_meas_lo=least_low,
        p_min_meas_hi=least_high,
        divergences=sum(r.identical is False and not r.tie for r in (*stopped, *least)),
        chosen=stop.rule.num_read > 0 and _is_sure(ratio.ratio, confidence),
    )


def _timed(runs: Sequence[StopRun]) -> dict[tuple[str, int], tuple[float, float]]:
    """(prompt, process) -> tokens and time of its runs."""
    return {
        key: (float(sum(r.tokens for r in of_one)), float(sum(r.elapsed_ns for r in of_one)))
        for key, of_one in grouped((r for r in runs if r.tokens), lambda r: (r.prompt_id, r.process)).items()
    }


def stop_choice(evidence: Evidence, batch_size: int) -> StopChoice:
    """The fitted rule of one drafter, and its judgement."""
    table, method = evidence.costs(batch_size), evidence.maps[0].method
    times = round_times(table, evidence.rule.include_host, method in METHODS and METHODS[method].one_pass)
    times = times._replace(reading=reading_time(evidence, batch_size), batch_size=batch_size)
    answers = answers_of(_within(evidence.maps, len(times.draft) - 1))
    depth, (fixed_depth, _) = len(times.draft) - 1, best_fixed(answers, times)
    chains, rules = held_out_chains(answers, times)
    fixed, stopped = (replay_chains(answers, each, depth) for each in (fixed_chains(fixed_depth), chains))
    least = replay_chains(answers, held_out_least(answers, times), depth)
    gain, least_gain = (_gain(fixed, other, times, table, evidence) for other in (stopped, least))
    low, high = gain.interval()
    bins = reliability(answers, stopped, rules)
    final, (p_min, p_min_depth) = fit_rule(answers, times).rule, best_least(answers, times)
    least_low, least_high = least_gain.interval()
    plain = times.verify[0]
    num_rounds = stopped.counts.sum()
    return StopChoice(
        draft_key=evidence.draft_key,
        method=method,
        batch_size=batch_size,
        num_prompts=len(answers),
        num_rounds=int(num_rounds),
        fixed_depth=fixed_depth,
        speedup_fixed=fixed.rate(times) * plain,
        speedup=stopped.rate(times) * plain,
        gain=gain.value,
        gain_lo=low,
        gain_hi=high,
        chosen=final.num_read > 0 and _is_sure(gain, evidence.rule.confidence),
        al=float(stopped.tokens.sum() / num_rounds),
        drafted=float((stopped.counts.sum(axis=(0, 1)) * np.arange(depth + 1)).sum() / num_rounds),
        share_of_oracle=stopped.rate(times) / oracle(answers, times, stopped.rate(times)).rate(times),
        p_min=p_min,
        p_min_depth=p_min_depth,
        p_min_gain=least_gain.value,
        p_min_gain_lo=least_low,
        p_min_gain_hi=least_high,
        calibration_error=calibration_error(bins),
        reliability=[[b.predicted, b.observed, float(b.num_tokens)] for b in bins],
        calibration=[[list(curve.confidence), list(curve.accepted)] for curve in final.calibration],
        draft_from=list(final.draft_from),
        verify_from=list(final.verify_from),
        reading_share=times.reading * fixed_depth / float(times.draft[fixed_depth] + times.verify[fixed_depth]),
    )


def _within(maps: Sequence[AcceptanceMap], depth: int) -> list[AcceptanceMap]:
    """The maps without what lies deeper than the costs reach."""
    return [
        replace(
            m, k_max=depth, accepted=[min(a, depth) for a in m.accepted], confidence=[c[:depth] for c in m.confidence]
        )
        for m in maps
    ]


def reading_time(evidence: Evidence, batch_size: int) -> float:
    """What reading one confidence takes, ms: how much longer drafts take under a rule that reads all and ends none.

    Raises UserError where that was not measured.
    """
    chains = [c for c in evidence.cells if (c.draft_key, c.batch_size) == (evidence.draft_key, batch_size)]
    read = [c for c in chains if c.phase == "draft_read"]
    if not read:
        raise UserError(
            f"cost: what a stop rule's own decisions take was not measured for drafter {evidence.draft_key[:12]}, "
            f"batch {batch_size}: set stop_rule: true in bench.measure_step_cost"
        )
    depth = max(c.depth_k for c in read)
    unread = [c for c in chains if (c.phase, c.depth_k, c.tree_budget) == ("draft", depth, None)]
    longer = [
        steady([c.median_ns for c in of_one]) - steady([c.median_ns for c in unread if _timed_at(c) == run])
        for run, of_one in grouped((c for c in read if c.depth_k == depth), _timed_at).items()
    ]
    return max(0.0, float(np.mean(longer))) / 1e6 / depth


def _timed_at(cell: CostCell) -> tuple[int, int]:
    return cell.process, cell.kv_len


def round_times(table: CostTable, include_host: bool, in_one_pass: bool) -> RoundTimes:
    """The times of a cost table; depths between those that were measured lie on straight lines."""
    depths = np.arange(table.depths[-1] + 1)
    measured = (table.times.draft, table.times.verify, table.times.host)
    draft, verify, host = (np.interp(depths, table.depths, part) for part in measured)
    return RoundTimes(draft, verify + host if include_host else verify, in_one_pass)


def _gain(fixed: Replayed, other: Replayed, times: RoundTimes, table: CostTable, evidence: Evidence) -> Estimate:
    """Time at the fixed depth over time of other chains, over the same tokens; prompts and processes drawn alike."""
    depths = np.arange(len(times.draft))
    rule, seed = evidence.rule, evidence.seed
    stream = np.random.default_rng([seed, 5, zlib.crc32(evidence.draft_key.encode())])
    weights = draw_weights(len(fixed.tokens), rule.num_draws, stream)
    factors = cost_factors(table, rule.num_draws, seed)  # [draws, depths of the table], on speed
    slower = np.stack([np.interp(depths, table.depths, 1.0 / row) for row in factors])
    process = np.stack([np.interp(depths, table.depths, unit) for unit in table.process.T] or [np.zeros(0)], axis=-1)
    spent = [replayed.by_verified(times) for replayed in (fixed, other)]
    draws = [np.einsum("dp,pk,dk->d", weights, part, slower, optimize=True) for part in spent]
    above, below = (part.sum(axis=1) for part in spent)
    influence, value = ratio_influence(above, below), float(above.sum() / below.sum())
    shares = [part.sum(axis=0) / part.sum() for part in spent]
    loading = (shares[0] - shares[1]) @ process * value if table.process.shape[1] else np.zeros(0)
    dof = float(table.process_dof.min())
    return Estimate(value, draws[0] / draws[1], influence, sample_of(below, influence), loading, dof, minimum=0.0)


def best_least(answers: Sequence[Answer], times: RoundTimes) -> tuple[float, int]:
    """(p_min, depth) with the highest rate on these answers; a p_min of 0 ends no chain."""
    depth = len(times.draft) - 1
    seen = np.concatenate([answer.confidence.ravel() for answer in answers])
    least = [0.0, *np.round(np.quantile(seen, np.linspace(0.02, 0.9, NUM_LEAST)), 3).tolist()]
    rates = {
        (p, k): replay_chains(answers, least_chains(answers, p, k, times), depth).rate(times)
        for p in dict.fromkeys(least)
        for k in range(1, depth + 1)
    }
    return max(rates, key=lambda pair: rates[pair])


def least_chains(answers: Sequence[Answer], p_min: float, depth: int, times: RoundTimes) -> Chains:
    """Chains of a single threshold; in a batch beside rounds of these answers."""
    rule, elsewhere = StopRule.of_least(p_min, depth), None
    if times.batch_size > 1:
        elsewhere = rows_at(answers, replay_chains(answers, fixed_chains(depth), len(times.draft) - 1).rounds)
    return rule_chains(rule, elsewhere, times.batch_size, times.in_one_pass)


def held_out_least(answers: Sequence[Answer], times: RoundTimes) -> Chains:
    """Chains of every answer by the p_min and depth that were best without it."""
    folds = min(FOLDS, len(answers))
    chains_of: dict[int, Chains] = {}
    for fold in range(folds):
        others = [a for i, a in enumerate(answers) if i % folds != fold]
        chains = least_chains(others, *best_least(others, times), times)
        chains_of |= {id(a): chains for i, a in enumerate(answers) if i % folds == fold}
    return lambda answer: chains_of[id(answer)](answer)
