"""The tables of reports: depths, choices, arms, the gate, comparisons, drift, flags, fewer bits and engines.

Each takes rows or parts of a policy and returns a `Table` of text, which Markdown, HTML and CSV show alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from components.policy import Gate, MeasuredArm, RankedDrafter, WeightsCost, Winner
from components.rows import ALL, DepthChoice, DepthEval, Drift, EngineComparison, PairedComparison, QualityFlag
from components.tables import Table, format_estimate, format_interval, format_percent, format_ratio

_METHOD_TITLES: Final = {"eagle1": "EAGLE", "eagle3": "EAGLE-3", "mtp": "MTP", "ngram": "prompt lookup"}


def depth_table(evals: Sequence[DepthEval], chosen_depth: int | None = None) -> Table:
    """Every depth of one drafter on one workload. Times in ms, 95 % intervals in brackets."""
    header = ["depth", "AL", "T_target", "T_verify", "T_draft", "cost", "gain", "cost added", "predicted", "measured"]
    header += ["P(best)", "regret"]
    rows = [
        [
            str(e.depth_k),
            f"{e.al:.2f}{format_interval(e.al_lo, e.al_hi) if e.depth_k else ''}",
            f"{e.t_target_ms:.2f}",
            f"{e.t_verify_ms:.2f}",
            f"{e.t_draft_ms:.2f}",
            f"{e.cost_ratio:.2f}",
            format_percent(e.marginal_gain),
            format_percent(e.marginal_cost),
            f"{format_ratio(e.speedup_pred)}{format_interval(e.pred_lo, e.pred_hi) if e.depth_k else ''}",
            format_estimate(e.speedup_meas, e.meas_lo, e.meas_hi),
            format_percent(e.p_best),
            format_percent(e.regret),
        ]
        for e in sorted(evals, key=lambda e: e.depth_k)
    ]
    stressed = next((i for i, row in enumerate(rows) if row[0] == str(chosen_depth)), None)
    return Table(header, rows, stressed)


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
    rows = [
        [
            drafter_name(c.method, c.draft_key, roles or {}),
            c.workload,
            *([str(c.batch_size)] if batches else []),
            *(["all" if c.kv_len is None else str(c.kv_len)] if contexts else []),
            str(c.depth_k),
            f"{format_ratio(c.speedup_pred)}{format_interval(c.pred_lo, c.pred_hi) if c.depth_k else ''}",
            format_estimate(c.speedup_meas, c.meas_lo, c.meas_hi),
            format_percent(c.pred_error, sign=True),
            "" if c.p_beats_no_spec is None else f"{c.p_beats_no_spec:.3f}",
            *([format_percent(c.loss)] if losses else []),
            c.verdict.replace("_", " "),
        ]
        for c in choices
    ]
    wins = [i for i, c in enumerate(choices) if winner and c.draft_key == winner.draft_key and c.workload == ALL]
    header = ["drafter", "workload", *(["batch"] if batches else []), *(["context"] if contexts else []), "depth"]
    header += ["predicted", "measured", "gap", "P(S > 1)", *(["lost at one depth"] if losses else []), "verdict"]
    return Table(header, rows, wins[0] if wins else None)


USUAL_DEPTHS = (3, 7)  # the usual depths of engines on CPUs


def edge_table(choices: Iterable[DepthChoice], evals: Iterable[DepthEval], roles: Mapping[str, str]) -> Table | None:
    """The chosen depth beside 3 and 7 drafts, over all prompts; None where neither was evaluated."""
    by_depth = {(e.draft_key, e.batch_size, e.depth_k): e for e in evals if e.workload == ALL and e.tree_budget is None}
    rows = []
    for c in choices:
        at_choice = by_depth.get((c.draft_key, c.batch_size, c.depth_k))
        if c.workload != ALL or c.kv_len is not None or at_choice is None:
            continue
        for depth in sorted({c.depth_k, *USUAL_DEPTHS}):
            e = by_depth.get((c.draft_key, c.batch_size, depth))
            if e is None:
                continue
            depth_text = f"{depth}" + (" (chosen)" if depth == c.depth_k else "")
            against = "-" if e is at_choice else f"{100 * (e.speedup_pred / at_choice.speedup_pred - 1):+.1f} %"
            predicted = f"{format_ratio(e.speedup_pred)}{format_interval(e.pred_lo, e.pred_hi) if depth else ''}"
            measured = format_estimate(e.speedup_meas, e.meas_lo, e.meas_hi)
            name = drafter_name(c.method, c.draft_key, roles)
            rows.append(
                [
                    name,
                    str(c.batch_size),
                    depth_text,
                    f"{e.al:.2f}",
                    f"{e.cost_ratio:.2f}",
                    predicted,
                    measured,
                    against,
                ]
            )
    header = ["drafter", "batch", "depth", "AL", "cost", "predicted", "measured", "predicted against chosen"]
    return Table(header, rows) if any("(chosen)" not in row[2] for row in rows) else None


def ranking_table(ranking: Sequence[RankedDrafter]) -> Table | None:
    """Every drafter in every shape (policy.json: ranking); None for fewer than two rows."""
    rows = [
        [
            r.method,
            r.draft_key[:12],
            chain_or_tree(r.tree_budget),
            "-" if r.draft_vocab is None else str(r.draft_vocab),
            str(r.depth_k),
            format_estimate(r.speedup_pred, r.pred_lo, r.pred_hi),
            format_percent(r.p_best),
            format_percent(r.regret),
        ]
        for r in ranking
    ]
    header = ["drafter", "key", "shape", "draft vocabulary", "depth", "predicted", "P(best)", "regret"]
    return Table(header, rows, next((i for i, r in enumerate(ranking) if r.chosen), None)) if len(rows) > 1 else None


def arm_table(arms: Iterable[MeasuredArm], roles: Mapping[str, str] | None = None) -> Table:
    """Every measured arm of policy.json, fastest first; speedups against the best plain kernel on the same prompts.

    Shape, batch size, dtype and kernel have a column only where they differ or are unusual.
    """
    arms = sorted(arms, key=lambda a: (a.workload != ALL, a.workload, -a.speedup))
    optional = {
        "shape": [chain_or_tree(a.tree_budget) for a in arms],
        "batch": [str(a.batch_size) for a in arms],
        "dtype": [a.dtype for a in arms],
        "kernel": [kernel_name(a.kernel) for a in arms],
    }
    common = {"shape": "chain", "batch": "1"}
    varying = (
        {name: cells for name, cells in optional.items() if set(cells) - {common.get(name, cells[0])}} if arms else {}
    )
    header = [
        "arm",
        "depth",
        "workload",
        *varying,
        "tokens/s",
        "plain tokens/s",
        "AL",
        "AL replayed",
        "accepted",
        "predicted",
        "speedup",
    ]
    header += ["prompts", "compared", "ties", "differ"]
    rows = [
        [
            drafter_name(a.method, a.draft_key, roles or {}),
            str(a.depth_k),
            a.workload,
            *(cells[i] for cells in varying.values()),
            f"{a.tokens_per_s:.1f}",
            f"{a.plain_tokens_per_s:.1f}",
            *("-" if length is None else f"{length:.2f}" for length in (a.al, a.al_replayed)),
            format_percent(a.draft_acceptance_rate),
            format_ratio(a.speedup_pred),
            format_estimate(a.speedup, a.lo, a.hi),
            str(a.num_prompts),
            str(a.checked),
            str(a.ties),
            str(a.divergences),
        ]
        for i, a in enumerate(arms)
    ]
    return Table(header, rows)


def chain_or_tree(budget: int | None) -> str:
    """The shape of the drafts that one pass verifies, in words."""
    return "chain" if budget is None else f"tree of {budget}"


def kernel_name(kernel: str) -> str:
    """A kernel's name without the layer shapes that it was calibrated for."""
    return kernel.split("[")[0]


