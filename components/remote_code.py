"""Which models may run Python code of their own: a model of the hub may bring code, and its author must be trusted.

Whoever runs something now gives the permission: the pipeline (its load_target steps, or its own `trust_remote_code` for
targets that come from elsewhere), or $DRAFTSMITH_REMOTE_CODE for a command. Artifacts, stores and tags cannot give it,
since others may have written them.
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
