"""The main job at tiny size, run as a user runs it: its pipeline, its command, what it left, and how to kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline_builder import Pipeline, step
from tiny_targets import Family, make_tiny_target
from usual_pipeline import usual

DRAFTSMITH = str(Path(sys.executable).with_name("draftsmith"))
NUM_STEPS = 15
KILLED = -signal.SIGKILL


def main_job(model: Path) -> Pipeline:
    """The main job at tiny size, over the target at `model`."""
    drafts = {"target": "target", "drafts": "draft", "prompts": "prompts"}
    decided: list[Any] = ["acceptance", "end_to_end", {"policy": "verdict"}]
    blocks = {"tokens_per_block": 16, "seconds": 1, "num_processes": 1}
    timed = {"max_new_tokens": 16, "num_prompts": 4, "seconds": 3, "num_processes": 2}
    return (
        usual("tiny", model, to="acceptance")
        .with_keys(about="The main job at tiny size.")
        .with_setting("prompts", num_train=24, num_validation=6, num_test=4, num_warm_up=2)
        .with_setting("answers", max_new_tokens=24, batch_size=8, shard_size=8)
        .with_step_keys("draft", {"matrix": {"method": ["eagle3", "mtp"]}})
        .with_setting("draft", method="${matrix.method}", num_steps=12, draft_vocab_size=128)
        .with_setting("acceptance", max_new_tokens=16)
        .with_steps(
            tuning=step("bench.autotune", drafts, seconds=0),
            step_cost=step("bench.measure_step_cost", "tuning", drafts, **blocks),
            depth=step("speedup.choose_depth", "acceptance", {"cost": "step_cost"}),
            end_to_end=step("bench.compare_end_to_end", "tuning", drafts, {"policy": "depth"}, **timed),
            verdict=step("speedup.confirm_depth", "end_to_end", {"policy": "depth"}),
            release=step("publish.export_release", *decided, "target", {"drafts": "draft"}),
            report=step("report.write_page", *decided, "release", {"cost": "step_cost"}),
        )
    )


def write_pipeline(family: Family, folder: Path) -> Path:
    """Make a tiny target of `family` and the pipelines.yaml over it; returns the file."""
    model = make_tiny_target(family, folder / "model")
    file = folder / "pipelines.yaml"
    file.write_text(main_job(model).text, encoding="utf-8")
    return file


def environment(home: Path) -> dict[str, str]:
    """The environment of a command that works on its own home, and waits for nobody else's measuring."""
    place = home.parent / "tmp"
    place.mkdir(parents=True, exist_ok=True)
    return {**os.environ, "DRAFTSMITH_HOME": str(home), "TMPDIR": str(place)}


def draftsmith(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line against its own home, as a user would."""
    return subprocess.run(
        [DRAFTSMITH, *arguments], env=environment(home), capture_output=True, text=True, timeout=1200, check=False
    )


def draftsmith_killed(home: Path, after_s: float, *arguments: str, once: Callable[[], bool] = lambda: True) -> int:
    """Start the command and SIGKILL it so many seconds after `once` is so; its exit code: KILLED, or 0 at its end."""
    process = subprocess.Popen(
        [DRAFTSMITH, *arguments], env=environment(home), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not once():
        time.sleep(0.02)
    try:
        process.wait(timeout=after_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    return process.wait()


def artifacts(home: Path) -> dict[str, dict[str, Any]]:
    """Every finished artifact's record, by key."""
    return {file.parent.name: json.loads(file.read_text()) for file in (home / "store").glob("*/artifact.json")}


def finished_at(home: Path) -> dict[str, int]:
    """When each finished artifact was finished, by key, ns: a step that is made again changes its number."""
    return {file.parent.name: file.stat().st_mtime_ns for file in (home / "store").glob("*/artifact.json")}


def rows(home: Path, sql: str) -> list[list[Any]]:
    """What `draftsmith query` answers, as the library gives it."""
    from storage.history.query import query

    _, found = query(sql, home)
    return [list(row) for row in found]
