"""PREFECT: what starts pipelines besides schedules (`triggers:`), and who hears of their nights (`notify:`).

Each is an automation on the server, made and changed by `deploy` as a diff; what a person has switched off in the UI
stays off. After a pipeline: Prefect's own event of a whole run that ended well, under one of the names of WHOLE_RUN (a
dry run, a part of a run and a night without news end under others). A file or a registry alias: the events of
event_watcher.py beside this file. A notification: Prefect's events of runs that failed, and those that runs send
themselves (notifications.py); one that is due when no verdict came for some days is the absence of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import RunDeployment, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

from components.contract import UserError
from components.outside_json import JsonObject
from flows.orchestration.event_watcher import FILE_EVENT, MOVE_EVENT, file_resource, move_resource, pattern_of
from flows.orchestration.notifications import RUN_LINK, VERDICTS, WHOLE_RUN, event_of, pipeline_resource
from flows.spec.schema import NotifySpec, Spec, TriggerSpec

# Texts of notifications, which the server fills in: it knows by which address people reach it.
FAILED = f"{{{{ flow_run.state.message }}}}\n\n{RUN_LINK}: {{{{ flow_run|ui_url }}}}"
HAPPENED = "{{ event.payload.sentence }}\n\n{{ event.payload.links }}"
ITS_PAGE = "the pipeline: {{ (automation|ui_url).partition('/automations')[0] }}/deployments/deployment/"
FAILURES = ("prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut")


@dataclass(frozen=True)
class Change:
    """One line of the plan.

    action: "create", "update", "prune", or "keep" for a setting made by hand, which stays.
    kind:   "pipeline", "schedule", "trigger", "notify", "pool" or "limit". name: "quickstart", "quickstart/nightly".
    reason: what differs, in words. apply: makes the change.
    """

    action: str
    kind: str
    name: str
    reason: str = ""
    apply: Callable[[SyncPrefectClient], object] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.action:<6}  {self.kind:<8}  {self.name}" + (f"  ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class _Wanted:
    """An automation that the file declares. reaction: its trigger; act: its action, by ids that the server has."""

    kind: str
    name: str
    reaction: EventTrigger
    act: Callable[[SyncPrefectClient], Any]


def deployment_id(client: SyncPrefectClient, name: str) -> Any:
    """The id of a pipeline's deployment, which `create` has made just before."""
    return client.read_deployment_by_name(f"{name}/{name}").id


def automation_changes(client: SyncPrefectClient, file: Path, spec: Spec) -> Iterator[Change]:
    """The changes that make the automations of this file match its triggers and notifications.

    Raises:
        UserError: a notification goes to a block that the server does not have.
    """
    mark = f"Made by `draftsmith deploy` from {file.resolve()}"
    deployed = {a.name: a for a in find_automations(client) if a.description == mark}
    for intent in [*_triggers(file, spec), *_notifications(client, file, spec)]:
        automation = deployed.pop(intent.name, None)
        put = partial(_put, automation, intent, mark)
        if automation is None:
            yield Change("create", intent.kind, intent.name, "", put)
            continue
        if not automation.enabled:
            yield Change("keep", intent.kind, intent.name, "switched off by hand, stays off")
        if _differs(client, automation, intent, mark):
            yield Change("update", intent.kind, intent.name, "", put)
    for name, automation in deployed.items():
        kind = "notify" if automation.actions and automation.actions[0].type == "send-notification" else "trigger"
        delete = methodcaller("delete_automation", automation.id)
        yield Change("prune", kind, name, "no longer in the file", delete)


def _triggers(file: Path, spec: Spec) -> Iterator[_Wanted]:
    for pipeline, declared in spec.pipelines.items():
        names: dict[str, int] = {}
        for trigger in declared.triggers:
            label = trigger_label(trigger)
            names[label] = names.get(label, 0) + 1
            name = f"{pipeline}: {label}" + (f" ({names[label]})" if names[label] > 1 else "")
            reaction = EventTrigger(posture=Posture.Reactive, threshold=1, **_expected_event(trigger, file))
            yield _Wanted("trigger", name, reaction, partial(_start, pipeline, trigger.params or None))


def _start(pipeline: str, parameters: JsonObject | None, client: SyncPrefectClient) -> RunDeployment:
    return RunDeployment(source="selected", deployment_id=deployment_id(client, pipeline), parameters=parameters)


def trigger_label(trigger: TriggerSpec) -> str:
    """A trigger as the UI names it: "after quickstart", "file in/*.jsonl", "registry NAME@champion"."""
    if trigger.after is not None:
        return f"after {trigger.after}"
    if trigger.file is not None:
        return f"file {trigger.file}"
    return f"registry {trigger.registry}@{trigger.alias}"


