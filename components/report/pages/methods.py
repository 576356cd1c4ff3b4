"""Step `report.compare_methods`: every drafter on the same prompts, in one table and one chart.

Acceptance, cost and speedups come from the depth policy, parameters and training times from the drafters' files. Trees
are shown beside the chains of the same drafter where they were measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.contract import Context, DepthPolicy, Draft, Page, UserError
from components.html_pages import write_html
from components.outside_json import JsonObject
from components.policy import MeasuredArm, read_policy
from components.report.charts.depth import PLAIN, speedup_series
from components.report.charts.export import side_by_side, write_pictures
from components.report.charts.svg import PALETTE, Point, Series, line_chart
from components.report.summary import verdict_in_words
from components.report.tables import acceptance_length, flag_table, measured_speedup, predicted_speedup
from components.rows import ALL, DepthChoice, DepthEval, QualityFlag, read_rows
from components.tables import Table, format_estimate, format_ratio


@dataclass(frozen=True)
class Drafter:
    """One line of the table. evals: its chain at every depth. parameters, minutes (of training): None where unknown."""

    name: str
    choice: DepthChoice
    evals: tuple[DepthEval, ...]
    trees: tuple[DepthEval, ...]
    parameters: int | None
    minutes: float | None

    def at_chosen_depth(self) -> DepthEval:
        """The row of its chosen depth."""
        return next(e for e in self.evals if e.depth_k == self.choice.depth_k)


def compare_methods(drafts: list[Draft], policy: DepthPolicy, *, title: str, ctx: Context) -> Page:
    """The step `report.compare_methods`; its settings are explained in components/report/steps.py."""
    facts = methods_facts(drafts, policy, title)
    size = write_html(ctx.out, Path(__file__).parent / "methods.html.jinja", facts)
    one_chart = side_by_side((name, chart) for name, _, chart in facts["charts"])
    write_pictures(ctx.out, {"methods": one_chart}, [("methods", facts["table"]), ("trees", facts["trees"])])
    return Page.of_step(ctx, {"title": title, "bytes": size, "verdict": facts["verdict"]})


def methods_facts(drafts: Sequence[Draft], policy: DepthPolicy, title: str) -> JsonObject:
    """The variables of the template."""
    content = read_policy(policy.path)
    drafters = find_drafters(drafts, policy)
    flags = read_rows(policy.path, QualityFlag)
    return {
        "title": title,
        "verdict": content.verdict,
        "sentence": verdict_in_words(policy.info),
        "table": methods_table(drafters, content.arms, content.winner.draft_key if content.winner else None),
        "charts": methods_charts(drafters),
        "trees": tree_table(drafters),
        "flags": flag_table(flags) if flags else None,
    }


def find_drafters(drafts: Sequence[Draft], policy: DepthPolicy) -> list[Drafter]:
    """Every drafter with a chosen depth, at its smallest batch size, the fastest first."""
    choices = [c for c in read_rows(policy.path, DepthChoice) if c.workload == ALL and c.kv_len is None]
    evals = [e for e in read_rows(policy.path, DepthEval) if e.workload == ALL]
    if not choices:
        raise UserError(f"policy ({policy.key[:12]}): no depth_choice rows; run speedup.choose_depth again")
    smallest: dict[str, DepthChoice] = {}
    for c in sorted(choices, key=lambda c: c.batch_size):
        smallest.setdefault(c.draft_key, c)
    drafts_by_key = {draft.key: draft for draft in drafts}
    methods = [c.method for c in smallest.values()]
    drafters = []
    for key, c in smallest.items():
        of_drafter = [e for e in evals if (e.draft_key, e.batch_size) == (key, c.batch_size)]
        chain = sorted((e for e in of_drafter if e.tree_budget is None), key=lambda e: e.depth_k)
        trees = sorted(
            (e for e in of_drafter if e.tree_budget is not None), key=lambda e: (e.depth_k, e.tree_budget or 0)
        )
        name = c.method if methods.count(c.method) == 1 else f"{c.method} {key[:6]}"
        drafters.append(Drafter(name, c, tuple(chain), tuple(trees), *_recorded_facts(drafts_by_key.get(key))))
    return sorted(drafters, key=lambda d: -(d.choice.speedup_meas or d.choice.speedup_pred))


def _recorded_facts(draft: Draft | None) -> tuple[int | None, float | None]:
    """(parameters, training minutes) from the drafter's files; None where unknown or not trained."""
    if draft is None:
        return None, None
    parameters = json.loads((draft.path / "draft.json").read_text(encoding="utf-8")).get("num_parameters")
    record = draft.path / "artifact.json"
    seconds = json.loads(record.read_text(encoding="utf-8"))["record"].get("seconds") if record.is_file() else None
    return parameters, None if seconds is None or not parameters else seconds / 60.0


