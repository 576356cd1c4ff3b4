"""PREFECT: `triggers:` as automations: one for each trigger of each pipeline, compared, created, updated and pruned.

After a pipeline: Prefect's own event of a run that ended as "Completed" (a dry run, a part of a run and a night without
news end under other names). A file or a registry alias: the events of flows/watch.py. What a person has switched off
in the UI stays off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.deploy import Change, deployment_id
from flows.spec import Spec, TriggerSpec
from flows.watch import FILE_EVENT, MOVE_EVENT, file_resource, move_resource, pattern_of

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import Automation, AutomationCore


def trigger_changes(client: SyncPrefectClient, file: Path, spec: Spec) -> Iterator[Change]:
    """The changes that make the automations of this file match its triggers."""
    mark = f"Made by `draftsmith deploy` from {file.resolve()}"
    deployed = {a.name: a for a in _automations(client) if a.description == mark}
    for pipeline, declared in spec.pipelines.items():
        names: dict[str, int] = {}
        for trigger in declared.triggers:
            label = trigger_label(trigger)
            names[label] = names.get(label, 0) + 1
            name = f"{pipeline}: {label}" + (f" ({names[label]})" if names[label] > 1 else "")
            automation = deployed.pop(name, None)
            if automation is None:
                yield Change("create", "trigger", name, "", _create(name, pipeline, trigger, file, mark))
                continue
            if not automation.enabled:
                yield Change("keep", "trigger", name, "switched off by hand, stays off")
            if _differs(client, automation, pipeline, trigger, file):
                yield Change("update", "trigger", name, "", _update(automation, name, pipeline, trigger, file, mark))
    for name, automation in deployed.items():
        yield Change("prune", "trigger", name, "no longer in the file", _delete(automation))


def trigger_label(trigger: TriggerSpec) -> str:
    """A trigger as the UI names it: "after quickstart", "file in/*.jsonl", "registry NAME@champion"."""
    if trigger.after is not None:
        return f"after {trigger.after}"
    if trigger.file is not None:
        return f"file {trigger.file}"
    return f"registry {trigger.registry}@{trigger.alias}"


def _expected_event(trigger: TriggerSpec, file: Path) -> dict[str, Any]:
    """The event that fires a trigger: its names, and which resource it is about."""
    if trigger.after is not None:
        flow = {"prefect.resource.role": "flow", "prefect.resource.name": trigger.after}
        match = {"prefect.resource.id": "prefect.flow-run.*"}
        return {"expect": {"prefect.flow-run.Completed"}, "match": match, "match_related": flow}
    if trigger.file is not None:
        match = {"prefect.resource.id": file_resource(pattern_of(file, trigger.file))}
        return {"expect": {FILE_EVENT}, "match": match, "match_related": {}}
    assert trigger.registry is not None, "spec.py lets one of the three through"
    match = {"prefect.resource.id": move_resource(trigger.registry, trigger.alias)}
    return {"expect": {MOVE_EVENT}, "match": match, "match_related": {}}


def _automation(name: str, identity: Any, trigger: TriggerSpec, file: Path, mark: str, enabled: bool) -> AutomationCore:
    from prefect.events.actions import RunDeployment
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    return AutomationCore(
        name=name,
        description=mark,
        enabled=enabled,
        trigger=EventTrigger(posture=Posture.Reactive, threshold=1, **_expected_event(trigger, file)),
        actions=[RunDeployment(source="selected", deployment_id=identity, parameters=trigger.params or None)],
    )


def _differs(
    client: SyncPrefectClient, automation: Automation, pipeline: str, trigger: TriggerSpec, file: Path
) -> bool:
    """Whether an automation would do anything else than the file says. A pipeline not yet deployed has a new id."""
    from prefect.exceptions import ObjectNotFound

    try:
        identity = deployment_id(client, pipeline)
    except ObjectNotFound:
        return True
    desired = _automation(automation.name, identity, trigger, file, automation.description, automation.enabled)
    keys = {"trigger": {"expect", "match", "match_related"}, "actions": True}
    return _comparable_fields(desired, keys) != _comparable_fields(automation, keys)


def _comparable_fields(automation: AutomationCore, keys: Any) -> Any:
    fields = automation.model_dump(mode="json", include=keys)
    fields["actions"] = [(action["deployment_id"], action["parameters"] or {}) for action in fields["actions"]]
    return fields


def _create(name: str, pipeline: str, trigger: TriggerSpec, file: Path, mark: str) -> Callable[[Any], object]:
    def create(client: SyncPrefectClient) -> None:
        client.create_automation(_automation(name, deployment_id(client, pipeline), trigger, file, mark, True))

    return create


def _update(
    existing: Automation, name: str, pipeline: str, trigger: TriggerSpec, file: Path, mark: str
) -> Callable[[Any], object]:
    def update(client: SyncPrefectClient) -> None:
        identity = deployment_id(client, pipeline)
        client.update_automation(existing.id, _automation(name, identity, trigger, file, mark, existing.enabled))

    return update


def _delete(automation: Automation) -> Callable[[SyncPrefectClient], object]:
    return lambda client: client.delete_automation(automation.id)


def _automations(client: SyncPrefectClient) -> Iterator[Automation]:
    offset = 0
    while page := client.read_automations(limit=200, offset=offset):
        offset += len(page)
        yield from page
