"""Whoever can write the shared store answers a predictable key with a model of his own: its code never runs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import DRAFTSMITH, environment
from tiny_targets import make_tiny_target
from usual_pipeline import usual

from storage.artifacts.records import SECRET_VARIABLE, with_digest
from storage.artifacts.remote import VARIABLE

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
CODE = """
from pathlib import Path
from transformers import LlamaConfig

Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own-llama"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that both colleagues serve."""
    return make_tiny_target("llama", tmp_path_factory.mktemp("model"))


def run(folder: Path, model: Path, who: str, num_tokens: int, secret: str = "") -> subprocess.CompletedProcess[str]:
    """The pipeline on a home of its own, with the store that the team shares."""
    file = folder / f"{who}.yaml"
    small = usual("answers", model, to="answers").with_setting("prompts", num_train=8, num_test=4)
    file.write_text(small.with_setting("answers", max_new_tokens=num_tokens, batch_size=4, shard_size=4).text)
    given = environment(folder / who / "home") | {VARIABLE: f"file://{folder}/team", SECRET_VARIABLE: secret}
    given["HF_MODULES_CACHE"] = str(folder / "modules")
    command = [DRAFTSMITH, "run", "answers", "--direct", "-f", str(file)]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=600, check=False)


def put_code(folder: Path) -> Path:
    """Make the team's target one that brings its own code and asks for it to run; the file that the code would make."""
    marker = folder / "the code has run"
    evil = make_tiny_target("llama", folder / "evil")
    (evil / "configuration_own.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((evil / "config.json").read_text())
    config |= {"model_type": "own-llama", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (evil / "config.json").write_text(json.dumps(config))
    record_file = next(
        file for file in (folder / "team" / "artifacts").glob("*.json") if record_in(file)["kind"] == "Target"
    )
    record = record_in(record_file)
    said = {"model": str(evil), "folder": str(evil), "trust_remote_code": True, "dtype": "float32", "files": {}}
    text = json.dumps(said).encode()
    digest = hashlib.sha256(text).hexdigest()
    place = folder / "team" / "objects" / digest[:2]
    place.mkdir(parents=True, exist_ok=True)
    (place / digest).write_bytes(text)
    record["files"]["target.json"] = {"size": len(text), "sha256": digest}
    record_file.write_text(json.dumps(with_digest(record)))  # with the digest that this record ought to have
    return marker


def record_in(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text()))


def test_code_from_a_shared_store_is_not_run(tmp_path: Path, model: Path) -> None:
    """The attacker's record is taken, as he may write the store; what it asks for is not done."""
    first = run(tmp_path, model, "ada", 8)
    assert first.returncode == 0, first.stderr
    marker = put_code(tmp_path)
    done = run(tmp_path, model, "bob", 9)
    assert "reused" in done.stdout, done.stdout
    assert done.returncode != 0 and "nobody has allowed" in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and not marker.exists()


def test_with_a_secret_the_foreign_record_is_not_even_taken(tmp_path: Path, model: Path) -> None:
    first = run(tmp_path, model, "ada", 8, "of the team")
    assert first.returncode == 0, first.stderr
    marker = put_code(tmp_path)
    done = run(tmp_path, model, "bob", 9, "of the team")
    assert done.returncode == 0, done.stdout + done.stderr
    assert SECRET_VARIABLE in done.stdout + done.stderr, "it is said why the target was made again"
    assert not marker.exists()
    assert os.environ.get(SECRET_VARIABLE) is None
