"""Charts by depth: speedup, cost of a round, acceptance by position, marginal gain; and speedup by workload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from components.policy import AcceptanceSummary, MeasuredArm, StopChoice
from components.report.charts.svg import Point, Series, bar_chart, line_chart
from components.rows import CostCell, DepthChoice, DepthEval

PLAIN = Series("plain", "ink", "level", [Point(0, 1.0)])
"""Plain decoding, the unit of speedups."""


def speedup_chart(evals: Sequence[DepthEval], arms: Sequence[MeasuredArm], choice: DepthChoice) -> str:
    """Predicted (line and band) and measured (dots) speedup at each depth, plain decoding and prompt lookup."""
    series = speedup_series(((e.depth_k, e) for e in evals), "line")
    same = [a for a in arms if a.method == "ngram" and a.batch_size == choice.batch_size]
    lookup = max((a.speedup for a in same), default=None)
    if lookup is not None:
        series.append(Series("prompt lookup", "other", "level", [Point(0, lookup)]))
    series.append(PLAIN)
    return line_chart(series, "draft depth k", "speedup by draft depth", marked_x=choice.depth_k, unit="x")


def cost_chart(evals: Sequence[DepthEval], cells: Sequence[CostCell], choice: DepthChoice) -> str:
    """Times of verifying, drafting and both by depth, with the spread over timing blocks, and one plain step.

    cells: of this drafter's chains at the batch size of the choice; [] draws only the medians.
    """
    drafted = [e for e in evals if e.depth_k]
    blocks = {phase: _block_times([c for c in cells if c.phase == phase]) for phase in ("verify", "draft")}

    def points(phase: str, name: str) -> list[Point]:
        medians = []
        for e in drafted:
            times = blocks[phase].get(e.depth_k, [])
            several = len(times) > 1
            medians.append(
                Point(e.depth_k, getattr(e, name), min(times) if several else None, max(times) if several else None)
            )
        return medians

    both = [Point(e.depth_k, e.t_verify_ms + e.t_draft_ms) for e in drafted]
    series = [
        Series("verify + draft", "ink", "line", both),
        Series("verify", "pred", "line", points("verify", "t_verify_ms")),
        Series("draft", "meas", "line", points("draft", "t_draft_ms")),
        Series("one plain step", "other", "level", [Point(0, drafted[0].t_target_ms if drafted else 0.0)]),
    ]
    return line_chart(series, "draft depth k", "cost of a round by draft depth", choice.depth_k or None, " ms", True)


def speedup_series(
    rows: Iterable[tuple[float, DepthEval | DepthChoice]], style: str, aside: float = 0.0
) -> list[Series]:
    """Predicted speedups and, as dots, those that were measured. rows: (x, row); aside: how far each kind is off x."""
    rows = list(rows)
    predicted = [Point(x - aside, row.speedup_pred, row.pred_lo, row.pred_hi) for x, row in rows]
    measured = [
        Point(x + aside, row.speedup_meas, row.meas_lo, row.meas_hi) for x, row in rows if row.speedup_meas is not None
    ]
    dots = [Series("measured", "meas", "dots", measured)] if measured else []
    return [Series("predicted", "pred", style, predicted), *dots]


def _block_times(cells: Sequence[CostCell]) -> dict[int, list[float]]:
    """Depth -> the time in ms of each timing block, the median over context lengths."""
    blocks: dict[tuple[int, int], list[float]] = {}
    for c in cells:
        blocks.setdefault((c.depth_k, c.block), []).append(c.median_ns / 1e6)
    by_depth: dict[int, list[float]] = {}
    for (depth, _), times in sorted(blocks.items()):
        by_depth.setdefault(depth, []).append(median(times))
    return by_depth


def acceptance_chart(summary: AcceptanceSummary) -> str:
    """How often the i-th draft token is kept: of all uncut rounds, and of those in which all before it were kept."""
    rounds = summary.reached[0] if summary.reached else 0
    pairs = list(zip(summary.reached, summary.kept, strict=True))
    conditional = [
        Point(i, 100 * num_kept / num_reached)
        for i, (num_reached, num_kept) in enumerate(pairs, start=1)
        if num_reached
    ]
    joint = [Point(i, 100 * num_kept / rounds) for i, (_, num_kept) in enumerate(pairs, start=1) if rounds]
    series = [
        Series("kept, given those before", "pred", "line", conditional or [Point(1, 0.0)]),
        Series("kept, of all uncut rounds", "meas", "line", joint or [Point(1, 0.0)]),
    ]
    return line_chart(
        series, f"position of the draft (rounds of depth {summary.depth_k})", "acceptance", unit=" %", from_zero=True
    )


def reliability_chart(stop: StopChoice) -> str:
    """Predicted beside observed acceptance of held-out draft tokens, in bins of as many tokens by prediction."""
    predicted, observed = (
        [Point(i, 100 * of_bin[which]) for i, of_bin in enumerate(stop.reliability)] for which in (0, 1)
    )
    return line_chart(
        [Series("predicted", "pred", "line", predicted), Series("observed", "meas", "dots", observed)],
        "draft tokens by predicted acceptance, a tenth each",
        "acceptance",
        unit=" %",
        from_zero=True,
        x_labels=[f"{of_bin[0]:.0%}" for of_bin in stop.reliability],
    )


def marginal_chart(evals: Sequence[DepthEval]) -> str:
    """The tokens and the time that the k-th draft token adds; it pays while gain exceeds cost."""
    drafted = [e for e in evals if e.depth_k]
    groups = [(str(e.depth_k), [e.marginal_gain, e.marginal_cost]) for e in drafted]
    return bar_chart(
        groups,
        [("tokens gained", "pred"), ("time added", "meas")],
        "draft depth k",
        "marginal gain against marginal cost",
    )


def workload_chart(choices: Sequence[DepthChoice]) -> str:
    """Predicted and measured speedup of each workload at the depth that it would choose, side by side."""
    series = [*speedup_series(enumerate(choices), "dots", aside=0.08), PLAIN]
    labels = [f"{c.workload} ({c.depth_k})" for c in choices]
    return line_chart(series, "workload (its depth)", "speedup by workload", unit="x", x_labels=labels)
