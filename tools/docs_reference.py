"""The reference pages of the documentation, written from the code: steps, settings of methods, commands, queries.

mkdocs calls `on_files` when it builds the site, so that these pages are never written by hand and never committed.
Without mkdocs, `python -m tools.docs_reference FOLDER` writes them as Markdown.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # mkdocs runs a hook without the repository on its path
    sys.path.insert(0, str(ROOT))

ROOM_ORDER = ("targets", "data", "drafts", "bench", "speedup", "publish", "report")
STEP_IN_TEXT = re.compile(rf"(?<![\[`])`((?:{'|'.join(ROOM_ORDER)})\.[a-z]\w+)`(?![\]`])")


@cache
def pages() -> dict[str, str]:
    """Address of a page under docs/ -> its Markdown."""
    return {
        "reference/steps.md": steps_page(),
        "reference/method-settings.md": methods_page(),
        "reference/commands.md": commands_page(),
        "reference/queries.md": queries_page(),
    }


def steps_page() -> str:
    """Every step, room by room: inputs, settings, defaults and meaning."""
    out = [
        "# Steps and their settings",
        "This page is made from the signatures and docstrings of the steps. A step's address is what `uses:` takes. "
        "Inputs are given under `in:`, settings under `with:`. A setting without a default must be given. A step that "
        "measures runs alone on its machine, and what it makes is reused on that machine only.",
    ]
    for room, addresses in step_addresses().items():
        out += [f"## {room}", escape(_room_about(room))]
        for address in addresses:
            out += _step(address)
    return "\n\n".join(out) + "\n"


@cache
def step_addresses() -> dict[str, list[str]]:
    """Room -> the addresses of its steps, in alphabetical order."""
    import importlib

    found: dict[str, list[str]] = {}
    for room in ROOM_ORDER:
        module = importlib.import_module(f"components.{room}")
        functions = inspect.getmembers(module, inspect.isfunction)
        found[room] = [f"{room}.{name}" for name, _ in functions if not name.startswith("_")]
    return found


def _room_about(room: str) -> str:
    import importlib

    from flows.planning.explanation import first_paragraph

    return first_paragraph(inspect.getdoc(importlib.import_module(f"components.{room}")) or "")


def _step(address: str) -> Iterator[str]:
    from flows.planning.explanation import explain_step
    from flows.planning.step_signature import PACKAGES

    step = explain_step(address, PACKAGES)
    yield f"### {address} {{#{address}}}"
    yield escape(step.about)
    yield f"It makes **{step.makes}**.{' It measures.' if step.measures else ''}"
    if step.inputs:
        yield table(("input", "kind", "meaning"), [(f"`{e.name}`", e.kind, e.meaning) for e in step.inputs])
    if step.settings:
        yield table(SETTING_HEAD, _rows(step.settings))
    for mapping in step.mappings:
        yield f"**{mapping.name}.** {escape(mapping.about)}"
        yield table(("key", "type", "default", "meaning"), _rows(mapping.keys))


def _rows(entries: Iterable[Any]) -> list[tuple[str, str, str, str]]:
    """The cells of settings."""
    return [
        (f"`{e.name}`", e.kind, "must be given" if e.default is None else f"`{e.default}`", e.meaning) for e in entries
    ]


def methods_page() -> str:
    """The settings of every drafting method."""
    from components.methods import METHODS
    from flows.planning.explanation import explain_method

    out = [
        "# Settings of the methods",
        "`drafts.train_draft` takes these under `settings:`, by method: `settings: {eagle3: {ttt_steps: 5}}`. Only the "
        "entry of the trained method counts, so that one `matrix` can hold those of all. This page is made from "
        "`components/drafts/settings.py`.",
    ]
    for method in METHODS:
        about, entries = explain_method(method)
        out += [f"## {method}", escape(about), table(SETTING_HEAD, _rows(entries))]
    return "\n\n".join(out) + "\n"


SETTING_HEAD = ("setting", "type", "default", "meaning")


def commands_page() -> str:
    """What every command says under --help."""
    out = [
        "# Commands",
        "Every command says this under `--help`. Exit codes are 0 (done), 1 (a run failed), 2 (the input is wrong, a "
        "line for each fault) and 130 (interrupted); commands with others say so.",
    ]
    for name in command_table():
        out += [f"## {name}", f"```text\n{_help_of(name)}\n```"]
    return "\n\n".join(out) + "\n"


@cache
def command_table() -> dict[str, Any]:
    """Name of a command -> the command as typer built it."""
    from flows.cli import COMMANDS, load_command

    return {name: load_command(name) for name in COMMANDS}


def _help_of(name: str) -> str:
    from flows.cli import main

    out = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(out):
            main([name, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return out.getvalue().strip()


def queries_page() -> str:
    """The named queries, and every view and table with its columns."""
    from storage.history.query import named_queries

    out = [
        "# Named queries, views and tables",
        '`draftsmith query NAME` asks a named query; `-p NAME=VALUE` gives it a parameter. `draftsmith query "SELECT '
        '..."` asks the views and tables in SQL. This page is made from the files that define them.',
        "## Named queries",
    ]
    for query in named_queries().values():
        out += [f"### {query.name}", escape(query.about)]
        if query.parameters:
            rows = [
                (f"`{p.name}`", p.kind, "" if p.default is None else f"`{p.default}`", p.about)
                for p in query.parameters
            ]
            out.append(table(("parameter", "type", "default", "meaning"), rows))
    columns = history_columns()
    views = sorted(name for name in columns if name.startswith("v_"))
    out.append("## Views")
    for name in views:
        out += _relation(name, columns[name])
    out += ["## Tables", "Rows of these are written by steps, runs and promotions; the views are made of them."]
    for name in sorted(set(columns) - set(views)):
        out += _relation(name, columns[name])
    return "\n\n".join(part for part in out if part) + "\n"


def _relation(name: str, columns: Iterable[str]) -> Iterator[str]:
    from storage.history.comments import about_column, about_tables

    yield f"### {name}"
    yield escape(about_tables()[name])
    yield table(("column", "meaning"), [(f"`{column}`", about_column(name, column)) for column in columns])


@cache
def history_columns() -> dict[str, list[str]]:
    """Every view and table that a question can name -> its columns, from an empty history."""
    from storage.history.query import open_history, view_names

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        names = view_names()
        with open_history(home) as run_query:
            return {name: list(run_query(f"SELECT * FROM {name} LIMIT 0", {})[0]) for name in names}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; the last column is prose and is escaped."""
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for *cells, last in rows:
        lines.append("| " + " | ".join([*(cell.replace("|", "\\|") for cell in cells), escape(last)]) + " |")
    return "\n".join(lines)


