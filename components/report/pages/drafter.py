"""Step `report.write_page`: one self-contained page about a drafter, the verdict first, then every number behind it.

The page reads the depth policy (rows and policy.json) and counts the rows of the measuring steps; what was not measured
has no section. The text is in page.html.jinja, the style in style.css.jinja; charts and tables are also files.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from components.contract import Context, Conversations, DepthPolicy, Measurements, Page, Release, UserError
from components.html_pages import write_html
from components.outside_json import JsonObject
from components.policy import MeasuredArm, Mixture, Policy, judged_choice, read_policy, verdict_in_words
from components.release_record import read_release
from components.report.charts.depth import (
    acceptance_chart,
    cost_chart,
    marginal_chart,
    reliability_chart,
    speedup_chart,
    workload_chart,
)
from components.report.charts.export import write_pictures
from components.report.pages.training_data import trained_on
from components.report.summary import VERDICTS, origin_of, summarise
from components.report.tables import (
    arm_table,
    change_table,
    choice_table,
    comparison_table,
    context_table,
    depth_table,
    distinct_names,
    drafter_name,
    drift_table,
    edge_table,
    engine_table,
    evals_by_depth,
    flag_table,
    gate_table,
    method_title,
    ranking_table,
    sampled_table,
    stop_table,
    weights_table,
)
from components.rows import (
    ALL,
    AcceptanceChange,
    AcceptanceMap,
    CostCell,
    DepthChoice,
    DepthEval,
    Drift,
    EngineComparison,
    Request,
    read_rows,
)
from components.tables import Table
from components.text import kernel_in_words

CHANGE_TITLES = {"target": "The changed target", "tuning": "Tuning", "both": "Both together"}
SAMPLED_CHANGES = ("sampled", "sampled_tuned")


def write_page(
    policy: DepthPolicy,
    acceptance: list[Measurements],
    cost: list[Measurements],
    end_to_end: Measurements,
    release: Release | None,
    drift: Measurements | None,
    engines: Measurements | None,
    answers: list[Conversations] | None,
    *,
    title: str,
    ctx: Context,
) -> Page:
    """The step `report.write_page`; its settings are explained in components/report/steps.py."""
    facts = page_facts(policy, acceptance, cost, end_to_end, release, title)
    drifts = read_rows(drift.path, Drift) if drift is not None else []
    facts["drift"] = drift_table(drifts) if drifts else None
    changes = [row for source in acceptance for row in read_rows(source.path, AcceptanceChange)]
    sampled = [row for row in changes if row.what in SAMPLED_CHANGES]
    changes = [row for row in changes if row.what not in SAMPLED_CHANGES]
    facts["tuning"] = change_table(changes) if changes else None
    temperature = max((float(source.info.get("temperature", 0.0)) for source in acceptance), default=0.0)
    facts["sampled"] = sampled_table(sampled, temperature) if sampled else None
    facts["changed_target"] = any(row.what == "target" for row in changes)
    lines = [pair for source in acceptance for pair in source.info.get("change_lines", {}).items()]
    facts["change_lines"] = [(CHANGE_TITLES[what], line) for what, line in lines if what in CHANGE_TITLES]
    served = read_rows(engines.path, EngineComparison) if engines is not None else []
    facts["served"] = engine_table(served) if served else None
    facts["trained_on"] = trained_on(answers or [])
    size = write_html(ctx.out, Path(__file__).parent / "page.html.jinja", facts)
    write_pictures(ctx.out, charts_of(facts), tables_of(facts))
    return Page.of_step(ctx, {"title": title, "bytes": size, "verdict": facts["verdict"]})


def page_facts(
    policy: DepthPolicy,
    acceptance: Sequence[Measurements],
    cost: Sequence[Measurements],
    end_to_end: Measurements,
    release: Release | None,
    title: str,
) -> JsonObject:
    """The variables of the template: texts, tables and charts."""
    content = read_policy(policy.path)
    choices, evals, roles = content.choices, content.evals, content.roles
    cells = [cell for source in cost for cell in read_rows(source.path, CostCell)]
    if not choices or not evals:
        raise UserError(
            f"policy ({policy.key[:12]}): no depth_choice or depth_eval rows; run speedup.choose_depth again"
        )
    info = dict(policy.info)
    requests = read_rows(end_to_end.path, Request)
    arms = [a for a in content.arms if a.workload == ALL]
    judged = judged_choice(content)
    winner_first = sorted(
        (c for c in choices if c.workload == ALL),
        key=lambda c: (judged is None or judged.draft_key != c.draft_key, c.method, c.batch_size),
    )
    best = winner_first[0] if winner_first else choices[0]
    by_workload = [c for c in choices if (c.draft_key, c.batch_size) == (best.draft_key, best.batch_size)]
    return {
        "title": title,
        "origin": origin_of(content.target_model, content.target_key, end_to_end),
        "verdict": content.verdict,
        "winner": content.winner,
        "verdict_word": VERDICTS.get(content.verdict, content.verdict),
        "sentence": verdict_in_words(info),
        "reasons": content.reasons,
        "summary": summarise(info, release.info if release is not None else None),
        "drafters": [drafter_facts(c, evals, content, arms, cells) for c in winner_first],
        "choices": choice_table(choices, content.winner, roles),
        "workload_chart": workload_chart(by_workload) if len(by_workload) > 2 else "",
        "mixtures": [_describe_mixture(mixture) for mixture in content.mixtures],
        "edge": edge_table(winner_first, evals, roles),
        "contexts": choice_table(content.contexts, None, roles) if content.contexts else None,
        "by_context": _context_table(content, winner_first),
        "ranking": ranking_table(content.ranking),
        "cost_grids": cost_grid(cells, {c.draft_key: c.depth_k for c in reversed(winner_first)}),
        "prefill": prefill_table(cells),
        "engines": _engine_lines(release) if release is not None else [],
        "comparisons": comparison_table(content.comparisons) if content.comparisons else None,
        "stops": stop_table(content.stops, roles) if content.stops else None,
        "reliability": [(s.method, s.draft_key, s.batch_size, reliability_chart(s)) for s in content.stops],
        "weights": weights_table(content.weights),
        "arms": arm_table(arms, roles) if arms else None,
        "arms_by_workload": arm_table([a for a in content.arms if a.workload != ALL], roles) if content.arms else None,
        "gate": content.gate,
        "gate_table": gate_table(content.gate) if content.gate else None,
        "flags": flag_table(content.flags) if content.flags else None,
        "num_prompts_left_out": end_to_end.info.get("num_prompts_left_out", 0),
        "generation_remark": end_to_end.info.get("generation_remark", ""),
        "rule": content.rule,
        "dtype": content.dtype,
        "kernel": kernel_in_words(content.kernel),
        "counts": _count_rows(acceptance, cells, requests),
        "keys": _key_table(policy, acceptance, cost, end_to_end, release, content),
    }


def _context_table(content: Policy, choices: Sequence[DepthChoice]) -> Table | None:
    """Acceptance by context length, each drafter at its chosen depth; None in policies from before it was counted."""
    depths = {choice.draft_key: choice.depth_k for choice in reversed(choices)}
    return context_table(content.acceptance_by_context, depths) if content.acceptance_by_context else None


def drafter_facts(
    choice: DepthChoice,
    evals: Sequence[DepthEval],
    content: Policy,
    arms: Sequence[MeasuredArm],
    cells: Sequence[CostCell],
) -> JsonObject:
    """One drafter at one batch size: its table and its charts."""
    by_depth = evals_by_depth(choice, evals)
    positions = [a for a in content.acceptance if a.draft_key == choice.draft_key and a.workload == ALL]
    deepest = max(positions, key=lambda a: a.depth_k)
    host = [r for r in content.rounds if (r.draft_key, r.batch_size) == (choice.draft_key, choice.batch_size)]
    timed = [
        c for c in cells if (c.draft_key, c.batch_size, c.tree_budget) == (choice.draft_key, choice.batch_size, None)
    ]
    return {
        "name": drafter_name(method_title(choice.method), choice.draft_key, content.roles),
        "choice": choice,
        "won": bool(content.winner and content.winner.draft_key == choice.draft_key),
        "table": depth_table(by_depth, choice.depth_k),
        "speedup_chart": speedup_chart(by_depth, arms, choice),
        "cost_chart": cost_chart(by_depth, timed, choice),
        "acceptance_chart": acceptance_chart(deepest),
        "marginal_chart": marginal_chart(by_depth),
        "conventions": next((a for a in positions if choice.depth_k and a.depth_k == choice.depth_k), deepest),
        # The formula without host time, for comparison where the prediction includes it.
        "bare": next(e.al / e.cost_ratio for e in by_depth if e.depth_k == choice.depth_k),
        "host": [(r.depth_k, r.t_host_ms) for r in host if r.t_host_ms is not None],
        "coverage": sorted({a.num_prompts for a in arms if a.draft_key == choice.draft_key}),
    }


def charts_of(facts: JsonObject) -> dict[str, str]:
    """File name -> chart, for every chart of the page."""
    charts = {"speedup-by-workload": facts["workload_chart"]} if facts["workload_chart"] else {}
    for d in facts["drafters"]:
        name = f"{d['choice'].method}-{d['choice'].draft_key[:8]}-batch-{d['choice'].batch_size}"
        for kind in ("speedup", "cost", "acceptance", "marginal"):
            charts[f"{name}-{kind}"] = d[f"{kind}_chart"]
    for method, draft_key, batch_size, chart in facts["reliability"]:
        charts[f"{method}-{draft_key[:8]}-batch-{batch_size}-reliability"] = chart
    return charts


def tables_of(facts: JsonObject) -> list[tuple[str, Table | None]]:
    """(file name, table) of every table of the page; None for a table without rows."""
    names = "choices edge contexts ranking cost_grids prefill comparisons tuning sampled weights drift served arms"
    named = (*names.split(), "stops", "by_context", "arms_by_workload", "gate_table", "flags")
    tables = [(name.replace("_", "-"), facts[name]) for name in named]
    for d in facts["drafters"]:
        batch = f"batch-{d['choice'].batch_size}"
        tables.append((f"depths-{d['choice'].method}-{d['choice'].draft_key[:8]}-{batch}", d["table"]))
    return tables


def _count_rows(
    acceptance: Sequence[Measurements], cells: Sequence[CostCell], requests: Sequence[Request]
) -> dict[str, int]:
    """Kind of row -> number of rows behind the page."""
    return {
        "acceptance maps": sum(len(read_rows(m.path, AcceptanceMap)) for m in acceptance),
        "cost cells": len(cells),
        "timed requests": sum(not r.is_warmup for r in requests),
        "warm-up requests": sum(r.is_warmup for r in requests),
        "failed requests": sum(r.status == "error" for r in requests),
    }


def _describe_mixture(mixture: Mixture) -> str:
    """One depth for several workloads, in a sentence (policy.json: mixtures)."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in mixture.shares.items())
    apart = ", ".join(f"{name} {depth}" for name, depth in mixture.depths_apart.items())
    whose = "the stated mixture" if mixture.stated else "the measured mixture"
    return (
        f"{method_title(mixture.method)}, batch {mixture.batch_size}: one depth for {whose} "
        f"({shares}) is {mixture.depth_k}, predicted {mixture.speedup_pred:.2f}x [{mixture.pred_lo:.2f}, "
        f"{mixture.pred_hi:.2f}]. Each workload at its own ({apart}) would give "
        f"{mixture.speedup_apart:.2f}x: one depth for all loses {100 * mixture.loss:.1f} %."
    )


