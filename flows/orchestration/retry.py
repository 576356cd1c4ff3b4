"""PREFECT: a night that other work disturbed is tried again later the same night, as `retry:` of its pipeline says.

The run asks Prefect for another run of its own deployment at a later time, with the steps that measure forced, and
ends. Prefect does the waiting, the run is seen in its UI, and whoever deletes it there has called it off. Nothing is
trained again: the same release gets newer evidence, and the gate decides anew.
"""

from __future__ import annotations

import zoneinfo
from datetime import UTC, datetime, timedelta

import httpx
from prefect import get_client
from prefect.runtime import deployment, flow_run
from prefect.states import Scheduled

from components.text import message_of
from flows.execution.local_run import RunOutcome
from flows.planning.plan import Plan
from flows.spec.schema import RetrySpec


def next_attempt(policy: RetrySpec, now: datetime, begun: datetime) -> datetime | None:
    """When to try again; None where that is past the first `until` after the run was due to begin."""
    zone = zoneinfo.ZoneInfo(policy.timezone)
    hour, minute = map(int, policy.until.split(":"))
    due = begun.astimezone(zone)
    end = due.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if end <= due:
        end += timedelta(days=1)
    at = now + timedelta(minutes=policy.every_minutes)
    return at if at <= end else None


def try_again(plan: Plan, outcome: RunOutcome) -> list[str]:
    """Schedule another attempt of a disturbed run, where its pipeline says so; one line about it, [] for other runs."""
    policy = plan.declared.retry if plan.declared is not None else None
    if policy is None or not outcome.noise:
        return []
    by_hand = f"`draftsmith remeasure {outcome.release_key[:12]}` measures it again" if outcome.release_key else ""
    if deployment.id is None:
        return [f"not tried again by itself, since no deployment began it{by_hand and f'; {by_hand}'}"]
    at = next_attempt(policy, datetime.now(UTC), flow_run.scheduled_start_time)
    if at is None:
        return [f"not tried again tonight: it would be later than {policy.until}{by_hand and f'; {by_hand}'}"]
    force = sorted({step.name.partition("[")[0] for step in plan.steps if step.measures})
    try:
        with get_client(sync_client=True) as client:
            client.create_flow_run_from_deployment(
                deployment.id,
                parameters={**flow_run.parameters, "force": force},
                state=Scheduled(scheduled_time=at),
                idempotency_key=f"again-{flow_run.id}",
            )
    except httpx.HTTPError as error:  # all else of the run is done and kept
        return [f"not tried again: Prefect did not take it ({message_of(error, 200)}){by_hand and f'; {by_hand}'}"]
    local = at.astimezone(zoneinfo.ZoneInfo(policy.timezone))
    return [f"it is measured again at {local:%H:%M} {policy.timezone}, as `retry` of the pipeline says"]
