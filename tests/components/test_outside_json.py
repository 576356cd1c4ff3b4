"""JSON from outside is read within bounds, or costs one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from components.contract import UserError
from components.outside_json import MOST_DEPTH, parse_json, read_json, read_object


def test_what_is_no_usable_json_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for content, message in ((b"{oops", "is not JSON"), (b"\xff", "is not JSON"), (b"[" * 200_000, "nested deeper")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=message) as error:
            read_json(file)
        assert "\n" not in str(error.value)
    file.write_text("[1]")
    with pytest.raises(UserError, match="is a list, not an object"):
        read_object(file)
    with pytest.raises(UserError, match="3 bytes of JSON, and at most 2"):
        read_json(file, most_bytes=2)
    with pytest.raises(UserError, match="there is no such file"):
        read_json(tmp_path / "absent")


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="there is no such file"):
        read_json(tmp_path / "pipe")


def test_nesting_has_a_limit_and_within_it_everything_is_read() -> None:
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH, "x") is not None
    with pytest.raises(UserError, match=f"x: is nested deeper than {MOST_DEPTH} levels"):
        parse_json("[" * (MOST_DEPTH + 2) + "]" * (MOST_DEPTH + 2), "x")
