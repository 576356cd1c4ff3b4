"""The README says what is true: its tree is the disk, what it names exists, nothing in it is left to fill in."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_path_in_the_tree_exists() -> None:
    folder, seen = ROOT, 0
    for line in README.split("## The tree")[1].split("```")[1].splitlines():
        if not line.strip():
            continue
        name = line.split()[0]
        inside = line.startswith("  ")
        path = (folder if inside else ROOT) / name
        assert path.exists(), f"the README's tree names {name}, which is not there"
        folder = folder if inside else path
        seen += 1
    assert seen > 25


def test_every_folder_of_the_rooms_is_in_the_tree() -> None:
    tree = README.split("## The tree")[1].split("```")[1]
    for room in sorted(p for p in (ROOT / "components").iterdir() if p.is_dir() and not p.name.startswith("_")):
        assert f"{room.name}/" in tree, f"the README's tree lacks components/{room.name}/"


def test_every_command_named_exists() -> None:
    program = Path(sys.executable).with_name("draftsmith")
    listed = subprocess.run([str(program), "--help"], capture_output=True, text=True, check=True).stdout
    for command in sorted(set(re.findall(r"^draftsmith (\w+)", README, re.MULTILINE))):
        assert re.search(rf"\b{command}\b", listed), f"the README names `draftsmith {command}`"


def test_every_step_named_exists() -> None:
    rooms = [path.name for path in (ROOT / "components").iterdir() if (path / "__init__.py").is_file()]
    named = sorted(set(re.findall(rf"\b({'|'.join(rooms)})\.([a-z]\w+)", README)))
    assert len(named) > 20
    for room, step in named:
        if not (ROOT / "components" / room / f"{room}.{step}").exists():
            assert hasattr(importlib.import_module(f"components.{room}"), step), f"the README names {room}.{step}"


def test_every_file_named_exists() -> None:
    named = set(re.findall(r"`((?:components|tests|benchmarks|deploy|flows)/[\w./-]+)[*`]", README))
    assert len(named) > 8
    assert [path for path in sorted(named) if not [*ROOT.glob(path + "*")]] == []


def test_every_option_and_question_named_exists() -> None:
    program = str(Path(sys.executable).with_name("draftsmith"))

    def said(*words: str) -> str:
        return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout

    options: dict[str, set[str]] = {}
    for command, rest in re.findall(r"draftsmith ([a-z-]+)([^`\n#]*)", README):
        options.setdefault(command, set()).update(re.findall(r"(?<= )--?[a-z][\w-]*", rest.split("  ")[0]))
    for command, used in options.items():
        if used:
            known = re.findall(r"--?[a-z][\w-]*", said(command, "--help"))
            assert used <= {*known}, f"the README gives `draftsmith {command}` {sorted(used - {*known})}"
    assert sum(map(len, options.values())) >= 6
    questions = re.findall(r"^(\S+)", said("query", "--list"), re.MULTILINE)
    named = set(re.findall(r"draftsmith query ([a-z][\w-]+)", README))
    assert len(named) >= 3 and named <= {*questions}


def test_nothing_is_left_to_fill_in() -> None:
    assert "@@" not in README
