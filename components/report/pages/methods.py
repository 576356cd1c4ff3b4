"""Step `report.compare_methods`: every drafter on the same prompts, in one table and one chart.

Acceptance, cost and speedups come from the depth policy, parameters and training times from the drafters' files. Trees
are shown beside the chains of the same drafter where they were measured. A method whose best depth is 0 is shown at the
best depth that drafts, so that its line says by how much it loses.

Why it loses is the price of a row. With T_verify(k) = T_target + s k for k draft tokens, the rest of a round T_rest and
the acceptance length AL(k), the speedup model is above 1 where
  s < (AL(k) (T_target + T_rest) - T_draft(k) - T_rest - T_target) / k.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.contract import Context, DepthPolicy, Draft, Page, UserError
from components.html_pages import write_html
from components.outside_json import JsonObject
from components.policy import MeasuredArm, RoundCost, read_policy, verdict_in_words
from components.report.charts.depth import PLAIN, speedup_series
from components.report.charts.export import side_by_side, write_pictures
from components.report.charts.svg import PALETTE, Point, Series, line_chart
from components.report.summary import origin_of
from components.report.tables import acceptance_length, flag_table, measured_speedup, predicted_speedup
from components.rows import ALL, DepthChoice, DepthEval, QualityFlag, read_rows
from components.tables import Table, format_estimate, format_percent, format_ratio

BLOCK_DRAFTERS = ("dflash", "dspark")
"""Methods that draft all tokens of a round in one pass, however few are taken."""


@dataclass(frozen=True)
class Drafter:
    """One line of the table. evals: its chain at every depth. parameters, minutes (of training): None where unknown."""

    name: str
    choice: DepthChoice
    evals: tuple[DepthEval, ...]
    trees: tuple[DepthEval, ...]
    parameters: int | None
    minutes: float | None

    def at_shown_depth(self) -> DepthEval:
        """The row of its chosen depth, or of the fastest that drafts where depth 0 was chosen."""
        drafting = [e for e in self.evals if e.depth_k]
        if self.choice.depth_k or not drafting:
            return next(e for e in self.evals if e.depth_k == self.choice.depth_k)
        return max(drafting, key=lambda e: e.speedup_meas or e.speedup_pred)

    def speedups(self) -> DepthChoice | DepthEval:
        """The row whose speedups are shown."""
        return self.choice if self.choice.depth_k else self.at_shown_depth()


@dataclass(frozen=True)
class RowPrice:
    """What a row of verification costs, and what it may cost until drafting no longer pays; in shares of a plain step.

    depth: the draft tokens at which it may cost most. break_even_lo, break_even_hi: by the interval of the AL alone.
    """

    depth: DepthEval
    measured: float
    break_even: float
    break_even_lo: float
    break_even_hi: float

    def outcome(self) -> str:
        """Whether drafting pays at this depth, by the interval of its predicted speedup."""
        if self.break_even_hi <= 0.0:
            return "would not pay at any price"
        if self.depth.pred_lo > 1.0:
            return "pays"
        return "does not pay" if self.depth.pred_hi < 1.0 else "undecided"


def row_price(evals: Sequence[DepthEval], rounds: Sequence[RoundCost]) -> RowPrice | None:
    """The price of a row at the depth that bears the highest; None where nothing was drafted.

    evals, rounds: of one drafter's chain at one batch size.
    """
    # The rest of a round counts where the choice of depth counted it.
    rest = {r.depth_k: r.t_host_ms or 0.0 for r in rounds if r.cost_ratio_with_host is not None}

    def price(e: DepthEval, al: float) -> float:
        plain, other = e.t_target_ms + rest.get(0, 0.0), e.t_draft_ms + rest.get(e.depth_k, 0.0)
        return (al * plain - other - e.t_target_ms) / e.depth_k / e.t_target_ms

    drafting = [e for e in evals if e.depth_k]
    if not drafting:
        return None
    best = max(drafting, key=lambda e: price(e, e.al))
    measured = (best.t_verify_ms / best.t_target_ms - 1.0) / best.depth_k
    return RowPrice(best, measured, *(price(best, al) for al in (best.al, best.al_lo, best.al_hi)))


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
    prices = [(d.name, price) for d in drafters if (price := row_price(d.evals, rounds_of(d, content.rounds)))]
    return {
        "title": title,
        "origin": origin_of(content.target_model, content.target_key, policy),
        "verdict": content.verdict,
        "sentence": verdict_in_words(policy.info),
        "closest": closest_in_words(drafters) if content.verdict != "use" else "",
        "prices": price_table(prices),
        "blocks": [block_in_words(name, price) for name, price in prices if name.split()[0] in BLOCK_DRAFTERS],
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
    return sorted(drafters, key=lambda d: -(d.speedups().speedup_meas or d.speedups().speedup_pred))


def rounds_of(drafter: Drafter, rounds: Sequence[RoundCost]) -> list[RoundCost]:
    """Those of a drafter's chain at its batch size."""
    key = (drafter.choice.draft_key, drafter.choice.batch_size)
    return [r for r in rounds if (r.draft_key, r.batch_size) == key]


