"""A plan says for every step whether it is reused, and if not, why; it writes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_builder import Pipeline, pipeline, step
from toy_garden import GARDEN

from components.contract import UserError
from flows.execution.engine import Engine
from flows.planning.plan import Plan
from storage.artifacts.store import Store


def reasons(plan: Plan) -> dict[str, str]:
    return {step.name: step.reason for step in plan.steps}


@pytest.fixture
def grown(plan_of: Callable[..., Plan], engine_of: Callable[..., Engine]) -> Plan:
    """The garden, grown once."""
    plan = plan_of()
    engine_of(plan).run()
    return plan


def test_a_plan_writes_nothing(plan_of: Callable[..., Plan], home: Path) -> None:
    assert set(reasons(plan_of()).values()) == {"new: never run"}
    assert not home.exists()


def test_each_reason_is_told(grown: Plan, plan_of: Callable[..., Plan], store: Store) -> None:
    assert set(reasons(plan_of()).values()) == {"reused"}

    told = reasons(plan_of(params={"steps": 7}))
    assert told["corpus"] == "reused"
    assert told["draft[fern]"] == "setting num_steps 6 -> 7"
    assert told["judged[fern]"] == "input draft changed"
    assert told["page"] == "input judged changed"

    assert reasons(plan_of(seed=3))["corpus"] == "seed 0 -> 3"
    assert reasons(plan_of(GARDEN.with_setting("page", title="T")))["page"] == "setting title All -> T"

    forced = reasons(plan_of(force=("judged[moss]",)))
    assert {name for name, why in forced.items() if why == "forced"} == {"judged[moss]", "page"}

    file = store.path_of(grown.step("draft[moss]").key) / "growth.txt"
    file.write_text("wilted")
    told = reasons(plan_of())
    assert told["draft[moss]"] == "broken: growth.txt has 6 bytes instead of " + str(len(growth(6)))
    assert told["judged[moss]"] == "reused"

    shutil.rmtree(store.path_of(grown.step("page").key))
    assert reasons(plan_of())["page"] == "gone: it is not in the store any more"


def test_what_is_deleted_by_hand_is_made_again_only_where_a_step_that_runs_takes_it(
    grown: Plan, plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    """As after `draftsmith gc`: files of gigabytes are deleted by people, too."""
    key, fern = grown.step("corpus").key, grown.step("draft[fern]").key
    shutil.rmtree(store.path_of(key))
    told = reasons(plan_of())
    assert told.pop("corpus") == "reused: only its record is left, and nothing that runs needs more"
    assert set(told.values()) == {"reused"}
    made = engine_of(plan_of()).run()
    assert made["corpus"].key == key and made["corpus"].info and not store.path_of(key).exists()

    shutil.rmtree(store.path_of(fern))
    told = reasons(plan_of(force=("judged[fern]",)))
    assert [name for name in told if told[name].startswith("gone: ")] == ["corpus", "draft[fern]"]
    shutil.rmtree(store.path_of(grown.step("page").key))
    told = reasons(plan_of())
    assert [name for name in told if told[name] != "reused"] == ["corpus", "draft[fern]", "page"]
    assert told["corpus"] == told["draft[fern]"] == "reused: only its record is left, and nothing that runs needs more"
    engine_of(plan_of(force=("judged[fern]",))).run()
    assert set(reasons(plan_of()).values()) == {"reused"}


def test_a_damaged_record_is_no_record_under_its_second_name_either(
    grown: Plan, plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    key = grown.step("corpus").key
    with (store.path_of(key) / "artifact.json").open("r+b") as file:
        file.write(b"torn")
    with store.lock(key):
        store.quarantine(key)
    assert not store.is_collected(key)
    assert reasons(plan_of())["corpus"] == "gone: it is not in the store any more"
    engine_of(plan_of()).run()
    assert set(reasons(plan_of()).values()) == {"reused"}


def growth(steps: int) -> str:
    return "".join(f"{step} {step} 5\n" for step in range(steps))


def test_code_changes_are_named(grown: Plan, plan_of: Callable[..., Plan], store: Store) -> None:
    from flows.planning.plan import StepHistory

    history = StepHistory(store.home, "garden")
    parts = history.last("draft[fern]")
    assert parts is not None
    parts["code"]["toybox/toys/fern.py: Fern.at"] = "0"
    parts["code"]["toybox/toys/old.py: gone"] = "0"
    del parts["code"]["toybox/toys/light.py: shine"]
    history.remember("draft[fern]", parts)
    step = plan_of().step("draft[fern]")
    assert step.reused  # the key is in the store: what was last is only an explanation
    for place in (store.path_of(step.key), store.home / "records" / step.key):
        shutil.rmtree(place)
    assert set(plan_of().step("draft[fern]").reason.split("; ")) == {
        "code changed: toybox/toys/fern.py: Fern.at",
        "code removed: toybox/toys/old.py: gone",
        "code new: toybox/toys/light.py: shine",
    }


def test_to_runs_only_what_a_step_needs(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(to_step="judged[fern]")
    assert [step.name for step in plan.steps] == ["corpus", "draft[fern]", "judged[fern]"]
    assert dict(plan.skipped)["page"] == "--to judged[fern]"


def test_from_wants_what_stands_before_it_made(plan_of: Callable[..., Plan], engine_of: Callable[..., Engine]) -> None:
    with pytest.raises(
        UserError, match=r"^--from judged: step 'corpus' before it would have to run \(new: never run\)"
    ):
        plan_of(from_step="judged")
    engine_of(plan_of(to_step="draft")).run()
    plan = plan_of(from_step="judged")
    assert [step.name for step in plan.steps if not step.reused] == ["judged[fern]", "judged[moss]", "page"]
    assert "timed[fern]" in dict(plan.skipped)


def test_a_store_key_can_be_an_input_and_must_fit(grown: Plan, plan_of: Callable[..., Plan]) -> None:
    def grown_from(key: str) -> Pipeline:
        return pipeline("p", d=step("toys.grow", {"corpus": f"store:{key}"}))

    plan = plan_of(grown_from(grown.step("corpus").key[:20]))
    assert plan.steps[0].parts["inputs"] == {"corpus": grown.step("corpus").key}
    with pytest.raises(
        UserError, match=r"pipelines.yaml:4: step 'd': 'corpus' wants Corpus, but 'store:.*' makes Page"
    ):
        plan_of(grown_from(grown.step("page").key))
    with pytest.raises(UserError, match=r"no artifact in .* has a key that starts with 'feed'"):
        plan_of(grown_from("feed"))


def test_the_drawing_has_every_step_and_edge(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    drawing = plan.mermaid()
    assert drawing.startswith("flowchart LR")
    assert drawing.count(" --> ") == sum(len(step.input_names()) for step in plan.steps)
    assert all(f'"{step.name}<br/>' in drawing for step in plan.steps)
