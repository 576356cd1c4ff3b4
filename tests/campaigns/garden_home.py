"""Homes in which the toy pipeline runs: made quickly, and compared by what their steps have made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from forked import Ended, draftsmith
from toy_garden import GARDEN

from storage.registry.tracking import ensure_database

NUM_STEPS = 8
REPEATING = ("train.jsonl", "growth.txt", "height.txt", "index.html")
"""Files of toy steps that are the same however often they are made; span.txt holds the time."""


def write_garden(folder: Path) -> Path:
    """The pipeline's file, in a folder that is made when it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "pipelines.yaml"
    file.write_text(GARDEN.text, encoding="utf-8")
    return file


def database_template(folder: Path) -> Path:
    """MLflow's folder of a home, with its database: it takes seconds to make and moments to copy."""
    ensure_database(folder)
    return folder / "mlflow"


def new_home(folder: Path, template: Path) -> Path:
    """A home that has MLflow's database and nothing else."""
    home = folder / "home"
    shutil.copytree(template, home / "mlflow")
    return home


def run_garden(home: Path, file: Path, *options: str, **settings: Any) -> Ended:
    """`draftsmith run garden --direct` on a home; settings as of `draftsmith`."""
    return draftsmith("run", "garden", "--direct", "--file", str(file), *options, home=home, **settings)


def made(home: Path) -> dict[str, bytes]:
    """The files that must repeat of every finished artifact, by "key/name"."""
    return {
        f"{file.parent.name}/{file.name}": file.read_bytes()
        for record in sorted((home / "store").glob("*/artifact.json"))
        for file in sorted(record.parent.iterdir())
        if file.name in REPEATING
    }


def finished_at(home: Path) -> dict[str, int]:
    """When each finished artifact was finished, by key, ns: a step that is made again changes its number."""
    return {file.parent.name: file.stat().st_mtime_ns for file in (home / "store").glob("*/artifact.json")}


def answer(home: Path, sql: str, **environment: str) -> list[list[Any]]:
    """The rows that `draftsmith query` answers with, asked in a process of its own."""
    ended = draftsmith("query", sql, "--format", "json", home=home, **environment)
    assert ended.code == 0, ended.said
    rows: list[list[Any]] = [list(row.values()) for row in json.loads(ended.said)]
    return rows
