"""What a run takes is said before its first step, and what surely has no room is refused then."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_builder import step
from tiny_targets import make_tiny_target
from toy_garden import Cli
from usual_pipeline import usual

from components.contract import UserError
from flows.execution import cost_ahead
from flows.execution.engine import Engine
from flows.planning.plan import Plan
from storage import journal
from storage.artifacts.store import Store

LINE = (
    r"(about|at least) [\d.]+ \w+.* here, [\d.]+ \w+ of disk \([\d.]+ \w+ free\), at least [\d.]+ \w+ of memory"
    r" \([\d.]+ \w+ here\); "
)


def test_a_drafter_without_room_in_any_memory_is_refused_before_anything_is_made(
    draftsmith: Cli, store: Store, tmp_path: Path
) -> None:
    """Its gradients and moments alone are terabytes; the answers and features before it would take minutes."""
    huge = usual("huge").with_setting("draft", settings={"eagle3": {"intermediate_size": 10**9}})
    file = tmp_path / "pipelines.yaml"
    file.write_text(huge.text)
    code, out, err = draftsmith("run", "huge", "--direct", "-f", file)
    assert (code, out) == (2, "")
    assert re.search(
        r"step 'draft': gradients and moments of its drafter need [\d.]+ GiB of memory, and this mach", err
    )
    assert re.search(r"at least [\d.]+ GiB are still to be written, [\d.]+ GiB of it by draft, and the disk of ", err)
    assert list(store.keys()) == []
    ends = [entries[-1] for entries in journal.all_runs(store.home)]
    assert [end["status"] for end in ends] == ["failed"] * store.home.is_dir()


def test_the_cost_of_what_is_still_to_run_is_one_line_and_only_counted_bytes_refuse(
    plan_of: Callable[..., Plan],
    engine_of: Callable[..., Engine],
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"num_train": 8, "num_validation": 2, "num_test": 4, "num_warm_up": 1}
    whole = usual("cost", make_tiny_target("llama", tmp_path / "model")).with_setting("prompts", **sizes)
    whole = whole.with_setting("answers", max_new_tokens=8).up_to("features")
    file = tmp_path / "pipelines.yaml"
    file.write_text(whole.text)
    monkeypatch.setattr(cost_ahead, "free_disk", lambda home: 100)
    said = cost_ahead.cost_ahead(plan_of(whole), store, file)
    unfit = "by that it does not fit: `draftsmith plan cost --on here` says what would help"
    assert re.fullmatch(f"{LINE}all assumed; {unfit}", said), "answers may be short: nothing is refused"
    engine_of(plan_of(whole.up_to("answers"))).run()
    with pytest.raises(UserError) as refused:
        cost_ahead.cost_ahead(plan_of(whole), store, file)
    lines = str(refused.value).splitlines()
    assert len(lines) == 1 and "of it by features, and the disk of" in lines[0] and "storage: fp8" in lines[0]
    monkeypatch.setattr(cost_ahead, "ask_child", lambda *_: pytest.fail("a run with nothing long to do asked"))
    done = whole.up_to("answers").with_steps(more=step("data.collect_prompts"))
    assert cost_ahead.cost_ahead(plan_of(done), store, file) == ""


def test_what_cannot_be_estimated_is_said_and_refuses_nothing(
    plan_of: Callable[..., Plan], store: Store, tmp_path: Path
) -> None:
    far = usual("far", "owner/name").up_to("answers")
    said = cost_ahead.cost_ahead(plan_of(far), store, tmp_path / "pipelines.yaml")
    assert said.startswith("what it takes cannot be said yet: ") and "owner/name" in said
