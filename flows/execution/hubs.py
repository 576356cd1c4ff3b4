"""Whether the steps of a run may read from hubs and upload to them: the pipeline asks for it, the operator allows it.

Steps are offline unless something says otherwise. On the command line a person says so (`--online`); runs that a
schedule, a trigger or the UI starts belong to pipelines with `online: true`, and the operator names these pipelines in
one place, $DRAFTSMITH_ONLINE of the process that runs them (`draftsmith up`, a worker, a container): their names, or
`all`. `none` there, or $HF_HUB_OFFLINE=1, is a no that nothing overrides. A pipeline that asks in vain does not run at
all: hours later it would find that it may not upload.
"""

from __future__ import annotations

import os

from components.text import did_you_mean
from flows.spec.diagnostics import InputError

VARIABLE = "DRAFTSMITH_ONLINE"
OFFLINE = "HF_HUB_OFFLINE"
ALL, NONE = "all", "none"


def hubs_fault(pipeline: str, *, declared: bool, asked: bool) -> str:
    """Why a run may not reach hubs although it wants to, in one line; "" where it may, or does not want to.

    declared: the pipeline says `online: true`. asked: a person says `--online`.
    """
    if not (declared or asked):
        return ""
    allowed = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    wants = "--online" if asked else f"pipeline '{pipeline}' says `online: true`"
    if NONE in allowed:
        return f"{wants}: the operator denies it (${VARIABLE} is {','.join(allowed)}); ask whoever runs this machine"
    if asked:
        return ""
    if os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"{wants}: ${OFFLINE} is set where it runs and keeps every step offline; unset it there"
    if {ALL, pipeline} & {*allowed}:
        return ""
    hint = did_you_mean(pipeline, allowed) if allowed else ""
    allow = f"start `draftsmith up` (or the worker) with {VARIABLE}={','.join([*allowed, pipeline])}"
    return f"{wants}, and the operator does not allow it{hint}: {allow}, or run it by hand with --online"


def reach_hubs(pipeline: str, *, declared: bool, asked: bool) -> None:
    """Let the steps of this process reach hubs, where the run wants to and may.

    Raises:
        UserError: it wants to, and may not.
    """
    if fault := hubs_fault(pipeline, declared=declared, asked=asked):
        raise InputError([fault], ["security"])
    if declared or asked:
        os.environ[OFFLINE] = "0"
