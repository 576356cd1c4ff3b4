"""Step `speedup.measure_languages`: acceptance length by language, and what a training mix without a language loses.

One drafter for each training mix is measured on the same prompts. Acceptance length is pooled over the prompts of a
language at one depth. The first drafter is the baseline; the others are compared with it prompt by prompt: each draw of
prompts serves both, so what makes a prompt hard cancels. Rows also hold the share of answer tokens in a drafter's
vocabulary: other tokens cannot be kept, however long the drafter is trained.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from components.contract import Context, Measurements, Prompts, UserError
from components.rows import ALL, AcceptanceByLanguage, AcceptanceMap, QualityFlag, read_rows, write_rows
from components.speedup.bootstrap import PROMPTS, Estimate, draw_weights
from components.speedup.prediction.flags import QualityIssue
from components.speedup.prediction.replay import acceptance_length

UNKNOWN = "unknown"


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
        estimates = [_estimate_acceptance(drafter, prompts, depth, num_draws, ctx.seed) for drafter in drafters]
        rows += [
            _language_row(drafter, baseline, (estimate, estimates[0]), (language, prompts), depth, ctx.key[:16])
            for drafter, estimate in zip(drafters, estimates, strict=True)
        ]
    write_rows(ctx.out, [*rows, *_few_prompts_flags(rows)])
    lowered = [row for row in rows if row.verdict == "lower" and row.language != ALL]
    for row in lowered:
        ctx.note(summary_line(row))
    return Measurements.of_step(
        ctx,
        {
            "method": baseline.method,
            "depth_k": depth,
            "num_prompts": len(shared),
            "prompts_by_language": dict(languages.most_common()),
            "al_by_language": [
                {"trained_on": row.trained_on, "language": row.language, "al": row.al, "change": row.change}
                for row in rows
            ],
            "lower": [summary_line(row) for row in lowered],
        },
    )


def summary_line(row: AcceptanceByLanguage) -> str:
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
    maps = [m for m in read_rows(measured.path, AcceptanceMap) if m.tree_budget is None and m.num_tokens >= 2]
    if not maps:
        raise UserError(f"acceptance ({measured.key[:12]}): no usable acceptance maps; wire bench.measure_acceptance")
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


def _estimate_acceptance(drafter: _Drafter, prompts: Sequence[str], depth: int, num_draws: int, seed: int) -> Estimate:
    """`al` at a depth; every drafter on the same prompts gets the same draws."""
    weights = draw_weights(len(prompts), num_draws, np.random.default_rng([seed, 8]))
    return acceptance_length([drafter.maps[prompt] for prompt in prompts], depth, weights)


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
        verdict = "undecided"
        if difference.is_decisive:
            verdict = "lower" if change_hi < 0.0 else "higher" if change_lo > 0.0 else verdict
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


def _few_prompts_flags(rows: Sequence[AcceptanceByLanguage]) -> list[QualityFlag]:
    """Flags of languages with few prompts: intervals are wide, and a relevant difference may go unseen."""
    few = [row for row in rows if row.verdict == "baseline" and row.num_prompts < PROMPTS.warn]
    detail = f"fewer than {PROMPTS.warn} prompts; its intervals are wide"
    issues = [
        QualityIssue("few_prompts", "warning", row.num_prompts, f"language {row.language}: {detail}") for row in few
    ]
    return [issue.to_flag(row.session_id, row.draft_key, row.method) for issue, row in zip(issues, few, strict=True)]
