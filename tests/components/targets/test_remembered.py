"""A digest is that of the content: a large file is hashed once, and again when it has changed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from components import files
from components.targets import remembered


def test_a_large_file_is_hashed_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remembered, "LARGE", 4)
    hashed: list[Path] = []
    real = files.sha256_of
    monkeypatch.setattr("components.files.sha256_of", lambda file: hashed.append(file) or real(file))
    file = tmp_path / "weights"
    file.write_bytes(b"first")
    assert remembered.sha256_of(file) == remembered.sha256_of(file) == hashlib.sha256(b"first").hexdigest()
    assert hashed == [file]
    file.write_bytes(b"other")
    os.utime(file, ns=(1, 1))  # as long as before, written at another time
    assert remembered.sha256_of(file) == hashlib.sha256(b"other").hexdigest()


def test_a_broken_cache_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    monkeypatch.setattr(remembered, "LARGE", 0)
    (tmp_path / "digests.json").write_text("{cut o", encoding="utf-8")
    file = tmp_path / "weights"
    file.write_bytes(b"content")
    assert remembered.sha256_of(file) == hashlib.sha256(b"content").hexdigest()
    assert len(json.loads((tmp_path / "digests.json").read_text(encoding="utf-8"))) == 1
