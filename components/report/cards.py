"""Markdown of measurements and decisions for the Prefect UI: tables, and charts as data URIs.

The UI renders GitHub's Markdown in a page of its own, so a chart contains its colours and is embedded in an image
address: nothing is fetched. Every number in a chart is also in a table beside it.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from components.contract import DepthPolicy, Measurements, Page
from components.definitions import accept_joint_everywhere, tokens_per_s
from components.report.depth_charts import acceptance_chart, cost_chart, marginal_chart, speedup_chart, workload_chart
from components.report.engine_tables import engine_table
from components.report.languages import language_table
from components.report.pictures import as_image, picture
from components.report.tables import (
    Table,
    arm_table,
    chain_or_tree,
    choice_table,
    comparison_table,
    depth_table,
    distinct_names,
    drafter_name,
    drift_table,
    edge_table,
    evals_by_depth,
    flag_table,
    gate_table,
    kernel_name,
)
from components.report.weights_tables import weights_table
from components.rows import (
    ALL,
    AcceptanceByLanguage,
    AcceptanceMap,
    CostCell,
    DepthChoice,
    DepthEval,
    Drift,
    EngineComparison,
    PairedComparison,
    QualityFlag,
    Request,
    read_rows,
)

# An artifact's page is narrow, so the table of depths is shown in two parts.
SPEED = ("depth", "AL", "predicted", "measured", "P(best)", "regret")
COST = ("depth", "T_target", "T_verify", "T_draft", "cost", "gain", "cost added")


def decision_card(policy: DepthPolicy) -> str:
    """The depth decision: choices, every depth, charts, measured arms and the promotion gate."""
    file = policy.path / "policy.json"
    raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    every_choice = read_rows(policy.path, DepthChoice)
    choices = [c for c in every_choice if c.kv_len is None]
    contexts = [c for c in every_choice if c.kv_len is not None]
    evals = [e for e in read_rows(policy.path, DepthEval) if e.tree_budget is None]
    arms = [arm for arm in raw.get("arms") or [] if arm["workload"] == ALL]
    roles = raw.get("roles") or {}
    parts = [choice_table(choices, raw.get("winner"), roles).markdown()]
    if comparisons := read_rows(policy.path, PairedComparison):
        parts += ["### challenger against champion\n", comparison_table(comparisons).markdown()]
    if weights := weights_table(raw.get("weights") or []):
        parts += ["### weights in fewer bits\n", weights.markdown()]
    if contexts:
        parts += ["### by context length\n", choice_table(contexts, None, roles).markdown()]
    if edge := edge_table(choices, evals, roles):
        parts += ["### the usual settings, 3 and 7 drafts\n", edge.markdown()]
    for choice in choices:
        if choice.workload != ALL:
            continue
        of_drafter = [c for c in choices if (c.draft_key, c.batch_size) == (choice.draft_key, choice.batch_size)]
        by_depth = evals_by_depth(choice, evals)
        parts.append(f"### {drafter_name(choice.method, choice.draft_key, roles)}, batch {choice.batch_size}\n")
        table = depth_table(by_depth, choice.depth_k)
        parts += [_select_columns(table, SPEED).markdown(), _select_columns(table, COST).markdown()]
        parts.append(picture(speedup_chart(by_depth, arms, choice), f"{choice.method}: speedup by depth"))
        parts.append(picture(cost_chart(by_depth, [], choice), f"{choice.method}: what a round costs"))
        if len(of_drafter) > 2:
            parts.append(picture(workload_chart(of_drafter), f"{choice.method}: speedup by workload"))
        parts.append(picture(marginal_chart(by_depth), f"{choice.method}: does one more draft pay?"))
        maps = raw.get("acceptance") or []
        summaries = [a for a in maps if a["draft_key"] == choice.draft_key and a["workload"] == ALL]
        if summaries:
            deepest = max(summaries, key=lambda a: a["depth_k"])
            parts.append(picture(acceptance_chart(deepest), f"{choice.method}: how often the i-th draft is kept"))
    if arms:
        parts += ["### measured end to end\n", arm_table(arms, roles).markdown()]
    if raw.get("gate"):
        parts += ["### promotion gate\n", gate_table(raw["gate"]).markdown()]
    return "\n".join(parts)


def measurements_card(measured: Measurements) -> str:
    """Tables of the rows of a Measurements artifact; "" when it has none with a table."""
    parts = []
    if drifts := read_rows(measured.path, Drift):
        parts += ["### has the traffic drifted?\n", drift_table(drifts).markdown()]
    if by_language := read_rows(measured.path, AcceptanceByLanguage):
        parts += ["### acceptance by language\n", language_table(by_language).markdown()]
    if served := read_rows(measured.path, EngineComparison):
        parts += ["### served by engines\n", engine_table(served).markdown()]
    if maps := read_rows(measured.path, AcceptanceMap):
        parts += ["### acceptance\n", acceptance_table(maps).markdown()]
    if cells := read_rows(measured.path, CostCell):
        parts += ["### cost of a step\n", cost_table(cells).markdown()]
    if requests := [r for r in read_rows(measured.path, Request) if not r.is_warmup]:
        parts += ["### speed end to end\n", speed_table(requests).markdown()]
    if flags := read_rows(measured.path, QualityFlag):
        parts += ["### reasons to doubt\n", flag_table(flags).markdown()]
    return "\n".join(parts)


def page_card(page: Page) -> str:
    """The table and the chart of a page that compares methods or languages; "" for other pages."""
    for name in ("methods", "languages"):
        chart, table = page.path / "charts" / f"{name}.svg", page.path / "tables" / f"{name}.csv"
        if chart.is_file() and table.is_file():
            with table.open(encoding="utf-8", newline="") as file:
                header, *rows = list(csv.reader(file))
            drawn = as_image(chart.read_text(encoding="utf-8"), f"{name} side by side")
            return Table(header, rows).markdown() + "\n" + drawn
    return ""


def acceptance_table(maps: Sequence[AcceptanceMap]) -> Table:
    """For each drafter and workload: how many draft tokens in a row are kept, over all positions of all prompts.

    The accepted length at a position is the longest run of draft tokens that the target would keep there, at most
    k_max. Maps of trees are left out, because a kept path of a tree is no run of one draft.
    """
    groups: dict[tuple[str, str], list[AcceptanceMap]] = defaultdict(list)
    for row in (m for m in maps if m.tree_budget is None):
        groups[row.method, row.workload].append(row)
        groups[row.method, ALL].append(row)
    rows = []
    for (method, workload), some in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] != ALL, item[0])):
        lengths = [length for row in some for length in row.accepted[: row.num_tokens - 1]]
        shares_kept = [accept_joint_everywhere(lengths, position) for position in (1, 2, 3)]
        shares = ["-" if share is None else f"{share:.0%}" for share in shares_kept]
        mean = f"{sum(lengths) / len(lengths):.2f}" if lengths else "-"
        rows.append([method, workload, str(len(some)), str(len(lengths)), mean, *shares])
    header = ["drafter", "workload", "prompts", "places", "kept in a row (mean)", ">= 1 kept", ">= 2 kept", ">= 3 kept"]
    return Table(header, rows)


def cost_table(cells: Sequence[CostCell]) -> Table:
    """Median time in ms of each phase at each depth, over the measured context lengths and blocks."""
    groups: dict[tuple[str, str, int, int, int], list[float]] = defaultdict(list)  # a tree's budget, 0 for a chain
    for cell in cells:
        arm = (cell.method, cell.phase, cell.batch_size, cell.tree_budget or 0, cell.depth_k)
        groups[arm].append(cell.median_ns / 1e6)
    trees = any(budget for *_, budget, _ in groups)
    rows = [
        [
            method or "-",
            phase.replace("_", " "),
            str(batch),
            *([chain_or_tree(budget or None)] if trees else []),
            str(depth),
            f"{median(times):.2f}",
            str(len(times)),
        ]
        for (method, phase, batch, budget, depth), times in sorted(groups.items())
    ]
    header = ["drafter", "phase", "batch", *(["shape"] if trees else []), "depth", "median ms", "cells"]
    return Table(header, rows)


def speed_table(requests: Sequence[Request]) -> Table:
    """For each arm: tokens a second over its timed requests, and how many outputs equal plain decoding's.

    Shape and batch size have a column only where arms differ in them.
    """
    groups: dict[tuple[str, str, int, int, int, str, str], list[Request]] = defaultdict(list)
    for r in requests:
        arm = (r.method, r.draft_key, r.tree_budget or 0, r.batch_size, r.depth_k, r.kernel, r.dtype)
        groups[arm].append(r)
    trees, batches = any(arm[2] for arm in groups), {arm[3] for arm in groups}
    names = distinct_names((method, key) for method, key, *_ in groups)
    rows = []
    for (method, draft_key, budget, batch, depth, kernel, dtype), some in sorted(groups.items()):
        tokens_a_second = tokens_per_s(some)
        speed = "-" if tokens_a_second is None else f"{tokens_a_second:.1f}"
        compared = [r for r in some if r.identical is not None]
        same = f"{sum(bool(r.identical) for r in compared)} of {len(compared)}" if compared else "-"
        failed = sum(r.status == "error" for r in some)
        rows.append(
            [
                "plain" if method == "none" else names[method, draft_key],
                *([chain_or_tree(budget or None)] if trees else []),
                *([str(batch)] if len(batches) > 1 else []),
                str(depth),
                kernel_name(kernel),
                dtype,
                str(len(some)),
                speed,
                same,
                str(failed),
            ]
        )
    varying = [*(["shape"] if trees else []), *(["batch"] if len(batches) > 1 else [])]
    header = ["arm", *varying, "depth", "kernel", "dtype", "requests", "tokens/s", "same tokens as plain", "failed"]
    return Table(header, rows)


def _select_columns(table: Table, names: Sequence[str]) -> Table:
    places = [table.header.index(name) for name in names]
    return Table(list(names), [[row[place] for place in places] for row in table.rows], table.stressed)
