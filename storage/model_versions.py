"""Versions of registered models: logged from a release in a child process, looked up, described for people.

A version is models-from-code (components/publish/mlflow_model.py), so nothing is pickled; MLflow runs that file when it
logs it, which happens in a child process to keep torch out of this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.contract import UserError
from components.escapes import in_markdown
from storage.alias_moves import GONE, aliases_of
from storage.promotion_gate import Decision
from storage.release_facts import ROOT, ReleaseFacts, copy_of_components
from storage.tracking import KEY_TAG, RELEASES, ensure_experiment, open_client

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

MODEL_CODE = ROOT / "components" / "publish" / "mlflow_model.py"
# Settings of a loaded version (MLflow ignores keys that were not logged); explained in the model's code.
SERVING = {"target": "", "max_new_tokens": 128, "temperature": 0.0, "seed": 0, "depth": -1}
RELEASE_FIRST = "run the pipeline that releases it first, such as `draftsmith run quickstart`"
REQUIREMENTS = ("torch", "transformers", "safetensors", "tokenizers", "mlflow")
_ABOUT = "A drafter for speculative decoding. Aliases: champion serves, previous is where `draftsmith rollback` goes."
# (fact of a version, what people call it)
_FACT_LABELS = (
    ("verdict", "verdict"),
    ("depth_k", "depth to serve with"),
    ("depth_by_workload", "depth by workload"),
    ("target", "target"),
    ("target_revision", "target revision"),
    ("data_digest", "training data"),
    ("machine_name", "measured on"),
    ("machine", "machine"),
    ("depth_policy", "depth policy"),
    ("sha256", "artifact sha256"),
    ("drafter_bytes", "drafter, bytes"),
    ("pipeline", "pipeline"),
    ("pipeline_digest", "pipeline as written"),
    ("run_id", "run"),
    ("flow_run_id", "Prefect flow run"),
    ("git_commit", "git commit"),
)


def versions_of_release(client: MlflowClient, name: str, release_key: str) -> list[int]:
    """The versions that were registered from this release, oldest first."""
    assert "'" not in name + release_key, "both are made by us"
    versions = client.search_model_versions(f"name = '{name}' AND tags.`{KEY_TAG}` = '{release_key}'")
    return sorted(int(version.version) for version in versions)


def tags_of(client: MlflowClient, name: str, version: int) -> dict[str, str]:
    """The facts of a version."""
    return dict(client.get_model_version(name, str(version)).tags)


def resolve(client: MlflowClient, name: str, version: int | str) -> int:
    """The number of a version, given by number or alias.

    Raises:
        UserError: there is no such model, version or alias.
    """
    from mlflow.exceptions import MlflowException

    require_model(client, name)
    if not str(version).isdecimal():
        aliases = aliases_of(client, name)
        if version not in aliases:
            listed = ", ".join(f"{alias}: {number}" for alias, number in sorted(aliases.items())) or "it has none"
            raise UserError(f"{name}: no version has the alias '{version}' ({listed})")
        return aliases[str(version)]
    try:
        return int(client.get_model_version(name, str(version)).version)
    except MlflowException as error:
        if error.error_code != GONE:
            raise
        numbers = sorted(int(latest.version) for latest in client.get_registered_model(name).latest_versions)
        raise UserError(f"{name}: there is no version {version} (the newest is {max(numbers, default=0)})") from error


def require_model(client: MlflowClient, name: str) -> None:
    """Raise UserError, with the names there are, for a name that no registered model has."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code not in (GONE, "INVALID_PARAMETER_VALUE"):
            raise
        names = ", ".join(model.name for model in client.search_registered_models()) or "none yet"
        raise UserError(f"there is no registered model '{name}' (known: {names}); {RELEASE_FIRST}") from error


def describe(client: MlflowClient, name: str, version: int, decision: Decision | None) -> None:
    """Write a version's description: its facts, its evidence and the decision of the promotion gate."""
    text = description(tags_of(client, name, version), decision)
    client.update_model_version(name, str(version), description=text)


