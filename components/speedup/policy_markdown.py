"""The depth policy as it is written: `policy.json`, its rows, and `policy.md` for people, the choice first.

`policy_summary` has the few facts that an artifact's info and the end of a run show. CPU engines are usually set to
three or seven drafts; tables mark these depths, so that a reader sees the speed of the usual setting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from components.outside_json import JsonObject
from components.policy import Mixture, Policy, RankedDrafter, StopChoice, judged_choice, noise_of
from components.rows import ALL, DepthChoice, DepthEval, QualityFlag, write_rows
from components.tables import Table
from components.text import in_markdown

USUAL = (3, 7)


def write_policy(directory: Path, policy: Policy) -> None:
    """Write policy.json, policy.md and the rows of its evaluations, choices, comparisons and flags."""
    text = json.dumps(asdict(policy), indent=1, allow_nan=False)
    (directory / "policy.json").write_text(text + "\n", encoding="utf-8")
    (directory / "policy.md").write_text(policy_text(policy), encoding="utf-8")
    rows = [*policy.evals, *policy.trees, *policy.choices, *policy.contexts, *policy.comparisons, *policy.flags]
    write_rows(directory, [*rows, *policy.acceptance_by_context])


def policy_summary(policy: Policy) -> JsonObject:
    """The facts for an artifact's info, a run's metrics and a summary: of the drafter that its verdict is about."""
    facts: JsonObject = {
        "verdict": policy.verdict,
        "reasons": policy.reasons,
        "num_flags": len(policy.flags),
        "gate_passed": policy.gate.passed if policy.gate else None,
        "gate_failed": [check.refusal() for check in policy.gate.checks if not check.passed] if policy.gate else [],
        "noise": noise_of(policy),
        "depth_k": 0,
        "target_key": policy.target_key,
        "model": policy.target_model,
    }
    best = judged_choice(policy)
    if best is None:
        return facts
    facts |= {
        "method": best.method,
        "draft_key": best.draft_key,
        "depth_k": best.depth_k,
        "speedup_pred": best.speedup_pred,
        "speedup_meas": best.speedup_meas,
        "meas_lo": best.meas_lo,
        "meas_hi": best.meas_hi,
        "pred_error": best.pred_error,
    }
    for row in policy.evals:
        best_key = (best.draft_key, ALL, best.depth_k, best.batch_size)
        if (row.draft_key, row.workload, row.depth_k, row.batch_size) == best_key:
            facts |= {"al": row.al, "al_lo": row.al_lo, "al_hi": row.al_hi}
            facts |= {"al_meas": row.al_meas, "al_replayed": row.al_replayed}
    facts["num_prompts"] = len({c.prompt_id for c in policy.prompts if c.draft_key == best.draft_key})
    for pair in policy.comparisons:
        if (pair.quantity, pair.workload) == ("decode_speed", ALL):
            facts |= {"vs_champion": pair.ratio, "vs_champion_lo": pair.lo, "vs_champion_hi": pair.hi}
            facts |= {"champion_key": pair.champion_key, "vs_champion_verdict": pair.verdict}
    drafter_arms = [a for a in policy.arms if a.draft_key == best.draft_key and a.workload == ALL]
    if drafter_arms:
        # Outputs must be identical in all arms of the drafter; speed is that of the arm that is served.
        served = (
            a for a in drafter_arms if (a.depth_k, a.batch_size, a.tree_budget) == (best.depth_k, best.batch_size, None)
        )
        arm = next(served, None)
        facts["speedup_pred_same_prompts"] = arm.speedup_pred if arm is not None else None
        facts["num_prompts_timed"] = arm.num_prompts if arm is not None else None
        facts["identical"] = sum(a.divergences for a in drafter_arms) == 0 and sum(a.checked for a in drafter_arms) > 0
        facts["num_ties"] = sum(a.ties for a in drafter_arms)
        facts["num_checked"] = sum(a.checked for a in drafter_arms)
    return facts


def _markdown(table: Table) -> str:
    """The table in GitHub's Markdown, with numbers as they are."""
    lines = ["| " + " | ".join(table.header) + " |", "|" + "---|" * len(table.header)]
    return "\n".join([*lines, *("| " + " | ".join(map(_escape, row)) + " |" for row in table.rows)])


