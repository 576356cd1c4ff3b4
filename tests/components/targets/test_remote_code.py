"""Python code that comes with a model runs when the pipeline says so now, and for no other reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_targets import make_tiny_target

from components.contract import Context, Target, UserError
from components.source_code import REMOTE_CODE, allow_code
from components.targets import load_target
from components.targets.load import open_target

CODE = """
from pathlib import Path
from transformers import LlamaConfig

Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own-llama"
"""


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """A file that is there once the model's code has run."""
    return tmp_path / "the code has run"


@pytest.fixture
def model(tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose configuration is a class of its own."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = make_tiny_target("llama", tmp_path / "model")
    (folder / "configuration_own.py").write_text(CODE.format(marker=str(ran)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own-llama", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REMOTE_CODE, "")  # and what a test allows is taken back


def target_that_says_so(folder: Path, model: str, place: Path) -> Target:
    """A Target as anybody can write one: its record asks for code to be run."""
    folder.mkdir()
    record = {"model": model, "folder": str(place), "trust_remote_code": True, "dtype": "float32", "files": {}}
    (folder / "target.json").write_text(json.dumps(record))
    return Target(key="a" * 64, path=folder)


def test_a_record_that_asks_for_it_runs_nothing(model: Path, ran: Path, tmp_path: Path) -> None:
    foreign = target_that_says_so(tmp_path / "target", str(model), model)
    with pytest.raises(UserError, match="nobody has allowed") as caught:
        open_target(foreign)
    assert str(model) in str(caught.value) and "\n" not in str(caught.value) and not ran.exists()
    allow_code(["another"])
    with pytest.raises(UserError, match="nobody has allowed"):
        open_target(foreign)
    assert not ran.exists()


def test_what_was_allowed_is_a_name_not_the_folder_that_a_record_gives(model: Path, ran: Path, tmp_path: Path) -> None:
    harmless = make_tiny_target("llama", tmp_path / "harmless")
    allow_code([str(harmless)])
    target = target_that_says_so(tmp_path / "target", str(harmless), model)
    assert open_target(target).shape.vocab_size > 0
    assert not ran.exists()


def test_the_setting_of_the_pipeline_that_runs_is_obeyed(model: Path, ran: Path, tmp_path: Path) -> None:
    """In a process of its own: code that ran once stays imported."""
    ctx = Context(key="a" * 64, out=tmp_path, scratch=tmp_path, num_threads=1)
    with pytest.raises(UserError) as refused:
        load_target(model=str(model), ctx=ctx)
    assert "\n" not in str(refused.value) and not ran.exists()
    script = (
        "import sys; from components.targets.config import read_config; from pathlib import Path;"
        "read_config(Path(sys.argv[1]), location='it', trust_remote_code=sys.argv[2] == 'yes')"
    )
    for said, runs in (("no", False), ("yes", True)):
        subprocess.run([sys.executable, "-c", script, str(model), said], capture_output=True, check=False)
        assert ran.exists() is runs
