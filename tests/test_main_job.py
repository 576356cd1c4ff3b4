"""The main job at tiny size, on targets that are not the built-in one: every step real, nothing mocked.

One pipeline, two architectures made from `transformers` configs: one that our own forward pass runs, with dense layers
and experts, and one that transformers' does. Speed is not asserted here (see benchmarks/).
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import (
    KILLED,
    NUM_STEPS,
    artifacts,
    draftsmith,
    draftsmith_killed,
    environment,
    finished_at,
    rows,
    write_pipeline,
)
from tiny_targets import Family

from storage.artifacts.store import Store
from storage.repair import find_damage

OURS: Family = "qwen3_moe"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run the tiny pipeline once for each family asked for; gives (home, pipelines file)."""
    made: dict[Family, tuple[Path, Path]] = {}

    def run(family: Family) -> tuple[Path, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            file = write_pipeline(family, folder)
            done = draftsmith(folder / "home", "run", "tiny", "--direct", "--file", str(file))
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            made[family] = folder / "home", file
        return made[family]

    return run


@pytest.mark.parametrize("family", [OURS, "deepseek_v3"])
def test_the_main_job_runs_on_any_target(finished: Any, family: Family) -> None:
    """Every step is made, both drafters decode token for token like the target alone, and the numbers answer in SQL."""
    home, _ = finished(family)
    kinds = sorted(record["kind"] for record in artifacts(home).values())
    expected = ["Conversations", "Draft", "Draft", "Features", "Page", "Prompts", "Release", "Target"]
    assert kinds == sorted([*expected, *["DepthPolicy"] * 2, *["Measurements"] * 5])
    decoded = rows(home, "SELECT method, identical, tie FROM request WHERE method <> 'none' AND NOT is_warmup")
    assert {method for method, _, _ in decoded} == {"eagle3", "mtp", "ngram"}
    assert all(identical or tie for _, identical, tie in decoded)
    timed = rows(home, "SELECT num_threads, kernel FROM cost_cell UNION SELECT num_threads, kernel FROM request")
    tuned = next(r["info"] for r in artifacts(home).values() if r["record"]["step"] == "tuning")
    assert {number for number, _ in timed} == {tuned["num_threads"]}, "predicted on other threads than measured"
    assert {kernel for _, kernel in timed} - {"plain"} == {tuned["kernel"]} - {"plain"}, "on other kernels"
    depths = rows(home, "SELECT DISTINCT method FROM depth_eval WHERE speedup_pred > 0")
    assert {method for (method,) in depths} == {"eagle3", "mtp"}


def test_a_second_run_makes_nothing_anew(finished: Any) -> None:
    home, file = finished(OURS)
    before = finished_at(home)
    done = draftsmith(home, "run", "tiny", "--direct", "--file", str(file))
    assert done.returncode == 0, done.stderr
    assert f"{NUM_STEPS} reused, 0 to run" in done.stdout
    assert before == finished_at(home)


def test_a_release_is_measured_again_in_every_session_and_nothing_is_trained(finished: Any) -> None:
    home, file = finished(OURS)
    store, made = Store(home), artifacts(home)
    key = next(key for key, content in made.items() if content["kind"] == "Release")
    before = {key: len(store.sessions(key)) for key in made}
    counts = "SELECT count(DISTINCT created_at), count(DISTINCT artifact_key) FROM {}"
    done = draftsmith(home, "remeasure", key[:12], "--file", str(file))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    again = {made[one]["record"]["step"] for one in made if len(store.sessions(one)) == before[one] + 1}
    assert again == {"tuning", "step_cost", "depth", "end_to_end", "verdict", "release", "report"}
    assert artifacts(home).keys() == made.keys() and store.keys()[-1] in made
    for table in ("request", "cost_cell", "depth_eval"):
        times, keys = rows(home, counts.format(table))[0]
        assert times == 2 * keys, f"{table} has lost a session"
    for view in ("v_speed", "v_cost"):
        times, keys = rows(home, counts.format(view))[0]
        assert times == keys, f"{view} shows more than the newest session"
    sessions = [session.name for session in store.sessions(key)]
    told = [json.loads(line) for line in (home / "promotions.jsonl").read_text().splitlines()]
    assert [row["promotion_id"].split("-model-")[0] for row in told if row["action"] == "evidence"] == [
        f"evidence-{sessions[0]}"
    ], "the log says of which version, and what it was before"


@pytest.mark.parametrize("way", ["copied", "restored"])
def test_a_moved_home_answers_serves_and_runs_where_it_is_now(finished: Any, tmp_path: Path, way: str) -> None:
    """With the original out of reach: SQL, registry, a version loaded, another run; nothing appears elsewhere."""
    home, file = finished(OURS)
    asked = "SELECT run_id, status FROM run WHERE status <> 'killed' ORDER BY 1"
    copy, away, before = tmp_path / "copy", home.with_name("away"), rows(home, asked)
    if way == "copied":
        shutil.copytree(home, copy)
    else:
        restore_of_a_backup_while_a_run_writes(home, file, copy)
    home.rename(away)
    try:
        original = {path: path.stat().st_mtime_ns for path in away.rglob("*")}
        answered = draftsmith(copy, "query", asked, "--format", "json")
        assert [list(row.values()) for row in json.loads(answered.stdout)] == before
        if way == "copied":
            assert f"{copy} was moved here from {home}: " in answered.stderr
        log = (copy / "promotions.jsonl").read_text().splitlines()
        model = json.loads(log[0])["name"]
        shown = draftsmith(copy, "show", model, "--json")
        versions = json.loads(shown.stdout)["versions"]  # two, where what was measured again serves something else
        assert shown.stderr == "" and "candidate" in {alias for version in versions for alias in version["aliases"]}
        code = f"import mlflow; print(mlflow.pyfunc.load_model('models:/{model}@candidate').predict(['def add(']))"
        tracking = {**environment(copy), "MLFLOW_TRACKING_URI": f"sqlite:///{copy}/mlflow/mlflow.db"}
        served = subprocess.run([sys.executable, "-c", code], env=tracking, capture_output=True, text=True, check=False)
        assert "'num_tokens'" in served.stdout, served.stderr[-2000:]
        again = draftsmith(copy, "run", "tiny", "--direct", "--file", str(file), "--force", "release")
        assert again.returncode == 0 and f"registered as      {model}" in again.stdout, again.stdout + again.stderr
        moved_on = [
            json.loads(line)["action"] for line in (copy / "promotions.jsonl").read_text().splitlines()[len(log) :]
        ]
        assert moved_on[0] == "evidence", "its version has the newer release"
        assert not list(find_damage(copy, Store(copy)))
        assert not home.exists() and {path: path.stat().st_mtime_ns for path in away.rglob("*")} == original
    finally:
        away.rename(home)


def restore_of_a_backup_while_a_run_writes(home: Path, file: Path, into: Path) -> None:
    """Back the home up while a run of it makes its release anew, and restore that elsewhere."""
    journals, archive = home / "runs", into.with_name("home.tar")
    begun, of_run = (
        len(list(journals.iterdir())),
        ("run", "tiny", "--direct", "--file", str(file), "--force", "release"),
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(draftsmith, home, *of_run)
        while len(list(journals.iterdir())) == begun:
            assert not running.done(), running.result().stderr
            time.sleep(0.05)
        saved = draftsmith(home, "backup", str(archive))
        done = running.result()
    assert saved.returncode == 0 and done.returncode == 0, saved.stderr + done.stdout + done.stderr
    restored = draftsmith(into, "restore", str(archive))
    assert restored.returncode == 0, restored.stderr


def test_a_killed_run_ends_with_the_same_weights(finished: Any, tmp_path: Path) -> None:
    """SIGKILL while it writes answers and trains either drafter, then the same command: finished steps stay, weights
    equal bit for bit. Of moments drawn at random there are fifty in the soak (test_soak.py).
    """
    reference, file = finished(OURS)
    before = sorted(artifacts(reference).items(), key=lambda of: finished_at(reference)[of[0]])
    (answers,) = [key for key, content in before if content["kind"] == "Conversations"]
    drafts = [key for key, content in before if content["kind"] == "Draft"]
    assert len(drafts) == 2
    chance = random.Random(1)
    home = tmp_path / "home"
    arguments = ["run", "tiny", "--direct", "--file", str(file), "--to", "draft"]
    seen: dict[str, int] = {}
    for key in (answers, *drafts):
        begun = home / "partial" / key
        assert draftsmith_killed(home, chance.uniform(0.0, 0.5), *arguments, once=begun.exists) == KILLED
        now = finished_at(home)
        assert key not in now and {made: now.get(made) for made in seen} == seen, "a finished step was made again"
        seen = now
    done = draftsmith(home, *arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert {key: finished_at(home).get(key) for key in seen} == seen, "a finished step was made again"
    for key in drafts:
        weights = "model.safetensors"
        assert (home / "store" / key / weights).read_bytes() == (reference / "store" / key / weights).read_bytes()
