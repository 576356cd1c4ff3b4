"""A home of every release, made by its own code (tests/older_homes/make_home.py), is opened by the code of now."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_pipeline import main_job
from toy_garden import GARDEN, PACKAGES

from components.contract import UserError
from components.speedup.comparison.promotion_rule import judge
from flows import cli
from flows.execution.engine import Engine
from storage import journal
from storage.history.query import named_queries, open_history, query, view_names
from storage.home import read_identity
from storage.registry.registry import find_release, versions_of

HOMES = sorted((Path(__file__).parent / "older_homes").glob("*.tar.gz"))
EXPLAINED = re.compile(r"reused|(code|setting|input|machine|outside|[\w ]+) .*(changed|new:|removed:|->)|forced")


class Opened:
    """A home of a release at a place that is not its own, with the pipelines of now."""

    def __init__(self, archive: Path, folder: Path) -> None:
        with tarfile.open(archive) as content:
            content.extractall(folder, filter="data")
        self.home, self.pipelines = folder / "home", folder / "pipelines.yaml"
        tiny = main_job(folder / "model").text.partition("pipelines:\n")[2]
        self.pipelines.write_text(GARDEN.text + tiny, encoding="utf-8")
        (self.name,) = {row.name for row in journal.promotions(self.home)}


@pytest.fixture(params=HOMES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    here = Opened(request.param, tmp_path / "elsewhere")
    (tmp_path / "machine").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "machine"))
    monkeypatch.setenv("DRAFTSMITH_HOME", str(here.home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert Engine.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Engine.__init__.__kwdefaults__, "preload", ())
    return here


@pytest.fixture
def draftsmith(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A command that must do well; what it printed."""

    def run(*arguments: object) -> str:
        capfd.readouterr()
        code = cli.main([str(argument) for argument in arguments], packages=PACKAGES)
        captured = capfd.readouterr()
        assert code == 0, f"{arguments}: {captured.err}{captured.out}"
        return captured.out

    return run


def test_there_is_one_for_this_release() -> None:
    version = re.search(r'^version = "(.*)"$', (Path(__file__).parents[1] / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None and version[1] in {path.name.removesuffix(".tar.gz") for path in HOMES}


def test_it_is_well_answers_and_goes_on(opened: Opened, draftsmith: Callable[..., str], tmp_path: Path) -> None:
    home, file = opened.home, opened.pipelines
    assert "BAD" not in draftsmith("doctor")
    identity = read_identity(home)
    assert identity is not None and identity.path == str(home)

    runs = {(row[0], row[1]) for row in query("SELECT pipeline, status FROM v_run", home)[1]}
    assert runs == {("garden", "completed"), ("tiny", "completed")}
    views = view_names()
    with open_history(home) as run_query:
        rows = {view: run_query(f"SELECT count(*) FROM {view}", {})[1][0][0] for view in views}
    assert all(rows[view] for view in ("v_artifact", "v_run", "promotion", "v_depth", "v_choice")), rows
    for name in named_queries():
        draftsmith("query", name)

    for pipeline in ("garden", "tiny"):
        steps = json.loads(draftsmith("plan", pipeline, "--json", "-f", file))
        reasons = {step["name"]: step["reason"] for step in steps}
        made = {file.stem for file in (home / "steps" / pipeline).iterdir()}  # steps that this release had
        assert made & reasons.keys()
        assert not [reasons[name][:300] for name in made & reasons.keys() if not EXPLAINED.search(reasons[name])]

    key, *_ = find_release(home, opened.name, "champion", judge)
    draftsmith("show", key[:12])
    draftsmith("show", opened.name)
    draftsmith("resync")
    facts = [facts for name in (opened.name, "model") for *_, facts in versions_of(home, name)]
    assert all(one["draftsmith.key"] and one["draftsmith.draft_key"] for one in facts), "a tag each, or all in one"
    try:
        assert find_release(home, "model", "champion", judge)[0] == key
    except UserError as error:
        assert "draftsmith promote model" in str(error), "it was forced; the next command says how to do so again"
    draftsmith("gc", "--dry-run", "-f", file)
    draftsmith("run", "garden", "--direct", "-f", file)
    assert all(step["reused"] for step in json.loads(draftsmith("plan", "garden", "--json", "-f", file)))
    assert query("SELECT count(*) FROM v_run WHERE pipeline = 'garden'", home)[1] == [(3,)]
    draftsmith("backup", tmp_path / "saved.tar")
    draftsmith("restore", tmp_path / "saved.tar", "--into", tmp_path / "restored")
    assert "BAD" not in draftsmith("doctor")