def description(tags: Mapping[str, str], decision: Decision | None) -> str:
    """The facts of a version as Markdown, in which no fact can become markup."""
    facts = {name.removeprefix("draftsmith."): value for name, value in tags.items()}
    lines = [
        f"**{in_markdown(facts['method'])}** drafter for **{in_markdown(facts['target'])}**",
        "",
        *_table_head("evidence", "value", "95 % interval"),
        _table_row("measured speedup", _format_number(facts, "speedup_meas"), _format_interval(facts, "meas")),
        _table_row("predicted speedup", _format_number(facts, "speedup_pred"), ""),
        _table_row("acceptance length", _format_number(facts, "al"), _format_interval(facts, "al")),
        _table_row("acceptance length while decoding", _format_number(facts, "al_meas"), ""),
        _table_row("the same, replayed for those prompts", _format_number(facts, "al_replayed"), ""),
        *(_table_row(label, facts[fact], "") for fact, label in _FACT_LABELS if fact in facts),
        "",
        *_table_head("own gate", "value", "asked", "passed"),
    ]
    for check in json.loads(facts["gate.checks"]):
        value = "" if check["value"] is None else f"{check['value']:.4g}"
        lines.append(_table_row(check["name"], value, check["limit"], _yes_no(check["passed"])))
    if decision is not None and decision.against is not None:
        lines += ["", *_table_head(f"against version {decision.against}", "value", "asked", "passed")]
        lines += [
            _table_row(check.name, check.measured(), check.asked, _yes_no(check.passed)) for check in decision.checks
        ]
    return "\n".join(lines)


def _yes_no(passed: bool) -> str:
    return "yes" if passed else "NO"


def _format_interval(facts: Mapping[str, str], name: str) -> str:
    return (
        f"[{_format_number(facts, f'{name}_lo')}, {_format_number(facts, f'{name}_hi')}]"
        if f"{name}_lo" in facts
        else ""
    )


def _format_number(tags: Mapping[str, str], fact: str) -> str:
    return f"{float(tags[fact]):.2f}" if fact in tags else "-"


def _table_head(*header: str) -> list[str]:
    return [_table_row(*header), "|" + " --- |" * len(header)]


def _table_row(*cells: str) -> str:
    return "| " + " | ".join(map(in_markdown, cells)) + " |"


def log_version(home: Path, release: Path, facts: ReleaseFacts, source_run: str | None, code: Path) -> int:
    """Log and register a version in a child process; its memory is returned and torch stays out of this one."""
    request = {
        "home": str(home),
        "release": str(release),
        "name": facts.name,
        "tags": facts.tags,
        "source_run": source_run,
        "code": str(code),
        "with_builtin": facts.target == "builtin",
        "requirements": [f"{package}=={installed_version(package).split('+')[0]}" for package in REQUIREMENTS],
    }
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    done = subprocess.run(
        [sys.executable, "-m", "storage.model_versions"],
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
        experiment = ensure_experiment(home, client, RELEASES)
        run = client.create_run(experiment, tags=request["tags"], run_name=name).info.run_id
        client.set_terminated(run)
    with tempfile.TemporaryDirectory() as scratch, mlflow.start_run(run_id=run):
        model = mlflow.pyfunc.log_model(
            name="release",
            python_model=request["code"],
            artifacts={"release": request["release"]},
            model_config=SERVING,
            code_paths=[str(copy_of_components(Path(scratch), request["with_builtin"]))],
            pip_requirements=request["requirements"],
        )
    try:
        client.create_registered_model(name, description=_ABOUT)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = client.create_model_version(
        name, source=model.model_uri, run_id=run, tags=request["tags"], model_id=model.model_id
    )
    return int(version.version)


if __name__ == "__main__":
    result = _log_version_here(json.load(sys.stdin))
    sys.stdout.write(f"{result}\n")
