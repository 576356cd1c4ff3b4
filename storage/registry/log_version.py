"""Logs a release as a version of a registered model: `python -m storage.registry.log_version`, the request on stdin.

A version is models-from-code (components/publish/release/mlflow_model.py), so nothing is pickled. MLflow runs that file
when it logs it; this process returns the memory of both when it ends. The number of the version goes to stdout. The
caller is `log_version` in storage/registry/versions.py.
"""

from __future__ import annotations

import filecmp
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import mlflow
import mlflow.pyfunc
from mlflow.exceptions import MlflowException

from storage.registry.tracking import (
    RELEASES,
    MlflowClient,
    ensure_experiment,
    open_client,
    second_name,
    uses_home_database,
)
from storage.registry.versions import ROOT, VersionRequest

_LARGE = 1 << 16  # bytes of a file that is worth a look at others
_ABOUT = (
    "Drafters of one target, of whatever method. "
    "Aliases: champion serves, previous is where `draftsmith rollback` goes."
)
# Settings of a loaded version (MLflow ignores keys that were not logged); explained in the model's code.
SERVING = {"target": "", "max_new_tokens": 128, "temperature": 0.0, "seed": 0, "depth": -1, "prompt_format": ""}


def log_version(request: VersionRequest) -> int:
    """Log and register the version; returns its number. With `restore_to` only its files are made: 0."""
    home = Path(request["home"])
    client = open_client(home)
    mlflow.set_tracking_uri(client.tracking_uri)
    mlflow.set_registry_uri(client.tracking_uri)
    name = request["name"]
    run = request["source_run"]
    if request["restore_to"] is not None:
        with tempfile.TemporaryDirectory() as scratch:
            mlflow.pyfunc.save_model(path=request["restore_to"], **_content(request, Path(scratch)))
        _share(home, client, request, Path(request["restore_to"]))
        return 0
    if run is None:
        experiment = ensure_experiment(home, client, RELEASES)
        run = client.create_run(experiment, tags=request["tags"], run_name=name).info.run_id
        client.set_terminated(run)
    with tempfile.TemporaryDirectory() as scratch, mlflow.start_run(run_id=run):
        model = mlflow.pyfunc.log_model(name="release", **_content(request, Path(scratch)))
    try:
        client.create_registered_model(name, description=_ABOUT)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    place = urlsplit(client.get_logged_model(model.model_id).artifact_location)
    _share(home, client, request, Path(url2pathname(place.path)))
    version = client.create_model_version(
        name, source=model.model_uri, run_id=run, tags=request["tags"], model_id=model.model_id
    )
    return int(version.version)


def _content(request: VersionRequest, scratch: Path) -> dict[str, Any]:
    """What a version is made of, as MLflow's functions take it."""
    return {
        "python_model": request["code"],
        "artifacts": {"release": request["release"]},
        "model_config": SERVING,
        "code_paths": [str(copy_of_components(scratch, request["with_builtin"]))],
        "pip_requirements": request["requirements"],
    }


def copy_of_components(scratch: Path, with_builtin: bool) -> Path:
    """The code that the model needs, so that it loads where Draftsmith is not installed; weights if it serves them."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        if with_builtin and Path(folder).name == "builtin":
            return set()
        sources = (".py", ".json", ".c", ".h")
        return {name for name in names if "." in name and not name.endswith(sources)} | {"__pycache__"}

    place = scratch / "components"
    shutil.copytree(ROOT / "components", place, ignore=ignored)
    return place


def _share(home: Path, client: MlflowClient, request: VersionRequest, folder: Path) -> None:
    """Let the files of a version cost the disk little beside its release, its target and the version before it."""
    if not uses_home_database(home):
        return
    share_files(folder, [Path(request["release"]), home / "mlflow" / "artifacts"])
    for version in client.search_model_versions(f"name = '{request['name']}'"):  # the newest comes first
        place = urlsplit(client.get_model_version_download_uri(version.name, version.version))
        earlier = Path(url2pathname(place.path))
        if earlier != folder and earlier.is_relative_to(home.absolute()) and (earlier / "MLmodel").is_file():
            share_code(folder, earlier)
            break


def share_code(folder: Path, earlier: Path) -> None:
    """Let the files that an earlier version has under the same name, byte for byte, have one copy: its code, mostly."""
    for file in (file for file in sorted(folder.rglob("*")) if file.is_file()):
        other = earlier / file.relative_to(folder)
        if other.is_file() and filecmp.cmp(file, other, shallow=False) and not second_name(file, other):
            return


def share_files(folder: Path, places: Sequence[Path]) -> None:
    """Let large files of a folder that are below one of these places too, byte for byte, have one copy on the disk."""
    same_size: dict[int, list[Path]] = {}
    for file in (file for place in places for file in place.rglob("*") if not file.is_relative_to(folder)):
        if file.is_file() and not file.is_symlink():
            same_size.setdefault(file.stat().st_size, []).append(file)
    for file in (file for file in sorted(folder.rglob("*")) if file.is_file() and file.stat().st_size >= _LARGE):
        for other in same_size.get(file.stat().st_size, ()):
            if filecmp.cmp(file, other, shallow=False):
                if not second_name(file, other):
                    return
                break


if __name__ == "__main__":
    sys.stdout.write(f"{log_version(json.load(sys.stdin))}\n")
