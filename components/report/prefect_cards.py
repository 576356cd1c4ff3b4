"""Markdown for the Prefect UI: of decisions and measurements, of datasets, and of answers with their training mask.

The UI renders GitHub's Markdown in a page of its own, so a chart contains its colours and is embedded in an image
address: nothing is fetched. Every number in a chart is also in a table beside it.

Counts of datasets come from the artifacts' info; no rows are read again. Names and excerpts are untrusted. Markdown has
no colours, so a black square in a table marks the pieces of a chat that are trained on; `sample.html` beside the shards
has colours.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from components.chat_sample import SAMPLE, SampleRow, read_sample_rows
from components.contract import Chats, Conversations, DepthPolicy, Measurements, Page, Prompts
from components.definitions import accept_joint_everywhere, tokens_per_s
from components.outside_json import JsonObject
from components.policy import Policy, judged_choice, policy_in, verdict_in_words
from components.refusals import remedy
from components.report.charts.depth import acceptance_chart, cost_chart, marginal_chart, speedup_chart, workload_chart
from components.report.charts.export import as_image, picture
from components.report.pages.languages import language_table
from components.report.summary import summarise
from components.report.tables import (
    arm_table,
    chain_or_tree,
    change_table,
    choice_table,
    comparison_table,
    depth_table,
    distinct_names,
    drafter_name,
    drift_table,
    edge_table,
    engine_table,
    evals_by_depth,
    flag_table,
    gate_table,
    kernel_name,
    weights_table,
)
from components.rows import (
    ALL,
    AcceptanceByLanguage,
    AcceptanceChange,
    AcceptanceMap,
    CostCell,
    Drift,
    EngineComparison,
    QualityFlag,
    Request,
    read_rows,
)
from components.tables import Table
from components.text import in_markdown

# An artifact's page is narrow, so the table of depths is shown in two parts.
SPEED = ("depth", "AL", "predicted", "measured", "P(best)", "regret")
FIRST_FACTS = (
    "drafter",
    "chosen depth",
    "acceptance length",
    "measured speedup",
    "predicted speedup",
    "token-identical",
    "against champion",
)
COST = ("depth", "T_target", "T_verify", "T_draft", "cost", "gain", "cost added")


def verdict_card(policy: DepthPolicy | None, became: Sequence[str], links: Sequence[tuple[str, str]]) -> str:
    """The first card of a run: verdict, links, chart, what the gate found, what became of the run.

    policy: the last decision of the run, None without one. became: lines about versions, notes, problems. links:
    (label, address), that work from another machine where the servers answer there.
    """
    info = policy.info if policy is not None else {}
    parts = [f"## {in_markdown(verdict_in_words(info))}"] if info.get("verdict") else []
    parts += [" · ".join(f"[{label}]({address})" for label, address in links)] if links else []
    if info.get("verdict"):
        told = summarise(info)
        rows = [[label, told[label]] for label in FIRST_FACTS if label in told]
        parts.append(Table(["", ""], rows).markdown())
    if policy is not None and (content := policy_in(policy.path)):
        parts += _served_chart(content)
        refused = [check for check in content.gate.checks if not check.passed] if content.gate else []
        if refused:
            rows = [[c.what(), c.measured(), c.asked(), remedy(c.name)] for c in refused]
            parts += ["### why the gate refuses", Table(["what", "measured", "asked", "what to do"], rows).markdown()]
    if became:
        parts += ["### what became of it", "\n".join(f"- {in_markdown(line)}" for line in became)]
    return "\n\n".join(parts)


def _served_chart(content: Policy) -> list[str]:
    """Speedup by depth of the drafter that the verdict is about; [] where no depth was judged."""
    choice = judged_choice(content)
    if choice is None:
        return []
    arms = [arm for arm in content.arms if arm.workload == ALL]
    chart = speedup_chart(evals_by_depth(choice, content.evals), arms, choice)
    return [picture(chart, f"{choice.method}: speedup by depth, predicted and measured")]


def decision_card(policy: DepthPolicy) -> str:
    """The depth decision: choices, every depth, charts, measured arms, the gate; "" where it is no policy of ours."""
    content = policy_in(policy.path)
    if content is None:
        return ""
    choices, evals, roles = content.choices, content.evals, content.roles
    arms = [arm for arm in content.arms if arm.workload == ALL]
    parts = [choice_table(choices, content.winner, roles).markdown()]
    if content.comparisons:
        parts += ["### challenger against champion\n", comparison_table(content.comparisons).markdown()]
    if weights := weights_table(content.weights):
        parts += ["### weights in fewer bits\n", weights.markdown()]
    if content.contexts:
        parts += ["### by context length\n", choice_table(content.contexts, None, roles).markdown()]
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
        summaries = [a for a in content.acceptance if a.draft_key == choice.draft_key and a.workload == ALL]
        if summaries:
            deepest = max(summaries, key=lambda a: a.depth_k)
            parts.append(picture(acceptance_chart(deepest), f"{choice.method}: how often the i-th draft is kept"))
    if arms:
        parts += ["### measured end to end\n", arm_table(arms, roles).markdown()]
    if content.gate:
        parts += ["### promotion gate\n", gate_table(content.gate).markdown()]
    return "\n".join(parts)


def measurements_card(measured: Measurements) -> str:
    """Tables of the rows of a Measurements artifact; "" when it has none with a table."""
    parts = []
    if drifts := read_rows(measured.path, Drift):
        parts += ["### has the traffic drifted?\n", drift_table(drifts).markdown()]
    if changes := read_rows(measured.path, AcceptanceChange):
        parts += ["### acceptance before and after\n", change_table(changes).markdown()]
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
    return Table.of(
        sorted(groups.items()),
        {
            "drafter": lambda item: item[0][0] or "-",
            "phase": lambda item: item[0][1].replace("_", " "),
            "batch": lambda item: str(item[0][2]),
            "shape": (lambda item: chain_or_tree(item[0][3] or None)) if trees else None,
            "depth": lambda item: str(item[0][4]),
            "median ms": lambda item: f"{median(item[1]):.2f}",
            "cells": lambda item: str(len(item[1])),
        },
    )


def speed_table(requests: Sequence[Request]) -> Table:
    """For each arm: tokens a second over its timed requests, and how many outputs equal plain decoding's.

    Shape and batch size have a column only where arms differ in them.
    """
    groups: dict[tuple[str, str, int, int, int, str, str], list[Request]] = defaultdict(list)
    for r in requests:
        groups[r.method, r.draft_key, r.tree_budget or 0, r.batch_size, r.depth_k, r.kernel, r.dtype].append(r)
    trees, batches = any(arm[2] for arm in groups), {arm[3] for arm in groups}
    names = distinct_names((method, key) for method, key, *_ in groups)
    return Table.of(
        [some for _, some in sorted(groups.items())],
        {
            "arm": lambda some: "plain" if some[0].method == "none" else names[some[0].method, some[0].draft_key],
            "shape": (lambda some: chain_or_tree(some[0].tree_budget or None)) if trees else None,
            "batch": (lambda some: str(some[0].batch_size)) if len(batches) > 1 else None,
            "depth": lambda some: str(some[0].depth_k),
            "kernel": lambda some: kernel_name(some[0].kernel),
            "dtype": lambda some: some[0].dtype,
            "requests": lambda some: str(len(some)),
            "tokens/s": lambda some: "-" if (speed := tokens_per_s(some)) is None else f"{speed:.1f}",
            "same tokens as plain": _same_tokens,
            "failed": lambda some: str(sum(r.status == "error" for r in some)),
        },
    )


def _same_tokens(requests: Sequence[Request]) -> str:
    compared = [r for r in requests if r.identical is not None]
    return f"{sum(bool(r.identical) for r in compared)} of {len(compared)}" if compared else "-"


def _select_columns(table: Table, names: Sequence[str]) -> Table:
    places = [table.header.index(name) for name in names]
    return Table(list(names), [[row[place] for place in places] for row in table.rows], table.stressed)


SHOWN_NAMES: Final = 12
ROW_CHARACTERS: Final = 160


def chats_card(chats: Chats, examples: Sequence[Mapping[str, str]]) -> str:
    """Rows read, kept and dropped by source and by reason. examples: one dropped row for each reason."""
    info = chats.info
    parts = [f"{info.get('num_rows', 0):,} of {info.get('num_read', 0):,} rows kept."]
    sources = {name: counts for name, counts in (info.get("by_source") or {}).items() if isinstance(counts, Mapping)}
    if sources:
        rows = [
            [
                name,
                f"{counts['read']:,}",
                f"{counts['kept']:,}",
                _format_counts(counts["dropped"]),
                f"{counts['broken']:,}",
            ]
            for name, counts in sources.items()
        ]
        parts.append(Table(["source", "read", "kept", "dropped", "broken files"], rows).markdown())
    elif info.get("dropped"):
        parts.append(f"Dropped: {in_markdown(_format_counts(info['dropped']))}.")
    for name in ("languages", "domains", "shapes", "duplicates_between"):
        if info.get(name):
            parts.append(f"{name.replace('_', ' ').capitalize()}: {in_markdown(_format_counts(info[name]))}.")
    if examples:
        rows = [[row["reason"], row["source"], row["where"], _short_row(row["excerpt"])] for row in examples]
        parts += ["### such as\n", Table(["reason", "source", "where", "row"], rows).markdown()]
    return "\n\n".join(parts) + "\n"


def mix_card(prompts: Prompts) -> str:
    """Shares asked for and got of every source, language and domain; "" for prompts that are not of data.mix_chats."""
    mix: Sequence[JsonObject] = prompts.info.get("mix") or ()
    if not mix:
        return ""
    header = ["", "asked", "got", "rows", "tokens", "validation", "test", "rows read"]
    parts = [f"{prompts.info.get('num_train', 0):,} rows to train on."]
    for dimension in dict.fromkeys(entry["of"] for entry in mix):
        of_it = sorted((entry for entry in mix if entry["of"] == dimension), key=lambda entry: -entry["got"])
        rows = [
            [entry["name"] or "unknown", f"{entry['asked']:.1%}", f"{entry['got']:.1%}"]
            + [f"{entry[name]:,}" for name in ("rows", "tokens", "validation", "test", "rows_read")]
            for entry in of_it[:SHOWN_NAMES]
        ]
        parts.append(Table([str(dimension), *header[1:]], rows).markdown())
        if len(of_it) > SHOWN_NAMES:
            parts.append(f"and {len(of_it) - SHOWN_NAMES} more in mix.json")
    if prompts.info.get("dropped"):
        parts.append(f"Left out: {in_markdown(_format_counts(prompts.info['dropped']))}.")
    return "\n\n".join(parts) + "\n"


def _format_counts(counts: Mapping[str, int]) -> str:
    """Counts by name in a list, the largest first."""
    names = sorted(counts, key=lambda name: (-counts[name], name))
    parts = [f"{name.replace('_', ' ') or 'unknown'} {counts[name]:,}" for name in names[:SHOWN_NAMES]]
    if len(names) > SHOWN_NAMES:
        parts.append(f"{len(names) - SHOWN_NAMES} more")
    return ", ".join(parts)


def _short_row(text: str) -> str:
    return text if len(text) <= ROW_CHARACTERS else f"{text[:ROW_CHARACTERS]}..."


SHOWN_ROWS = 3
SHOWN_PIECES = 16
PIECE_CHARACTERS = 240


def answers_card(answers: Conversations) -> str:
    """Counts and a sample; "" where the artifact has no sample."""
    if not (answers.path / SAMPLE).is_file():
        return ""
    rows = read_sample_rows(answers.path)
    info = answers.info
    lines = [f"{info.get('num_answer_tokens', 0):,} answer tokens of {info.get('num_tokens', 0):,}"]
    for name in ("languages", "domains"):
        if info.get(name):
            lines.append(f"{name}: " + ", ".join(f"{in_markdown(k)} {v:,}" for k, v in info[name].items()))
    if info.get("mask_methods"):
        lines.append("masks agreed by " + ", ".join(f"{k} ({v})" for k, v in info["mask_methods"].items()))
    if info.get("set_aside"):
        lines.append("set aside: " + ", ".join(f"{v} x {in_markdown(k)}" for k, v in info["set_aside"].items()))
    parts = ["\n".join(f"- {line}" for line in lines), *(_sample_row(row) for row in rows[:SHOWN_ROWS])]
    parts.append(f"In colour, and more of them:\n\n```\n{(answers.path / 'sample.html').as_uri()}\n```")
    return "\n\n".join(parts) + "\n"


def _sample_row(row: SampleRow) -> str:
    facts = (row["row_id"], row["workload"], row["split"], row["language"])
    title = " · ".join(fact for fact in facts if fact)
    lines = [
        ["■" if piece["masked"] else "", piece["role"], _short_piece(piece["text"])]
        for piece in row["pieces"][:SHOWN_PIECES]
    ]
    return f"**{in_markdown(title)}**\n\n{Table(['trained on', 'role', 'text'], lines).markdown()}"


def _short_piece(text: str) -> str:
    one_liner = text.replace("\n", "⏎")
    return one_liner if len(one_liner) <= PIECE_CHARACTERS else f"{one_liner[:PIECE_CHARACTERS]}..."
