"""Markdown tables of the facts people ask for; the same cells fill the page's tables.

A table is a header and rows of text cells (`Table`), so that Markdown and HTML show the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from components.escapes import in_markdown
from components.rows import DepthChoice, DepthEval, Drift, PairedComparison, QualityFlag

_AS_WRITTEN: Final = {"eagle1": "EAGLE", "eagle3": "EAGLE-3", "mtp": "MTP", "ngram": "prompt lookup"}


class Table(NamedTuple):
    """Text cells, and the index of the row to stress (None: no row)."""

    header: list[str]
    rows: list[list[str]]
    stressed: int | None = None

    def markdown(self) -> str:
        """The table in GitHub's Markdown; a stressed row is bold."""
        lines = [_line(map(in_markdown, self.header)), _line(["---"] * len(self.header))]
        for index, row in enumerate(self.rows):
            told = [in_markdown(cell) for cell in row]
            cells = [f"**{cell}**" if cell and index == self.stressed else cell for cell in told]
            lines.append(_line(cells))
        return "\n".join(lines) + "\n"


def depth_table(evals: Sequence[DepthEval], chosen: int | None = None) -> Table:
    """Every depth of one drafter on one workload. Times in ms, 95 % intervals in brackets."""
    header = ["depth", "AL", "T_target", "T_verify", "T_draft", "cost", "gain", "cost added", "predicted", "measured"]
    header += ["P(best)", "regret"]
    rows = [
        [
            str(e.depth_k),
            f"{e.al:.2f}{bounds(e.al_lo, e.al_hi) if e.depth_k else ''}",
            f"{e.t_target_ms:.2f}",
            f"{e.t_verify_ms:.2f}",
            f"{e.t_draft_ms:.2f}",
            f"{e.cost_ratio:.2f}",
            percent(e.marginal_gain),
            percent(e.marginal_cost),
            f"{times(e.speedup_pred)}{bounds(e.pred_lo, e.pred_hi) if e.depth_k else ''}",
            f"{times(e.speedup_meas)}{bounds(e.meas_lo, e.meas_hi)}",
            percent(e.p_best),
            percent(e.regret),
        ]
        for e in sorted(evals, key=lambda e: e.depth_k)
    ]
    stressed = next((i for i, row in enumerate(rows) if row[0] == str(chosen)), None)
    return Table(header, rows, stressed)


def in_print(method: str) -> str:
    """A method as people write it."""
    return _AS_WRITTEN.get(method, method)


def named(method: str, draft_key: str, roles: Mapping[str, str]) -> str:
    """A drafter as tables call it: its method, and its role where a challenger meets a champion."""
    return f"{method}, {roles[draft_key]}" if draft_key in roles else method


