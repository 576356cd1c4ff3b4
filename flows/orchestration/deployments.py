"""PREFECT: deployments, schedules and triggers as a diff: create, update, prune, and keep what a person has paused.

Each pipeline is one deployment of the same name; schedules go by slug, triggers are automations. What stands on the
server is read first and compared field by field, so a second `deploy` changes nothing. Prefect's own re-apply would
wake what somebody has paused in the UI and leave removed schedules running, so single changes are sent instead.
A deployment belongs to the file that made it (DRAFTSMITH_PIPELINES in its job variables): files may share a server.

`triggers:` and `notify:` are automations (flows/orchestration/automations.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.objects import ConcurrencyOptions, DeploymentSchedule, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from components.contract import UserError
from components.machine import num_usable_cores
from components.outside_json import JsonObject
from components.text import did_you_mean
from flows.orchestration.automations import Change, automation_changes, deployment_id, find_automations
from flows.orchestration.compiled_flow import compile_flow, version_of
from flows.orchestration.ui_artifacts import machine_limit
from flows.planning.step_signature import PACKAGES
from flows.services.client import WORK_POOL
from flows.spec.placement import RunsOn, parse_pipeline_placement
from flows.spec.schema import PipelineSpec, ScheduleSpec, Spec, load_spec

ROOT = Path(__file__).resolve().parents[2]
TAG = "draftsmith"
COLLISION = {"wait": "ENQUEUE", "skip": "CANCEL_NEW"}


def plan_changes(file: Path, home: Path, packages: tuple[str, ...] = PACKAGES) -> list[Change]:
    """What `deploy` would change on the server at $PREFECT_API_URL (flows/orchestration/flow.py: prepare). Changes
    nothing.

    Raises:
        UserError: the file is wrong, or names a work pool that is not there or cannot give GPUs.
    """
    spec = load_spec(file)
    with get_client(sync_client=True) as client:
        pools = {pool.name: pool for pool in client.read_work_pools()}
        deployments = _deployments(client, file, spec)
        changes = list(_shared_changes(client, pools))
        for name, pipeline in spec.pipelines.items():
            runs_on = _placement(name, pipeline, file, pools)
            desired = _desired_deployment(name, pipeline, file, home, runs_on, packages)
            changes += _deployment_changes(name, desired, deployments.get(name))
            changes += _schedule_changes(name, pipeline.schedules, deployments.get(name))
        changes += [
            Change("prune", "pipeline", name, "no longer in the file", methodcaller("delete_deployment", deployment.id))
            for name, deployment in deployments.items()
            if name not in spec.pipelines
        ]
        changes += automation_changes(client, file, spec)
    return changes


def apply_changes(changes: list[Change]) -> int:
    """Make these changes, in their order; returns how many there were.

    Raises:
        UserError: the server refuses one.
    """
    done = 0
    with get_client(sync_client=True) as client:
        for change in changes:
            if change.apply is None:
                continue
            try:
                change.apply(client)
            except PrefectHTTPStatusError as error:
                message = " ".join(error.response.text.split())[:300]
                raise UserError(f"{change}: the Prefect server refuses it: {message}") from error
            done += 1
    return done


def rename_deployment(
    file: Path, home: Path, former: str, present: str, packages: tuple[str, ...] = PACKAGES
) -> list[Change]:
    """Deploy the file, in which a pipeline has another name now; what a person has paused of it stays paused.

    Returns what was changed. Runs stay under the flow of the former name, as everything else that has happened.
    """
    with get_client(sync_client=True) as client:
        try:
            before = client.read_deployment_by_name(f"{former}/{former}")
        except ObjectNotFound:
            before = None
        off = {one.name.removeprefix(f"{former}: ") for one in find_automations(client) if not one.enabled}
    changes = plan_changes(file, home, packages)
    apply_changes(changes)
    with get_client(sync_client=True) as client:
        if before is not None:
            now = client.read_deployment_by_name(f"{present}/{present}")
            if before.paused:
                client.pause_deployment(now.id)
            asleep = {schedule.slug for schedule in before.schedules if not schedule.active}
            for schedule in now.schedules:
                if schedule.slug in asleep:
                    client.update_deployment_schedule(now.id, schedule.id, active=False)
        for one in find_automations(client):
            if one.name.startswith(f"{present}: ") and one.name.removeprefix(f"{present}: ") in off:
                client.pause_automation(one.id)
    apply_changes(plan_changes(file, home, packages))  # a schedule forgets its parameters when it is paused
    return [change for change in changes if change.apply is not None]


def _deployments(client: SyncPrefectClient, file: Path, spec: Spec) -> dict[str, DeploymentResponse]:
    """The deployments that this file has made, by name. Deployments of a file that no longer exists may be taken over.

    Raises:
        UserError: a pipeline of this file has the name of another file's deployment.
    """
    tagged = DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG]))
    deployments: dict[str, DeploymentResponse] = {}
    offset = 0
    while page := client.read_deployments(deployment_filter=tagged, limit=200, offset=offset):
        offset += len(page)
        for deployment in page:
            maker = Path(deployment.job_variables.get("env", {}).get("DRAFTSMITH_PIPELINES", ""))
            if maker == file.resolve() or (deployment.name in spec.pipelines and not maker.is_file()):
                deployments[deployment.name] = deployment
            elif deployment.name in spec.pipelines:
                what = f"the server has one of that name from {maker}"
                raise UserError(f"{file.name}: pipeline '{deployment.name}': {what}; name it otherwise")
    return deployments


def _placement(name: str, pipeline: PipelineSpec, file: Path, pools: Mapping[str, WorkPool]) -> RunsOn:
    """Where the runs of a pipeline go, with the pool's name filled in.

    Raises:
        UserError: the server has no such pool, or one that gives no GPUs although some are asked for.
    """
    runs_on = parse_pipeline_placement(pipeline.runs_on)
    pool = runs_on.pool or WORK_POOL
    if pool not in {*pools, WORK_POOL}:
        suggestion = did_you_mean(pool, sorted({*pools, WORK_POOL}))
        raise UserError(f"{file}: pipeline '{name}': the server has no work pool '{pool}'{suggestion}")
    template = pools[pool].base_job_template if pool in pools else {}
    if runs_on.gpus and "gpus" not in template.get("variables", {}).get("properties", {}):
        remedy = "make it of a job template that does (deploy/kubernetes), or leave 'gpus' out"
        raise UserError(f"{file}: pipeline '{name}': work pool '{pool}' gives no GPUs to a run: {remedy}")
    return replace(runs_on, pool=pool)


def runs_at_once() -> int:
    """How many runs the worker of this machine starts side by side; twenty at once lock Prefect's SQLite database."""
    return max(4, 2 * num_usable_cores())


