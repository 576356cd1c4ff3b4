"""MLflow's model registry: a release becomes a version, aliases say which version is which, a log says who moved them.

One registered model for each target and method, `<target name>-<method>`. Every version gets `candidate`; a publish
moves `challenger` to it, and `champion` when the promotion gate has passed; `previous` is where a rollback goes.
Aliases in MLflow are plain upserts without a history, so every move is written to the append-only promotion log. A
version is models-from-code (components/publish/mlflow_model.py), so nothing is pickled; MLflow runs that file when it
logs it, which happens in a child process to keep torch out of this one.
"""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.contract import UserError
from storage import journal
from storage.records import PromotionRow, now
from storage.release_facts import ROOT, ReleaseFacts, copy_of_components, facts_of
from storage.tracking import KEY_TAG, mlflow_lock, open_client

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

ALIASES = ("candidate", "challenger", "champion", "previous")
MODEL_CODE = ROOT / "components" / "publish" / "mlflow_model.py"
# What whoever loads a version may set (MLflow ignores keys that were not logged); explained in the model's code.
_SERVING = {"target": "", "max_new_tokens": 128, "temperature": 0.0, "seed": 0, "depth": -1}
_REQUIREMENTS = ("torch", "transformers", "safetensors", "tokenizers", "mlflow")


@dataclass(frozen=True)
class Registered:
    """A version of a registered model. is_new: it was not there before. note: one line to show."""

    name: str
    version: int
    is_new: bool
    aliases: tuple[str, ...]
    note: str


def register(home: Path, release: Path, *, source_run: str | None = None, code: Path | None = None) -> Registered:
    """Make a Release a model version, once: the same release key never registers twice.

    release: the artifact's directory. source_run: the MLflow run it is logged under; None starts one.
    code: the model file, MODEL_CODE unless given.
    """
    facts = facts_of(release)
    client = open_client(home)
    with mlflow_lock(home, "registry"):
        found = _version_of(client, facts.name, facts.release_key)
        is_new = found is None
        if found is None:
            found = _log_version(home, release, facts, source_run, code or MODEL_CODE)
        moves = {"candidate": "publish"}
        if facts.worth_using:
            moves["challenger"] = "publish"
        if facts.worth_using and facts.gate_passed:
            moves["champion"] = "promote"
        # A version that was there before keeps its aliases: people may have moved them since. But the moves of a
        # publication that died half way are in no log, and are made now.
        logged = {(row.alias, row.to_version) for row in journal.promotions(home) if row.name == facts.name}
        for alias, action in moves.items():
            if is_new or (alias, found) not in logged:
                why = "published" if alias != "champion" else "the promotion gate passed"
                _move(home, client, facts.name, alias, found, action, why, facts.tags)
    aliases = tuple(alias for alias, at in aliases_of(client, facts.name).items() if at == found)
    said = f"{facts.name} version {found}" + (f" ({', '.join(aliases)})" if aliases else "")
    return Registered(
        facts.name, found, is_new, aliases, f"registered {said}" if is_new else f"already registered: {said}"
    )


def promote(home: Path, name: str, version: int | str, why: str) -> Registered:
    """Make a version the champion by hand; the one before becomes `previous`.

    version: a number, or an alias such as "challenger".

    Raises:
        UserError: there is no such model or version, or no reason is given.
    """
    client = open_client(home)
    with mlflow_lock(home, "registry"):
        number = _resolve(client, name, version)
        if not why.strip():
            raise UserError(f"promote {name}: say why (--why), the promotion log keeps it")
        tags = dict(client.get_model_version(name, str(number)).tags)
        if aliases_of(client, name).get("champion") == number == _last_logged(home, name, "champion"):
            return Registered(name, number, False, ("champion",), f"{name} version {number} is the champion already")
        _move(home, client, name, "champion", number, "promote", why, tags)
    return Registered(name, number, False, ("champion",), f"{name} version {number} is now champion")


def rollback(home: Path, name: str, why: str) -> Registered:
    """Make the previous champion the champion again; the present one becomes `previous`.

    Raises:
        UserError: there is no such model, no previous champion, or no reason is given.
    """
    client = open_client(home)
    with mlflow_lock(home, "registry"):
        _require_model(client, name)
        if not why.strip():
            raise UserError(f"rollback {name}: say why (--why), the promotion log keeps it")
        number = aliases_of(client, name).get("previous")
        if number is None:
            raise UserError(f"rollback {name}: no version has the alias 'previous', there was one champion only")
        tags = dict(client.get_model_version(name, str(number)).tags)
        _move(home, client, name, "champion", number, "rollback", why, tags)
    return Registered(name, number, False, ("champion",), f"{name} is back at version {number}")


def aliases_of(client: MlflowClient, name: str) -> dict[str, int]:
    """alias -> version number of a registered model."""
    return {alias: int(number) for alias, number in client.get_registered_model(name).aliases.items()}


