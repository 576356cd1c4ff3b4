"""Commands on a whole home: what takes room in it, what of it may go, a copy in one file and back, a page about it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from components.contract import UserError
from components.tables import format_bytes
from flows.commands.terminal import DEFAULT_FILE, File, Format, echo, echo_error, out, print_in
from flows.spec.schema import RetentionSpec, load_spec
from storage import backup as backups
from storage import collect
from storage.artifacts.store import Store, default_home, require_writable
from storage.home import settle
from storage.registry.tracking import uses_home_database
from storage.repair import find_damage

Output = Annotated[Format, typer.Option("--format", help="How the answer is printed.")]


def du(format_: Output = Format.table) -> None:
    """Bytes on disk, by kind of artifact and by pipeline."""
    home = default_home()
    uses = collect.usage(home) if home.is_dir() else []
    of_kinds = [(use.what, use.key, use.num_bytes) for use in uses]
    of_pipelines = [(use.pipeline, use.key, use.num_bytes) for use in uses if use.pipeline]
    rows = [("kind", *row) for row in collect.totals(of_kinds)]
    rows += [("pipeline", *row) for row in collect.totals(of_pipelines)]
    readable = format_ is Format.table
    shown = [[by, name, keys or "", format_bytes(size) if readable else size] for by, name, keys, size in rows]
    print_in(format_, out, ("by", "name", "artifacts", "size" if readable else "bytes"), shown)
    if readable:
        echo(f"{format_bytes(sum(use.num_bytes for use in uses))} in {home}")


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, delete nothing.")] = False,
    runs: Annotated[
        int | None,
        typer.Option(
            min=0, help="Newest runs of each pipeline of which all is kept; else as `retention:` says, or 10."
        ),
    ] = None,
    versions: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Newest versions of each model that are kept besides those with an alias; else as said, or 5.",
        ),
    ] = None,
    features: Annotated[
        bool, typer.Option("--features", help="Also features of those runs whose drafters are trained and there.")
    ] = False,
    file: File = DEFAULT_FILE,
) -> None:
    """Delete what no alias, no kept version and none of the newest runs needs; records and evidence stay."""
    home, store = default_home(), Store()
    declared = (load_spec(file).retention if file.is_file() else None) or RetentionSpec()
    items = collect.find_items(
        home,
        store,
        runs=declared.keep_runs if runs is None else runs,
        versions=declared.keep_versions if versions is None else versions,
        features=features or declared.features,
    )
    if not dry_run:
        require_writable(home)
        items = collect.collect(home, store, items)
    rows = collect.totals((item.kind, item.key, item.num_bytes) for item in items)
    if rows:
        print_in(
            Format.table, out, ("kind", "number", "size"), [[kind, n, format_bytes(size)] for kind, n, size in rows]
        )
    total = format_bytes(sum(item.num_bytes for item in items))
    echo(f"{total} would be freed; nothing was deleted" if dry_run else f"{total} freed")


def backup(
    file: Annotated[Path, typer.Argument(help="The file to write: a tar, compressed where its name ends in .gz.")],
) -> None:
    """Copy this home into one file, also while runs go on: store, history, journals, MLflow and Prefect databases."""
    home = default_home()
    made = backups.back_up(home, file)
    echo(f"{file}: {made.artifacts} artifacts and {made.runs} runs of {home}, {format_bytes(file.stat().st_size)}")
    if not uses_home_database(home):
        echo_error("MLflow stands on another server, $MLFLOW_TRACKING_URI: back up its database there")
    for name in ("DRAFTSMITH_PREFECT_DATABASE", "DRAFTSMITH_MLFLOW_DATABASE"):
        if os.environ.get(name):
            echo_error(f"a database stands in PostgreSQL, ${name}: back it up there")


def restore(
    file: Annotated[Path, typer.Argument(help="What `draftsmith backup` has written.")],
    into: Annotated[
        Path | None, typer.Option("--into", help="The folder of the home; left out: $DRAFTSMITH_HOME.", metavar="DIR")
    ] = None,
) -> None:
    """Make a home of a backup, at any place: its addresses lead there, and every file is compared with its digest."""
    if not file.is_file():
        raise UserError(f"restore: {file}: no such file")
    home = into.absolute() if into is not None else default_home()
    made = backups.restore(file, home)
    if line := settle(home):
        echo(line)
    damages = list(find_damage(home, Store(home)))
    for damage in damages:
        echo_error(f"{damage.kind}: {damage.name[:40]} {damage.fault}")
    echo(f"{home}: {made.artifacts} artifacts and {made.runs} runs, {'as they were' if not damages else 'damaged'}")
    raise typer.Exit(bool(damages))


def dashboard(
    to: Annotated[
        Path | None, typer.Option("--to", help="The file to write; left out: one in the home.", metavar="FILE")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How many days back charts over time and lists look.")] = 90,
    reports: Annotated[
        str, typer.Option("--reports-at", help="Where report pages are served; left out: in the store, as files.")
    ] = "",
) -> None:
    """Write one page about this home: champions and why, speed and acceptance over time, nights, failures, disk."""
    from flows.dashboard.gathered import make_dashboard

    home = default_home()
    file = to if to is not None else home / "dashboard" / "index.html"
    if to is not None and not to.absolute().parent.is_dir():
        raise UserError(f"dashboard --to {to}: there is no folder {to.absolute().parent}")
    require_writable(home)
    store = os.path.relpath(home / "store", file.absolute().parent)
    board = make_dashboard(home, file, days=days, reports=reports or store)
    number = f"{len(board.champions)} champions, {len(board.choices)} choices, {len(board.runs)} runs"
    echo(f"{file}: {number} of the last {days} days, {format_bytes(file.stat().st_size)}")
