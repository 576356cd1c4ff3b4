"""du, gc, backup and restore as they are called: what is told, what stays, what a plan makes anew afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from toy_garden import Cli, grow

from flows.execution.engine import Engine
from flows.planning.plan import Plan
from storage.artifacts.store import Store
from storage.journal import Journal


def kinds(store: Store) -> list[str]:
    return sorted(store.record_of(key)["kind"] for key in store.keys())  # noqa: SIM118


def to_run(plan: Plan) -> list[str]:
    return [step.name for step in plan.steps if not step.reused]


@pytest.fixture
def grown(file: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home in which the garden was grown once, with a pipelines file beside it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    grow(file)
    return home


def test_du_counts_every_byte_by_kind_and_by_pipeline(grown: Path, draftsmith: Cli) -> None:
    code, out, _ = draftsmith("du", "--format", "json")
    rows = {(row["by"], row["name"]): row for row in json.loads(out)}
    assert code == 0 and rows["kind", "Draft"]["artifacts"] == 2 and rows["kind", "Measurements"]["artifacts"] == 4
    total = sum({(file := path.stat()).st_ino: file.st_size for path in grown.rglob("*") if path.is_file()}.values())
    assert sum(row["bytes"] for (by, _), row in rows.items() if by == "kind") == total
    stored = sum(path.stat().st_size for path in (grown / "store").rglob("*") if path.is_file())
    assert rows["pipeline", "garden"]["bytes"] == stored


def test_what_gc_has_collected_is_made_again_only_where_something_that_runs_needs_it(
    grown: Path, draftsmith: Cli, plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    before = plan_of()
    code, out, _ = draftsmith("gc", "--dry-run")
    assert code == 0 and "Corpus" in out and "nothing was deleted" in out and len(store.keys()) == 8
    code, out, err = draftsmith("gc")
    assert (code, err) == (0, "") and "Draft" in out and kinds(store) == ["Measurements"] * 4
    assert "0 bytes would be freed" in draftsmith("gc", "--dry-run")[1]

    plan = plan_of()
    assert to_run(plan) == ["page"] and plan.step("draft[fern]").reason.startswith("reused: only its record")
    engine_of(plan).run()
    assert to_run(plan_of()) == [] and kinds(store) == ["Measurements"] * 4 + ["Page"]
    code, out, _ = draftsmith("show", before.step("corpus").key[:10])
    assert code == 0 and "collected or deleted; draftsmith run garden makes them again" in " ".join(out.split())

    anew = plan_of(force=("judged[moss]",))
    assert to_run(anew) == ["corpus", "draft[moss]", "judged[moss]", "page"]
    engine_of(anew).run()
    assert store.verify_local(before.step("draft[moss]").key).artifact is not None
    assert to_run(plan_of()) == [], "the fern is still not needed"
    assert to_run(plan_of(to_step="draft")) == ["draft[fern]"], "now somebody asks for it"


def test_what_retention_does_not_keep_goes_by_itself_after_the_runs_that_it_names(
    file: Path, home: Path, draftsmith: Cli, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Engine.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Engine.__init__.__kwdefaults__, "preload", ())
    file.write_text(f"{file.read_text()}retention: {{keep_runs: 1, after: garden}}\n")

    def run(**params: object) -> tuple[int, str, str]:
        given = [word for name, value in params.items() for word in ("-p", f"{name}={value}")]
        return draftsmith("run", "garden", "--direct", "-f", str(file), *given)

    def drafts() -> list[int]:
        records = [store.record_of(key) for key in store.keys()]  # noqa: SIM118
        return sorted(record["info"]["num_steps"] for record in records if record["kind"] == "Draft")

    assert "retention: " not in run(steps=6)[1], "nothing was older"
    fern = next(key for key in store.keys() if store.record_of(key)["info"].get("method") == "fern")  # noqa: SIM118
    with closing(Journal.start(home, "other", {}, "direct", keys=[fern])):
        code, out, err = run(steps=7)
        assert (code, err) == (0, "") and "retention: " in out and " freed, 2 artifacts" in out
        assert drafts() == [6, 7, 7], "a run that goes on may need the fern"
        assert len([key for key in store.keys() if store.record_of(key)["kind"] == "Measurements"]) == 8  # noqa: SIM118
    for path in (home / "runs").iterdir():
        os.utime(path, (0, 0))
    file.write_text(file.read_text().replace("toys.judge_all", "toys.fail"))
    file.write_text(file.read_text().replace("in: {judged: judged}", "with: {how: user}"))
    assert run(steps=8)[0] != 0 and 7 not in drafts(), "a run that failed, for want of room or not, lets go too"
    assert draftsmith("gc", "-f", str(file))[1] == "0 bytes freed\n"
    assert "Draft" in draftsmith("gc", "-f", str(file), "--runs", "0", "--dry-run")[1]
    file.write_text(file.read_text().replace("after: garden", "after: gardne"))
    assert "retention: no pipeline 'gardne' (did you mean 'garden'?)" in draftsmith("check", "-f", str(file))[2]


def test_a_backup_is_restored_elsewhere_whole_or_not_at_all(
    grown: Path,
    file: Path,
    tmp_path: Path,
    draftsmith: Cli,
    plan_of: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved, place = tmp_path / "saved" / "home.tar.gz", tmp_path / "elsewhere" / "home"
    code, out, err = draftsmith("backup", str(saved))
    assert (code, err) == (0, "") and "8 artifacts and 0 runs" in out
    code, out, err = draftsmith("restore", str(saved), "--into", str(place))
    assert (code, err) == (0, "") and f"{place}: 8 artifacts and 0 runs, as they were" in out
    for path in (grown / "store").rglob("*"):
        there = place / path.relative_to(grown)
        assert there.is_dir() if path.is_dir() else there.read_bytes() == path.read_bytes()
    code, _, err = draftsmith("restore", str(saved), "--into", str(place))
    assert code == 2 and "there is something" in err and err.count("\n") == 1

    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(saved.read_bytes()[:-700])
    code, _, err = draftsmith("restore", str(cut), "--into", str(tmp_path / "third"))
    assert code == 2 and str(cut) in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir() if "third" in path.name) == []
