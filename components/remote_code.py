"""Whose own Python code may run: models of the hub may bring code, and to run it is to trust whoever wrote it.

It is said by whoever runs something now: by the pipeline (its load_target steps, or its own `trust_remote_code` for
targets that come from elsewhere), or in $DRAFTSMITH_REMOTE_CODE for a command. That an artifact, a store or a tag says
so counts for nothing, since others may have written it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

REMOTE_CODE: Final = "DRAFTSMITH_REMOTE_CODE"
"""The environment variable that names the models whose own code may run, joined like a PATH."""


def allow_code(models: Iterable[str]) -> None:
    """Let this process, and those that it starts, run the code of these models and of no others."""
    os.environ[REMOTE_CODE] = os.pathsep.join(models)


def may_run_code(model: str) -> bool:
    """Whether code that comes with this model may run in this process."""
    return model != "" and model in os.environ.get(REMOTE_CODE, "").split(os.pathsep)
