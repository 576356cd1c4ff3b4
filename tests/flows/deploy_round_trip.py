"""Deploys a file again and again while people and the file change things: deploy_round_trip.py FILE HOME."""

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from pipeline_builder import pipeline, step, written  # noqa: E402

from components.contract import UserError  # noqa: E402
from flows.orchestration.prefect_server import prepare  # noqa: E402

TOYS = pipeline(
    "toys",
    {
        "num_rows": {"type": "int", "default": 10, "min": 1, "max": 50, "about": "Rows to plant."},
        "source": {"type": "enum", "default": "seed", "choices": ["seed", "cutting"]},
    },
    keys={
        "about": "Toys that grow.",
        "schedules": [
            {"slug": "nightly", "cron": "0 2 * * *", "params": {"num_rows": 20}},
            {"slug": "weekly", "cron": "0 3 * * 0", "timezone": "Europe/Berlin"},
        ],
        "overlap": "wait",
    },
    soil=step("toys.plant", num_rows="${params.num_rows}"),
)
FOLLOWER = pipeline("follower", keys={"triggers": [{"after": "toys"}, {"file": "in/*.txt"}]}, soil=step("toys.plant"))
LEAVER = pipeline("leaver", keys={"schedules": [{"slug": "daily", "cron": "0 1 * * *"}]}, soil=step("toys.plant"))
FIRST = written(TOYS, FOLLOWER, LEAVER)
SECOND = written(  # one schedule and one pipeline gone, one schedule and one form changed, a trigger moved
    TOYS.with_param("num_rows", max=60).with_keys(
        schedules=[{"slug": "nightly", "cron": "30 2 * * *", "params": {"num_rows": 20}}], overlap="skip"
    ),
    FOLLOWER.with_keys(triggers=[{"after": "toys"}, {"registry": "builtin"}]),
)


def main(file: Path, home: Path) -> dict[str, Any]:
    """What every deploy says, and what the server has in the end."""
    file.write_text(FIRST)
    prepare(home)
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import PrefectHTTPStatusError

    from flows.orchestration.deployments import apply_changes, plan_changes, rename_deployment

    said: dict[str, Any] = {}

    def deploy(step: str) -> None:
        changes = plan_changes(file, home, packages=("toybox",))
        said[step] = sorted(f"{change.action} {change.kind} {change.name}" for change in changes)
        apply_changes(changes)

    def refused(parameters: dict[str, Any]) -> str:
        try:
            client.create_flow_run_from_deployment(toys.id, parameters=parameters)
        except PrefectHTTPStatusError as error:
            return str(error.response.json()["detail"])
        return "taken"

    with get_client(sync_client=True) as client:
        deploy("first")
        deploy("again")
        toys = client.read_deployment_by_name("toys/toys")
        said["refused"] = [refused(given) for given in ({"num_rows": 51}, {"num_row": 5}, {"from_step": "sol"})]
        client.pause_deployment(toys.id)
        nightly = next(schedule for schedule in toys.schedules if schedule.slug == "nightly")
        client.update_deployment_schedule(toys.id, nightly.id, active=False)
        deploy("paused")
        file.write_text(SECOND)
        deploy("changed")
        deploy("settled")
        toys = client.read_deployment_by_name("toys/toys")
        said["toys"] = {
            "paused": toys.paused,
            "schedules": [[s.slug, s.schedule.cron, s.active, s.parameters] for s in toys.schedules],
            "maximum": toys.parameter_openapi_schema["properties"]["num_rows"]["maximum"],
            "described": toys.parameter_openapi_schema["properties"]["num_rows"]["description"],
            "strategy": toys.concurrency_options.collision_strategy.value,
        }
        other = file.with_name("other.yaml")
        other.write_text(pipeline("alone", soil=step("toys.plant")).text)
        apply_changes(plan_changes(other, home, packages=("toybox",)))
        deploy("beside another file")
        said["there"] = sorted(d.name for d in client.read_deployments() if "draftsmith" in d.tags)
        other.write_text(pipeline("toys", soil=step("toys.plant")).text)
        try:
            plan_changes(other, home, packages=("toybox",))
        except UserError as error:
            said["clash"] = str(error)
        text = (HERE.parents[1] / "deploy" / "kubernetes" / "base" / "job-template.json").read_text()
        template = json.loads(text.replace("$STORE_VOLUME", "{}"))
        client.create_work_pool(WorkPoolCreate(name="cluster", type="kubernetes", base_job_template=template))
        alone = pipeline("alone", soil=step("toys.plant"))
        other.write_text(alone.with_keys(runs_on={"pool": "cluster", "gpus": 2}).text)
        apply_changes(plan_changes(other, home, packages=("toybox",)))
        placed = client.read_deployment_by_name("alone/alone")
        said["placed"] = [placed.work_pool_name, placed.job_variables["gpus"]]
        said["placed again"] = [str(change) for change in plan_changes(other, home, packages=("toybox",))]
        other.write_text(alone.with_keys(runs_on={"gpus": 2}).text)
        try:
            plan_changes(other, home, packages=("toybox",))
        except UserError as error:
            said["no gpus"] = str(error)
        mark = f"Made by `draftsmith deploy` from {file.resolve()}"  # others share this server
        said["triggers"] = sorted(a.name for a in client.read_automations() if a.description == mark)
        client.pause_automation(next(a.id for a in client.read_automations() if a.name == "follower: after toys"))
        for former, present in (("follower", "fan"), ("toys", "games")):
            said["switched off"] = [a.name for a in client.read_automations() if not a.enabled]
            file.write_text(re.sub(rf"\b{former}\b(?!\.)", present, file.read_text()))
            said[f"renaming {former}"] = list(
                map(str, rename_deployment(file, home, former, present, packages=("toybox",)))
            )
        games = client.read_deployment_by_name("games/games")
        said["games"] = [games.paused, [[s.slug, s.active, s.parameters] for s in games.schedules]]
        deploy("renamed")
    return said


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))) + "\n")
