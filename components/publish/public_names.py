"""Public names of models, files and settings: without folders of this machine and without buckets.

A path is useless elsewhere and may be private: in a release, except in draftsmith/, it is replaced by its last part.
Before an upload, the release is searched once more (public_copy.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

DATA_SET = "hf:"  # a data set in Hugging Face format, on the hub or in a folder
_LOCAL = re.compile(r"^(?:[/~.]|[A-Za-z]:[\\/])")
_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*://")
_IN_TEXT = re.compile(r"[a-z][a-z0-9+.-]*://[^\s\"']+|(?<![\w./:<-])/(?:[\w.@+-]+/)+[\w.@+-]*")
_RELATIVE_FILE = re.compile(r"^[^\s:]*/[^\s:]*\.[A-Za-z0-9]{1,8}$")


def public_name(model: str) -> str:
    """A hub id or "builtin" as it is, a folder or an address by its last part."""
    if model.startswith(DATA_SET):
        return DATA_SET + public_name(model.removeprefix(DATA_SET))
    if _ADDRESS.match(model):
        return Path(urlsplit(model).path.rstrip("/")).name or "an address"
    if _LOCAL.match(model):
        return Path(model.replace("\\", "/")).name
    here = model not in ("", "builtin") and len(model) < 256 and Path(model).is_dir()
    return Path(model).name if here else model


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's settings with its given draft model by its public name."""
    public = {"model": public_name(str(settings["model"]))} if settings.get("model") else {}
    return {**settings, **public}


def public_value(value: Any) -> Any:
    """Settings or facts of a step with every path and address, also inside texts, replaced by its last part."""
    if isinstance(value, Mapping):
        return {str(name): public_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [public_value(one) for one in value]
    if isinstance(value, str):
        short = Path(value).name if _RELATIVE_FILE.match(value) else public_name(value)
        return _IN_TEXT.sub(lambda match: public_name(match[0]), short)
    return value