def _shared_changes(client: SyncPrefectClient, pools: Mapping[str, WorkPool]) -> Iterator[Change]:
    """The work pool that every pipeline goes to unless it names another, and the limit that shows a measuring step."""
    at_once = f"{runs_at_once()} runs at once"
    if WORK_POOL not in pools:
        yield Change("create", "pool", WORK_POOL, at_once, _create_pool)
    elif pools[WORK_POOL].concurrency_limit is None:  # a worker that comes first makes the pool without a limit
        yield Change("update", "pool", WORK_POOL, at_once, _limit_pool)
    limit = machine_limit()
    if limit not in {existing.name for existing in client.read_global_concurrency_limits(limit=200, offset=0)}:
        yield Change(
            "create",
            "limit",
            limit,
            "shows which step measures alone",
            lambda client: client.upsert_global_concurrency_limit_by_name(limit, 1),
        )


def _create_pool(client: SyncPrefectClient) -> None:
    template = ProcessWorker.get_default_base_job_template()
    pool = WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template, concurrency_limit=runs_at_once())
    try:
        client.create_work_pool(pool)
    except ObjectAlreadyExists:  # a worker that started since makes it too, without a limit
        _limit_pool(client)


def _limit_pool(client: SyncPrefectClient) -> None:
    client.update_work_pool(WORK_POOL, WorkPoolUpdate(concurrency_limit=runs_at_once()))


def _desired_deployment(
    name: str, pipeline: PipelineSpec, file: Path, home: Path, runs_on: RunsOn, packages: tuple[str, ...]
) -> JsonObject:
    """Every field of a deployment that the file decides, as the API writes it.

    The run starts in the file's folder, so relative paths mean the same as on the command line; nothing is copied.
    """
    flow = compile_flow(pipeline, name, lambda values: None)
    schema = parameter_schema(flow.fn).model_dump(mode="json", exclude_unset=True)
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = {
        "DRAFTSMITH_PIPELINES": str(file.resolve()),
        "DRAFTSMITH_HOME": str(home.resolve()),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONSAFEPATH": "1",  # Prefect runs scripts from a folder with a storage.py, which would hide our storage/
    }
    if packages != PACKAGES:
        env["DRAFTSMITH_PACKAGES"] = ",".join(packages)
    return {
        "entrypoint": f"flows.catalog:{name}",
        "version": version_of(pipeline),
        "description": pipeline.about,
        "tags": [TAG],
        "work_pool_name": runs_on.pool,
        # a run that writes into its worker's pipe dies with the worker; what it logs is in the UI anyway
        "job_variables": {"env": env, "stream_output": False} | ({"gpus": runs_on.gpus} if runs_on.gpus else {}),
        "pull_steps": [{"prefect.deployments.steps.set_working_directory": {"directory": str(file.resolve().parent)}}],
        "parameters": {},  # defaults come from the file when the run starts, as on the command line
        # The server refuses what the schema refuses; unknown parameters too, which Prefect would let through.
        "parameter_openapi_schema": {**schema, "additionalProperties": False},
        "enforce_parameter_schema": True,
        "concurrency_limit": 1 if pipeline.overlap else None,
        "concurrency_options": {"collision_strategy": COLLISION[pipeline.overlap]} if pipeline.overlap else None,
    }


