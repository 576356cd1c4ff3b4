"""Reads JSON from outside: a regular file of bounded size and bounded nesting, or one line of error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from components.contract import UserError

JsonObject = dict[str, Any]
"""An object of JSON whose fields this house does not fix: a config from outside, info of an artifact, settings."""
MOST_BYTES: Final = 256 << 20
"""Of one file. The largest that people have are tokenizer.json and the index of a checkpoint: tens of megabytes."""
MOST_DEPTH: Final = 100
"""Lists and objects within each other. A chat with tool calls has about ten."""


def read_json(file: Path, most_bytes: int = MOST_BYTES) -> Any:
    """The content of a file of at most `most_bytes` bytes of JSON.

    Raises:
        UserError: it is absent, is no regular file (a pipe would never end), is too large, no JSON, or nested too deep.
    """
    try:
        if not file.is_file():
            raise UserError(f"{file}: there is no such file")
        if (size := file.stat().st_size) > most_bytes:
            raise UserError(f"{file}: {size:,} bytes of JSON, and at most {most_bytes:,} are read")
        data = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError(f"{file}: cannot be read ({type(error).__name__})") from error
    return parse_json(data, str(file))


def read_object(file: Path, most_bytes: int = MOST_BYTES) -> JsonObject:
    """The content of a file whose JSON must be an object; raises UserError as `read_json` does."""
    content = read_json(file, most_bytes)
    if not isinstance(content, dict):
        raise UserError(f"{file}: is a {type(content).__name__}, not an object of fields")
    return content


def parse_json(text: str | bytes, location: str) -> Any:
    """The content of a text of JSON. location: its name in errors. Raises UserError where it is no JSON or too deep."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise UserError(f"{location}: is nested deeper than {MOST_DEPTH} levels") from error
    except ValueError as error:  # bytes that are no UTF-8 too, and numbers of thousands of digits
        raise UserError(f"{location}: is not JSON ({' '.join(str(error).split())[:120]})") from error
    if _is_deeper(content, MOST_DEPTH):
        raise UserError(f"{location}: is nested deeper than {MOST_DEPTH} levels")
    return content


def _is_deeper(content: Any, depth: int) -> bool:
    """Whether lists and objects stand within each other more than `depth` times; level by level, never recursive."""
    level = [content]
    for _ in range(depth + 1):
        level = [
            inner
            for value in level
            if isinstance(value, (Mapping, list))
            for inner in (value.values() if isinstance(value, Mapping) else value)
            if isinstance(inner, (Mapping, list))
        ]
        if not level:
            return False
    return True