def methods_table(drafters: Sequence[Drafter], arms: Sequence[MeasuredArm], winner: str | None) -> Table:
    """One line a drafter; prompt lookup, which has no drafter, is added from its measured arm."""
    table = Table.of(
        drafters,
        {
            "method": lambda d: d.name,
            "parameters": lambda d: "-" if d.parameters is None else f"{d.parameters:,}",
            "training minutes": lambda d: "-" if d.minutes is None else f"{d.minutes:.1f}",
            "depth": lambda d: str(d.choice.depth_k),
            "AL": lambda d: acceptance_length(d.at_chosen_depth()),
            "cost": lambda d: f"{d.at_chosen_depth().cost_ratio:.2f}",
            "predicted": lambda d: predicted_speedup(d.choice),
            "measured": lambda d: measured_speedup(d.choice),
            "verdict": lambda d: d.choice.verdict.replace("_", " "),
        },
        next((i for i, d in enumerate(drafters) if d.choice.draft_key == winner), None),
    )
    methods = {d.choice.method for d in drafters}
    for a in arms:
        if a.workload == ALL and a.method not in {*methods, "none"} and not a.draft_key:
            al = "-" if a.al is None else f"{a.al:.2f} on {a.num_prompts} timed prompts"
            speed = format_estimate(a.speedup, a.lo, a.hi)
            table.rows.append([a.method, "0", "-", str(a.depth_k), al, "-", "-", speed, "-"])
    return table


def methods_charts(drafters: Sequence[Drafter]) -> list[tuple[str, str, str]]:
    """(title, description, chart): acceptance, cost and speedup by depth, and both speedups at the chosen depth."""
    lines: dict[str, list[Series]] = {"al": [], "cost_ratio": [], "speedup_pred": []}
    for i, d in enumerate(drafters):
        for quantity, series in lines.items():
            points = [Point(e.depth_k, getattr(e, quantity)) for e in d.evals]
            series.append(Series(d.name, PALETTE[i % len(PALETTE)], "line", points))
    speeds = speedup_series(enumerate(d.choice for d in drafters), "dots", aside=0.1)
    depth, names = "draft depth k", [d.name for d in drafters]
    acceptance = line_chart(lines["al"], depth, "acceptance length by draft depth")
    cost = line_chart(lines["cost_ratio"], depth, "cost by draft depth")
    by_depth = line_chart([*lines["speedup_pred"], PLAIN], depth, "speedup by draft depth", unit="x")
    at_chosen = line_chart([*speeds, PLAIN], "method", "speedup by method", unit="x", x_labels=names)
    return [
        ("Acceptance by depth", "Tokens kept a round, the target's own included.", acceptance),
        ("Cost by depth", "Time of a round over that of one plain step.", cost),
        ("Speedup by depth", "Predicted: acceptance over cost.", by_depth),
        ("Speedup at the chosen depth", "With 95 % intervals. At 1x without one: depth 0 was chosen.", at_chosen),
    ]


def tree_table(drafters: Sequence[Drafter]) -> Table | None:
    """Every tree beside the chain of the same depth; None where no tree was measured."""
    chains = {(d.name, e.depth_k): e for d in drafters for e in d.evals}
    best = {d.name: max(e.speedup_pred for e in d.evals) for d in drafters if d.trees}
    trees = [(d.name, tree, chains.get((d.name, tree.depth_k))) for d in drafters for tree in d.trees]
    table = Table.of(
        trees,
        {
            "method": lambda row: row[0],
            "depth": lambda row: str(row[1].depth_k),
            "tree budget": lambda row: str(row[1].tree_budget),
            "AL of the tree": lambda row: f"{row[1].al:.2f}",
            "AL of the chain": lambda row: "-" if row[2] is None else f"{row[2].al:.2f}",
            "cost of the tree": lambda row: f"{row[1].cost_ratio:.2f}",
            "tree predicted": lambda row: format_estimate(row[1].speedup_pred, row[1].pred_lo, row[1].pred_hi),
            "chain predicted": lambda row: "-" if row[2] is None else format_ratio(row[2].speedup_pred),
            "faster at its best depth": lambda row: "tree" if row[1].speedup_pred > best[row[0]] else "chain",
        },
    )
    return table if trees else None
