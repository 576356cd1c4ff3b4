"""The main job at tiny size, on targets that are not the built-in one: every step real, nothing mocked.

One pipeline, three architectures made from `transformers` configs. Speed is not asserted here (see benchmarks/).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_targets import Family, make_tiny_target

ROOT = Path(__file__).resolve().parents[1]
DRAFTSMITH = str(Path(sys.executable).with_name("draftsmith"))

TINY = """
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
        with: {{max_new_tokens: 24, batch_size: 8}}
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
      step_cost:
        uses: bench.measure_step_cost
        in: {{target: target, draft: draft, prompts: prompts}}
        with: {{num_blocks: 5, tokens_per_block: 16, num_threads: 1}}
      depth:    {{uses: speedup.choose_depth, in: {{acceptance: acceptance, cost: step_cost}}}}
      end_to_end:
        uses: bench.compare_end_to_end
        in: {{target: target, drafts: draft, prompts: prompts, policy: depth}}
        with: {{max_new_tokens: 16, num_prompts: 4, reps: 1, num_threads: 1}}
      verdict:  {{uses: speedup.confirm_depth, in: {{policy: depth, end_to_end: end_to_end}}}}
      release:
        uses: publish.export_release
        in: {{target: target, drafts: draft, policy: verdict, acceptance: acceptance, end_to_end: end_to_end}}
      report:
        uses: report.write_page
        in: {{policy: verdict, acceptance: acceptance, cost: step_cost, end_to_end: end_to_end, release: release}}
"""


def draftsmith(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line against its own home, as a user would."""
    return subprocess.run(
        [DRAFTSMITH, *arguments],
        env={**os.environ, "DRAFTSMITH_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def artifacts(home: Path) -> dict[str, dict[str, Any]]:
    """Every finished artifact's record, by key."""
    return {file.parent.name: json.loads(file.read_text()) for file in (home / "store").glob("*/artifact.json")}


def rows(home: Path, sql: str) -> list[list[Any]]:
    """What `draftsmith query` answers, as the library gives it."""
    from storage.results import query

    _, found = query(sql, home)
    return [list(row) for row in found]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run the tiny pipeline once for each family asked for; gives (home, pipelines file)."""
    made: dict[Family, tuple[Path, Path]] = {}

    def run(family: Family) -> tuple[Path, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            model = make_tiny_target(family, folder / "model")
            file = folder / "pipelines.yaml"
            file.write_text(TINY.format(model=model), encoding="utf-8")
            done = draftsmith(folder / "home", "run", "tiny", "--direct", "--file", str(file))
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            made[family] = folder / "home", file
        return made[family]

    return run


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_the_main_job_runs_on_any_target(finished: Any, family: Family) -> None:
    """Every step is made, both drafters decode token for token like the target alone, and the numbers answer in SQL."""
    home, _ = finished(family)
    kinds = sorted(record["kind"] for record in artifacts(home).values())
    expected = ["Conversations", "Draft", "Draft", "Features", "Page", "Prompts", "Release", "Target"]
    assert kinds == sorted([*expected, *["DepthPolicy"] * 2, *["Measurements"] * 5])
    decoded = rows(home, "SELECT method, identical, tie FROM request WHERE method <> 'none' AND NOT is_warmup")
    assert {method for method, _, _ in decoded} == {"eagle3", "mtp", "ngram"}
    assert all(identical or tie for _, identical, tie in decoded)
    depths = rows(home, "SELECT DISTINCT method FROM depth_eval WHERE speedup_pred > 0")
    assert {method for (method,) in depths} == {"eagle3", "mtp"}


def test_a_second_run_makes_nothing_anew(finished: Any) -> None:
    home, file = finished("llama")
    before = {key: (home / "store" / key / "artifact.json").stat().st_mtime_ns for key in artifacts(home)}
    done = draftsmith(home, "run", "tiny", "--direct", "--file", str(file))
    assert done.returncode == 0, done.stderr
    assert "15 reused, 0 to run" in done.stdout
    assert before == {key: (home / "store" / key / "artifact.json").stat().st_mtime_ns for key in artifacts(home)}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_killed_run_ends_with_the_same_weights(finished: Any, tmp_path: Path, seed: int) -> None:
    """SIGKILL at random moments, then the same command: finished steps stay, weights equal bit for bit."""
    reference, file = finished("llama")
    drafts = {key for key, record in artifacts(reference).items() if record["kind"] == "Draft"}
    assert len(drafts) == 2
    chance = random.Random(seed)
    home = tmp_path / "home"
    command = [DRAFTSMITH, "run", "tiny", "--direct", "--file", str(file), "--to", "draft"]
    seen: dict[str, int] = {}
    for _ in range(4):
        process = subprocess.Popen(
            command,
            env={**os.environ, "DRAFTSMITH_HOME": str(home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(timeout=chance.uniform(2.0, 14.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.wait()
        now = {key: (home / "store" / key / "artifact.json").stat().st_mtime_ns for key in artifacts(home)}
        assert {key: now.get(key) for key in seen} == seen, "a finished step was made again"
        seen = now
    done = subprocess.run(
        command, env={**os.environ, "DRAFTSMITH_HOME": str(home)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for key in drafts:
        weights = "model.safetensors"
        assert (home / "store" / key / weights).read_bytes() == (reference / "store" / key / weights).read_bytes()
