"""`draftsmith delete` and `rename`: a pipeline or a model goes, or gets another name, with all that hangs on it.

Evidence is only ever added: journals, the history's rows and measurements stay under the name that they were made
under, and the deletion or the renaming is one more of them. The pipelines file is the user's: what it still says is
named with its line, and nothing is touched before it agrees.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from components.contract import UserError
from components.text import did_you_mean
from flows.commands.terminal import DEFAULT_FILE, File, Invocation, echo
from flows.orchestration.prefect_server import prepare
from flows.spec.schema import load_spec, pipeline_of
from storage import journal
from storage.artifacts.store import default_home, require_writable
from storage.history.write import record_run
from storage.registry.removal import delete_experiment, delete_model, rename_experiment


class Kind(StrEnum):
    """What is deleted."""

    pipeline = "pipeline"
    model = "model"


def delete(
    kind: Annotated[Kind, typer.Argument(help="What it is.")],
    name: Annotated[str, typer.Argument(help="Its name.")],
    reason: Annotated[str, typer.Option("--why", help="The reason, which the history keeps.")],
    file: File = DEFAULT_FILE,
) -> None:
    """Delete a pipeline or a registered model with all that hangs on it; the history keeps its rows, and says so."""
    home = default_home()
    require_writable(home)
    if kind is Kind.model:
        _require_unnamed(file, name)
        count = delete_model(home, name, reason)
        echo(f"{name} is deleted with {count} versions and their aliases; `draftsmith gc` frees their files")
        return
    spec = load_spec(file) if file.is_file() else None
    if spec is not None and name in spec.pipelines:
        line = spec.lines.at("pipelines", name)
        raise UserError(f"{file.name}:{line}: pipeline '{name}' still stands here: take it out first")
    if not _is_noted(home, name, ""):
        record_run(home, journal.note_fate(home, name, reason))
    if (home / "steps" / name).is_dir():
        shutil.rmtree(home / "steps" / name)
    delete_experiment(home, name)
    if spec is not None and prepare(home):
        from flows.orchestration.deployments import apply_changes, plan_changes

        changes = [change for change in plan_changes(file, home, Invocation.packages) if change.apply is not None]
        apply_changes(changes)
        _show(changes)
    echo(f"{name} is deleted; `draftsmith gc` frees what it alone has made, and measurements stay")


def rename(
    former: Annotated[str, typer.Argument(metavar="OLD", help="The pipeline's name until now.")],
    present: Annotated[str, typer.Argument(metavar="NEW", help="Its name in the pipelines file now.")],
    reason: Annotated[str, typer.Option("--why", help="The reason, which the history keeps.")] = "",
    file: File = DEFAULT_FILE,
) -> None:
    """Lead what hangs on a pipeline to its new name: reasons of plans, MLflow's experiment, Prefect's deployment."""
    home, spec = default_home(), load_spec(file)
    require_writable(home)
    pipeline_of(spec, present)
    if former in spec.pipelines:
        line = spec.lines.at("pipelines", former)
        raise UserError(f"{file.name}:{line}: pipeline '{former}' still stands here: give it its new name first")
    if not _is_noted(home, former, present):
        if any(entries[0]["pipeline"] == present for entries in journal.all_runs(home)):
            raise UserError(f"rename: '{present}' has runs of its own already: choose a name that is free")
        words = f"renamed to {present}"
        record_run(home, journal.note_fate(home, former, f"{words}: {reason}" if reason else words, to=present))
    if (home / "steps" / former).is_dir():
        (home / "steps" / former).rename(home / "steps" / present)
    rename_experiment(home, former, present)
    if prepare(home):
        from flows.orchestration.deployments import rename_deployment

        _show(rename_deployment(file, home, former, present, Invocation.packages))
    echo(f"{former} is {present} now; what it has made is reused, and the history's rows keep the name of their time")


def _is_noted(home: Path, name: str, fate: str) -> bool:
    """Whether a command that was killed has noted this fate of a pipeline already.

    Raises:
        UserError: a run of the pipeline goes on, or there is none.
    """
    pipelines, journals = set[str](), [(path, journal.read(path)) for path in journal.journals(home)]
    former = journal.former_pipelines(entries for _, entries in journals)
    for path, entries in journals:
        start = journal.first(entries, "run") or {}
        pipelines.add(start.get("pipeline", ""))
        if start.get("pipeline") == name and journal.first(entries, "end") is None and not journal.end_if_dead(path):
            raise UserError(f"a run of '{name}' goes on ({start['run_id']}): wait for it, or cancel it")
    present = sorted(pipelines - {"", *former})
    if name not in present and former.get(name) != fate:
        raise UserError(f"no pipeline '{name}' has run in {home}{did_you_mean(name, present)}")
    return name not in present


def _require_unnamed(file: Path, name: str) -> None:
    """Raise UserError with the first line of the pipelines file that asks for a registered model."""
    asks = re.compile(rf"registry:\s*['\"]?{re.escape(name)}(?![\w.-])")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for number, line in enumerate(lines, start=1):
        if asks.search(line.partition(" #")[0]):
            raise UserError(f"{file.name}:{number}: asks for model '{name}' ({line.strip()[:80]}): change that first")


def _show(changes: Iterable[object]) -> None:
    for change in changes:
        echo(f"  {change}")