def escape(text: str) -> str:
    """Prose of a docstring as Markdown: what is no code span shows as it is written."""
    parts = text.split("`")
    outside = [
        re.sub(r"([*<|])", r"\\\1", part) if i % 2 == 0 else part.replace("|", "\\|") for i, part in enumerate(parts)
    ]
    return "`".join(outside)


def link_steps(markdown: str, up: str) -> str:
    """Step addresses in code spans become links to the reference; code blocks and headings stay as they are."""
    known = {address for addresses in step_addresses().values() for address in addresses}

    def link(match: re.Match[str]) -> str:
        return f"[`{match[1]}`]({up}reference/steps.md#{match[1]})" if match[1] in known else match[0]

    pieces = re.split(r"(^```.*?^```|^#.*?$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(piece if i % 2 else STEP_IN_TEXT.sub(link, piece) for i, piece in enumerate(pieces))


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs: adds the generated pages and the changelog."""
    from mkdocs.structure.files import File

    for address, content in pages().items():
        files.append(File.generated(config, address, content=content))
    files.append(File.generated(config, "changelog.md", abs_src_path=str(ROOT / "CHANGELOG.md")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs: links the steps that a page names."""
    if page.file.src_uri.startswith("reference/"):
        return markdown
    return link_steps(markdown, "../" * page.file.src_uri.count("/"))


def main() -> None:
    """Write the pages into a folder."""
    folder = Path(sys.argv[1])
    for address, content in pages().items():
        place = folder / address
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content, encoding="utf-8")
        print(place)


if __name__ == "__main__":
    main()
