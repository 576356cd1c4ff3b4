"""Editing this project's own code reruns what it reaches and nothing else, on a copy of the real tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MEASURED_TOGETHER = {"tuning", "step_cost"}
"""Drafters are measured side by side, so that another one measures all of them anew."""
DECIDED = {"depth", "end_to_end", "verdict", "release", "report"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rooms and pipelines.yaml, in a folder of their own."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("flows", "components", "storage"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pipelines.yaml", folder)
    return folder


def keys(folder: Path) -> dict[str, str]:
    """Step name -> key, as `draftsmith plan quickstart --json` prints them, from the code in `folder`."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "plan", "quickstart", "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "DRAFTSMITH_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {step["name"]: step["key"] for step in json.loads(done.stdout)}


@cache
def keys_before(folder: Path) -> dict[str, str]:
    """The keys of the tree as it is copied, to which every edit is undone."""
    return keys(folder)


def changed(folder: Path, file: str, old: str, new: str) -> set[str]:
    """The steps whose key an edit changes; the edit is undone."""
    before = keys_before(folder)
    path = folder / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) >= 1, f"{file} no longer contains {old!r}"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    after = keys(folder)
    path.write_text(text, encoding="utf-8")
    return {name for name in before if before[name] != after[name]}


def test_a_comment_reruns_nothing(copy: Path) -> None:
    edit = "class Eagle3("
    assert changed(copy, "components/drafts/methods/eagle3.py", edit, "# a remark\n" + edit) == set()


def test_the_loss_of_eagle3_reruns_its_drafter_and_what_follows(copy: Path) -> None:
    edit = "teacher = teacher_for_steps(self.target, batch, self.draft_ids)"
    steps = changed(copy, "components/drafts/methods/eagle3.py", edit, edit + "\n        assert teacher is not None")
    assert steps == {"draft[eagle3]", "acceptance[eagle3]", *MEASURED_TOGETHER, *DECIDED}


def test_the_speedup_model_reruns_the_choice_and_no_training(copy: Path) -> None:
    steps = changed(copy, "components/speedup/choose.py", "    policy = ", "    assert cost\n    policy = ")
    assert steps == DECIDED


def test_what_runs_in_fresh_processes_is_code_of_the_steps_that_measure(copy: Path) -> None:
    edit = "        take_turns(generations, tokens_a_slice, self.order)\n"
    steps = changed(copy, "components/bench/measurement/process.py", edit, edit + "        assert generations\n")
    assert steps == {"step_cost", *DECIDED}


def test_a_new_setting_of_one_method_reruns_its_drafter_alone(copy: Path) -> None:
    edit = "    mtp_modules: Annotated[int, Field(ge=1, le=8)] = 3\n"
    steps = changed(copy, "components/drafts/settings.py", edit, edit + "    new: int = 0\n")
    assert steps == {"draft[mtp]", "acceptance[mtp]", *MEASURED_TOGETHER, *DECIDED}


def test_a_method_that_no_step_names_reruns_nothing(copy: Path) -> None:
    for file, edit in (
        ("components/drafts/methods/medusa.py", "        self._decoder = None\n"),
        ("components/decoding/lookahead.py", "        state.advance(picks, accepted)\n"),
    ):
        assert changed(copy, file, edit, edit + "        assert True\n") == set(), file