def _expected_event(trigger: TriggerSpec, file: Path) -> JsonObject:
    """The event that fires a trigger: its names, and which resource it is about."""
    if trigger.after is not None:
        match = {"prefect.resource.id": "prefect.flow-run.*"}
        names = {f"prefect.flow-run.{name}" for name in WHOLE_RUN}
        return {"expect": names, "match": match, "match_related": _flow(trigger.after)}
    if trigger.file is not None:
        match = {"prefect.resource.id": file_resource(pattern_of(file, trigger.file))}
        return {"expect": {FILE_EVENT}, "match": match, "match_related": {}}
    assert trigger.registry is not None, "spec.py lets one of the three through"
    match = {"prefect.resource.id": move_resource(trigger.registry, trigger.alias)}
    return {"expect": {MOVE_EVENT}, "match": match, "match_related": {}}


def _flow(pipeline: str) -> dict[str, str]:
    """The flow of a pipeline, as a related resource of its runs' events."""
    return {"prefect.resource.role": "flow", "prefect.resource.name": pipeline}


def _notifications(client: SyncPrefectClient, file: Path, spec: Spec) -> Iterator[_Wanted]:
    for pipeline, declared in spec.pipelines.items():
        if declared.notify is None:
            continue
        to = _block_id(client, file, pipeline, declared.notify)
        mine = {"prefect.resource.id": pipeline_resource(pipeline)}
        for what in dict.fromkeys(declared.notify.on):
            if what == "failed":
                runs = {"prefect.resource.id": "prefect.flow-run.*"}
                facts: JsonObject = {"expect": {*FAILURES}, "match": runs, "match_related": _flow(pipeline)}
                body = FAILED
            else:
                facts, body = {"expect": {event_of(what)}, "match": mine}, HAPPENED
            reaction = EventTrigger(posture=Posture.Reactive, threshold=1, **facts)
            yield _told(pipeline, what, reaction, to, body)
        if (days := declared.notify.verdict_within_days) is not None:
            expected = {event_of(what) for what in VERDICTS}
            silence = EventTrigger(
                posture=Posture.Proactive, threshold=1, within=timedelta(days=days), expect=expected, match=mine
            )
            body = f"{pipeline}: no verdict for {days:g} days; `draftsmith query runs` says how its last runs ended"
            yield _told(pipeline, "stale", silence, to, body)


def _told(pipeline: str, what: str, reaction: EventTrigger, to: Any, body: str) -> _Wanted:
    """A notification of one thing, to the block with this id."""

    def send(client: SyncPrefectClient) -> SendNotification:
        text = body if what != "stale" else f"{body}\n\n{ITS_PAGE}{deployment_id(client, pipeline)}"
        return SendNotification(block_document_id=to, subject=f"draftsmith: {pipeline} {what}", body=text)

    return _Wanted("notify", f"{pipeline}: tell of {what}", reaction, send)


def _block_id(client: SyncPrefectClient, file: Path, pipeline: str, notify: NotifySpec) -> Any:
    """The id of the block that a pipeline's notifications go to."""
    kind, _, name = notify.to.partition("/")
    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound as error:
        how = "make it in Prefect's UI under Blocks, or name one that is there as TYPE/NAME"
        raise UserError(
            f"{file}: pipeline '{pipeline}': notify: no block '{notify.to}' on the server; {how}"
        ) from error


def _core(client: SyncPrefectClient, intent: _Wanted, mark: str, enabled: bool) -> AutomationCore:
    return AutomationCore(
        name=intent.name,
        description=mark,
        enabled=enabled,
        trigger=intent.reaction,
        actions=[intent.act(client)],
    )


def _differs(client: SyncPrefectClient, automation: Automation, intent: _Wanted, mark: str) -> bool:
    """Whether an automation would do anything else than the file says. A pipeline not yet deployed has a new id."""
    try:
        desired = _core(client, intent, mark, automation.enabled)
    except ObjectNotFound:
        return True
    return _comparable_fields(desired) != _comparable_fields(automation)


def _comparable_fields(automation: AutomationCore) -> Any:
    facts = {"expect", "match", "match_related", "posture", "within"}
    fields = ("type", "deployment_id", "block_document_id", "subject", "body")
    actions = [action.model_dump(mode="json") for action in automation.actions]
    return automation.trigger.model_dump(include=facts), [  # as sets: events have no order
        ([action.get(name) for name in fields], action.get("parameters") or {}) for action in actions
    ]


def _put(existing: Automation | None, intent: _Wanted, mark: str, client: SyncPrefectClient) -> None:
    """Create or update an automation; one that a person has switched off stays off."""
    desired = _core(client, intent, mark, existing is None or existing.enabled)
    if existing is None:
        client.create_automation(desired)
    else:
        client.update_automation(existing.id, desired)


def find_automations(client: SyncPrefectClient) -> Iterator[Automation]:
    offset = 0
    while page := client.read_automations(limit=200, offset=offset):
        offset += len(page)
        yield from page
