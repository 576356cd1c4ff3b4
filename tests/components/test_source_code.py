"""Python source is parsed although other Python code runs in between, and only named models run code of their own."""

from __future__ import annotations

import ast
import gc
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from components import source_code
from components.source_code import REMOTE_CODE, ROOT, allow_code, code_state, may_run_code, syntax_tree

SOURCE = Path(__file__).read_text()


@pytest.fixture
def parses_while_garbage_is_collected() -> Iterator[list[int]]:
    """As another thread does that gets its turn then: here in a callback of the collector, so every time."""
    parsed: list[int] = []

    def parse_too(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            ast.parse("a = 1")
            parsed.append(info["generation"])

    before = gc.get_threshold()
    gc.callbacks.append(parse_too)
    gc.set_threshold(20)
    yield parsed
    gc.set_threshold(*before)
    gc.callbacks.remove(parse_too)


def test_a_collection_in_the_middle_does_not_end_it(parses_while_garbage_is_collected: list[int]) -> None:
    tree = syntax_tree(SOURCE)
    assert gc.isenabled()
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert names[-1] == "test_names_are_told_apart_whole"
    kept = [[number] for number in range(2000)]  # the trap was set: without our parse it springs
    assert parses_while_garbage_is_collected and len(kept) == 2000


def test_an_image_has_the_commit_that_its_builder_gave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source_code, "ROOT", tmp_path)
    for given, commit in (("0a1b2c", "0a1b2c"), ("", None)):
        monkeypatch.setenv("DRAFTSMITH_COMMIT", given)
        code_state.cache_clear()
        assert code_state() == (commit, None)
    code_state.cache_clear()


def test_a_source_that_is_none_is_refused_and_garbage_is_collected_again() -> None:
    with pytest.raises(SyntaxError, match=r"here\.py"):
        syntax_tree("def", "here.py")
    assert gc.isenabled()


def test_modules_that_stay_are_loaded_without_a_search_for_garbage_which_goes_on_after_them() -> None:
    program = """
import gc, sys
from components.source_code import import_to_stay
searches = []
gc.callbacks.append(lambda phase, info: searches.append(phase))
import_to_stay("sqlalchemy", "networkx")
print("networkx" in sys.modules, searches, gc.isenabled(), gc.get_freeze_count() > 10_000)
try:
    import_to_stay("not.there")
except ModuleNotFoundError:
    print(gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True [] True True\nTrue\n"


def test_the_commit_and_whether_files_differ_are_what_git_says() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        assert code_state() == (None, None)
        return
    head = subprocess.run([git, "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    code_state.cache_clear()  # it is asked once a process, and a commit may have been made since
    assert code_state().commit == head.stdout.strip()
    assert isinstance(code_state().changed, bool)


def test_names_are_told_apart_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REMOTE_CODE, "")
    allow_code(["owner/name", "/models/mine"])
    assert may_run_code("owner/name") and may_run_code("/models/mine")
    assert not may_run_code("owner") and not may_run_code("") and not may_run_code("/models")
    allow_code([])
    assert not may_run_code("owner/name") and not may_run_code("")
