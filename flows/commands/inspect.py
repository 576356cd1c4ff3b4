"""Commands that look: at an artifact or a registered model, at anybody's checkpoint, at the history in SQL."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.contract import UserError
from components.data.formats.chats import dropped_examples
from components.tables import duration
from components.text import shorten
from flows.commands.terminal import Format, Params, echo, named_values, out, print_answer, print_in
from storage import journal
from storage.artifacts.store import Store, default_home
from storage.history import files as history_files
from storage.history import query as history
from storage.history.records import PromotionRow
from storage.registry.fact_tags import FILES
from storage.registry.registry import changed_facts, notice_moves, versions_of

MAX_FILES = 12
VERSIONS = ("version", "aliases", "method", "speedup", "95 %", "depth", "verdict", "gate", "release")
LOG = ("when (UTC)", "alias", "what", "from", "to", "who", "why")


def show(
    key: Annotated[str, typer.Argument(help="A key, or the beginning of one; or the name of a registered model.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="artifact.json as it is, or of a model all versions and moves.")
    ] = False,
) -> None:
    """One artifact: what it is, what it was made from, where it lies. Or a registered model: who moved which alias."""
    store = Store()
    if is_model(store.home, key):
        if as_json:
            print_model_json(store.home, key)
        else:
            print_model(store.home, key, out)
        return
    full_key = store.resolve(key)
    if as_json:
        echo(json.dumps(store.record_of(full_key), indent=1))
    else:
        print_artifact(store, full_key, out)


def validate(
    folder: Annotated[Path, typer.Argument(help="A drafter's folder: config.json and *.safetensors; or a GGUF file.")],
    target: Annotated[
        str, typer.Option(help="Its target: builtin, or a folder in Hugging Face format; compared with it.")
    ] = "",
) -> None:
    """Is a drafter's checkpoint exactly what engines expect? Names, shapes, dtypes, vocabulary, numbers, config."""
    from components.publish.release.validate import validate_folder

    for line in validate_folder(folder, target):
        echo(line)


def convert(
    folder: Annotated[Path, typer.Argument(help="A drafter's folder in any format that drafts.import_draft reads.")],
    to: Annotated[str, typer.Option("--to", help="The format to write: eagle3, speculators, medusa, mtp, ...")],
    target: Annotated[str, typer.Option(help="Its target: builtin, or a folder in Hugging Face format.")],
    into: Annotated[
        Path | None, typer.Option("--out", help="The folder to write; left out: FOLDER-FORMAT, beside the first.")
    ] = None,
) -> None:
    """Write a drafter in another format. It must fit its target, and what is written is read back and compared."""
    from components.publish.release.convert import convert_folder

    beside = folder.resolve().parent / f"{folder.resolve().name}-{to}"
    for line in convert_folder(folder, to, target, into or beside):
        echo(line)


def query(
    question: Annotated[
        str, typer.Argument(help="The name of a query (--list), or one SELECT; SHOW TABLES lists the views.")
    ] = "",
    param: Params = [],  # noqa: B006 typer copies it
    format_: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.table,
    list_: Annotated[bool, typer.Option("--list", help="List the named queries and their parameters.")] = False,
    all_sessions: Annotated[
        bool, typer.Option("--all-sessions", help="Views show every session of what was measured again.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a SELECT may take.")] = 120.0,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows that the answer to a SELECT may have.")] = 500_000,
) -> None:
    """Every number ever measured: by the name of a question, or in SQL."""
    if list_ or not question:
        print_in(format_, out, *history.list_rows())
        return

    values = named_values(param)
    if history.is_name(question):
        columns, rows = history.run_named_query(default_home(), question, values, all_sessions=all_sessions)
    elif values:
        raise UserError("query: -p is for named queries; a SELECT says its values itself")
    else:
        limits = history.Limits(seconds=timeout, rows=max_rows)
        columns, rows = history.query(question, default_home(), all_sessions=all_sessions, limits=limits)
    print_in(format_, out, columns, rows)
    if format_ is Format.table:
        echo(f"{len(rows)} rows")


def compact() -> None:
    """Merge the small files of the history into few large ones; runs do so by themselves past a few hundred."""
    merged = history_files.compact(default_home(), 0, whole=True)
    echo(", ".join(f"{table}: {count} files" for table, count in merged.items()) or "nothing to merge")


