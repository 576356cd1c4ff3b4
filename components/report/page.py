"""One self-contained page about a drafter: verdict first, then every number behind it, nothing loaded from elsewhere.

The page reads the depth policy (rows and policy.json) and counts what the measuring steps stored; words and looks stand
in page.html.jinja, charts in charts.py, tables in tables.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from components.contract import Context, DepthPolicy, Measurements, Page, Release, UserError
from components.report.charts import Point, Series, bar_chart, line_chart
from components.report.summary import VERDICTS, summarise, verdict_in_words
from components.report.tables import (
    arm_table,
    choice_table,
    comparison_table,
    depth_table,
    drift_table,
    flag_table,
    gate_table,
    named,
)
from components.rows import (
    AcceptanceMap,
    CostCell,
    DepthChoice,
    DepthEval,
    Drift,
    PairedComparison,
    QualityFlag,
    Request,
    read_rows,
)

ALL = "all"
NAMES = {"eagle3": "EAGLE-3", "mtp": "MTP", "ngram": "prompt lookup"}


def write_page(
    policy: DepthPolicy,
    acceptance: list[Measurements],
    cost: list[Measurements],
    end_to_end: Measurements,
    release: Release,
    drift: Measurements | None = None,
    *,
    title: Annotated[str, Field(min_length=1, max_length=200)] = "Draft depth report",
    ctx: Context,
) -> Page:
    """Write index.html.

    Args:
        policy: chosen depths with predicted and measured speedups, and the promotion gate.
        acceptance: acceptance maps of the drafters; counted on the page.
        cost: step times of the drafters; counted on the page.
        end_to_end: the timed comparison; counted on the page.
        release: what was exported.
        drift: acceptance of the champion on new traffic against that at its release.
        title: the heading of the page.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    facts = page_facts(policy, acceptance, cost, end_to_end, release, title)
    drifts = read_rows(drift.path, Drift) if drift is not None else []
    facts["drift"] = drift_table(drifts) if drifts else None
    text = environment.get_template("page.html.jinja").render(facts)
    (ctx.out / "index.html").write_text(text, encoding="utf-8")
    return Page.made(ctx, {"title": title, "bytes": len(text.encode()), "verdict": facts["verdict"]})


def page_facts(
    policy: DepthPolicy,
    acceptance: Sequence[Measurements],
    cost: Sequence[Measurements],
    end_to_end: Measurements,
    release: Release,
    title: str,
) -> dict[str, Any]:
    """What the template is given: words, tables and charts."""
    file = policy.path / "policy.json"
    if not file.is_file():
        raise UserError(f"policy ({policy.key[:12]}): no policy.json; wire speedup.confirm_depth into `policy`")
    raw = json.loads(file.read_text(encoding="utf-8"))
    choices = read_rows(policy.path, DepthChoice)
    evals = read_rows(policy.path, DepthEval)
    flags = read_rows(policy.path, QualityFlag)
    comparisons = read_rows(policy.path, PairedComparison)
    roles = raw["roles"]
    if not choices or not evals:
        raise UserError(
            f"policy ({policy.key[:12]}): no depth_choice or depth_eval rows; run speedup.choose_depth again"
        )
    info = dict(policy.info)
    requests = read_rows(end_to_end.path, Request)
    arms = [a for a in raw["arms"] if a["workload"] == ALL]
    winner_first = sorted(
        (c for c in choices if c.workload == ALL),
        key=lambda c: (not (raw["winner"] and raw["winner"]["draft_key"] == c.draft_key), c.method, c.batch_size),
    )
    return {
        "title": title,
        "verdict": raw["verdict"],
        "verdict_word": VERDICTS.get(raw["verdict"], raw["verdict"]),
        "sentence": verdict_in_words(info),
        "reasons": raw["reasons"],
        "summary": summarise(info, release.info),
        "drafters": [drafter_facts(c, evals, raw, arms) for c in winner_first],
        "choices": choice_table(choices, raw["winner"], roles),
        "comparisons": comparison_table(comparisons) if comparisons else None,
        "arms": arm_table(arms, roles) if arms else None,
        "arms_by_workload": arm_table([a for a in raw["arms"] if a["workload"] != ALL], roles) if raw["arms"] else None,
        "gate": raw["gate"],
        "gate_table": gate_table(raw["gate"]) if raw["gate"] else None,
        "flags": flag_table(flags) if flags else None,
        "rule": raw["rule"],
        "dtype": raw["dtype"],
        "kernel": raw["kernel"],
        "counts": {
            "acceptance maps": sum(len(read_rows(m.path, AcceptanceMap)) for m in acceptance),
            "cost cells": sum(len(read_rows(m.path, CostCell)) for m in cost),
            "timed requests": sum(not r.is_warmup for r in requests),
            "warm-up requests": sum(r.is_warmup for r in requests),
            "failed requests": sum(r.status == "error" for r in requests),
        },
        "keys": _keys(policy, acceptance, cost, end_to_end, release, raw),
    }


