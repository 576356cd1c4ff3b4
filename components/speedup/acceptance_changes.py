"""Acceptance length of one set of acceptance maps against another, at one depth and with intervals over prompts.

Step `speedup.measure_drift`: the champion on today's traffic against that at its release, at the depth that is served.
The two sets hold different prompts, so each is resampled by itself; where the interval of the change excludes zero, the
rows and a flag report drift.

Step `speedup.measure_languages`: acceptance length by language, and what a training mix without a language loses. One
drafter for each training mix is measured on the same prompts. The first drafter is the baseline; the others are
compared with it prompt by prompt: each draw of prompts serves both, so what makes a prompt hard cancels. Rows also hold
the share of answer tokens in a drafter's vocabulary: other tokens cannot be kept, however long the drafter is trained.

Step `speedup.measure_tuning`: a drafter as it came against the same one tuned, and, where the target was changed, what
that cost before. All are compared prompt by prompt; the older target gave other answers to the same prompts. Where
prompts were also answered by sampling, what either drafter keeps of those answers stands beside its greedy ones.

`weights_costs`: what rounding a drafter's weights costs, the rounded drafter against its original on the same prompts,
compared in the same way at the depth at which the rounded drafter is to serve.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from components.contract import Context, DepthPolicy, Measurements, Prompts, UserError
from components.policy import WeightsCost, read_policy
from components.refusals import PROMPTS
from components.rows import (
    ALL,
    NAMES_OF_CHANGES,
    AcceptanceByLanguage,
    AcceptanceChange,
    AcceptanceMap,
    Drift,
    QualityFlag,
    SampledRun,
    read_rows,
    write_rows,
)
from components.speedup.bootstrap import Estimate, draw_weights, pooled_ratio
from components.speedup.prediction.replay import acceptance_length

UNKNOWN = "unknown"  # the language of a prompt without one


def measure_drift(
    then: Measurements, now: Measurements, policy: DepthPolicy | None, *, depth_k: int, num_draws: int, ctx: Context
) -> Measurements:
    """The step `speedup.measure_drift`; its settings are explained in components/speedup/steps.py."""
    old, new = (_chain_maps(source, name) for source, name in ((then, "then"), (now, "now")))
    if old[0].draft_key != new[0].draft_key:
        raise UserError("then, now: two drafters; drift compares one drafter on two sets of prompts")
    depth = min(depth_k or _served_depth(policy, old[0].draft_key) or 64, *(m.k_max for m in (*old, *new)))
    rows = []
    for workload in [ALL, *sorted({m.workload for m in new} - {ALL})]:
        now_maps = [m for m in new if workload in (ALL, m.workload)]
        then_maps = [m for m in old if m.workload == workload]
        against = workload if then_maps else ALL
        rows.append(
            _drift_row(then_maps or old, now_maps, (workload, against), depth, num_draws, ctx.seed, ctx.key[:16])
        )
    pooled = rows[0]
    flags = [*(_drift_flag(row) for row in rows if row.drifted), *_few_prompts_of_drift(pooled)]
    write_rows(ctx.out, [*rows, *flags])
    ctx.note(f"drift: {drift_line(pooled)}")
    return Measurements.of_step(
        ctx,
        {
            "method": pooled.method,
            "draft_key": pooled.draft_key,
            "depth_k": depth,
            "al_then": pooled.al_then,
            "al_now": pooled.al_now,
            "change": pooled.change,
            "change_lo": pooled.lo,
            "change_hi": pooled.hi,
            "drifted": pooled.drifted,
            "drift": drift_line(pooled),
            "drifted_workloads": [row.workload for row in rows if row.drifted],
        },
    )


def drift_line(row: Drift) -> str:
    """One line: both acceptance lengths, the change with its interval, and the conclusion."""
    conclusion = "it has drifted" if row.drifted else "no drift shown"
    return (
        f"acceptance length {row.al_now:.2f} on {row.num_prompts_now} new prompts, {row.al_then:.2f} on "
        f"{row.num_prompts_then} of its release, {row.change:+.2f} [{row.lo:+.2f}, {row.hi:+.2f}]: {conclusion}"
    )


def _served_depth(policy: DepthPolicy | None, draft_key: str) -> int:
    """The depth that a policy chose for a drafter over all workloads; 0 without one."""
    choices = read_policy(policy.path).choices if policy is not None else []
    return next((c.depth_k for c in choices if (c.draft_key, c.workload) == (draft_key, ALL)), 0)


def _drift_row(
    then: Sequence[AcceptanceMap],
    now: Sequence[AcceptanceMap],
    workloads: tuple[str, str],
    depth: int,
    num_draws: int,
    seed: int,
    session_id: str,
) -> Drift:
    al_then = _estimate(then, depth, num_draws, [seed, 6])
    al_now = _estimate(now, depth, num_draws, [seed, 7])
    lo, hi = al_now.minus(al_then).interval()
    (then_lo, then_hi), (now_lo, now_hi) = al_then.interval(), al_now.interval()
    return Drift(
        session_id=session_id,
        target_key=now[0].target_key,
        draft_key=now[0].draft_key,
        method=now[0].method,
        workload=workloads[0],
        workload_then=workloads[1],
        depth_k=depth,
        num_prompts_then=len(then),
        num_prompts_now=len(now),
        al_then=al_then.value,
        then_lo=then_lo,
        then_hi=then_hi,
        al_now=al_now.value,
        now_lo=now_lo,
        now_hi=now_hi,
        change=al_now.value - al_then.value,
        lo=lo,
        hi=hi,
        drifted=al_then.is_decisive and al_now.is_decisive and (lo > 0.0 or hi < 0.0),
    )


def _few_prompts_of_drift(row: Drift) -> list[QualityFlag]:
    """A flag where a side has few prompts: the interval is wide, and a relevant change may go unseen."""
    fewest = min(row.num_prompts_then, row.num_prompts_now)
    if fewest >= PROMPTS.warn:
        return []
    detail = f"drift over fewer than {PROMPTS.warn} prompts on one side: its interval is wide"
    return [_few_prompts_flag(row, fewest, detail)]


def _drift_flag(row: Drift) -> QualityFlag:
    against = "the same workload" if row.workload_then == row.workload else "everything"
    detail = (
        f"workload {row.workload}: acceptance length {row.al_now:.2f} on new traffic, {row.al_then:.2f} on {against} "
        f"at release (change {row.lo:+.2f} to {row.hi:+.2f})"
    )
    return QualityFlag(row.session_id, row.draft_key, row.method, "traffic_drift", "warning", row.change, detail)


def measure_languages(
    acceptance: list[Measurements], mixes: list[Prompts], *, depth_k: int, num_draws: int, ctx: Context
) -> Measurements:
    """The step `speedup.measure_languages`; its settings are explained in components/speedup/steps.py."""
    if len(acceptance) != len(mixes):
        raise UserError(
            f"acceptance, mixes: {len(acceptance)} drafters and {len(mixes)} mixes; wire one mix for each drafter"
        )
    drafters = [_read_drafter(maps, mix) for maps, mix in zip(acceptance, mixes, strict=True)]
    for what in ("target_key", "dtype"):
        if len(values := {getattr(drafter, what) for drafter in drafters}) > 1:
            named = ", ".join(sorted(value[:12] for value in values))
            raise UserError(f"acceptance: maps of {len(values)} {what}s ({named}); measure all drafters on one")
    shared = set.intersection(*(set(drafter.maps) for drafter in drafters))
    if not shared:
        raise UserError("acceptance: these drafters share no prompt; measure all of them on one set of prompts")
    depth = min(depth_k or 64, *(m.k_max for drafter in drafters for m in drafter.maps.values()))
    if depth < 1:
        raise UserError("acceptance: mapped at depth 0 alone; measure at depth 1 or deeper")
    baseline = drafters[0]
    languages = Counter(baseline.language(prompt) for prompt in shared)
    rows = []
    for language in [ALL, *sorted(languages)]:
        prompts = sorted(prompt for prompt in shared if language in (ALL, baseline.language(prompt)))
        estimates = [
            _estimate([drafter.maps[prompt] for prompt in prompts], depth, num_draws, [ctx.seed, 8])
            for drafter in drafters
        ]
        rows += [
            _language_row(drafter, baseline, (estimate, estimates[0]), (language, prompts), depth, ctx.key[:16])
            for drafter, estimate in zip(drafters, estimates, strict=True)
        ]
    write_rows(ctx.out, [*rows, *_few_prompts_by_language(rows)])
    lowered = [row for row in rows if row.verdict == "lower" and row.language != ALL]
    for row in lowered:
        ctx.note(language_line(row))
    return Measurements.of_step(
        ctx,
        {
            "model": str(acceptance[0].info.get("model", "")),
            "method": baseline.method,
            "depth_k": depth,
            "num_prompts": len(shared),
            "prompts_by_language": dict(languages.most_common()),
            "al_by_language": [
                {"trained_on": row.trained_on, "language": row.language, "al": row.al, "change": row.change}
                for row in rows
            ],
            "lower": [language_line(row) for row in lowered],
        },
    )


def language_line(row: AcceptanceByLanguage) -> str:
    """One line: a drafter compared with the baseline."""
    conclusion = {"lower": "lower", "higher": "higher"}.get(row.verdict, "no difference shown")
    assert row.change is not None and row.change_lo is not None and row.change_hi is not None
    return (
        f"trained on {' + '.join(row.trained_on)}, acceptance length on {row.language} is {row.al:.2f}, "
        f"{row.change:+.2f} [{row.change_lo:+.2f}, {row.change_hi:+.2f}] against the first mix: {conclusion}"
    )


@dataclass(frozen=True)
class _Drafter:
    """One drafter: its chain maps by prompt, and the number of training prompts of its mix by language."""

    key: str
    method: str
    target_key: str
    dtype: str
    maps: dict[str, AcceptanceMap]
    trained_on: Counter[str]

    def language(self, prompt_id: str) -> str:
        return self.maps[prompt_id].language or UNKNOWN


def _read_drafter(measured: Measurements, mix: Prompts) -> _Drafter:
    maps = _chain_maps(measured, "acceptance")
    if len({m.draft_key for m in maps}) > 1:
        raise UserError(f"acceptance ({measured.key[:12]}): maps of several drafters; wire one for each")
    first = maps[0]
    by_prompt = {m.prompt_id: m for m in maps}
    return _Drafter(first.draft_key, first.method, first.target_key, first.dtype, by_prompt, _training_languages(mix))


def _training_languages(mix: Prompts) -> Counter[str]:
    """Number of training prompts by language."""
    file = mix.path / "prompts.jsonl"
    if not file.is_file():
        raise UserError(f"mixes ({mix.key[:12]}): no prompts.jsonl; wire the step that made the training prompts")
    counts: Counter[str] = Counter()
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["split"] == "train":
                counts[row.get("language") or UNKNOWN] += 1
    return counts


def _language_row(
    drafter: _Drafter,
    baseline: _Drafter,
    estimates: tuple[Estimate, Estimate],
    subset: tuple[str, Sequence[str]],
    depth: int,
    session_id: str,
) -> AcceptanceByLanguage:
    (estimate, baseline_estimate), (language, prompts) = estimates, subset
    maps = [drafter.maps[prompt] for prompt in prompts]
    guessable = [(m.num_guessable, m.num_tokens - 1) for m in maps if m.num_guessable is not None]
    lo, hi = estimate.interval()
    change = change_lo = change_hi = None
    verdict = "baseline"
    if drafter is not baseline:
        difference = estimate.minus_paired(baseline_estimate)
        change, (change_lo, change_hi) = difference.value, difference.interval()
        verdict = _verdict(difference)
    trained = drafter.trained_on
    return AcceptanceByLanguage(
        session_id=session_id,
        target_key=drafter.target_key,
        draft_key=drafter.key,
        method=drafter.method,
        language=language,
        depth_k=depth,
        num_prompts=len(prompts),
        trained_on=[name for name, _ in trained.most_common()],
        num_trained_on=trained.total() if language == ALL else trained[language],
        al=estimate.value,
        al_lo=lo,
        al_hi=hi,
        coverage=sum(n for n, _ in guessable) / sum(total for _, total in guessable) if guessable else None,
        baseline_key=baseline.key,
        change=change,
        change_lo=change_lo,
        change_hi=change_hi,
        verdict=verdict,
    )


def _few_prompts_by_language(rows: Sequence[AcceptanceByLanguage]) -> list[QualityFlag]:
    """Flags of languages with few prompts: intervals are wide, and a relevant difference may go unseen."""
    few = [row for row in rows if row.verdict == "baseline" and row.num_prompts < PROMPTS.warn]
    detail = f"fewer than {PROMPTS.warn} prompts; its intervals are wide"
    return [_few_prompts_flag(row, row.num_prompts, f"language {row.language}: {detail}") for row in few]


Pairing = tuple[str, str, str]
"""(what of an AcceptanceChange, the state before, the state after)."""
BY_TUNING: Pairing = ("tuning", "as it came", "tuned")
SAMPLED: Mapping[str, str] = {"as it came": "sampled", "tuned": "sampled_tuned"}
"""State -> `what` of its sampled answers beside its greedy ones."""
WITH_OLDER: tuple[Pairing, ...] = (
    ("target", "older target", "as it came"),
    BY_TUNING,
    ("both", "older target", "tuned"),
)


def measure_tuning(
    acceptance: Measurements,
    tuned: Measurements,
    older: Measurements | None,
    policy: DepthPolicy | None,
    *,
    depth_k: int,
    num_draws: int,
    ctx: Context,
) -> Measurements:
    """The step `speedup.measure_tuning`; its settings are explained in components/speedup/steps.py."""
    sources = {"as it came": ("acceptance", acceptance), "tuned": ("tuned", tuned)}
    if older is not None:
        sources["older target"] = ("older", older)
    states = {state: _one_drafter(source, name) for state, (name, source) in sources.items()}
    came, after = states["as it came"], states["tuned"]
    if came[0].target_key != after[0].target_key:
        raise UserError("acceptance, tuned: measured on two targets; what the older one gave goes to `older`")
    by_prompt = {state: {m.prompt_id: m for m in maps} for state, maps in states.items()}
    shared = set.intersection(*(set(maps) for maps in by_prompt.values()))
    if not shared:
        raise UserError("acceptance: these measurements share no prompt; measure all of them on one set of prompts")
    deepest = min(m.k_max for maps in states.values() for m in maps)
    depth = min(depth_k or _served_depth(policy, after[0].draft_key) or deepest, deepest)
    if depth < 1:
        raise UserError("acceptance: mapped at depth 0 alone; measure at depth 1 or deeper")
    rows = []
    for workload in [ALL, *sorted({by_prompt["tuned"][p].workload for p in shared} - {ALL})]:
        prompts = sorted(p for p in shared if workload in (ALL, by_prompt["tuned"][p].workload))
        chosen = {state: [maps[p] for p in prompts] for state, maps in by_prompt.items()}
        lengths = {state: _estimate(maps, depth, num_draws, [ctx.seed, 10]) for state, maps in chosen.items()}
        rows += [
            _change_row(pairing, chosen, lengths, workload, depth, ctx.key[:16])
            for pairing in (WITH_OLDER if older is not None else (BY_TUNING,))
        ]
        for state, what in SAMPLED.items():
            runs = sampled_runs(sources[state][1], prompts)
            if runs and (at := runs[0].depth_k) <= chosen[state][0].k_max:
                both = {"greedy": _estimate(chosen[state], at, num_draws, [ctx.seed, 10])}
                both["sampled"] = _sampled_estimate(runs, num_draws, [ctx.seed, 10])
                pair = dict.fromkeys(both, chosen[state])
                rows.append(_change_row((what, "greedy", "sampled"), pair, both, workload, at, ctx.key[:16]))
    few = f"before and after over fewer than {PROMPTS.warn} prompts: its intervals are wide"
    warned = [row for row in rows if (row.what, row.workload) == ("tuning", ALL) and row.num_prompts < PROMPTS.warn]
    write_rows(ctx.out, [*rows, *(_few_prompts_flag(row, row.num_prompts, few) for row in warned)])
    lines = {row.what: change_line(row) for row in rows if row.workload == ALL}
    for what, line in lines.items():
        ctx.note(f"{NAMES_OF_CHANGES[what]}: {line}")
    facts = {row.what: {"change": row.change, "lo": row.lo, "hi": row.hi} for row in rows if row.workload == ALL}
    told = {"method": after[0].method, "draft_key": after[0].draft_key, "depth_k": depth, "num_prompts": len(shared)}
    return Measurements.of_step(ctx, {**told, "changes": facts, "change_lines": lines})


def change_line(row: AcceptanceChange) -> str:
    """One line: what changed acceptance length, by how much, with its interval, and the conclusion."""
    where = "" if row.workload == ALL else f" on {row.workload}"
    moved = f"{row.change:+.2f} [{row.lo:+.2f}, {row.hi:+.2f}] tokens a round{where}"
    lengths = f"{row.al_before:.2f} before, {row.al_after:.2f} after"
    lengths += f", at depth {row.depth_k} over {row.num_prompts} prompts"
    shown = {
        "tuning": {"higher": "tuning made it better", "lower": "tuning made it worse"},
        "target": {"higher": "it gained by the changed target", "lower": "lost with the changed target"},
        "both": {"higher": "it is better than it was on the older target", "lower": "still missing after tuning"},
    }.get(row.what, {"higher": "it keeps more of sampled answers", "lower": "it keeps less of sampled answers"})
    conclusion = shown.get(row.verdict, "no difference shown")
    back = ""
    if row.came_back is not None:
        back = f"; {row.came_back:.0%} [{row.came_back_lo:.0%}, {row.came_back_hi:.0%}] of what was lost came back"
    return f"{moved} ({lengths}): {conclusion}{back}"


def sampled_runs(source: Measurements, prompts: Sequence[str]) -> list[SampledRun]:
    """The sampled runs of these prompts, in their order; [] where one of them has none."""
    by_prompt = {run.prompt_id: run for run in read_rows(source.path, SampledRun)}
    return [by_prompt[prompt] for prompt in prompts] if by_prompt.keys() >= set(prompts) else []


def _sampled_estimate(runs: Sequence[SampledRun], num_draws: int, seed: Sequence[int]) -> Estimate:
    """Tokens a round; runs are sorted by prompt, as the maps of `_estimate`."""
    weights = draw_weights(len(runs), num_draws, np.random.default_rng(seed))
    tokens, rounds = (np.array([float(getattr(run, name)) for run in runs]) for name in ("num_tokens", "num_rounds"))
    return pooled_ratio(weights, tokens, rounds)


def _one_drafter(source: Measurements, name: str) -> list[AcceptanceMap]:
    """The chain maps of one drafter; raises UserError where they are of several."""
    maps = _chain_maps(source, name)
    if len({m.draft_key for m in maps}) > 1:
        raise UserError(f"{name} ({source.key[:12]}): maps of several drafters; wire the one that was tuned")
    return maps


def _change_row(
    pairing: Pairing,
    maps: Mapping[str, Sequence[AcceptanceMap]],
    lengths: Mapping[str, Estimate],
    workload: str,
    depth: int,
    session_id: str,
) -> AcceptanceChange:
    what, before, after = pairing
    change = lengths[after].minus_paired(lengths[before])
    back = _came_back(lengths) if what == BY_TUNING[0] else None
    (before_lo, before_hi), (after_lo, after_hi) = lengths[before].interval(), lengths[after].interval()
    (lo, hi), (back_lo, back_hi) = change.interval(), (None, None) if back is None else back.interval()
    return AcceptanceChange(
        session_id=session_id,
        what=what,
        target_key=maps[after][0].target_key,
        before_target_key=maps[before][0].target_key,
        draft_key=maps[after][0].draft_key,
        before_draft_key=maps[before][0].draft_key,
        method=maps[after][0].method,
        workload=workload,
        depth_k=depth,
        num_prompts=len(maps[after]),
        al_before=lengths[before].value,
        before_lo=before_lo,
        before_hi=before_hi,
        al_after=lengths[after].value,
        after_lo=after_lo,
        after_hi=after_hi,
        change=change.value,
        lo=lo,
        hi=hi,
        verdict=_verdict(change),
        came_back=None if back is None else back.value,
        came_back_lo=back_lo,
        came_back_hi=back_hi,
    )


def _came_back(lengths: Mapping[str, Estimate]) -> Estimate | None:
    """Gain by tuning over loss by the changed target; None where no loss was shown, or some draw has none."""
    if "older target" not in lengths:
        return None
    lost = lengths["older target"].minus_paired(lengths["as it came"])
    if _verdict(lost) != "higher" or not bool((lost.draws > 0.0).all()):
        return None
    return lengths["tuned"].minus_paired(lengths["as it came"]).over(lost)


class Rounded(NamedTuple):
    """Storage of a rounded drafter. weights: "int4, groups of 32". original_key: draft_key before rounding."""

    weights: str
    original_key: str


def weights_costs(
    maps: Mapping[str, Sequence[AcceptanceMap]], depths: Mapping[str, int], num_draws: int, seed: int
) -> list[WeightsCost]:
    """The costs of each rounded drafter whose original was measured too, in the order of their keys.

    maps: draft_key -> its chain maps. depths: draft_key -> the depth at which it is to serve; without one, or at 0, the
    deepest common depth is compared.
    """
    costs = []
    for key in sorted(maps):
        rounded = rounded_of(maps[key])
        if rounded is None or not maps.get(rounded.original_key):
            continue
        now, before = ({m.prompt_id: m for m in maps[by_prompt]} for by_prompt in (key, rounded.original_key))
        shared = sorted(now.keys() & before.keys())
        deepest = min((m.k_max for by_prompt in (now, before) for m in by_prompt.values()), default=0)
        if not shared or deepest < 1:
            continue
        depth = min(depths.get(key) or deepest, deepest)
        al, al_before = (
            _estimate([by_prompt[p] for p in shared], depth, num_draws, [seed, 9]) for by_prompt in (now, before)
        )
        change = al.minus_paired(al_before)
        (al_lo, al_hi), (lo, hi) = al.interval(), change.interval()
        costs.append(
            WeightsCost(
                draft_key=key,
                quantised_from=rounded.original_key,
                method=maps[key][0].method,
                weights=rounded.weights,
                depth_k=depth,
                num_prompts=len(shared),
                al=al.value,
                al_lo=al_lo,
                al_hi=al_hi,
                al_before=al_before.value,
                change=change.value,
                change_lo=lo,
                change_hi=hi,
                verdict=_verdict(change),
            )
        )
    return costs


def rounded_of(maps: Sequence[AcceptanceMap]) -> Rounded | None:
    """The storage of the drafter of these maps; None for a drafter that was not rounded."""
    return Rounded(maps[0].weights, maps[0].quantised_from) if maps and maps[0].weights else None


def _chain_maps(source: Measurements, name: str) -> list[AcceptanceMap]:
    """Usable maps of chains; a tree keeps more of the same draft tokens, so its maps do not describe what is served."""
    rows = [r for r in read_rows(source.path, AcceptanceMap) if r.tree_budget is None and r.num_tokens >= 2]
    if not rows:
        raise UserError(f"{name} ({source.key[:12]}): no usable acceptance maps; wire bench.measure_acceptance")
    return rows


def _estimate(maps: Sequence[AcceptanceMap], depth: int, num_draws: int, seed: Sequence[int]) -> Estimate:
    """`al` at a depth; prompts are sorted by name, so that the same prompts get the same draws."""
    weights = draw_weights(len(maps), num_draws, np.random.default_rng(seed))
    return acceptance_length(sorted(maps, key=lambda m: m.prompt_id), depth, weights)


def _verdict(change: Estimate) -> str:
    """lower | higher | undecided."""
    lo, hi = change.interval()
    if not change.is_decisive or lo <= 0.0 <= hi:
        return "undecided"
    return "lower" if hi < 0.0 else "higher"


def _few_prompts_flag(
    row: Drift | AcceptanceByLanguage | AcceptanceChange, num_prompts: int, detail: str
) -> QualityFlag:
    return QualityFlag(row.session_id, row.draft_key, row.method, "few_prompts", "warning", float(num_prompts), detail)
