"""The main job at tiny size, run as a user runs it: its pipeline, its command, what it left, and how to kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiny_targets import Family, make_tiny_target

DRAFTSMITH = str(Path(sys.executable).with_name("draftsmith"))
NUM_STEPS = 15
KILLED = -signal.SIGKILL

PIPELINE = """
pipelines:
  tiny:
    about: The main job at tiny size.
    steps:
      target:   {{uses: targets.load_target, with: {{model: "{model}"}}}}
      prompts:
        uses: data.collect_prompts
        with: {{source: python-stdlib, num_train: 24, num_validation: 6, num_test: 4, num_warm_up: 2}}
      answers:
        uses: data.write_answers
        in: {{target: target, prompts: prompts}}
        with: {{max_new_tokens: 24, batch_size: 8, shard_size: 8}}
      features: {{uses: data.record_features, in: {{target: target, answers: answers}}}}
      draft:
        uses: drafts.train_draft
        in: {{target: target, features: features}}
        matrix: {{method: [eagle3, mtp]}}
        with: {{method: "${{matrix.method}}", num_steps: 12, draft_vocab_size: 128}}
      acceptance:
        uses: bench.measure_acceptance
        in: {{target: target, draft: draft, prompts: prompts}}
        with: {{max_new_tokens: 16}}
      tuning:   {{uses: bench.autotune, in: {{target: target, prompts: prompts, drafts: draft}}, with: {{seconds: 0}}}}
      step_cost:
        uses: bench.measure_step_cost
        in: {{target: target, drafts: draft, prompts: prompts, tuning: tuning}}
        with: {{tokens_per_block: 16, seconds: 1, num_processes: 1}}
      depth:    {{uses: speedup.choose_depth, in: {{acceptance: acceptance, cost: step_cost}}}}
      end_to_end:
        uses: bench.compare_end_to_end
        in: {{target: target, drafts: draft, prompts: prompts, policy: depth, tuning: tuning}}
        with: {{max_new_tokens: 16, num_prompts: 4, seconds: 3, num_processes: 2}}
      verdict:  {{uses: speedup.confirm_depth, in: {{policy: depth, end_to_end: end_to_end}}}}
      release:
        uses: publish.export_release
        in: {{target: target, drafts: draft, policy: verdict, acceptance: acceptance, end_to_end: end_to_end}}
      report:
        uses: report.write_page
        in: {{policy: verdict, acceptance: acceptance, cost: step_cost, end_to_end: end_to_end, release: release}}
"""


def write_pipeline(family: Family, folder: Path) -> Path:
    """Make a tiny target of `family` and the pipelines.yaml over it; returns the file."""
    model = make_tiny_target(family, folder / "model")
    file = folder / "pipelines.yaml"
    file.write_text(PIPELINE.format(model=model), encoding="utf-8")
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


def draftsmith_killed(home: Path, after_s: float, *arguments: str) -> int:
    """Start the command and SIGKILL it after so many seconds; its exit code: KILLED, or 0 when it was done before."""
    process = subprocess.Popen(
        [DRAFTSMITH, *arguments], env=environment(home), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
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
