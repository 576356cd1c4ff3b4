"""What of `quickstart` is in the store: benchmarks measure what a run has made, and never start one."""

from __future__ import annotations

from components.contract import UserError
from flows.planning.plan import RunOptions, plan_run

PIPELINE = "quickstart"


def missing_for(*step_names: str) -> str:
    """Why a benchmark cannot run, in one line, or "" when it can.

    step_names: the steps that must be finished (a matrix step counts with all its combinations); none: all of them.
    """
    try:
        plan, store = plan_run(PIPELINE, {}, RunOptions())
    except UserError as error:
        return str(error)
    wanted = [step for step in plan.steps if not step_names or step.name.split("[")[0] in step_names]
    left = [step.name for step in wanted if not step.reused]
    if not left:
        return ""
    return (
        f"{len(left)} of the {len(wanted)} steps it needs are not in {store.home / 'store'} (first: {left[0]}); "
        f"run `draftsmith run {PIPELINE}` first"
    )