def print_artifact(store: Store, key: str, console: Console) -> None:
    """One artifact as a table of facts."""
    content = store.record_of(key)
    record: dict[str, Any] = content["record"]
    presence = store.verify_local(key)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def say(name: str, value: object) -> None:
        table.add_row(name, Text(str(value)))

    say("kind", content["kind"])
    say("key", key)
    say("path", store.path_of(key))
    if "sample.html" in content["files"]:
        say("to look at", store.path_of(key) / "sample.html")
    elsewhere = presence.fault == "absent"  # its record came from the shared store
    state = "in the shared store, not on this machine" if elsewhere else f"BROKEN: {presence.fault}"
    if store.is_collected(key):
        state = f"its files were collected or deleted; draftsmith run {record.get('pipeline')} makes them again"
    say("state", "whole" if presence.artifact is not None else state)
    say("made by", f"{record.get('uses', '?')} as step {record.get('step', '?')} of {record.get('pipeline', '?')}")
    when = datetime.fromtimestamp(content["finished_at"], UTC).isoformat(" ", "seconds")
    say("when", f"{when}, in {duration(float(record.get('seconds', 0.0)))}, peak {record.get('peak_rss_mib', 0):g} MiB")
    sessions = store.sessions(key)
    for session in sessions if len(sessions) > 1 else []:
        at = datetime.fromtimestamp(session.finished_at, UTC).isoformat(" ", "seconds")
        location = "the newest, above" if session.is_newest else str(session.path)
        say("measured" if session.is_newest else "", f"{at}  {location}")
    for name, value in record.get("settings", {}).items():
        say(f"  with {name}", shorten(value, 200))
    for name, value in record.get("inputs", {}).items():
        for input_key in value if isinstance(value, list) else [value]:
            say(f"  in {name}", f"{input_key[:12]}  {_what(store, input_key)}")
    for name, value in content["info"].items():
        say(f"  {name}", shorten(value, 200))
    files = content["files"]
    if "dropped.parquet" in files and presence.artifact is not None:
        for row in dropped_examples(store.path_of(key)):
            place = f"{row['source']} {row['where']}: " if row["where"] else ""
            say("dropped, such as", shorten(f"{row['reason']}: {place}{row['excerpt']}", 200))
    for name, facts in list(files.items())[:MAX_FILES]:
        say("file" if name == next(iter(files)) else "", f"{name}  {facts['size']:,} bytes")
    if len(files) > MAX_FILES:
        say("", f"and {len(files) - MAX_FILES} more")
    console.print(table)


def _what(store: Store, key: str) -> str:
    try:
        content = store.record_of(key)
    except (OSError, ValueError):
        return "(not in the store any more)"
    return f"{content['kind']} of step {content['record'].get('step', '?')}"


def is_model(home: Path, name: str) -> bool:
    """Whether the promotion log knows a registered model of this name."""
    return any(row.name == name for row in journal.promotions(home))


def print_model(home: Path, name: str, console: Console) -> None:
    """The versions of a model and its promotion log; what was moved by hand in MLflow is noticed first."""
    notice_moves(home)
    versions = [_version(*version) for version in versions_of(home, name)]
    console.print(Text(name, style="bold"))
    print_answer(console, VERSIONS, versions)
    console.print()
    print_answer(console, LOG, [_move(row) for row in journal.promotions(home) if row.name == name])
    if changed := changed_facts(home, name):
        raise UserError("\n".join(changed))
    if damaged := journal.damaged_promotions(home):
        raise UserError(
            f"{journal.promotions_file(home)}: {len(damaged)} lines cannot be read, and are left out above; "
            "`draftsmith doctor --repair` sets them aside, and takes them from the history"
        )


def print_model_json(home: Path, name: str) -> None:
    """The versions of a model with their facts, its promotion log, and what is not as it was sealed, as one object."""
    notice_moves(home)
    versions = [{"version": number, "aliases": at, "facts": tags} for number, at, tags in versions_of(home, name)]
    log = [json.loads(journal.as_line(row)) for row in journal.promotions(home) if row.name == name]
    for move in log:
        move["numbers"] = json.loads(move["numbers"])
    changed = changed_facts(home, name)
    echo(json.dumps({"model": name, "versions": versions, "log": log, "changed": changed}, indent=1))


def _version(number: int, aliases: list[str], tags: dict[str, str]) -> list[str]:
    facts = {fact: tags.get(f"draftsmith.{fact}", "") for fact in ("speedup_meas", "meas_lo", "meas_hi", "depth_k")}
    interval = f"[{_short(facts['meas_lo'])}, {_short(facts['meas_hi'])}]" if facts["meas_lo"] else ""
    method = tags.get("draftsmith.method", "")
    cells = [str(number), ", ".join(aliases), method, _short(facts["speedup_meas"]), interval, facts["depth_k"]]
    gate = tags.get("gate.answer") or tags.get("gate.status", "")
    release = tags.get("draftsmith.key", "")[:12] + (f"; files {tags[FILES]}" if FILES in tags else "")
    return [*cells, tags.get("draftsmith.verdict", ""), gate, release]


def _move(row: PromotionRow) -> list[str]:
    places = ["" if version is None else str(version) for version in (row.from_version, row.to_version)]
    return [f"{row.promoted_at:%Y-%m-%d %H:%M:%S}", row.alias, row.action, *places, row.who, row.why]


def _short(number: str) -> str:
    return f"{float(number):.2f}" if number else ""
