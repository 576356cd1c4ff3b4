"""Every fault of a row or a file has a code of its own, which no wording of its message changes."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from components.data.sources.bad_rows import (
    BadFile,
    BadRow,
    parse_fault,
    refuse_constant,
    refuse_utf16,
    row_excerpt,
    row_too_long,
)
from components.data.sources.files import read_rows


def codes_of(file: Path) -> list[str]:
    """The codes of the faulty rows of a file, and of the file where it cannot be read further."""
    codes: list[str] = []
    try:
        list(read_rows(file, lambda name, line, fault, row: codes.append(fault.code)))
    except BadFile as error:
        codes.append(error.code)
    return codes


@pytest.mark.parametrize(
    ("name", "content", "codes"),
    [
        ("a.jsonl", b'{"a": 1\n{"a": NaN}\n{"a": "\xff"}\n', ["not_json", "not_json", "not_utf8"]),
        ("deep.jsonl", b"[" * 9000 + b"]" * 9000, ["nested_too_deeply"]),
        ("a.json", b'[{"a": 1}, {"b" 2},\n{"c": 3}, 4 5', ["not_json", "not_json"]),
        ("b.json", b'[{"a": 1}] and more', ["not_json"]),
        ("c.json", b'{"rows": [', ["not_json"]),
        ("d.json", b'{"rows": ' + b"[" * 9000, ["nested_too_deeply"]),
        ("e.json", "[]".encode("utf-16"), ["not_utf8"]),
        ("a.csv", b'a,b\n1\n"x" y,2\n', ["not_csv", "not_csv"]),
        ("a.txt", b"\xff\xfea", ["not_utf8"]),
        ("b.txt", b"abc \xff", ["not_utf8"]),
    ],
)
def test_each_fault_of_a_file_has_its_code(tmp_path: Path, name: str, content: bytes, codes: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    assert codes_of(tmp_path / name) == codes
    if not name.startswith("e"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        assert codes_of(tmp_path / f"{name}.gz") == codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (row_too_long(), "too_long_a_row"),
        (RecursionError("depth"), "nested_too_deeply"),
        (ValueError("Exceeds the limit of digits"), "unreadable"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "not_utf8"),
        (json.JSONDecodeError("longer than expected, not UTF-8", "x", 0), "not_json"),
    ],
)
def test_the_code_follows_the_kind_of_error_and_not_its_words(error: Exception, code: str) -> None:
    assert parse_fault(error).code == code


def test_constants_and_utf16_are_refused() -> None:
    with pytest.raises(BadRow, match="NaN is not JSON"):
        refuse_constant("NaN")
    with pytest.raises(BadFile, match="UTF-16 text") as refused:
        refuse_utf16("rows.jsonl", b"\xff\xfe{")
    assert refused.value.code == "not_utf8"
    refuse_utf16("rows.jsonl", b"{}")


@pytest.mark.parametrize("fault", [BadRow("x", "not_csv"), BadFile("x", "not_utf8")])
def test_a_fault_keeps_its_code_on_the_way_from_a_worker(fault: Any) -> None:
    twin = copy.copy(fault)  # by __reduce_ex__, as what carries a fault between processes does
    assert (str(twin), twin.code) == (str(fault), fault.code)


def test_an_excerpt_is_short_and_takes_any_row() -> None:
    assert row_excerpt({"a": Path("x")}) == '{"a": "x"}'
    assert len(row_excerpt(["x" * 1000])) == 400
