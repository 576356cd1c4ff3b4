"""The tables of reports: depths, choices, arms, the gate, comparisons, drift, tuning, flags, fewer bits and engines.

Each takes rows or parts of a policy and returns a `Table` of text, which Markdown, HTML and CSV show alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from components.policy import Gate, MeasuredArm, RankedDrafter, StopChoice, WeightsCost, Winner
from components.rows import (
    ALL,
    AcceptanceByContext,
    AcceptanceChange,
    DepthChoice,
    DepthEval,
    Drift,
    EngineComparison,
    PairedComparison,
    QualityFlag,
    grouped,
)
from components.tables import Table, format_estimate, format_interval, format_percent, format_ratio

_METHOD_TITLES: Final = {
    "eagle1": "EAGLE",
    "eagle3": "EAGLE-3",
    "mtp": "MTP",
    "ngram": "prompt lookup",
    "suffix": "suffix decoding",
}


def depth_table(evals: Sequence[DepthEval], chosen_depth: int | None = None) -> Table:
    """Every depth of one drafter on one workload. Times in ms, 95 % intervals in brackets."""
    evals = sorted(evals, key=lambda e: e.depth_k)
    return Table.of(
        evals,
        {
            "depth": lambda e: str(e.depth_k),
            "AL": acceptance_length,
            "T_target": lambda e: f"{e.t_target_ms:.2f}",
            "T_verify": lambda e: f"{e.t_verify_ms:.2f}",
            "T_draft": lambda e: f"{e.t_draft_ms:.2f}",
            "cost": lambda e: f"{e.cost_ratio:.2f}",
            "gain": lambda e: format_percent(e.marginal_gain),
            "cost added": lambda e: format_percent(e.marginal_cost),
            "predicted": predicted_speedup,
            "measured": measured_speedup,
            "P(best)": lambda e: format_percent(e.p_best),
            "regret": lambda e: format_percent(e.regret),
        },
        next((i for i, e in enumerate(evals) if e.depth_k == chosen_depth), None),
    )


def acceptance_length(row: DepthEval) -> str:
    """Tokens a round, bonus included, with the 95 % interval; at depth 0, where it is 1, without one."""
    return f"{row.al:.2f}{format_interval(row.al_lo, row.al_hi) if row.depth_k else ''}"


def predicted_speedup(row: DepthEval | DepthChoice) -> str:
    """The predicted speedup with its 95 % interval; at depth 0, which is the unit, without one."""
    return f"{format_ratio(row.speedup_pred)}{format_interval(row.pred_lo, row.pred_hi) if row.depth_k else ''}"


def measured_speedup(row: DepthEval | DepthChoice) -> str:
    """The measured speedup with its 95 % interval; "-" where it was not measured."""
    return format_estimate(row.speedup_meas, row.meas_lo, row.meas_hi)


def evals_by_depth(choice: DepthChoice, evals: Iterable[DepthEval]) -> list[DepthEval]:
    """The rows of a choice's drafter at its batch size over all prompts, ordered by depth."""
    key = (choice.draft_key, ALL, choice.batch_size)
    return sorted((e for e in evals if (e.draft_key, e.workload, e.batch_size) == key), key=lambda e: e.depth_k)


def method_title(method: str) -> str:
    """The usual spelling of a method's name."""
    return _METHOD_TITLES.get(method, method)


def drafter_name(method: str, draft_key: str, roles: Mapping[str, str]) -> str:
    """A drafter's name in tables: its method, and its role where a challenger is compared with a champion."""
    return f"{method}, {roles[draft_key]}" if draft_key in roles else method