def told_apart(drafters: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(method, draft_key) -> its method, with the beginning of the key where several drafters have the same method."""
    known = set(drafters)
    several = Counter(method for method, _ in known)
    return {(method, key): f"{method} {key[:8]}" if several[method] > 1 else method for method, key in known}


def choice_table(
    choices: Iterable[DepthChoice], winner: Mapping[str, Any] | None = None, roles: Mapping[str, str] | None = None
) -> Table:
    """One line for each drafter and workload. roles: draft_key -> challenger | champion.

    Batch size, context length and what one depth for all loses stand there where they differ or were worked out.
    """
    choices = list(choices)
    batches, contexts = len({c.batch_size for c in choices}) > 1, any(c.kv_len is not None for c in choices)
    losses = any(c.loss is not None for c in choices)
    rows = [
        [
            named(c.method, c.draft_key, roles or {}),
            c.workload,
            *([str(c.batch_size)] if batches else []),
            *(["all" if c.kv_len is None else str(c.kv_len)] if contexts else []),
            str(c.depth_k),
            f"{times(c.speedup_pred)}{bounds(c.pred_lo, c.pred_hi) if c.depth_k else ''}",
            f"{times(c.speedup_meas)}{bounds(c.meas_lo, c.meas_hi)}",
            percent(c.pred_error, sign=True),
            "" if c.p_beats_no_spec is None else f"{c.p_beats_no_spec:.3f}",
            *([percent(c.loss)] if losses else []),
            c.verdict.replace("_", " "),
        ]
        for c in choices
    ]
    wins = [i for i, c in enumerate(choices) if winner and c.draft_key == winner["draft_key"] and c.workload == "all"]
    header = ["drafter", "workload", *(["batch"] if batches else []), *(["context"] if contexts else []), "depth"]
    header += ["predicted", "measured", "gap", "P(S > 1)", *(["lost at one depth"] if losses else []), "verdict"]
    return Table(header, rows, wins[0] if wins else None)


USUAL = (3, 7)  # drafts a round that engines on CPUs are usually set to


def edge_table(choices: Iterable[DepthChoice], evals: Iterable[DepthEval], roles: Mapping[str, str]) -> Table | None:
    """The chosen depth beside 3 and 7 drafts, over all prompts; None where neither was evaluated."""
    by_depth = {
        (e.draft_key, e.batch_size, e.depth_k): e for e in evals if e.workload == "all" and e.tree_budget is None
    }
    rows = []
    for c in choices:
        chosen = by_depth.get((c.draft_key, c.batch_size, c.depth_k))
        if c.workload != "all" or c.kv_len is not None or chosen is None:
            continue
        for depth in sorted({c.depth_k, *USUAL}):
            e = by_depth.get((c.draft_key, c.batch_size, depth))
            if e is None:
                continue
            said = f"{depth}" + (" (chosen)" if depth == c.depth_k else "")
            against = "-" if e is chosen else f"{100 * (e.speedup_pred / chosen.speedup_pred - 1):+.1f} %"
            predicted = f"{times(e.speedup_pred)}{bounds(e.pred_lo, e.pred_hi) if depth else ''}"
            measured = f"{times(e.speedup_meas)}{bounds(e.meas_lo, e.meas_hi)}"
            name = named(c.method, c.draft_key, roles)
            rows.append(
                [name, str(c.batch_size), said, f"{e.al:.2f}", f"{e.cost_ratio:.2f}", predicted, measured, against]
            )
    header = ["drafter", "batch", "depth", "AL", "cost", "predicted", "measured", "predicted against chosen"]
    return Table(header, rows) if any("(chosen)" not in row[2] for row in rows) else None


def ranking_table(ranking: Sequence[Mapping[str, Any]]) -> Table | None:
    """Every drafter in every setting (policy.json: ranking); None for fewer than two."""
    rows = [
        [
            r["method"],
            r["draft_key"][:12],
            chain_or_tree(r["tree_budget"]),
            "-" if r["draft_vocab"] is None else str(r["draft_vocab"]),
            str(r["depth_k"]),
            f"{times(r['speedup_pred'])}{bounds(r['pred_lo'], r['pred_hi'])}",
            percent(r["p_best"]),
            percent(r["regret"]),
        ]
        for r in ranking
    ]
    header = ["drafter", "key", "shape", "draft vocabulary", "depth", "predicted", "P(best)", "regret"]
    return Table(header, rows, next((i for i, r in enumerate(ranking) if r["chosen"]), None)) if len(rows) > 1 else None


def arm_table(arms: Iterable[Mapping[str, Any]], roles: Mapping[str, str] | None = None) -> Table:
    """Every measured arm of policy.json, fastest first; speedups against the best plain kernel on the same prompts.

    What all arms have in common (batch size 1, one dtype, one kernel, chains) has no column.
    """
    arms = sorted(arms, key=lambda a: (a["workload"] != "all", a["workload"], -a["speedup"]))
    optional = {
        "shape": [chain_or_tree(a.get("tree_budget")) for a in arms],
        "batch": [str(a["batch_size"]) for a in arms],
        "dtype": [a["dtype"] for a in arms],
        "kernel": [kernel_name(a["kernel"]) for a in arms],
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
            named(a["method"], a["draft_key"], roles or {}),
            str(a["depth_k"]),
            a["workload"],
            *(cells[i] for cells in varying.values()),
            f"{a['tokens_per_s']:.1f}",
            f"{a['plain_tokens_per_s']:.1f}",
            *("-" if a[name] is None else f"{a[name]:.2f}" for name in ("al", "al_replayed")),
            percent(a["draft_acceptance_rate"]),
            times(a["speedup_pred"]),
            f"{times(a['speedup'])}{bounds(a['lo'], a['hi'])}",
            str(a["num_prompts"]),
            str(a["checked"]),
            str(a["ties"]),
            str(a["divergences"]),
        ]
        for i, a in enumerate(arms)
    ]
    return Table(header, rows)


def chain_or_tree(budget: int | None) -> str:
    """What is verified in one pass, in words."""
    return "chain" if budget is None else f"tree of {budget}"


def kernel_name(kernel: str) -> str:
    """A kernel without the layer shapes that it was calibrated for."""
    return kernel.split("[")[0]


def gate_table(gate: Mapping[str, Any]) -> Table:
    """The promotion gate, check by check."""
    rows = [
        [
            c["name"].replace("_", " "),
            "-" if c["value"] is None else f"{c['value']:.4g}",
            c["limit"],
            "yes" if c["passed"] else "NO",
        ]
        for c in gate["checks"]
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
            f"{d.al_then:.2f}{bounds(d.then_lo, d.then_hi)}",
            f"{d.al_now:.2f}{bounds(d.now_lo, d.now_hi)}",
            f"{d.change:+.2f}{bounds(d.lo, d.hi)}",
            f"{d.num_prompts_then} / {d.num_prompts_now}",
            "drifted" if d.drifted else "not shown",
        ]
        for d in drifts
    ]
    return Table(["workload", "held against", "depth", "at release", "now", "change", "prompts", "drift"], rows)


def flag_table(flags: Iterable[QualityFlag]) -> Table:
    """Reasons to doubt, worst first; drafters with the same one share a line, their values in the same order."""
    order = {"fault": 0, "warning": 1, "info": 2}
    ranked = sorted(flags, key=lambda f: (order.get(f.severity, 3), f.code, f.method))
    same: dict[tuple[str, str, str], list[QualityFlag]] = {}
    for f in ranked:
        same.setdefault((f.severity, f.code, f.detail), []).append(f)
    rows = []
    for (severity, code, detail), found in same.items():
        drafters = [f.method or "-" for f in found]
        values = [f"{f.value:.4g}" for f in found]
        if len({*values}) == 1:
            drafters, values = list(dict.fromkeys(drafters)), values[:1]
        rows.append([severity, code.replace("_", " "), ", ".join(drafters), ", ".join(values), detail])
    return Table(["severity", "flag", "drafter", "value", "what it means"], rows)


def times(value: float | None) -> str:
    """1.2345 -> 1.23x; None -> "-" (not measured)."""
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None, sign: bool = False) -> str:
    """0.1234 -> 12.3 %; None -> "-"."""
    if value is None:
        return "-"
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"


def bounds(lo: float | None, hi: float | None) -> str:
    """A 95 % interval after its value, or nothing."""
    return "" if lo is None or hi is None else f" [{lo:.2f}, {hi:.2f}]"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
