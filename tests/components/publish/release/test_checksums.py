"""The checksums of a release are those that sha256sum itself accepts, and a change is found."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.contract import UserError
from components.publish.release.validate import validate_folder


def test_sha256sum_itself_accepts_the_sums_and_finds_what_was_changed(
    export: Callable[..., Any], tmp_path: Path
) -> None:
    tool = shutil.which("sha256sum")
    assert tool, "every system that this runs on has it"
    release = export(include="all").path
    command = [tool, "--check", "--strict", "SHA256SUMS"]
    good = subprocess.run(command, cwd=release, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    files = {file.relative_to(release).as_posix() for file in release.rglob("*") if file.is_file()}
    assert {line.removesuffix(": OK") for line in good.stdout.splitlines()} == files - {"SHA256SUMS"}
    (release / "policy.json").write_text("{}")
    bad = subprocess.run(command, cwd=release, capture_output=True, text=True, check=False)
    assert bad.returncode != 0 and "policy.json: FAILED" in bad.stdout


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("SHA256SUMS", lambda text: text.replace("  README.md", " README.md"), r"SHA256SUMS:\d+: .* is no sha256"),
        ("SHA256SUMS", lambda text: text[:-1], "its last line is cut short"),
        ("SHA256SUMS", lambda text: text + text.splitlines()[0] + "\n", "stands twice"),
        ("SHA256SUMS", lambda text: text + "0" * 64 + "  ../outside\n", "is not in this folder"),
        ("SHA256SUMS", lambda text: "".join(text.splitlines(keepends=True)[1:]), "not part of this release"),
        ("provenance.json", lambda text: text.replace("CycloneDX", "Cyclone"), "its sha256 differs"),
    ],
)
def test_sums_that_cannot_be_trusted_are_one_line(
    name: str, spoil: Callable[[str], str], said: str, export: Callable[..., Any]
) -> None:
    release = export().path
    (release / name).write_text(spoil((release / name).read_text()))
    with pytest.raises(UserError, match=said) as error:
        validate_folder(release)
    assert "\n" not in str(error.value)
