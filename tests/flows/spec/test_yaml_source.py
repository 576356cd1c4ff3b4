"""YAML as it is written: words stay words, and what cannot be read costs one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["nowhere.yaml", "."])
def test_a_file_that_cannot_be_read_is_told_in_one_line(
    name: str, tmp_path: Path, draftsmith: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = draftsmith("check", "-f", tmp_path / name)
    assert code == 2
    assert len(err.splitlines()) == 1


def test_half_a_letter_is_told_with_its_line_and_column(
    tmp_path: Path, draftsmith: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "pipelines.yaml"
    file.write_bytes("pipelines: # \u00fc\n  p: \u00fc".encode() + b"\xc3\n")
    code, _, err = draftsmith("check", "-f", file)
    assert (code, err) == (2, "pipelines.yaml:2: the byte 0xC3 at column 7 is not UTF-8 text (docs: first-pipeline)\n")


def test_words_that_yaml_bends_stay_words(pipelines: Callable[[str], Path]) -> None:
    from flows.spec.yaml_source import read_yaml

    text = "a: no\nb: on\nc: 1e-4\nd: 2024-01-01\ne: 010\nf: 1_000\ng: yes\nh: ~\ni: 1.5\nj: true\nk: 0x1F\n"
    values, lines = read_yaml(pipelines(text))
    assert list(values.values()) == ["no", "on", 1e-4, "2024-01-01", "010", 1000, "yes", None, 1.5, True, "0x1F"]
    assert lines.at("k") == 11
