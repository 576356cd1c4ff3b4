"""The code that a step reaches makes it new, and no other does."""

from __future__ import annotations

import importlib
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline_builder import Pipeline
from toy_garden import GARDEN

from flows.planning import code_index, step_signature
from flows.planning.plan import Plan, RunOptions, make_plan
from flows.spec.schema import load_spec
from storage.artifacts.store import Store

UNPAUSED = GARDEN.without_setting("draft", "pause_s")
TOYS = Path(__file__).parents[1] / "toybox"

FERN_AND_ON = {"draft[fern]", "judged[fern]", "timed[fern]", "page"}

ALL_DRAFTS_AND_ON = FERN_AND_ON | {"draft[moss]", "judged[moss]", "timed[moss]"}

EDITS: dict[str, tuple[str, str, str, set[str]]] = {
    "a comment": ("fern.py", "# a comment", "# another", set()),
    "a docstring": ("fern.py", '"""Its height at a step."""', '"""Words."""', set()),
    "formatting": ("fern.py", "(step) * step", "(\n            step\n        ) * (step)", set()),
    "annotations": ("fern.py", "step: int) -> int", "step: float) -> float", set()),
    "a space": ("methods.py", "name)()", "name)( )", set()),
    "code that nobody reaches": ("light.py", "return 7", "return 8", set()),
    "a method of one entry of the registry": ("fern.py", "* step  #", "* step + 1  #", FERN_AND_ON),
    "a constant two modules away": ("light.py", "STRENGTH = 1", "STRENGTH = 2", FERN_AND_ON),
    "a function used as an attribute": ("light.py", "step * STRENGTH", "step + STRENGTH", FERN_AND_ON),
    "the registry's entry": ("methods.py", '.toys.fern:Fern"', '.toys.moss:Moss"', FERN_AND_ON),
    "a default": (
        "grow.py",
        "pause_s: float = 0.0, ctx: Context) -> D",
        "pause_s: float = 0.1, ctx: Context) -> D",
        ALL_DRAFTS_AND_ON,
    ),
    "the step itself": ("grow.py", "range(done, num_steps)", "range(done, num_steps + 0)", ALL_DRAFTS_AND_ON),
    "a later step": (
        "grow.py",
        "write_text(str(lines))",
        "write_text(repr(lines))",
        {"judged[fern]", "judged[moss]", "page"},
    ),
}

RECORDS = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Method:
    address: str
    steady: bool = True
    words: str = ""

METHODS = {
    "fern": Method(address="BOX.toys.fern:Fern", steady=True, words="tall"),
    "moss": Method(address="BOX.toys.moss:Moss", words="low"),
}
"""

RECORD_EDITS: dict[str, tuple[str, str, str, set[str]]] = {
    "a method of one entry": ("fern.py", "* step  #", "* step + 1  #", FERN_AND_ON),
    "the class of one entry": ("methods.py", '.toys.fern:Fern"', '.toys.moss:Moss"', FERN_AND_ON),
    "a fact that the step reads": ("methods.py", "steady=True, w", "steady=False, w", FERN_AND_ON),
    "a fact that no step reads": ("methods.py", 'words="tall"', 'words="high"', set()),
    "the record's class": (
        "methods.py",
        'words: str = ""',
        'words: str = "-"',
        FERN_AND_ON | {"draft[moss]", "judged[moss]", "timed[moss]"},
    ),
}


def keys(plan: Plan) -> dict[str, str]:
    return {step.name: step.key for step in plan.steps}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


class Box:
    """A copy of the toy package that a test may edit; planning it reads the files anew."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder = name, folder / name
        shutil.copytree(TOYS, self.folder, ignore=shutil.ignore_patterns("__pycache__"))
        for file in self.folder.rglob("*.py"):
            file.write_text(file.read_text().replace("toybox", name))
        self.store = Store(folder / "home")
        self.file = folder / "pipelines.yaml"

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / "toys" / file
        text = path.read_text()
        assert text.count(old) >= 1, f"{old!r} is not in {file}"
        path.write_text(text.replace(old, new))

    def plan(self, garden: Pipeline = GARDEN, params: dict[str, object] | None = None, seed: int = 0) -> Plan:
        for name in [name for name in sys.modules if name.split(".")[0] == self.name]:
            del sys.modules[name]
        importlib.invalidate_caches()
        for cached in (code_index._look_at, code_index.load_module, step_signature.resolve):
            cached.cache_clear()
        self.file.write_text(garden.text)
        options = RunOptions(device="cpu", seed=seed, packages=("components", self.name))
        return make_plan(load_spec(self.file), "garden", params or {}, options, self.store)


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit within a second would be read from an old .pyc
    yield Box(tmp_path, f"toybox_{random.randrange(10**9)}")


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_makes_new_exactly_what_reaches_it(box: Box, what: str) -> None:
    file, old, new, expected = EDITS[what]
    before = keys(box.plan(UNPAUSED))
    box.edit(file, old, new)
    assert changed(before, keys(box.plan(UNPAUSED))) == expected


def test_code_that_moves_to_another_file_makes_nothing_new(box: Box) -> None:
    before = keys(box.plan())
    toys = box.folder / "toys"
    (toys / "sky").mkdir()
    (toys / "sky" / "__init__.py").write_text("")
    (toys / "light.py").rename(toys / "sky" / "sun.py")
    (toys / "fern.py").rename(toys / "sky" / "tall.py")
    for file, old, new in [
        ("sky/tall.py", "toys import light", "toys.sky import sun as light"),
        ("methods.py", ".toys.fern:Fern", ".toys.sky.tall:Fern"),
    ]:
        box.edit(file, old, new)
    assert changed(before, keys(box.plan())) == set()
    box.edit("sky/sun.py", "STRENGTH = 1", "STRENGTH = 2")
    assert changed(before, keys(box.plan())) == FERN_AND_ON


def test_outside_facts_enter_the_key(box: Box) -> None:
    path = box.folder / "toys" / "grow.py"
    path.write_text(
        path.read_text() + "\n\ndef plant_fingerprint(settings: dict) -> dict[str, str]:\n    return {'soil': 'loam'}\n"
    )
    before = box.plan()
    assert before.step("corpus").parts["outside"] == {"soil": "loam"}
    box.edit("grow.py", "'loam'", "'clay'")
    assert changed(keys(before), keys(box.plan())) == set(keys(before))


@pytest.mark.parametrize("name", ["page.html.jinja", "kernels.c", "vectors.h"])
def test_a_file_named_in_the_code_is_code(box: Box, name: str) -> None:
    (box.folder / "toys" / name).write_text("one")
    box.edit("grow.py", "title + ", f'title + "{name}" + ')
    before = keys(box.plan())
    (box.folder / "toys" / name).write_text("two")
    assert changed(before, keys(box.plan())) == {"page"}


@pytest.mark.parametrize("what", RECORD_EDITS)
def test_of_a_registry_of_records_only_what_is_named_and_read_counts(box: Box, what: str) -> None:
    methods = (box.folder / "toys" / "methods.py").read_text()
    registry = methods[methods.index("METHODS = {") : methods.index("def build(")]
    box.edit("methods.py", registry, RECORDS.replace("BOX", box.name) + "\n\n")
    box.edit("grow.py", "build(METHODS[method])", "build(METHODS[method].address, METHODS[method].steady)")
    box.edit("methods.py", "def build(address: str)", "def build(address: str, steady: bool)")
    before = keys(box.plan(UNPAUSED))
    file, old, new, expected = RECORD_EDITS[what]
    box.edit(file, old, new)
    assert changed(before, keys(box.plan(UNPAUSED))) == expected
