"""A run in Prefect: a task for each step, one line when it fails, a typed form, and a history that outlives the server.

Prefect reads its settings when it is imported, so every run here is a process of its own; they share one server.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from pipeline_builder import pipeline, step, written
from prefect_server import environment

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]
TOYS = pipeline(
    "toys",
    {"num_rows": {"type": "int", "default": 10, "min": 1, "about": "Rows to plant."}},
    keys={"about": "Toys that grow."},
    soil=step("toys.plant", num_rows="${params.num_rows}"),
    plant=step(
        "toys.grow", {"corpus": "soil"}, keys={"matrix": {"method": ["fern", "moss"]}}, method="${matrix.method}"
    ),
    depth=step("decisions.decide"),
)
FAILS = pipeline("fails", good=step("toys.plant"), bad=step("toys.fail", how="user"))
CATALOG = pipeline(
    "prompts-only",
    {"num_rows": {"type": "int", "default": 8, "min": 4, "max": 64, "about": "Prompts to collect."}},
    keys={"about": "Prompts and nothing else."},
    prompts=step("data.collect_prompts", num_train="${params.num_rows}", num_validation=4, num_test=4),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    (place / "quiet").mkdir()
    found = step("toys.gather", folder=str(place / "quiet"))
    quiet = pipeline("quiet", good=step("toys.plant"), found=found, draft=step("toys.grow", {"corpus": "found"}))
    (place / "pipelines.yaml").write_text(written(TOYS, quiet, FAILS))
    (place / "catalog.yaml").write_text(CATALOG.text)
    return place / "home"


def run(home: Path, pipeline: str, **env: str) -> str:
    command = [sys.executable, str(HERE / "prefect_run.py"), str(home.parent / "pipelines.yaml"), str(home), pipeline]
    done = subprocess.run(command, env=environment(home, **env), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "shows less" not in done.stderr, done.stderr
    return done.stdout


def ask(server: str, what: str) -> list[dict[str, Any]]:
    """All flow_runs, task_runs or artifacts of the server, oldest first."""
    request = urllib.request.Request(f"{server}/{what}/filter", b"{}", {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return sorted(json.load(response), key=lambda row: row["created"])


def tasks_of(server: str, flow_id: str, number: int) -> list[tuple[str, str, int]]:
    """Name, state and attempts of a run's tasks, oldest first, once so many have ended or a minute is over: unlike a
    flow's state a task's is an event, which may be written when the run has ended already."""
    deadline = time.monotonic() + 60
    while True:
        rows = [row for row in ask(server, "task_runs") if row["flow_run_id"] == flow_id]
        ended = [row for row in rows if row["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")]
        if len(ended) == number or time.monotonic() > deadline:
            return [(row["name"], row["state"]["name"], row["run_count"]) for row in rows]
        time.sleep(0.2)


def test_a_run_is_a_flow_with_a_task_for_each_step_and_says_what_it_reused(server, home):
    said = run(home, "toys", PREFECT_API_URL=server)
    assert "['depth', 'plant[fern]', 'plant[moss]', 'soil'] []" in said and "torch in the flow process: False" in said
    run(home, "toys", PREFECT_API_URL=server)
    flows = [row for row in ask(server, "flow_runs") if row["parameters"].get("num_rows") == 5]
    assert [row["state"]["type"] for row in flows] == ["COMPLETED", "COMPLETED"]
    told = ["4 steps, 0 of them reused", "nothing new: all 4 steps are reused"]
    assert [row["state"]["message"] for row in flows] == told
    assert flows[0]["flow_version"].startswith("sha256:")
    first, second = ({name: state for name, state, _ in tasks_of(server, flow["id"], 4)} for flow in flows)
    assert first == dict.fromkeys(["soil", "plant[fern]", "plant[moss]", "depth"], "Completed")
    assert second == dict.fromkeys(
        ["soil (reused)", "plant[fern] (reused)", "plant[moss] (reused)", "depth (reused)"], "Reused"
    )
    artifacts = ask(server, "artifacts")
    shown = {row["key"]: row["data"] for row in artifacts}
    assert (
        "```mermaid" in shown["run-toys"]
        and "1.54" in shown["decision-depth"]
        and "min speedup" in shown["decision-depth"]
    )
    assert "progress-depth" not in shown, "a bar of progress goes with its run"
    (card,) = (row for row in artifacts if row["flow_run_id"] == flows[0]["id"])  # Prefect shows cards in no order
    chart, plan = (card["data"].index(text) for text in ("predicted and measured](data:image/svg", "```mermaid"))
    assert card["key"] == "run-toys" and chart < plan


def test_a_wrong_input_ends_failed_with_its_one_line_and_is_not_retried(server, home):
    line = "step 'bad': data.jsonl:3: no 'text'; give each row one"
    assert f"InputError: {line}\n" in run(home, "fails", PREFECT_API_URL=server)
    (flow,) = (
        row for row in ask(server, "flow_runs") if row["state"]["message"] == line and row["state"]["type"] == "FAILED"
    )
    assert tasks_of(server, flow["id"], 2) == [("good", "Completed", 1), ("bad", "Failed", 1)]
    card = next(row["data"] for row in ask(server, "artifacts") if row["key"] == "run-fails")
    assert card.startswith("## step 'bad': data.jsonl:3") and "goes on from the steps that are finished" in card


def test_a_night_without_news_ends_completed_and_says_so(server, home):
    assert "['good'] []" in run(home, "quiet", PREFECT_API_URL=server)
    line = f"nothing new: {home.parent}/quiet is empty; `draftsmith run quiet` looks again"
    (flow,) = (row for row in ask(server, "flow_runs") if row["state"]["message"] == line)
    assert (flow["state"]["type"], flow["state"]["name"]) == ("COMPLETED", "NothingNew")
    good, found = tasks_of(server, flow["id"], 2)
    assert (good[0].split()[0], *found[:2]) == ("good", "found", "NothingNew")


def test_catalog_flows_load_by_three_spellings_deploy_list_and_run(server, home):
    env = environment(
        home, PREFECT_API_URL=server, DRAFTSMITH_PIPELINES=str(home.parent / "catalog.yaml"), PYTHONPATH=str(ROOT)
    )
    command = [sys.executable, str(HERE / "catalog_round_trip.py"), "prompts-only"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    versions = {version for spelling, version in answer["found"].items() if spelling != "nosuch"}
    assert len(versions) == 1 and "nosuch" in answer["found"]
    (deployed,) = answer["deployments"]
    assert deployed[:2] == ["by-hand", "flows/catalog.py:prompts-only"]
    asked = {"default": 8, "minimum": 4, "maximum": 64, "type": "integer", "description": "Prompts to collect."}
    assert asked.items() <= deployed[2].items()
    assert answer["state"] == "Completed"
    assert answer["wrong"] == ["Failed", "--from nosuch: there is no such step (known: prompts)"]


def test_a_run_brings_its_own_server_which_dies_with_it_and_whose_history_stays(home):
    shutil.rmtree(home, ignore_errors=True)
    command = [sys.executable, str(HERE / "prefect_run.py"), str(home.parent / "pipelines.yaml"), str(home), "toys"]
    env = environment(home, PREFECT_API_URL="http://127.0.0.1:9/api")  # nobody answers there
    killed = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (children := psutil.Process(killed.pid).children()):
        time.sleep(0.05)
    killed.kill()
    said = killed.communicate()[1]
    assert said == "no Prefect server answers at http://127.0.0.1:9/api: taking a temporary one\n"
    assert psutil.wait_procs(children, timeout=300)[1] == [], "no server outlives a killed run"
    assert "[]" in run(home, "toys")
    with sqlite3.connect(f"file:{home}/prefect/prefect.db?mode=ro", uri=True) as database:
        flows = database.execute("SELECT state_type FROM flow_run").fetchall()
        tasks = database.execute("SELECT name, state_name FROM task_run ORDER BY name").fetchall()
    database.close()
    assert flows == [("COMPLETED",)]
    assert tasks == [(name, "Completed") for name in ("depth", "plant[fern]", "plant[moss]", "soil")]
