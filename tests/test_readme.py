"""The README and the documentation name what is there: folders, files, and nothing that is left to fill in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TREE = README.split("## The tree")[1].split("```")[1].removeprefix("text")
FOLDERS = ("components", "tests", "benchmarks", "deploy", "flows", "storage", "tools", "docs")


def test_every_path_in_the_tree_exists() -> None:
    folder, seen = ROOT, 0
    for line in filter(str.strip, TREE.splitlines()):
        name = line.split()[0]
        inside = line.startswith("  ")
        path = (folder if inside else ROOT) / name
        assert path.exists(), f"the README's tree names {name}, which is not there"
        folder = folder if inside else path
        seen += 1
    assert seen > 25


@pytest.mark.parametrize("room", ["components", "flows", "storage"])
def test_every_folder_of_the_rooms_is_in_the_tree(room: str) -> None:
    for folder in sorted(path for path in (ROOT / room).iterdir() if path.is_dir() and not path.name.startswith("_")):
        assert f"  {folder.name}/" in TREE, f"the README's tree lacks {room}/{folder.name}/"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_named_exists(page: Path) -> None:
    named = set(re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)[*`]", page.read_text(encoding="utf-8")))
    there = [path for path in named if "NAME" in path or [*ROOT.glob(path + "*")]]
    assert sorted(named - set(there)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_is_run_exists(page: Path) -> None:
    named = set(re.findall(r"python -m ((?:benchmarks|flows|tools)[\w.]*)", page.read_text(encoding="utf-8")))
    missing = [name for name in named if not (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()]
    assert [name for name in missing if name != "flows.services"] == []  # the changelog names the old one


def test_the_readme_is_short_and_nothing_is_left_to_fill_in() -> None:
    assert len(README.splitlines()) <= 150
    assert "@@" not in README and "TODO" not in README