def closest_in_words(drafters: Sequence[Drafter]) -> str:
    """How near the fastest method comes to plain decoding; "" where none was tried."""
    if not drafters or not drafters[0].at_shown_depth().depth_k:
        return ""
    best = drafters[0].at_shown_depth()
    speeds = f"predicted {predicted_speedup(best)}"
    if best.speedup_meas is not None:
        speeds += f", measured {measured_speedup(best)}"
    closest = f"The closest: {drafters[0].name} with {draft_tokens(best.depth_k)} a round, {speeds}."
    if any(d.choice.depth_k for d in drafters):
        return closest
    return f"No depth of any method was shown to beat depth 0, plain decoding. {closest}"


def draft_tokens(depth: int) -> str:
    """A number of draft tokens in words."""
    return "1 draft token" if depth == 1 else f"{depth} draft tokens"


def price_table(prices: Sequence[tuple[str, RowPrice]]) -> Table | None:
    """What a row costs and may cost, a line for each method; None where nothing was drafted."""
    table = Table.of(
        prices,
        {
            "method": lambda row: row[0],
            "draft tokens": lambda row: str(row[1].depth.depth_k),
            "AL": lambda row: acceptance_length(row[1].depth),
            "drafting": lambda row: format_percent(row[1].depth.t_draft_ms / row[1].depth.t_target_ms),
            "a row costs": lambda row: format_percent(row[1].measured),
            "pays below": lambda row: format_percent(row[1].break_even),
            "from": lambda row: format_percent(row[1].break_even_lo),
            "to": lambda row: format_percent(row[1].break_even_hi),
            "here": lambda row: row[1].outcome(),
        },
    )
    return table if prices else None


def block_in_words(name: str, price: RowPrice) -> str:
    """What decides whether a block drafter pays, as a sentence."""
    e = price.depth
    slope, limit = (share * e.t_target_ms for share in (price.measured, price.break_even))
    facts = (
        f"{name} keeps {e.al:.2f} tokens a round with {draft_tokens(e.depth_k)}. Its block takes {e.t_draft_ms:.2f} ms "
        f"beside a plain step of {e.t_target_ms:.2f} ms, and T_verify rises by {slope:.2f} ms a row, "
        f"{format_percent(price.measured)} of a plain step"
    )
    if price.break_even_hi <= 0.0:
        return f"{facts}; the block alone takes longer than it saves, so that it would lose if rows cost nothing."
    low, high = (format_percent(share) for share in (price.break_even_lo, price.break_even_hi))
    bound = f"{limit:.2f} ms a row, {format_percent(price.break_even)} ({low} to {high})"
    return f"{facts}. It pays below {bound}: {price.outcome()}."


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
            "shown": lambda d: str(d.at_shown_depth().depth_k),
            "AL": lambda d: acceptance_length(d.at_shown_depth()),
            "cost": lambda d: f"{d.at_shown_depth().cost_ratio:.2f}",
            "predicted": lambda d: predicted_speedup(d.speedups()),
            "measured": lambda d: measured_speedup(d.speedups()),
            "verdict": lambda d: d.choice.verdict.replace("_", " "),
        },
        next((i for i, d in enumerate(drafters) if d.choice.draft_key == winner), None),
    )
    methods = {d.choice.method for d in drafters}
    for a in arms:
        if a.workload == ALL and a.method not in {*methods, "none"} and not a.draft_key:
            al = "-" if a.al is None else f"{a.al:.2f} on {a.num_prompts} timed prompts"
            speed = format_estimate(a.speedup, a.lo, a.hi)
            table.rows.append([a.method, "0", "-", str(a.depth_k), str(a.depth_k), al, "-", "-", speed, "-"])
    return table


def methods_charts(drafters: Sequence[Drafter]) -> list[tuple[str, str, str]]:
    """(title, description, chart): acceptance, cost and speedup by depth, and both speedups at the depth shown."""
    lines: dict[str, list[Series]] = {"al": [], "cost_ratio": [], "speedup_pred": []}
    for i, d in enumerate(drafters):
        for quantity, series in lines.items():
            points = [Point(e.depth_k, getattr(e, quantity)) for e in d.evals]
            series.append(Series(d.name, PALETTE[i % len(PALETTE)], "line", points))
    speeds = speedup_series(enumerate(d.speedups() for d in drafters), "dots", aside=0.1)
    depth, names = "draft depth k", [d.name for d in drafters]
    acceptance = line_chart(lines["al"], depth, "acceptance length by draft depth")
    cost = line_chart(lines["cost_ratio"], depth, "cost by draft depth")
    by_depth = line_chart([*lines["speedup_pred"], PLAIN], depth, "speedup by draft depth", unit="x")
    at_shown = line_chart([*speeds, PLAIN], "method", "speedup by method", unit="x", x_labels=names)
    return [
        ("Acceptance by depth", "Tokens kept a round, the target's own included.", acceptance),
        ("Cost by depth", "Time of a round over that of one plain step.", cost),
        ("Speedup by depth", "Predicted: acceptance over cost.", by_depth),
        ("Speedup at the depth shown", "With 95 % intervals; the line at 1x is plain decoding.", at_shown),
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