def _escape(cell: str) -> str:
    """The cell with escapes, unless it is a number or an interval; other text may come from outside."""
    return cell if set(cell) <= set("0123456789.,x[] %+-e") else in_markdown(cell)


def policy_text(policy: Policy) -> str:
    """The text of policy.md."""
    parts = [f"# Depth policy: {policy.verdict.replace('_', ' ')}"]
    parts += ["\n".join(f"- {in_markdown(reason)}" for reason in policy.reasons), f"Rule: {in_markdown(policy.rule)}."]
    parts += ["## Choices", _markdown(choice_cells([*policy.choices, *policy.contexts]))]
    parts += [in_markdown(mixture_line(mixture)) for mixture in policy.mixtures]
    for choice in policy.choices:
        if choice.workload == ALL:
            choice_evals = [e for e in policy.evals if _is_of_choice(e, choice)]
            parts.append(f"## {in_markdown(choice.method)}, batch {choice.batch_size}: every depth")
            parts.append(_markdown(depth_cells(choice_evals, choice.depth_k)))
    if len(policy.ranking) > 1:
        parts += ["## Drafters against each other", _markdown(ranking_cells(policy.ranking))]
    if policy.stops:
        parts += ["## Chains that end by confidence", _markdown(stop_cells(policy.stops))]
    if policy.flags:
        parts += ["## Reasons to doubt", _markdown(flag_cells(policy.flags))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _is_of_choice(row: DepthEval, choice: DepthChoice) -> bool:
    names = ("draft_key", "workload", "batch_size")
    return all(getattr(row, name) == getattr(choice, name) for name in names)


def stop_cells(stops: Iterable[StopChoice]) -> Table:
    """A table with one line for each stop rule: against the best fixed depth, and a single threshold beside it."""
    header = [
        "drafter", "batch", "prompts", "fixed depth", "its speedup", "with the rule", "gain", "measured gain",
        "reading", "of the oracle", "tokens a round", "drafted", "calibration error", "p_min (depth)", "its gain",
        "measured", "chosen",
    ]  # fmt: skip
    rows = [
        [
            s.method,
            str(s.batch_size),
            str(s.num_prompts),
            str(s.fixed_depth),
            f"{s.speedup_fixed:.2f}x",
            f"{s.speedup:.2f}x",
            _gain_cell(s.gain, s.gain_lo, s.gain_hi),
            _gain_cell(s.gain_meas, s.meas_lo, s.meas_hi),
            "-" if s.reading_share is None else f"{s.reading_share:.1%}",
            f"{s.share_of_oracle:.2f}",
            f"{s.al:.2f}",
            f"{s.drafted:.2f}",
            f"{s.calibration_error:.3f}",
            f"{s.p_min:.3f} ({s.p_min_depth})",
            _gain_cell(s.p_min_gain, s.p_min_gain_lo, s.p_min_gain_hi),
            "-"
            if s.p_min_gain_meas is None
            else f"{s.p_min_gain_meas:.3f}x [{s.p_min_meas_lo:.3f}, {s.p_min_meas_hi:.3f}]",
            "stop by confidence" if s.chosen else "fixed depth",
        ]
        for s in stops
    ]
    return Table(header, rows)


def _gain_cell(gain: float | None, low: float | None, high: float | None) -> str:
    return "-" if gain is None else f"{gain:.3f}x [{low:.3f}, {high:.3f}]"


def choice_cells(choices: Iterable[DepthChoice]) -> Table:
    """A table with one line for each choice."""
    header = ["drafter", "workload", "batch", "context", "depth", "predicted", "measured", "P(S > 1)"]
    rows = [
        [
            c.method,
            c.workload,
            str(c.batch_size),
            "all" if c.kv_len is None else str(c.kv_len),
            str(c.depth_k),
            times(c.speedup_pred, c.pred_lo, c.pred_hi),
            times(c.speedup_meas, c.meas_lo, c.meas_hi),
            "" if c.p_beats_no_spec is None else f"{c.p_beats_no_spec:.3f}",
            "" if c.loss is None else f"{c.loss:.1%}",
            c.verdict.replace("_", " "),
        ]
        for c in choices
    ]
    return Table([*header, "lost at one depth", "verdict"], rows)


def mixture_line(mixture: Mixture) -> str:
    """One line about one depth for several workloads, with a caveat where the mixture is stated."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in mixture.shares.items())
    apart = ", ".join(f"{name} {depth}" for name, depth in mixture.depths_apart.items())
    whose = "stated" if mixture.stated else "of what was measured"
    predicted = times(mixture.speedup_pred, mixture.pred_lo, mixture.pred_hi)
    caveat = " It is a prediction: engines are told the depth over all measured prompts." if mixture.stated else ""
    return (
        f"{mixture.method}, batch {mixture.batch_size}: one depth for the mixture {whose} ({shares}) is "
        f"{mixture.depth_k}, {predicted}. Each workload at its own ({apart}) would give {mixture.speedup_apart:.2f}x: "
        f"one depth loses {mixture.loss:.1%}.{caveat}"
    )


def depth_cells(evals: Sequence[DepthEval], chosen_depth: int) -> Table:
    """A table of every depth of one drafter. Times in ms."""
    header = ["depth", "AL", "T_verify", "T_draft", "cost", "tokens gained", "time added", "predicted", "measured"]
    rows = [
        [
            f"{e.depth_k}{_depth_remark(e.depth_k, chosen_depth)}",
            f"{e.al:.2f}{bounds(e.al_lo, e.al_hi)}",
            f"{e.t_verify_ms:.3g}",
            f"{e.t_draft_ms:.3g}",
            f"{e.cost_ratio:.2f}",
            "" if e.marginal_gain is None else f"{e.marginal_gain:+.1%}",
            "" if e.marginal_cost is None else f"{e.marginal_cost:+.1%}",
            times(e.speedup_pred, e.pred_lo, e.pred_hi),
            times(e.speedup_meas, e.meas_lo, e.meas_hi),
            f"{e.p_best:.1%}",
            f"{e.regret:.1%}",
        ]
        for e in sorted(evals, key=lambda e: e.depth_k)
    ]
    return Table([*header, "P(best)", "regret"], rows)


def _depth_remark(depth: int, chosen_depth: int) -> str:
    words = [word for word, holds in (("chosen", depth == chosen_depth), ("usual on CPUs", depth in USUAL)) if holds]
    return f" ({', '.join(words)})" if words else ""


def ranking_cells(ranking: Sequence[RankedDrafter]) -> Table:
    """A table of every drafter in every setting at its chosen depth."""
    header = ["drafter", "key", "shape", "draft vocabulary", "depth", "predicted", "P(best)", "regret"]
    rows = [
        [
            c.method + (" (chosen)" if c.chosen else ""),
            c.draft_key[:12] if len(c.draft_key) == 64 else c.draft_key,
            "chain" if c.tree_budget is None else f"tree of {c.tree_budget}",
            "" if c.draft_vocab is None else str(c.draft_vocab),
            str(c.depth_k),
            times(c.speedup_pred, c.pred_lo, c.pred_hi),
            f"{c.p_best:.1%}",
            f"{c.regret:.1%}",
        ]
        for c in ranking
    ]
    return Table(header, rows)


def flag_cells(flags: Sequence[QualityFlag]) -> Table:
    """A table of quality flags."""
    rows = [[f.severity, f.code, f.method, f"{f.value:.4g}", f.detail] for f in flags]
    return Table(["severity", "flag", "drafter", "value", "what it means"], rows)


def times(value: float | None, lo: float | None, hi: float | None) -> str:
    """1.54x [1.50, 1.58]; "" where not measured."""
    return "" if value is None else f"{value:.2f}x{bounds(lo, hi)}"


def bounds(lo: float | None, hi: float | None) -> str:
    """[1.50, 1.58]; "" where no interval is known, or nothing varies."""
    return "" if lo is None or hi is None or lo == hi else f" [{lo:.2f}, {hi:.2f}]"
