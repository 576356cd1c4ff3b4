"""A step runs once, alone where it measures, in a child whose whole tree ends with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pipeline_builder import only, step
from tiny_targets import make_tiny_target
from toy_garden import ENGINE_ALONE, GARDEN, gone
from usual_pipeline import usual

from components.contract import NothingNew, UserError
from components.source_code import code_state
from flows.execution import step_process as supervise
from flows.execution.engine import Engine
from flows.execution.messages import StepFailed
from flows.planning.plan import Plan, RunOptions
from storage.artifacts.store import Store


def test_a_run_makes_everything_once_and_the_next_reuses_it(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    calls: list[tuple[str, bool]] = []
    plan = plan_of()
    made = engine_of(
        plan, on_finished=lambda step, artifact, record, seconds, reused: calls.append((step.name, reused))
    ).run()
    assert calls == [(step.name, False) for step in plan.steps]
    assert made["page"].info == {"num_judged": 2}
    assert (made["draft[fern]"].path / "growth.txt").read_text().splitlines()[2] == "2 4 5"
    assert not list((store.home / "partial").glob("*"))

    calls.clear()
    again = engine_of(
        plan_of(), on_finished=lambda step, artifact, record, seconds, reused: calls.append((step.name, reused))
    ).run()
    assert calls == [(step.name, True) for step in plan.steps]
    assert {name: artifact.key for name, artifact in again.items()} == {
        name: artifact.key for name, artifact in made.items()
    }


def test_artifact_json_says_how_it_came_to_be(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    plan = plan_of()
    engine_of(plan, run_id="r1").run()
    content = store.record_of(plan.step("draft[moss]").key)
    assert content["kind"] == "Draft"
    assert content["info"] == {"method": "moss", "num_steps": 6}
    record = content["record"]
    assert (record["pipeline"], record["step"], record["uses"], record["run_id"]) == (
        "garden",
        "draft[moss]",
        "toys.grow",
        "r1",
    )
    assert record["inputs"] == {"corpus": plan.step("corpus").key}
    assert record["settings"] == plan.step("draft[moss]").settings
    assert record["versions"]["torch"]
    assert record["machine"]["cpu_model"]
    assert (record["git_commit"], record["git_changed"]) == code_state(), "said beside the result, never in its key"
    assert not any("git" in name for name in record["parts"])
    assert record["peak_rss_mib"] > 5


def test_events_of_the_step_arrive_in_order(plan_of: Callable[..., Plan], engine_of: Callable[..., Engine]) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    engine_of(
        plan_of(to_step="judged[fern]"), on_event=lambda step, event: events.append((step.name, dict(event)))
    ).run()
    grow = [event for name, event in events if name == "draft[fern]"]
    assert [event["event"] for event in grow] == ["start", *["progress"] * 6, "done"]
    assert [event["done"] for event in grow if event["event"] == "progress"] == [1, 2, 3, 4, 5, 6]
    assert ("corpus", "5 rows from seed") in [(name, event.get("message")) for name, event in events]
    assert [event["height"] for _, event in events if event["event"] == "metrics"] == [6.0]


def test_a_user_error_is_final_and_named(plan_of: Callable[..., Plan], engine_of: Callable[..., Engine]) -> None:
    events: list[str] = []
    with pytest.raises(UserError, match=r"^step 'only': data.jsonl:3: no 'text'; give each row one$"):
        plan = plan_of(only("toys.fail", keys={"retries": 3}, how="user"))
        engine_of(plan, on_event=lambda step, event: events.append(event["event"])).run()
    assert events == ["start", "failed"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("crash", "RuntimeError: the pot fell"),
        ("die", r"its process was killed by signal 9 \(out of memory\?\)"),
        ("garbage", "AssertionError: toys.fail returned str, not Page"),
    ],
)
def test_other_failures_are_retried_then_told_with_their_log(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], how: str, said: str
) -> None:
    events: list[str] = []
    plan = plan_of(only("toys.fail", keys={"retries": 1}, how=how))
    with pytest.raises(StepFailed, match=f"^step 'only' failed: {said}$") as caught:
        engine_of(plan, on_event=lambda step, event: events.append(event["event"])).run()
    assert events == ["start", "retry", "start", "failed"]
    if how == "crash":
        assert caught.value.log.read_text().count("RuntimeError: the pot fell") == 2


def test_a_passing_fault_is_got_over(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    plan = plan_of(only("toys.fail", keys={"retries": 1}, how="once"))
    engine_of(plan).run()
    assert store.record_of(plan.steps[0].key)["record"]["attempts"] == 2


def test_a_deadline_ends_the_whole_tree(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps over the deadline once the whole tree is there, however long it took to come up."""
    plan = plan_of(only("toys.hang", keys={"timeout_minutes": 9}))
    pids = store.home / "partial" / f"{plan.steps[0].key}.scratch" / "pids"
    tree: list[int] = []

    def now() -> float:
        tree[:] = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
        return time.monotonic() + 540 * (len(tree) == 2)

    monkeypatch.setattr(supervise, "time", SimpleNamespace(sleep=time.sleep, monotonic=now))
    with pytest.raises(StepFailed, match=r"stopped after 540 s, its timeout_minutes"):
        engine_of(plan).run()
    assert len(tree) == 2 and all(gone(pid, within=1) for pid in tree)
    assert store.get(plan.steps[0].key) is None


