"""Deploys two nights, runs each as a worker does, and listens for what is told: night_round_trip.py FILE HOME UNTIL."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from pipeline_builder import pipeline, step, written  # noqa: E402
from toy_garden import COMMAND_LINE  # noqa: E402
from webhook import BLOCK, Webhook  # noqa: E402

from flows.orchestration.prefect_server import prepare  # noqa: E402


def nights(until: str) -> str:
    """A night without a champion, and one whose measurement was disturbed."""
    retry = {"when": "noisy", "until": until, "every_minutes": 20}
    told = {"on": ["failed", "drift"], "to": "custom-webhook/ops", "verdict_within_days": 0.0002}
    lost = pipeline(
        "lost",
        keys={"notify": told},
        soil=step("toys.plant"),
        judged=step("toys.judge", {"corpus": "soil", "draft": "registry:oak@champion"}),
    )
    noisy = pipeline(
        "noisy",
        {"rows": {"type": "int", "default": 3}},
        keys={"retry": retry},
        soil=step("toys.plant", num_rows="${params.rows}"),
        plant=step("toys.grow", {"corpus": "soil"}, num_steps=2),
        timed=step("toys.measure", {"draft": "plant"}),
        depth=step("decisions.decide", noise="other work ran meanwhile"),
    )
    return written(lost, noisy)


def main(file: Path, home: Path, until: str) -> dict[str, object]:
    """The state of each run (name, message), what is scheduled then (parameters and when), and what was told."""
    home.mkdir(exist_ok=True)
    file.write_text(nights(until))
    prepare(home)
    from prefect.client.orchestration import get_client

    from components.contract import UserError
    from flows.orchestration.deployments import apply_changes, plan_changes
    from flows.orchestration.notifications import tell
    from flows.spec.schema import load_spec

    said: dict[str, object] = {}
    packages = ("toybox", "decisionbox")
    try:
        plan_changes(file, home, packages)
    except UserError as error:
        said["no block"] = str(error)
    webhook = Webhook()
    subprocess.run([sys.executable, "-c", BLOCK, webhook.address], check=True)
    apply_changes(plan_changes(file, home, packages))
    said["deployed again"] = [str(change) for change in plan_changes(file, home, packages)]
    with get_client(sync_client=True) as client:
        for name in ("lost", "noisy"):
            said[name] = run_as_a_worker(client, name, parameters={"rows": 4} if name == "noisy" else {})
        page = f"/deployments/deployment/{client.read_deployment_by_name('lost/lost').id}"
        said["page"] = f"{os.environ['PREFECT_UI_URL']}{page}"
        noisy = client.read_deployment_by_name("noisy/noisy").id
        said["again"] = [
            [run.parameters, str(run.expected_start_time)]
            for run in client.read_flow_runs()
            if run.deployment_id == noisy and run.state_name == "Scheduled"
        ]
    notify = load_spec(file).pipelines["lost"].notify
    happened = [("drift", "acceptance fell"), ("promoted", "nobody asked")]
    links = [("the report", "https://draft.example.com/reports/k1/")]
    said["not told"] = tell("lost", happened, notify, links, watched=True)
    said["told"] = webhook.until_heard(*(f"draftsmith: lost {what}" for what in ("failed", "drift", "stale")))
    webhook.received.clear()
    said["not told"] = tell(
        "lost", [*happened, ("failed", "it died")], notify, links, watched=False
    )  # on a temporary server
    said["told by the run"] = webhook.until_heard(*(f"draftsmith: lost {what}" for what in ("failed", "drift")))
    webhook.received.clear()
    command = [sys.executable, "-c", COMMAND_LINE, "run", "lost", "-f", str(file)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(HERE)])}
    by_hand = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert by_hand.returncode == 2, by_hand.stderr
    said["told of a command"] = webhook.until_heard("draftsmith: lost failed")["draftsmith: lost failed"]
    file.write_text("pipelines: [\n")
    with get_client(sync_client=True) as client:
        said["unreadable"] = run_as_a_worker(client, "noisy", parameters={"rows": 4})
    return said


def run_as_a_worker(client: Any, name: str, parameters: dict[str, object]) -> list[str]:
    """The state of a run of a deployment, its message, and its page."""
    deployment = client.read_deployment_by_name(f"{name}/{name}")
    run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
    env = {**os.environ, **deployment.job_variables["env"], "PREFECT__FLOW_RUN_ID": str(run.id)}
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(HERE)])
    done = subprocess.run(
        [sys.executable, "-m", "prefect.engine"], env=env, capture_output=True, text=True, check=False
    )
    state = client.read_flow_run(run.id).state
    assert state is not None and state.is_final(), done.stderr
    return [state.name, state.message, f"{os.environ['PREFECT_UI_URL']}/runs/flow-run/{run.id}"]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])) + "\n")
