"""`${params.x}` and `${matrix.y}` inside values, nothing else. A value that is one insert keeps its type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Values = Mapping[str, Any]
"""Names and plain values, as YAML and JSON have them, only to be read."""
INSERT = re.compile(r"\$\{([^{}]*)\}")
NAME = re.compile(r"^\s*(params|matrix)\.([A-Za-z_][A-Za-z0-9_]*)\s*$")


def inserts_in(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """(place, what stands between the braces) of every insert in a nested value."""
    if isinstance(value, str):
        for match in INSERT.finditer(value):
            yield place, match.group(1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from inserts_in(item, (*place, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from inserts_in(item, (*place, index))


def params_in(value: Any) -> list[str]:
    """The names of the parameters that are inserted into a value."""
    matches = (NAME.match(inside) for _, inside in inserts_in(value))
    return [name.group(2) for name in matches if name and name.group(1) == "params"]


def params_at(value: Any, place: tuple[str | int, ...]) -> list[str]:
    """The names of the parameters that are inserted into the text at a place of a nested value, as it is written."""
    for part in place:
        if isinstance(value, Mapping):
            value = value.get(part, value)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
    return params_in(value) if isinstance(value, str) else []


def fill(value: Any, scopes: Mapping[str, Values]) -> Any:
    """The value with every insert replaced. `scopes`: {"params": {...}, "matrix": {...}}; names must be known."""
    if isinstance(value, str):
        whole = INSERT.fullmatch(value)
        if whole:
            return _look_up(whole.group(1), scopes)
        return INSERT.sub(lambda match: _text(_look_up(match.group(1), scopes)), value)
    if isinstance(value, Mapping):
        return {key: fill(item, scopes) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, scopes) for item in value]
    return value


def _look_up(inside: str, scopes: Mapping[str, Values]) -> Any:
    match = NAME.match(inside)
    assert match, f"spec.py lets no such insert through: {inside}"
    return scopes[match.group(1)][match.group(2)]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