def _deployment_changes(name: str, desired: JsonObject, deployed: DeploymentResponse | None) -> Iterator[Change]:
    if deployed is None:

        def create(client: SyncPrefectClient) -> None:
            options = desired["concurrency_options"]
            fields = {**desired, "concurrency_options": ConcurrencyOptions(**options) if options else None}
            client.create_deployment(flow_id=client.create_flow_from_name(name), name=name, **fields)

        yield Change("create", "pipeline", name, str(desired["description"]), create)
        return
    differs = {key: value for key, value in desired.items() if value != _deployed_value(deployed, key)}
    if deployed.paused:
        yield Change("keep", "pipeline", name, "paused by hand, stays paused")
    if differs:

        def update(client: SyncPrefectClient) -> None:
            fields = dict(differs)
            if "concurrency_options" in fields or "concurrency_limit" in fields:  # the server wants both together
                fields |= {key: desired[key] for key in ("concurrency_options", "concurrency_limit")}
            client.update_deployment(deployed.id, DeploymentUpdate(**fields))

        yield Change("update", "pipeline", name, ", ".join(_WORDS.get(key, key) for key in differs), update)


_WORDS = {
    "parameter_openapi_schema": "its form",
    "concurrency_limit": "overlap",
    "concurrency_options": "what a second run does",
    "work_pool_name": "its work pool",
    "job_variables": "its environment or its GPUs",
    "pull_steps": "where it runs",
    "description": "what it is about",
}


def _deployed_value(deployed: DeploymentResponse, key: str) -> Any:
    """A field of the deployment on the server, written as `_desired_deployment` writes it."""
    if key == "concurrency_limit":
        return deployed.global_concurrency_limit.limit if deployed.global_concurrency_limit is not None else None
    if key == "concurrency_options":
        options = deployed.concurrency_options
        return {"collision_strategy": options.collision_strategy.value} if options is not None else None
    return (deployed.description or "") if key == "description" else getattr(deployed, key)


def _schedule_changes(
    pipeline: str, declared: list[ScheduleSpec], deployed: DeploymentResponse | None
) -> Iterator[Change]:
    """Schedules by slug. `active` is sent only with a new one, so a pause made in the UI stays."""
    deployed_schedules = {schedule.slug: schedule for schedule in deployed.schedules} if deployed is not None else {}
    for schedule in declared:
        name, existing = f"{pipeline}/{schedule.slug}", deployed_schedules.pop(schedule.slug, None)
        timing = f"{schedule.cron} {schedule.timezone}"
        if existing is None:
            yield Change("create", "schedule", name, timing, partial(_create_schedule, pipeline, schedule))
            continue
        if not existing.active:
            yield Change("keep", "schedule", name, "paused by hand, stays paused")
        if _schedule_values(existing) != (schedule.cron, schedule.timezone, schedule.params):
            yield Change("update", "schedule", name, timing, partial(_update_schedule, existing, schedule))
    for slug, existing in deployed_schedules.items():
        if slug is None:
            yield Change("keep", "schedule", f"{pipeline}/-", "added by hand in the UI")
        else:
            yield Change(
                "prune", "schedule", f"{pipeline}/{slug}", "no longer in the file", partial(_delete_schedule, existing)
            )


def _schedule_values(schedule: DeploymentSchedule) -> tuple[Any, Any, JsonObject]:
    return getattr(schedule.schedule, "cron", None), getattr(schedule.schedule, "timezone", None), schedule.parameters


def _create_schedule(pipeline: str, schedule: ScheduleSpec, client: SyncPrefectClient) -> None:
    when = CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
    request = DeploymentScheduleCreate(schedule=when, active=True, parameters=schedule.params, slug=schedule.slug)
    client.create_deployment_schedules(deployment_id(client, pipeline), [request])


def _update_schedule(existing: DeploymentSchedule, schedule: ScheduleSpec, client: SyncPrefectClient) -> None:
    when = CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
    assert existing.deployment_id is not None
    client.update_deployment_schedule(existing.deployment_id, existing.id, schedule=when, parameters=schedule.params)


def _delete_schedule(existing: DeploymentSchedule, client: SyncPrefectClient) -> None:
    assert existing.deployment_id is not None
    client.delete_deployment_schedule(existing.deployment_id, existing.id)
