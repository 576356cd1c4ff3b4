"""The secrets that a step's process finds in its environment: those that its own work needs, and no others.

A step may run code that came with a model, or a package of somebody else's. Passwords of our own servers and the secret
of a shared store are of no use to any step, so no step has them; keys of hubs and object stores are there for the steps
that fetch and send, and a step has what its own settings name (`api_key_variable`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from storage.redaction import holds_password, is_secret_name

OF_OUR_SERVERS: Final = ("PREFECT_", "MLFLOW_", "DRAFTSMITH_")
"""How the variables begin that hold the passwords and addresses of what `draftsmith up` serves."""
ROOMS_WITHOUT_KEYS: Final = ("drafts", "decoding", "bench", "speedup", "report")
"""No step in these rooms fetches or sends anything."""


def forget_secrets(address: str, settings: Mapping[str, Any]) -> None:
    """Take from this process's environment the secrets that the step at this address has no use for."""
    named = {str(value) for name, value in settings.items() if name.endswith("_variable") and value}
    for name in secret_names(os.environ) - named:
        if name.startswith(OF_OUR_SERVERS) or address.partition(".")[0] in ROOMS_WITHOUT_KEYS:
            del os.environ[name]


def secret_names(environment: Mapping[str, str]) -> set[str]:
    """The variables that hold a secret: by their names, or because a password stands in the address they hold."""
    return {name for name, value in environment.items() if is_secret_name(name) or holds_password(value)}
