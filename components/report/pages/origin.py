"""The line under a page's heading: which model, measured on which machine, when, and by which code.

Machine, time and code are those that a measurement recorded about itself; what it did not record has no entry.
"""

from __future__ import annotations

from datetime import UTC, datetime

from components.contract import Artifact
from components.outside_json import read_object


def origin_of(model: str, target_key: str, measured: Artifact) -> list[tuple[str, str]]:
    """(label, value) of each fact. model: the target as the pipeline names it; "" where only its key is known."""
    facts = [("model", model or f"target {target_key[:12]}")]
    file = measured.path / "artifact.json"
    if not file.is_file():  # a step that is called outside of a run leaves no record
        return facts
    content = read_object(file)
    record = content["record"]
    if machine := record.get("machine"):
        name = machine["device_name"] or machine["cpu_model"]
        facts.append(("machine", f"{name}, {machine['num_cores']} cores, {machine['ram_gib']:g} GiB, {machine['os']}"))
    facts.append(("measured", f"{datetime.fromtimestamp(content['finished_at'], UTC):%Y-%m-%d %H:%M} UTC"))
    commit, torch = record.get("git_commit"), record.get("versions", {}).get("torch")
    code = [f"commit {commit[:12]}{' with changes' if record.get('git_changed') else ''}"] if commit else []
    if code := [*code, *([f"torch {torch}"] if torch else [])]:
        facts.append(("code", ", ".join(code)))
    return facts