def _engine_lines(release: Release) -> list[str]:
    """One line for each engine that can load the release, to copy (release.json: engines)."""
    engines = read_release(release.path)["engines"]
    lines = []
    for name, settings in engines.items():
        if isinstance(settings, Mapping):
            kind, value = next(iter(settings.items()))
            words = shlex.join(value) if kind == "flags" else f"{kind} {json.dumps(value)}"
            lines.append(f"{name}: {words}")
    return lines


def _key_table(
    policy: DepthPolicy,
    acceptance: Sequence[Measurements],
    cost: Sequence[Measurements],
    end_to_end: Measurements,
    release: Release | None,
    content: Policy,
) -> Table:
    """The keys of all artifacts behind the page."""
    drafts = {(c.method, c.draft_key) for c in content.choices}
    keys = [
        ("target", content.target_key),
        *((f"drafter {method}", key) for method, key in sorted(drafts)),
        *(("acceptance", m.key) for m in acceptance),
        *(("step cost", m.key) for m in cost),
        ("selection", content.selection_id),
        ("end to end", end_to_end.key),
        ("depth policy", policy.key),
        *([("release", release.key)] if release is not None else []),
    ]
    return Table(["artifact", "key"], [list(pair) for pair in keys])


def cost_grid(cells: Sequence[CostCell], depths_to_show: Mapping[str, int]) -> Table | None:
    """One line for each drafter, batch size and context length; None where only one pair of these was measured.

    depths_to_show: draft_key -> the chosen depth; where that was not measured, the shallowest measured depth is shown.
    """
    chains = [c for c in cells if c.tree_budget is None]
    sizes = sorted({(c.batch_size, c.kv_len) for c in chains if c.phase == "verify"})
    if len(sizes) < 2:
        return None
    times: dict[tuple[str, str, int, int, int], list[float]] = defaultdict(list)
    for c in chains:
        times[c.draft_key, c.phase, c.depth_k, c.batch_size, c.kv_len].append(c.median_ns / 1e6)
    drafters = sorted({(c.method, c.draft_key) for c in chains if c.phase == "verify"})
    rows = []
    for method, key in drafters:
        depths = sorted({c.depth_k for c in chains if c.draft_key == key and c.phase == "verify"})
        depth = depths_to_show.get(key) if depths_to_show.get(key) in depths else depths[0]
        assert depth is not None
        for batch, kv_len in sizes:
            cell = [times.get((key, phase, k, batch, kv_len)) for phase, k in (("verify", depth), ("draft", depth))]
            plain = times.get((key, "target_step", 0, batch, kv_len)) or times.get(
                ("", "target_step", 0, batch, kv_len)
            )
            if cell[0] is None or cell[1] is None or plain is None:
                continue
            verify, draft, target = median(cell[0]), median(cell[1]), median(plain)
            ratio = (verify + draft) / target
            numbers = [f"{target:.3g}", f"{verify:.3g}", f"{draft:.3g}", f"{ratio:.2f}"]
            rows.append([method, str(batch), str(kv_len), str(depth), *numbers])
    return (
        Table(["drafter", "batch", "context", "depth", "T_target", "T_verify", "T_draft", "cost"], rows)
        if rows
        else None
    )


def prefill_table(cells: Sequence[CostCell]) -> Table | None:
    """Time of the prefill by prompt length; None where it was not measured."""
    groups: dict[tuple[str, str, str, int, int], list[float]] = defaultdict(list)
    for c in cells:
        if c.phase in ("prefill", "draft_prefill"):
            groups[c.method, c.draft_key, c.phase, c.batch_size, c.num_rows].append(c.median_ns / 1e6)
    names = distinct_names((method, key) for method, key, *_ in groups)
    words = {"prefill": "the target's pass over the prompt", "draft_prefill": "the drafter's intake and first proposal"}
    table = Table.of(
        sorted(groups.items(), key=lambda item: (item[0][2], item[0])),
        {
            "drafter": lambda item: names[item[0][:2]] or "-",
            "what": lambda item: words[item[0][2]],
            "batch": lambda item: str(item[0][3]),
            "prompt tokens": lambda item: str(item[0][4]),
            "median ms": lambda item: f"{median(item[1]):.3g}",
            "blocks": lambda item: str(len(item[1])),
        },
    )
    return table if groups else None
