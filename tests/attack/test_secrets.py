"""Every fault that speaks of an address is provoked with secrets in it; then all that was shown or kept is searched."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from served_home import DRAFTSMITH, TOYS, free_port
from toy_garden import GARDEN, ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
SECRETS = {
    "MLflow": "mlflow-pass-5d1f",
    "Prefect": "prefect-pass-77ab",
    "auth string": "auth-string-91cc",
    "hub": "hf_token_8e2b44",
    "team": "team-secret-4f20",
    "object store": "aws-key-0a91bb",
    "database": "postgres-pass-c3d4",
}
COMMANDS = (
    ["check"],
    ["plan", "garden"],
    ["run", "garden"],
    ["--debug", "run", "garden"],
    ["run", "garden", "--direct"],
    ["run", "garden", "-p", "steps=hf_token_8e2b44"],
    ["deploy", "--dry-run"],
    ["deploy"],
    ["status"],
    ["doctor"],
    ["resync"],
    ["--debug", "resync"],
    ["rollback", "no-such-model", "--why", "to see"],
    ["promote", "no-such-model"],
    ["query", "SELECT 1 FROM no_such_table"],
    ["show", "ffff"],
    ["up", "--detach"],
    ["down"],
)


@pytest.mark.parametrize("reachable", [False, True], ids=["servers that nobody serves", "servers of our own"])
def test_no_secret_is_shown_or_kept(tmp_path: Path, reachable: bool) -> None:
    (tmp_path / "pipelines.yaml").write_text(GARDEN.text)
    environment = {
        **os.environ,
        "DRAFTSMITH_HOME": str(tmp_path / "home"),
        "DRAFTSMITH_PACKAGES": "components,toybox",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{TOYS}",
        "TMPDIR": str(tmp_path),
        "HF_TOKEN": SECRETS["hub"],
        "DRAFTSMITH_STORE_SECRET": SECRETS["team"],
        "AWS_SECRET_ACCESS_KEY": SECRETS["object store"],
        "DRAFTSMITH_STORE": f"file://{tmp_path}/team",
    }
    if not reachable:
        port = free_port()
        environment |= {
            "MLFLOW_TRACKING_URI": f"http://me:{SECRETS['MLflow']}@127.0.0.1:{port}",
            "PREFECT_API_URL": f"http://me:{SECRETS['Prefect']}@127.0.0.1:{port}/api",
            "PREFECT_API_AUTH_STRING": f"me:{SECRETS['auth string']}",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
            "DRAFTSMITH_PREFECT_DATABASE": f"postgresql+asyncpg://me:{SECRETS['database']}@127.0.0.1:{port}/none",
            "DRAFTSMITH_MLFLOW_DATABASE": f"postgresql://me:{SECRETS['database']}@127.0.0.1:{port}/none",
        }
    shown = []
    for command in COMMANDS:
        done = subprocess.run(
            [DRAFTSMITH, *command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        shown.append(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
    said = "\n".join(shown).replace("steps=hf_token_8e2b44", "")  # what we typed ourselves in COMMANDS
    places = {"what was shown": said.encode()}
    places |= {str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and not file.is_symlink()}
    assert sum("home" in place for place in places) > 3, "something was kept"
    found = [
        f"{place} holds the secret {what}"
        for place, content in places.items()
        for what, secret in SECRETS.items()
        if secret.encode() in content
    ]
    assert not found, "\n".join([*found, said[-6000:]])