def gate_table(gate: Gate) -> Table:
    """The promotion gate, check by check."""
    rows = [
        [
            c.name.replace("_", " "),
            "-" if c.value is None else f"{c.value:.4g}",
            c.limit,
            "yes" if c.passed else "NO",
        ]
        for c in gate.checks
    ]
    return Table(["check", "value", "asked", "passed"], rows)


def comparison_table(comparisons: Iterable[PairedComparison]) -> Table:
    """Challenger against champion on the same prompts; a ratio above 1 favours the challenger."""
    units = {"decode_speed": "tokens/s", "acceptance_length": "tokens a round"}
    rows = [
        [
            c.quantity.replace("_", " "),
            c.workload,
            f"{c.challenger_value:.2f} at depth {c.challenger_depth}",
            f"{c.champion_value:.2f} at depth {c.champion_depth}",
            units.get(c.quantity, ""),
            f"{c.ratio:.3f} [{c.lo:.3f}, {c.hi:.3f}]",
            str(c.num_prompts),
            c.verdict.replace("_", " "),
        ]
        for c in comparisons
    ]
    return Table(["quantity", "workload", "challenger", "champion", "unit", "ratio", "prompts", "verdict"], rows)


def drift_table(drifts: Iterable[Drift]) -> Table:
    """Acceptance length of the champion on new traffic against that at its release."""
    rows = [
        [
            d.workload,
            d.workload_then,
            str(d.depth_k),
            f"{d.al_then:.2f}{format_interval(d.then_lo, d.then_hi)}",
            f"{d.al_now:.2f}{format_interval(d.now_lo, d.now_hi)}",
            f"{d.change:+.2f}{format_interval(d.lo, d.hi)}",
            f"{d.num_prompts_then} / {d.num_prompts_now}",
            "drifted" if d.drifted else "not shown",
        ]
        for d in drifts
    ]
    return Table(["workload", "held against", "depth", "at release", "now", "change", "prompts", "drift"], rows)


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
WEIGHT_HEADER = ["drafter", "weights", "depth", "AL as trained", "AL (95 %)", "change (95 %)", "prompts", "verdict"]