def drafter_facts(
    choice: DepthChoice, evals: Sequence[DepthEval], raw: dict[str, Any], arms: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """One drafter at one batch size: its table and its charts."""
    mine = sorted(
        (e for e in evals if (e.draft_key, e.workload, e.batch_size) == (choice.draft_key, ALL, choice.batch_size)),
        key=lambda e: e.depth_k,
    )
    positions = [a for a in raw["acceptance"] if a["draft_key"] == choice.draft_key and a["workload"] == ALL]
    deepest = max(positions, key=lambda a: a["depth_k"])
    host = [r for r in raw["rounds"] if (r["draft_key"], r["batch_size"]) == (choice.draft_key, choice.batch_size)]
    return {
        "name": named(NAMES.get(choice.method, choice.method), choice.draft_key, raw["roles"]),
        "choice": choice,
        "won": bool(raw["winner"] and raw["winner"]["draft_key"] == choice.draft_key),
        "table": depth_table(mine, choice.depth_k),
        "speedup_chart": speedup_chart(mine, arms, choice),
        "acceptance_chart": acceptance_chart(deepest),
        "marginal_chart": marginal_chart(mine),
        "conventions": deepest if not choice.depth_k else _at(positions, choice.depth_k),
        # The formula alone, for comparison where host time is part of the prediction.
        "bare": next(e.al / e.cost_ratio for e in mine if e.depth_k == choice.depth_k),
        "host": [(r["depth_k"], r["t_host_ms"]) for r in host if r["t_host_ms"] is not None],
        "coverage": sorted({a["num_prompts"] for a in arms if a["draft_key"] == choice.draft_key}),
    }


def _at(positions: Sequence[dict[str, Any]], depth: int) -> dict[str, Any]:
    return next(a for a in positions if a["depth_k"] == depth)


def speedup_chart(evals: Sequence[DepthEval], arms: Sequence[dict[str, Any]], choice: DepthChoice) -> str:
    """Predicted (line and band) and measured (dots) speedup at each depth, plain decoding and prompt lookup."""
    measured = [Point(e.depth_k, e.speedup_meas, e.meas_lo, e.meas_hi) for e in evals if e.speedup_meas is not None]
    series = [
        Series("predicted", "pred", "line", [Point(e.depth_k, e.speedup_pred, e.pred_lo, e.pred_hi) for e in evals])
    ]
    if measured:
        series.append(Series("measured", "meas", "dots", measured))
    lookup = max((a["speedup"] for a in arms if a["method"] == "ngram"), default=None)
    if lookup is not None:
        series.append(Series("prompt lookup", "other", "level", [Point(0, lookup)]))
    series.append(Series("plain", "ink", "level", [Point(0, 1.0)]))
    return line_chart(series, "draft depth k", "speedup by draft depth", marked_x=choice.depth_k, unit="x")


def acceptance_chart(summary: dict[str, Any]) -> str:
    """How often the i-th draft is kept: of all rounds, and of rounds in which the drafts before it were kept."""
    rounds = summary["reached"][0] if summary["reached"] else 0
    pairs = list(zip(summary["reached"], summary["kept"], strict=True))
    given = [Point(i, 100 * kept / reached) for i, (reached, kept) in enumerate(pairs, start=1) if reached]
    joint = [Point(i, 100 * kept / rounds) for i, (_, kept) in enumerate(pairs, start=1) if rounds]
    series = [
        Series("kept, given those before", "pred", "line", given or [Point(1, 0.0)]),
        Series("kept, of all rounds", "meas", "line", joint or [Point(1, 0.0)]),
    ]
    return line_chart(
        series, f"position of the draft (rounds of depth {summary['depth_k']})", "acceptance", unit=" %", from_zero=True
    )


def marginal_chart(evals: Sequence[DepthEval]) -> str:
    """What the k-th draft adds in tokens and in time; it pays while gain exceeds cost."""
    drafted = [e for e in evals if e.depth_k]
    groups = [(str(e.depth_k), [e.marginal_gain, e.marginal_cost]) for e in drafted]
    return bar_chart(
        groups,
        [("tokens gained", "pred"), ("time added", "meas")],
        "draft depth k",
        "marginal gain against marginal cost",
    )


def _keys(
    policy: DepthPolicy,
    acceptance: Sequence[Measurements],
    cost: Sequence[Measurements],
    end_to_end: Measurements,
    release: Release,
    raw: dict[str, Any],
) -> list[tuple[str, str]]:
    """Where every number comes from: (artifact, key)."""
    drafts = {(c["method"], c["draft_key"]) for c in raw["choices"]}
    return [
        ("target", raw["target_key"]),
        *((f"drafter {method}", key) for method, key in sorted(drafts)),
        *(("acceptance", m.key) for m in acceptance),
        *(("step cost", m.key) for m in cost),
        ("selection", raw["selection_id"]),
        ("end to end", end_to_end.key),
        ("depth policy", policy.key),
        ("release", release.key),
    ]