def _version_of(client: MlflowClient, name: str, release_key: str) -> int | None:
    """The version that was registered from this release, if it was."""
    found = client.search_model_versions(f"name = '{name}' AND tags.`{KEY_TAG}` = '{release_key}'")
    return min((int(version.version) for version in found), default=None)


def _log_version(home: Path, release: Path, facts: ReleaseFacts, source_run: str | None, code: Path) -> int:
    """Log and register a version in a child process; its memory is returned and torch stays out of this one."""
    request = {
        "home": str(home),
        "release": str(release),
        "name": facts.name,
        "tags": facts.tags,
        "source_run": source_run,
        "code": str(code),
        "with_builtin": facts.target == "builtin",
    }
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    done = subprocess.run(
        [sys.executable, "-m", "storage.registry"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the child process said nothing"])[-1])
    return int(done.stdout.strip().splitlines()[-1])


def _log_version_here(request: Mapping[str, Any]) -> int:
    """Runs in the child process."""
    home = Path(request["home"])
    client = open_client(home)
    import mlflow
    import mlflow.pyfunc
    from mlflow.exceptions import MlflowException

    mlflow.set_tracking_uri(client.tracking_uri)
    mlflow.set_registry_uri(client.tracking_uri)
    name = request["name"]
    run = request["source_run"]
    if run is None:
        experiment = client.get_experiment_by_name("releases")
        place = (home / "mlflow" / "artifacts" / "releases").absolute().as_uri()
        identity = experiment.experiment_id if experiment else client.create_experiment("releases", place)
        run = client.create_run(identity, tags=request["tags"], run_name=name).info.run_id
        client.set_terminated(run)
    with tempfile.TemporaryDirectory() as scratch, mlflow.start_run(run_id=run):
        model = mlflow.pyfunc.log_model(
            name="release",
            python_model=request["code"],
            artifacts={"release": request["release"]},
            model_config=_SERVING,
            code_paths=[str(copy_of_components(Path(scratch), request["with_builtin"]))],
            pip_requirements=[f"{package}=={installed_version(package).split('+')[0]}" for package in _REQUIREMENTS],
        )
    try:
        client.create_registered_model(
            name, description="A drafter for speculative decoding; see the tags of each version."
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    made = client.create_model_version(
        name, source=model.model_uri, run_id=run, tags=request["tags"], model_id=model.model_id
    )
    return int(made.version)


def _move(
    home: Path,
    client: MlflowClient,
    name: str,
    alias: str,
    version: int,
    action: str,
    why: str,
    numbers: Mapping[str, str],
) -> None:
    """Move the alias, see that it moved, write the promotion log. `previous` follows `champion`.

    The log comes last: a move that died before it is made again by whoever comes next, and logged then.
    """
    before = aliases_of(client, name).get(alias)
    if alias == "champion" and before is not None and before != version:
        client.set_registered_model_alias(name, "previous", str(before))
    client.set_registered_model_alias(name, alias, str(version))
    assert aliases_of(client, name).get(alias) == version, f"{name}@{alias} was moved by somebody else meanwhile"
    if before == version:  # the move that died
        before = _last_logged(home, name, alias)
    row = PromotionRow(
        promotion_id=f"{now():%Y%m%d-%H%M%S-%f}-{uuid.uuid4().hex[:8]}",
        promoted_at=now(),
        name=name,
        alias=alias,
        action=action,
        from_version=before,
        to_version=version,
        who=_who(),
        why=why,
        numbers=json.dumps(dict(numbers), sort_keys=True),
    )
    journal.log_promotion(home, row)
    from storage.results import remember_promotion

    remember_promotion(home, row)


def _last_logged(home: Path, name: str, alias: str) -> int | None:
    """Where the promotion log says an alias is."""
    moves = [row.to_version for row in journal.promotions(home) if (row.name, row.alias) == (name, alias)]
    return moves[-1] if moves else None


def _resolve(client: MlflowClient, name: str, version: int | str) -> int:
    from mlflow.exceptions import MlflowException

    _require_model(client, name)
    if str(version) in ALIASES:
        number = aliases_of(client, name).get(str(version))
        if number is None:
            raise UserError(f"{name}: no version has the alias '{version}'")
        return number
    known = sorted(int(found.version) for found in client.search_model_versions(f"name = '{name}'"))
    try:
        return int(client.get_model_version(name, str(int(version))).version)
    except (ValueError, MlflowException) as error:
        raise UserError(f"{name}: there is no version {version} (there are {', '.join(map(str, known))})") from error


def _require_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(name)
    except MlflowException as error:
        known = ", ".join(model.name for model in client.search_registered_models()) or "none yet"
        raise UserError(f"there is no registered model '{name}' (known: {known})") from error


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user entry
        return f"uid {os.getuid()}"


if __name__ == "__main__":
    result = _log_version_here(json.load(sys.stdin))
    sys.stdout.write(f"{result}\n")