def distinct_names(drafters: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(method, draft_key) -> a distinct name: the method, with the first 8 digits of the key where methods repeat."""
    pairs = set(drafters)
    several = Counter(method for method, _ in pairs)
    return {(method, key): f"{method} {key[:8]}" if several[method] > 1 else method for method, key in pairs}


def choice_table(
    choices: Iterable[DepthChoice], winner: Winner | None = None, roles: Mapping[str, str] | None = None
) -> Table:
    """One line for each drafter and workload. roles: draft_key -> challenger | champion.

    The columns for batch size, context length and the loss of a common depth appear only where their values differ.
    """
    choices = list(choices)
    batches, contexts = len({c.batch_size for c in choices}) > 1, any(c.kv_len is not None for c in choices)
    losses = any(c.loss is not None for c in choices)
    wins = [i for i, c in enumerate(choices) if winner and c.draft_key == winner.draft_key and c.workload == ALL]
    return Table.of(
        choices,
        {
            "drafter": lambda c: drafter_name(c.method, c.draft_key, roles or {}),
            "workload": lambda c: c.workload,
            "batch": (lambda c: str(c.batch_size)) if batches else None,
            "context": (lambda c: "all" if c.kv_len is None else str(c.kv_len)) if contexts else None,
            "depth": lambda c: str(c.depth_k),
            "predicted": predicted_speedup,
            "measured": measured_speedup,
            "gap": lambda c: format_percent(c.pred_error, sign=True),
            "P(S > 1)": lambda c: "" if c.p_beats_no_spec is None else f"{c.p_beats_no_spec:.3f}",
            "lost at one depth": (lambda c: format_percent(c.loss)) if losses else None,
            "verdict": lambda c: c.verdict.replace("_", " "),
        },
        wins[0] if wins else None,
    )


def context_table(rows: Iterable[AcceptanceByContext], depths: Mapping[str, int]) -> Table:
    """Acceptance length of every drafter by context length. depths: draft_key -> the depth to show, where it has rows.

    Elsewhere the deepest is shown.
    """
    rows = list(rows)
    deepest = {key: max(row.depth_k for row in of_key) for key, of_key in grouped(rows, _draft_key).items()}
    depth_of = {key: depths.get(key) or deepest[key] for key in deepest}
    names = distinct_names((row.method, row.draft_key) for row in rows)
    return Table.of(
        [row for row in rows if row.depth_k == depth_of[row.draft_key]],
        {
            "drafter": lambda row: names[row.method, row.draft_key],
            "depth": lambda row: str(row.depth_k),
            "context": lambda row: _bin_name(row.context_from, row.context_to),
            "AL": lambda row: f"{row.al:.2f}{format_interval(row.al_lo, row.al_hi)}",
            "prompts": lambda row: str(row.num_prompts),
            "rounds": lambda row: f"{row.num_rounds:,}",
            "tokens": lambda row: f"{row.num_tokens:,}",
        },
    )


def _draft_key(row: AcceptanceByContext) -> str:
    return row.draft_key


def _bin_name(first: int, last: int | None) -> str:
    if last is None:
        return f"above {first // 1024}k"
    return f"{first // 1024}k to {last // 1024}k" if first else f"up to {last // 1024}k"


USUAL_DEPTHS = (3, 7)  # the usual depths of engines on CPUs


def edge_table(choices: Iterable[DepthChoice], evals: Iterable[DepthEval], roles: Mapping[str, str]) -> Table | None:
    """The chosen depth beside 3 and 7 drafts, over all prompts; None where neither was evaluated."""
    by_depth = {(e.draft_key, e.batch_size, e.depth_k): e for e in evals if e.workload == ALL and e.tree_budget is None}
    pairs: list[tuple[DepthEval, DepthEval]] = []  # (a usual or the chosen depth, the chosen depth)
    for c in choices:
        chosen = by_depth.get((c.draft_key, c.batch_size, c.depth_k))
        if c.workload != ALL or c.kv_len is not None or chosen is None:
            continue
        depths = [by_depth.get((c.draft_key, c.batch_size, depth)) for depth in sorted({c.depth_k, *USUAL_DEPTHS})]
        pairs += [(e, chosen) for e in depths if e is not None]
    table = Table.of(
        pairs,
        {
            "drafter": lambda pair: drafter_name(pair[0].method, pair[0].draft_key, roles),
            "batch": lambda pair: str(pair[0].batch_size),
            "depth": lambda pair: f"{pair[0].depth_k}{' (chosen)' if pair[0] is pair[1] else ''}",
            "AL": lambda pair: f"{pair[0].al:.2f}",
            "cost": lambda pair: f"{pair[0].cost_ratio:.2f}",
            "predicted": lambda pair: predicted_speedup(pair[0]),
            "measured": lambda pair: measured_speedup(pair[0]),
            "predicted against chosen": lambda pair: _difference(*pair),
        },
    )
    return table if any(e is not chosen for e, chosen in pairs) else None


def _difference(row: DepthEval, chosen: DepthEval) -> str:
    return "-" if row is chosen else f"{100 * (row.speedup_pred / chosen.speedup_pred - 1):+.1f} %"


def ranking_table(ranking: Sequence[RankedDrafter]) -> Table | None:
    """Every drafter in every shape (policy.json: ranking); None for fewer than two rows."""
    table = Table.of(
        ranking,
        {
            "drafter": lambda r: r.method,
            "key": lambda r: r.draft_key[:12],
            "shape": lambda r: chain_or_tree(r.tree_budget),
            "draft vocabulary": lambda r: "-" if r.draft_vocab is None else str(r.draft_vocab),
            "depth": lambda r: str(r.depth_k),
            "predicted": lambda r: format_estimate(r.speedup_pred, r.pred_lo, r.pred_hi),
            "P(best)": lambda r: format_percent(r.p_best),
            "regret": lambda r: format_percent(r.regret),
        },
        next((i for i, r in enumerate(ranking) if r.chosen), None),
    )
    return table if len(ranking) > 1 else None


def arm_table(arms: Iterable[MeasuredArm], roles: Mapping[str, str] | None = None) -> Table:
    """Every measured arm of policy.json, fastest first; speedups against the best plain kernel on the same prompts.

    Shape, batch size, dtype and kernel have a column only where they differ or are unusual.
    """
    arms = sorted(arms, key=lambda a: (a.workload != ALL, a.workload, -a.speedup))

    def where_varied(
        cell: Callable[[MeasuredArm], str], usual: str | None = None
    ) -> Callable[[MeasuredArm], str] | None:
        """The column, where its cells differ from the usual text or, without one, from each other."""
        return cell if {cell(a) for a in arms} - {usual or cell(arms[0]) if arms else ""} else None

    return Table.of(
        arms,
        {
            "arm": lambda a: drafter_name(a.method, a.draft_key, roles or {}),
            "depth": lambda a: str(a.depth_k),
            "workload": lambda a: a.workload,
            "shape": where_varied(lambda a: chain_or_tree(a.tree_budget), "chain"),
            "batch": where_varied(lambda a: str(a.batch_size), "1"),
            "dtype": where_varied(lambda a: a.dtype),
            "kernel": where_varied(lambda a: kernel_name(a.kernel)),
            "tokens/s": lambda a: f"{a.tokens_per_s:.1f}",
            "plain tokens/s": lambda a: f"{a.plain_tokens_per_s:.1f}",
            "AL": lambda a: _format_length(a.al, 2),
            "AL replayed": lambda a: _format_length(a.al_replayed, 2),
            "accepted": lambda a: format_percent(a.draft_acceptance_rate),
            "predicted": lambda a: format_ratio(a.speedup_pred),
            "speedup": lambda a: format_estimate(a.speedup, a.lo, a.hi),
            "prompts": lambda a: str(a.num_prompts),
            "compared": lambda a: str(a.checked),
            "ties": lambda a: str(a.ties),
            "differ": lambda a: str(a.divergences),
        },
    )


def chain_or_tree(budget: int | None) -> str:
    """The shape of the drafts that one pass verifies, in words."""
    return "chain" if budget is None else f"tree of {budget}"


def kernel_name(kernel: str) -> str:
    """A kernel's name without the layer shapes that it was calibrated for."""
    return kernel.split("[")[0]


def gate_table(gate: Gate) -> Table:
    """The promotion gate, check by check."""
    return Table.of(
        gate.checks,
        {
            "check": lambda c: c.name.replace("_", " "),
            "value": lambda c: "-" if c.value is None else f"{c.value:.4g}",
            "asked": lambda c: c.limit,
            "passed": lambda c: "yes" if c.passed else "NO",
        },
    )


def comparison_table(comparisons: Iterable[PairedComparison]) -> Table:
    """Challenger against champion on the same prompts; a ratio above 1 favours the challenger."""
    units = {"decode_speed": "tokens/s", "acceptance_length": "tokens a round"}
    return Table.of(
        comparisons,
        {
            "quantity": lambda c: c.quantity.replace("_", " "),
            "workload": lambda c: c.workload,
            "challenger": lambda c: f"{c.challenger_value:.2f} at depth {c.challenger_depth}",
            "champion": lambda c: f"{c.champion_value:.2f} at depth {c.champion_depth}",
            "unit": lambda c: units.get(c.quantity, ""),
            "ratio": lambda c: f"{c.ratio:.3f} [{c.lo:.3f}, {c.hi:.3f}]",
            "prompts": lambda c: str(c.num_prompts),
            "verdict": lambda c: c.verdict.replace("_", " "),
        },
    )


def stop_table(stops: Iterable[StopChoice], roles: Mapping[str, str]) -> Table:
    """Chains that end by confidence against chains of the best fixed depth, and a single threshold beside them."""
    return Table.of(
        stops,
        {
            "drafter": lambda s: drafter_name(s.method, s.draft_key, roles),
            "batch": lambda s: str(s.batch_size),
            "fixed depth": lambda s: f"{s.fixed_depth}: {s.speedup_fixed:.2f}x",
            "by confidence": lambda s: f"{s.drafted:.1f} drafts: {s.speedup:.2f}x",
            "gain, predicted": lambda s: format_estimate(s.gain, s.gain_lo, s.gain_hi),
            "gain, measured": lambda s: format_estimate(s.gain_meas, s.meas_lo, s.meas_hi),
            "prompts": lambda s: f"{s.num_prompts} / {s.num_prompts_meas or '-'}",
            "of the oracle": lambda s: format_percent(s.share_of_oracle),
            "calibration error": lambda s: f"{s.calibration_error:.3f}",
            "p_min (depth)": lambda s: f"{s.p_min:.2f} ({s.p_min_depth})",
            "its gain, predicted": lambda s: format_estimate(s.p_min_gain, s.p_min_gain_lo, s.p_min_gain_hi),
            "measured": lambda s: format_estimate(s.p_min_gain_meas, s.p_min_meas_lo, s.p_min_meas_hi),
            "chosen": lambda s: "by confidence" if s.chosen else "fixed depth",
        },
    )


def drift_table(drifts: Iterable[Drift]) -> Table:
    """Acceptance length of the champion on new traffic against that at its release."""
    return Table.of(
        drifts,
        {
            "workload": lambda d: d.workload,
            "held against": lambda d: d.workload_then,
            "depth": lambda d: str(d.depth_k),
            "at release": lambda d: f"{d.al_then:.2f}{format_interval(d.then_lo, d.then_hi)}",
            "now": lambda d: f"{d.al_now:.2f}{format_interval(d.now_lo, d.now_hi)}",
            "change": lambda d: f"{d.change:+.2f}{format_interval(d.lo, d.hi)}",
            "prompts": lambda d: f"{d.num_prompts_then} / {d.num_prompts_now}",
            "drift": lambda d: "drifted" if d.drifted else "not shown",
        },
    )


CHANGES: Final = {
    "target": "older target, as it came → target of now, as it came",
    "tuning": "as it came → tuned",
    "both": "older target, as it came → target of now, tuned",
    "sampled": "as it came, greedy → sampled",
    "sampled_tuned": "tuned, greedy → sampled",
}


def change_table(changes: Iterable[AcceptanceChange]) -> Table:
    """Acceptance length before and after, by workload: what a changed target cost, and what tuning brought."""
    changes = list(changes)
    several = len({c.what for c in changes}) > 1
    return Table.of(
        changes,
        {
            "from → to": (lambda c: CHANGES[c.what]) if several else None,
            "workload": lambda c: c.workload,
            "depth": lambda c: str(c.depth_k),
            "before": lambda c: f"{c.al_before:.2f}{format_interval(c.before_lo, c.before_hi)}",
            "after": lambda c: f"{c.al_after:.2f}{format_interval(c.after_lo, c.after_hi)}",
            "change": lambda c: f"{c.change:+.2f} [{c.lo:+.2f}, {c.hi:+.2f}]",
            "prompts": lambda c: str(c.num_prompts),
            "verdict": lambda c: WEIGHT_VERDICTS[c.verdict],
        },
    )


def sampled_table(changes: Iterable[AcceptanceChange], temperature: float) -> Table:
    """Acceptance length of greedy answers and of sampled ones, by drafter and workload."""
    return Table.of(
        changes,
        {
            "drafter": lambda c: "tuned" if c.what == "sampled_tuned" else "as it came",
            "workload": lambda c: c.workload,
            "depth": lambda c: str(c.depth_k),
            "temperature 0": lambda c: f"{c.al_before:.2f}{format_interval(c.before_lo, c.before_hi)}",
            f"temperature {temperature:g}": lambda c: f"{c.al_after:.2f}{format_interval(c.after_lo, c.after_hi)}",
            "change": lambda c: f"{c.change:+.2f} [{c.lo:+.2f}, {c.hi:+.2f}]",
            "prompts": lambda c: str(c.num_prompts),
            "verdict": lambda c: WEIGHT_VERDICTS[c.verdict],
        },
    )


def flag_table(flags: Iterable[QualityFlag]) -> Table:
    """Quality flags, worst first; drafters with the same flag share a line, with their values in the same order."""
    order = {"fault": 0, "warning": 1, "info": 2}
    ranked = sorted(flags, key=lambda f: (order.get(f.severity, 3), f.code, f.method))
    same: dict[tuple[str, str, str], list[QualityFlag]] = {}
    for f in ranked:
        same.setdefault((f.severity, f.code, f.detail), []).append(f)
    rows = []
    for (severity, code, detail), alike in same.items():
        drafters = [f.method or "-" for f in alike]
        values = [f"{f.value:.4g}" for f in alike]
        if len({*values}) == 1:
            drafters, values = list(dict.fromkeys(drafters)), values[:1]
        rows.append([severity, code.replace("_", " "), ", ".join(drafters), ", ".join(values), detail])
    return Table(["severity", "flag", "drafter", "value", "what it means"], rows)


WEIGHT_VERDICTS = {"lower": "lower", "higher": "higher", "undecided": "no difference shown"}


def weights_table(costs: Sequence[WeightsCost]) -> Table | None:
    """One line for each rounded drafter; None where no drafter was rounded."""
    table = Table.of(
        costs,
        {
            "drafter": lambda c: c.method,
            "weights": lambda c: c.weights,
            "depth": lambda c: str(c.depth_k),
            "AL as trained": lambda c: f"{c.al_before:.2f}",
            "AL (95 %)": lambda c: f"{c.al:.2f} [{c.al_lo:.2f}, {c.al_hi:.2f}]",
            "change (95 %)": lambda c: f"{c.change:+.3f} [{c.change_lo:+.3f}, {c.change_hi:+.3f}]",
            "prompts": lambda c: str(c.num_prompts),
            "verdict": lambda c: WEIGHT_VERDICTS[c.verdict],
        },
    )
    return table if costs else None


def engine_table(rows: Iterable[EngineComparison]) -> Table:
    """One line for each engine, drafter, depth and workload; acceptance length is tokens a round, bonus included."""
    return Table.of(
        rows,
        {
            "engine": lambda r: (
                f"{r.engine} {r.engine_version}".strip() + (f", {r.concurrency} at once" if r.concurrency > 1 else "")
            ),
            "drafter": lambda r: r.method,
            "depth": lambda r: str(r.depth_k),
            "workload": lambda r: r.workload,
            "same text": _same_texts,
            "AL predicted": lambda r: _format_length(r.al_pred),
            "AL ours": lambda r: _format_length(r.al_ours),
            "AL engine": lambda r: _format_length(r.al_engine),
            "speedup predicted": lambda r: format_ratio(r.speedup_pred),
            "speedup ours": lambda r: format_ratio(r.speedup_ours),
            "speedup engine": lambda r: format_ratio(r.speedup_engine),
            "verdict": lambda r: r.verdict.replace("_", " "),
        },
    )


def _same_texts(row: EngineComparison) -> str:
    if not row.num_compared:
        return "not compared"
    share = f"{row.num_identical} of {row.num_compared}"
    return f"{share}, {row.num_ties} at a tie" if row.num_ties else share


def _format_length(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
