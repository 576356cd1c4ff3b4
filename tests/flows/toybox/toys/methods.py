"""The registry of toy methods and how one is built."""

from __future__ import annotations

import importlib
from typing import Any

METHODS = {
    "fern": "toybox.toys.fern:Fern",
    "moss": "toybox.toys.moss:Moss",
}


def build(address: str) -> Any:
    """The method behind an address."""
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)()
