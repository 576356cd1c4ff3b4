"""Markdown of datasets for the Prefect UI: rows read, rows left out and why, shares that a mix asked for and got.

Counts come from the artifacts' info; no rows are read again. Names and excerpts are untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from components.contract import Chats, Prompts
from components.escapes import in_markdown
from components.report.tables import Table

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
    mix: Sequence[Mapping[str, Any]] = prompts.info.get("mix") or ()
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
