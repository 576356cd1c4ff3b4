"""PREFECT: what a run tells of itself besides its state: promoted, refused, waiting for a yes, drift; and to whom.

A run sends one event for each, about `draftsmith.pipeline.NAME`, with its sentence and the addresses of its report and
of its pages, as people reach them (`up --public-url`). Automations (automations.py) turn them into notifications. On
the temporary server of a `draftsmith run` no automation is looked at, so there the run notifies by itself, through the
same block. Whatever goes wrong with that is one line: all else of the run is kept.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import UTC, datetime

from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from components.contract import Measurements
from components.text import message_of
from flows.execution.local_run import RunOutcome
from flows.spec.schema import NotifySpec

RUN_LINK = "the run"
VERDICTS = {"promoted": "Promoted", "refused": "NotPromoted", "waiting": "Waiting"}
"""What a whole run decides of a release, and the name of the state that Prefect then shows."""
WHOLE_RUN = ("Completed", *VERDICTS.values())
"""State names of whole runs: after one of them other pipelines may start."""
Happened = list[tuple[str, str]]
"""What happened in a run, a word each, and its sentence."""


def event_of(what: str) -> str:
    """The name of the event that says so."""
    return f"draftsmith.run.{what}"


def pipeline_resource(pipeline: str) -> str:
    """The resource that events of a pipeline's runs are about."""
    return f"draftsmith.pipeline.{pipeline}"


def happened_in(outcome: RunOutcome) -> Happened:
    """What a run that ended well has to tell."""
    happened: Happened = []
    for version in outcome.registered:
        if not (version.is_new or version.renewed):
            continue
        what = "promoted" if "champion" in version.aliases else "waiting" if version.waits else "refused"
        happened.append((what, version.note))
    drifts = [artifact.info for artifact in outcome.artifacts.values() if isinstance(artifact, Measurements)]
    return happened + [("drift", str(info["drift"])) for info in drifts if info.get("drifted")]


def state_after(happened: Happened) -> str:
    """The name of the state of a whole run, by the last that it decided: one that waited may have been answered."""
    return next((VERDICTS[what] for what, _ in reversed(happened) if what in VERDICTS), "Completed")


def tell(
    pipeline: str,
    happened: Happened,
    notify: NotifySpec | None,
    links: Iterable[tuple[str, str]] = (),
    *,
    watched: bool,
) -> list[str]:
    """Tell the server what happened, or those who are to be notified; one line for each that could not be told.

    links: (label, address) of what shows more. watched: the server is one that goes on, and looks at automations.
    """
    try:
        if watched:
            page = url_for("flow-run", flow_run.id) if flow_run.id else None
            _send(pipeline, happened, _as_lines([*links, *([(RUN_LINK, page)] if page else ())]))
        elif notify is not None:
            for what, sentence in happened:
                if what in notify.on:
                    body = "\n\n".join(part for part in (sentence, _as_lines(links)) if part)
                    _notify(notify.to, f"draftsmith: {pipeline} {what}", body)
    except Exception as error:  # blocks are of many classes, and so are their errors; a run is not lost for a message
        return [f"nobody was notified: {type(error).__name__}: {message_of(error, 200)}"]
    return []


def _as_lines(links: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{label}: {address}" for label, address in links)


def _send(pipeline: str, happened: Happened, links: str) -> None:
    about = {"prefect.resource.id": pipeline_resource(pipeline), "prefect.resource.name": pipeline}
    run = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.resource.role": "flow-run"}
    events = [
        {
            "event": event_of(what),
            "occurred": datetime.now(UTC).isoformat(),
            "resource": about,
            "related": [run],
            "payload": {"sentence": sentence, "links": links},
            "id": str(uuid.uuid4()),
        }
        for what, sentence in happened
    ]
    if events:
        with get_client(sync_client=True) as client:
            client.request("POST", "/events", json=events).raise_for_status()


def _notify(block: str, subject: str, body: str) -> None:
    Block.load(block).notify(body, subject)