def weights_table(costs: Sequence[WeightsCost]) -> Table | None:
    """One line for each rounded drafter; None where no drafter was rounded."""
    rows = [
        [
            c.method,
            c.weights,
            str(c.depth_k),
            f"{c.al_before:.2f}",
            f"{c.al:.2f} [{c.al_lo:.2f}, {c.al_hi:.2f}]",
            f"{c.change:+.3f} [{c.change_lo:+.3f}, {c.change_hi:+.3f}]",
            str(c.num_prompts),
            WEIGHT_VERDICTS[c.verdict],
        ]
        for c in costs
    ]
    return Table(WEIGHT_HEADER, rows) if rows else None


def engine_table(rows: Iterable[EngineComparison]) -> Table:
    """One line for each engine, drafter, depth and workload; acceptance length is tokens a round, bonus included."""
    cells = [
        [
            f"{row.engine} {row.engine_version}".strip()
            + (f", {row.concurrency} at once" if row.concurrency > 1 else ""),
            row.method,
            str(row.depth_k),
            row.workload,
            _same_texts(row),
            *(_format_length(value) for value in (row.al_pred, row.al_ours, row.al_engine)),
            *(format_ratio(value) for value in (row.speedup_pred, row.speedup_ours, row.speedup_engine)),
            row.verdict.replace("_", " "),
        ]
        for row in rows
    ]
    header = ["engine", "drafter", "depth", "workload", "same text", "AL predicted", "AL ours", "AL engine"]
    header += ["speedup predicted", "speedup ours", "speedup engine", "verdict"]
    return Table(header, cells)


def _same_texts(row: EngineComparison) -> str:
    if not row.num_compared:
        return "not compared"
    share = f"{row.num_identical} of {row.num_compared}"
    return f"{share}, {row.num_ties} at a tie" if row.num_ties else share


def _format_length(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