@pytest.mark.parametrize("taken", [{"mib": 300}, {"mib": 1, "mib_of_child": 300}])
def test_memory_is_returned_and_no_process_is_left(
    taken: dict[str, int], plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    before = psutil.Process().memory_info().rss
    plan = plan_of(only("toys.leak", **taken))
    made = engine_of(plan).run()["only"]
    assert store.record_of(made.key)["record"]["peak_rss_mib"] > 300
    assert psutil.Process().memory_info().rss - before < 50 << 20
    assert gone(made.info["pid"], within=1)


def test_measuring_steps_run_alone(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    plan = plan_of(GARDEN.with_setting("timed", pause_s=0.3))
    engine = engine_of(plan)
    made = dict(engine.run())
    keys = [plan.step(name).key for name in ("timed[fern]", "timed[moss]", "judged[fern]")]
    for key in keys:
        store.quarantine(key)
    steps = [plan.step(name) for name in ("timed[fern]", "timed[moss]", "judged[fern]")]
    threads = [threading.Thread(target=engine.run_step, args=(step, made)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = sorted(tuple(map(float, (store.path_of(key) / "span.txt").read_text().split())) for key in keys[:2])
    assert spans[0][1] <= spans[1][0]
    assert store.get(keys[2]) is not None


def test_two_engines_make_a_key_once(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    plan = plan_of(params={"pause": 0.05}, to_step="draft[fern]")
    finished: list[tuple[str, bool]] = []

    def run() -> None:
        engine_of(
            plan, on_finished=lambda step, artifact, record, seconds, reused: finished.append((step.name, reused))
        ).run()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished) == [(name, reused) for name in ("corpus", "draft[fern]") for reused in (False, True, True)]


def test_a_forced_step_is_made_again_from_the_start(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    plan = plan_of(to_step="draft[fern]")
    first = engine_of(plan).run()["draft[fern]"]
    inode = (first.path / "growth.txt").stat().st_ino
    second = engine_of(plan_of(to_step="draft[fern]", force=("draft",))).run()["draft[fern]"]
    assert second.path == first.path
    assert (second.path / "growth.txt").stat().st_ino != inode
    assert len((second.path / "growth.txt").read_text().splitlines()) == 6


def test_a_broken_artifact_is_set_aside_and_rebuilt(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    plan = plan_of(to_step="draft[fern]")
    engine_of(plan).run()
    file = store.path_of(plan.step("draft[fern]").key) / "growth.txt"
    good = file.read_text()
    file.write_text(good.replace("1", "2"))
    notes: list[str] = []
    engine_of(plan_of(to_step="draft[fern]"), on_event=lambda step, event: notes.append(event.get("message", ""))).run()
    assert file.read_text() == good
    assert any(
        note.startswith("growth.txt has changed since it was made; the broken artifact is in ") for note in notes
    )
    assert len(list((store.home / "broken").iterdir())) == 1


def test_children_see_pinned_threads_and_no_network(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "envbox" / "seen"
    room.mkdir(parents=True)
    (tmp_path / "envbox" / "__init__.py").write_text("")
    (room / "__init__.py").write_text(
        "from __future__ import annotations\nimport os\nfrom components.contract import Context, Page\n"
        "def look(*, ctx: Context) -> Page:\n"
        "    import torch\n"
        "    names = ('OMP_NUM_THREADS', 'HF_HUB_OFFLINE', 'TOKENIZERS_PARALLELISM', 'GARDENER')\n"
        "    return Page.of_step(ctx, {'env': [os.environ[n] for n in names], 'threads': torch.get_num_threads()})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from flows.planning.plan import make_plan
    from flows.spec.schema import load_spec

    file = tmp_path / "pipelines.yaml"
    file.write_text(only("seen.look").text)
    options = RunOptions(device="cpu", packages=("components", "envbox"))
    for gardener in ("ada", "bob"):
        monkeypatch.setenv("GARDENER", gardener)
        store = Store(tmp_path / gardener)
        plan = make_plan(load_spec(file), "p", {}, options, store)
        made = Engine(store, plan, num_threads=1, preload=()).run()["only"]
        expected = ["1", os.environ.get("HF_HUB_OFFLINE", "1"), "false", gardener]
        assert made.info["env"] == expected, "the environment of now, not the one in which the fork server began"
        assert made.info["threads"] == 1


def test_a_temporary_folder_with_a_long_path_is_no_obstacle(
    start: Callable[..., subprocess.Popen[str]],
    pipelines: Callable[[str], Path],
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far = tmp_path / ("f" * 100)  # a socket below it would have a path longer than the 107 bytes a system takes
    far.mkdir()
    monkeypatch.setenv("TMPDIR", str(far))
    process = start(ENGINE_ALONE, "garden", pipelines(GARDEN.text))
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert len(store.keys()) == 8


def test_a_target_that_a_step_makes_is_held_against_what_is_measured(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store, tmp_path: Path
) -> None:
    """Its positions are not known when the pipeline is checked, and training would come before what needs them."""
    model = make_tiny_target("llama", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    made = step("targets.make_stand_in", model=str(model))
    plan = plan_of(usual("made", to="cost").with_other_step("target", made))
    with pytest.raises(
        UserError, match=r"^step 'cost': setting 'kv_lengths': .* need 257 positions, and the target has 128"
    ):
        engine_of(plan).run()
    assert store.verify_local(plan.step("target").key).artifact is not None
    assert store.verify_local(plan.step("prompts").key).fault == "absent"


def test_test_prompts_that_are_too_long_are_told_before_a_drafter_is_trained(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store, tmp_path: Path
) -> None:
    """Their lengths are known once the target's tokenizer has read them; training comes before they are used."""
    model = make_tiny_target("llama", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    rows = [
        json.dumps({"prompt": f"{n} " + "x y " * (37 if n % 10 < 2 else 10 if n % 10 < 4 else 25)}) for n in range(200)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    settings = {"source": str(tmp_path / "rows.jsonl"), "num_train": 8, "num_validation": 2, "num_test": 10}
    pipeline = usual("long", model, to="end_to_end").with_setting("prompts", **settings)
    pipeline = pipeline.with_setting("answers", max_new_tokens=8).with_setting("cost", kv_lengths=[64])
    events: list[str] = []
    plan = plan_of(
        pipeline.with_setting("acceptance", max_new_tokens=110).with_setting("end_to_end", max_new_tokens=128)
    )
    engine = engine_of(plan, on_event=lambda step, event: events.append(f"{step.name}: {event.get('message')}"))
    with pytest.raises(
        UserError, match=r"^step 'end_to_end': prompts: . of 10 test prompts do not fit .* give shorter"
    ):
        engine.run()
    assert any(line.startswith("answers: step 'acceptance': ") for line in events), "what is left out is told too"
    assert store.verify_local(plan.step("answers").key).artifact is not None
    assert store.verify_local(plan.step("features").key).fault == "absent"


def test_too_few_test_prompts_for_a_verdict_end_a_run_before_anything_is_trained(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store, tmp_path: Path
) -> None:
    """How many a file has is known once it is read and split; where no verdict is asked, they become a note."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(12)))
    few = usual("few", make_tiny_target("llama", tmp_path / "model")).with_setting(
        "prompts", source=str(tmp_path / "rows.jsonl"), num_validation=0, num_warm_up=0
    )
    plan = plan_of(few)
    with pytest.raises(UserError) as refused:
        engine_of(plan).run()
    said = r"step 'prompts': a verdict needs 4 test prompts, there (is|are) [0-3]: "
    assert re.fullmatch(said + "give more rows, or raise evaluation_percent from 20", str(refused.value))
    assert store.verify_local(plan.step("prompts").key).artifact is not None
    assert store.verify_local(plan.step("answers").key).fault == "absent"
    events: list[str] = []
    plan = plan_of(few.up_to("prompts"))
    engine_of(plan, on_event=lambda step, event: events.append(str(event.get("message")))).run()
    assert any(
        line.startswith("a verdict needs 4 ") and line.endswith("(no step here asks for one)") for line in events
    )
    enough = plan_of(few.up_to("prompts").with_setting("prompts", evaluation_percent=90))
    engine_of(enough, on_event=lambda step, event: events.append(f"now {event.get('message')}")).run()
    assert not any(line.startswith("now a verdict") for line in events)


def test_traffic_with_too_few_test_prompts_for_a_verdict_waits(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store, tmp_path: Path
) -> None:
    rows = "".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(12))
    (tmp_path / "traffic").mkdir()
    (tmp_path / "traffic" / "one.jsonl").write_text(rows)
    night = usual("few", make_tiny_target("llama", tmp_path / "model")).with_other_step(
        "prompts",
        step("data.collect_traffic", source=str(tmp_path / "traffic"), min_new=2, num_validation=0, num_warm_up=0),
    )
    with pytest.raises(NothingNew, match=r"^a verdict needs 4 test prompts, there (is|are) [1-3]; they wait$"):
        engine_of(plan_of(night)).run()
