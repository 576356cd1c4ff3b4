"""Runs on a real Prefect server and worker: from the form, by the clock, after others, eight at once, cancelled."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from browser import Browser
from pipeline_builder import pipeline, step, written
from prefect_stand import Stand, prefect_stand
from webhook import BLOCK, Webhook

from storage.history.query import query
from storage.registry.tracking import open_client

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]
FEW = {"num_rows": {"type": "int", "default": 3}}
SOIL, ROWS = step("toys.plant"), step("toys.plant", num_rows="${params.num_rows}")
PIPELINES = (
    pipeline(
        "toys",
        {
            "num_rows": {"type": "int", "default": 10, "min": 1, "max": 50, "about": "Rows to plant."},
            "source": {
                "type": "enum",
                "default": "seed",
                "choices": ["seed", "cutting"],
                "about": "Where plants come from.",
            },
            "fast": {"type": "bool", "default": False, "about": "Skip the slow part."},
            "words": {"type": "list", "default": ["a", "b"], "about": "Some words."},
        },
        keys={"about": "Toys that grow."},
        soil=step("toys.plant", num_rows="${params.num_rows}", source="${params.source}"),
        plant=step(
            "toys.grow", {"corpus": "soil"}, keys={"matrix": {"method": ["fern", "moss"]}}, method="${matrix.method}"
        ),
        timed=step("toys.measure", {"draft": "plant"}),
        depth=step("decisions.decide"),
    ),
    pipeline("many", soil=SOIL, plant=step("toys.grow", {"corpus": "soil"}, num_steps=5)),
    pipeline(
        "follower",
        FEW,
        keys={
            "triggers": [
                {"after": "many", "params": {"num_rows": 7}},
                {"file": "in/*.txt", "params": {"num_rows": 8}},
            ],
            "overlap": "wait",
        },
        soil=ROWS,
    ),
    pipeline("endless", keys={"overlap": "skip"}, page=step("toys.hang")),
    pipeline("late", page=step("toys.hang", keys={"timeout_minutes": 0.05})),
    pipeline("asks", keys={"approval": {"within_minutes": 5}}, release=step("decisions.release", speedup=1.7)),
    pipeline("asks_nobody", keys={"approval": {"within_minutes": 0.1}}, release=step("decisions.release", speedup=1.9)),
    pipeline(
        "gated",
        {"speedup": {"type": "float", "default": 1.7}},
        release=step("decisions.release", target="oak", speedup="${params.speedup}"),
    ),
)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder = tmp_path_factory.mktemp("stand")
    (folder / "in").mkdir()
    with prefect_stand(folder, written(*PIPELINES)) as it:
        yield it


def below(stand: Stand) -> list[psutil.Process]:
    """Processes of steps of this stand that are alive: they know its home from their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("DRAFTSMITH_HOME") == str(stand.home)
            if mine and process.status() != psutil.STATUS_ZOMBIE and "time.sleep(600)" in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def test_a_run_from_the_form_refuses_a_wrong_number_then_runs_and_shows_what_it_made(
    stand: Stand, tmp_path: Path
) -> None:
    with Browser(tmp_path / "browser", height=1500) as page:
        page.open(f"{stand.pages}/v2/deployments/deployment/{stand.deployment('toys')}/run")
        for described in ("Rows to plant.", "Where plants come from.", "Skip the slow part.", "Some words."):
            page.wait_for_text(described)
        page.fill("input[type=number]", "99")
        page.click("button", "Submit")
        page.wait_for("document.querySelector('input[type=number]').validity.rangeOverflow")
        page.screenshot(tmp_path / "1-refused.png")
        assert stand.runs_of("toys") == [], "nothing was started"
        page.fill("input[type=number]", "7")
        page.screenshot(tmp_path / "2-filled.png")
        submit(page, stand)
        (run,) = stand.runs_of("toys")
        assert run["parameters"]["num_rows"] == 7
        stand.wait(run["id"])
        page.open(f"{stand.pages}/v2/runs/flow-run/{run['id']}")
        page.wait_for_text("Completed")
        page.wait_for_text("6 Task runs")
        page.screenshot(tmp_path / "3-finished.png")
        (card,) = stand.ask("POST", "/artifacts/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
        page.open(f"{stand.pages}/v2/artifacts/artifact/{card['id']}")
        page.wait_for("document.querySelectorAll('img[src^=\"data:image/svg\"]').length == 1")
        page.wait_for("document.querySelector('svg[id^=mermaid], .mermaid svg, svg[aria-roledescription]')")
        page.screenshot(tmp_path / "4-plan.png")
        (decision,) = stand.ask("POST", "/artifacts/filter", {"artifacts": {"key": {"any_": ["decision-depth"]}}})
        page.open(f"{stand.pages}/v2/artifacts/artifact/{decision['id']}")
        page.wait_for("document.querySelectorAll('img[src^=\"data:image/svg\"]').length >= 2")
        page.wait_for("[...document.querySelectorAll('img[src^=\"data:image/svg\"]')].every(i => i.naturalWidth > 100)")
        page.screenshot(tmp_path / "5-decision.png")
    again = stand.wait(stand.start("toys", num_rows=7))
    assert again["state"]["message"] == "nothing new: all 6 steps are reused"
    deadline = time.monotonic() + 60  # unlike a run's, a task's state is an event, which may come after the run's end
    while "plant[fern] (reused)" not in (names := {task["name"] for task in stand.tasks_of(again["id"])}):
        assert time.monotonic() < deadline, names
        time.sleep(0.5)


def submit(page: Browser, stand: Stand) -> None:
    """Press Submit until the page goes on, as a person does: the form moves when a notice above it comes or goes, and
    a press that meets nothing starts nothing."""
    for _ in range(4):
        page.click("button", "Submit")
        with suppress(AssertionError):
            page.wait_for("!location.pathname.endsWith('/run')", timeout_s=60)
            return
        assert stand.runs_of("toys") == [], "a run was started and the page stays"
    raise AssertionError(f"the form starts no run; the page:\n{page.text()}")


def test_a_dry_run_runs_nothing_and_says_what_it_would(stand: Stand) -> None:
    run = stand.wait(stand.start("toys", num_rows=11, dry_run=True))
    assert run["state"]["name"] == "Planned" and run["state"]["message"].endswith("to run")
    assert stand.tasks_of(run["id"]) == []


def test_tasks_of_a_run_that_crashed_with_its_worker_are_ended(stand: Stand) -> None:
    flow = stand.ask("GET", f"/deployments/{stand.deployment('late')}")["flow_id"]
    run = stand.ask("POST", "/flow_runs/", {"flow_id": flow, "state": {"type": "CRASHED", "name": "Crashed"}})["id"]
    task = {"flow_run_id": run, "task_key": "hang", "dynamic_key": "0", "name": "hang"}
    stand.ask("POST", "/task_runs/", {**task, "state": {"type": "RUNNING", "name": "Running"}})
    deadline = time.monotonic() + 600
    while (state := stand.tasks_of(run)[0]["state"])["type"] == "RUNNING":
        assert time.monotonic() < deadline, (stand.folder / "reconcile.log").read_text()
        time.sleep(1)
    assert (state["type"], state["message"]) == ("CRASHED", "its flow run has ended")


def test_a_schedule_two_minutes_ahead_fires_by_itself(stand: Stand) -> None:
    due = datetime.now(UTC) + timedelta(seconds=150)  # its minute begins in 91 to 150 s: however slow the deploying is
    soon = {"slug": "soon", "cron": f"{due.minute} {due.hour} * * *", "params": {"num_rows": 9}}
    stand.file.write_text(written(*PIPELINES, pipeline("clock", FEW, keys={"schedules": [soon]}, soil=ROWS)))
    assert "create  schedule  clock/soon" in stand.deploy()
    deadline = time.monotonic() + 450
    while not (ended := [run for run in stand.runs_of("clock") if run["state"]["type"] == "COMPLETED"]):
        assert time.monotonic() < deadline, [run["state"]["name"] for run in stand.runs_of("clock")]
        time.sleep(1)
    assert ended[0]["parameters"] == {"num_rows": 9}
    assert datetime.fromisoformat(ended[0]["expected_start_time"]).minute == due.minute


def test_a_new_file_starts_a_run(stand: Stand) -> None:
    (stand.folder / "in" / "traffic.txt").write_text("a conversation")
    deadline = time.monotonic() + 120
    while not (mine := [run for run in stand.runs_of("follower") if run["parameters"] == {"num_rows": 8}]):
        assert time.monotonic() < deadline, (stand.folder / "watch.log").read_text()
        time.sleep(1)
    assert len(mine) == 1


def test_a_second_run_is_skipped_and_a_cancel_ends_every_process_within_15_seconds(stand: Stand) -> None:
    first = stand.start("endless")
    deadline = time.monotonic() + 200
    while not below(stand):
        assert time.monotonic() < deadline, stand.run(first)["state"]
        time.sleep(0.2)
    assert stand.wait(stand.start("endless"))["state"]["type"] == "CANCELLED", "overlap: skip"
    assert stand.run(first)["state"]["type"] == "RUNNING"
    began = time.monotonic()
    stand.ask("POST", f"/flow_runs/{first}/set_state", {"state": {"type": "CANCELLING"}})
    while below(stand):
        assert time.monotonic() - began < 15, "processes of a cancelled run are still there"
        time.sleep(0.1)
    assert stand.wait(first)["state"]["type"] == "CANCELLED"
    (end,) = ends_of(stand, "endless")
    assert end[0] == "killed" and end[1].startswith("cancelled (")
    assert end[1].endswith("; `draftsmith run endless` goes on from what is finished")


def ends_of(stand: Stand, name: str) -> list[tuple[str, str]]:
    """(status, reason) of every run of a pipeline, in the history as in MLflow, as soon as there is one."""
    of, deadline = "SELECT run_id, status, reason FROM v_run WHERE pipeline = $name", time.monotonic() + 300
    while not (rows := query(of, stand.home, {"name": name})[1]):
        assert time.monotonic() < deadline, f"no run of {name} has ended in the history"
        time.sleep(0.5)
    client = open_client(stand.home)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for run_id, status, reason in rows:
        tags = f"tags.`draftsmith.run_id` = '{run_id}' AND tags.`draftsmith.step` = '-'"
        (logged,) = client.search_runs(experiments, tags)
        words = {"completed": "FINISHED", "killed": "KILLED"}
        assert (logged.info.status, logged.data.tags["draftsmith.reason"]) == (words[status], reason)
    return [(status, reason) for _, status, reason in rows]


def test_a_deadline_ends_every_process_and_the_run_says_so(stand: Stand) -> None:
    run = stand.wait(stand.start("late"))
    assert run["state"]["type"] == "FAILED"
    assert "step 'page' failed: stopped after 3 s, its timeout_minutes" in run["state"]["message"]
    assert below(stand) == []


def test_silence_is_no_promotion_a_yes_in_the_ui_moves_the_champion_and_all_of_it_is_told(
    stand: Stand, tmp_path: Path
) -> None:
    ops = Webhook()
    subprocess.run([sys.executable, "-c", BLOCK, ops.address], env=stand.env, check=True)
    told = {"notify": {"on": ["waiting", "promoted", "refused"], "to": "custom-webhook/ops"}}
    stand.file.write_text(written(*(one.with_keys(**told) if "release" in one.steps else one for one in PIPELINES)))
    assert stand.deploy().count("create  notify") == 9
    silent = stand.wait(stand.start("asks_nobody"), "COMPLETED")  # this server may call it Failed for a moment
    assert silent["state"]["name"] == "NotPromoted"
    assert "was not promoted: nobody answered within 0.1 minutes" in silent["state"]["message"]
    promoted, asked = stand.start("gated"), stand.wait(stand.start("asks"), "PAUSED")
    assert stand.wait(promoted)["state"]["message"].endswith("oak version 1 (candidate, challenger, champion)")
    refused = stand.start("gated", speedup=1.3)
    heard = ops.until_heard(*(f"draftsmith: {what}" for what in ("asks_nobody refused", "asks waiting")))
    assert "nobody answered within 0.1 minutes; `draftsmith promote" in heard["draftsmith: asks_nobody refused"]
    assert heard["draftsmith: asks waiting"].startswith("registered builtin version 2 (candidate, challenger)")
    with Browser(tmp_path / "browser", height=1500) as page:
        page.open(ops.address)
        page.click(f"a[href$='{asked['id']}']")
        page.wait_for(f"location.pathname == '/v2/runs/flow-run/{asked['id']}'")  # the pages that have its cards
        page.wait_for_text("Paused")
        page.click("button", "Open menu")
        page.click("[role=menuitem]", "Resume")
        page.wait_for_text("Promote builtin version 2?")
        page.screenshot(tmp_path / "1-asked.png")
        page.click("[role*=dialog] button[role=switch], [role*=dialog] button[role=checkbox]")
        page.wait_for("document.querySelector('[role*=dialog] [aria-checked=true]')")
        page.screenshot(tmp_path / "2-answered.png")
        page.click("[role*=dialog] button", "Resume")
        page.wait_for_text("Promoted", timeout_s=600)
        page.screenshot(tmp_path / "3-promoted.png")
        heard = ops.until_heard(
            *(f"draftsmith: {what}" for what in ("asks promoted", "gated promoted", "gated refused"))
        )
        page.open(ops.address)
        page.wait_for_text("builtin version 2 is now champion")
        page.screenshot(tmp_path / "4-told.png", of="main")
    done = stand.wait(asked["id"])
    assert done["state"]["message"].endswith("builtin version 2 is now champion")
    assert [stand.run(run)["state"]["name"] for run in (asked["id"], promoted, refused)] == [
        "Promoted",
        "Promoted",
        "NotPromoted",
    ]
    its_page = f"the run: {stand.pages}/v2/runs/flow-run"
    assert heard["draftsmith: asks promoted"] == f"builtin version 2 is now champion\n\n{its_page}/{asked['id']}"
    champion = "registered oak version 1 (candidate, challenger, champion)"
    assert heard["draftsmith: gated promoted"] == f"{champion}\n\n{its_page}/{promoted}"
    assert heard["draftsmith: gated refused"].startswith(
        "registered oak version 2 (candidate, challenger); not promoted:"
    )
    assert heard["draftsmith: gated refused"].endswith(f"{its_page}/{refused}")
    log = (stand.home / "promotions.jsonl").read_text().splitlines()
    assert any('"alias": "champion"' in line and "approved in the Prefect UI" in line for line in log)
    (silence,), (yes,) = ends_of(stand, "asks_nobody"), ends_of(stand, "asks")
    assert "nobody answered within 0.1 minutes" in silence[1] and yes[1].endswith("builtin version 2 is now champion")


def test_eight_runs_at_once_all_end_well_on_the_same_artifacts_and_start_what_comes_after(stand: Stand) -> None:
    runs = [stand.wait(identity, timeout_s=900) for identity in [stand.start("many") for _ in range(8)]]
    assert Counter(run["state"]["name"] for run in runs) == {"Completed": 8}, [
        run["state"]["message"] for run in runs if run["state"]["name"] != "Completed"
    ]
    made = [path for path in (stand.home / "store").rglob("artifact.json") if 'num_steps": 5' in path.read_text()]
    assert len(made) == 1, "one of them made it, seven reused it"
    deadline = time.monotonic() + 300
    while not any(run["parameters"] == {"num_rows": 7} for run in stand.runs_of("follower")):
        assert time.monotonic() < deadline, "nothing came after"
        time.sleep(1)
