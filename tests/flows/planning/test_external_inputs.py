"""A registered version as an input: the release behind an alias, or what it was made from; a moved alias makes anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_builder import pipeline, step

from components.contract import UserError
from flows.execution.engine import Engine
from flows.planning.external_inputs import Sources, kind_of_source
from flows.planning.plan import Plan
from flows.spec.references import OFFERED, reference_error
from storage.artifacts.store import Store
from storage.registry.tracking import KEY_TAG, open_client

NAME = "builtin"
PIPELINE = pipeline(
    "p",
    {"who": {"type": "str", "default": "champion"}},
    corpus=step("toys.plant"),
    judged=step("toys.judge", "corpus", {"draft": f"registry:{NAME}@${{params.who}}"}),
)


def put(store: Store, key: str, kind: str, inputs: dict[str, object], info: dict[str, object] | None = None) -> str:
    out, _ = store.open_staging(key)
    (out / "growth.txt").write_text("1\n" * len(key))
    store.commit(key, kind, info or {}, {"inputs": inputs, "pipeline": "garden", "step": kind.lower()})
    return key


@pytest.fixture
def released(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Two versions of a model, each with its lineage; the first is champion."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = open_client(store.home)
    client.create_registered_model(NAME)
    target = put(store, "target", "Target", {})
    for number in (1, 2):
        prompts = put(store, f"prompts{number}", "Prompts", {})
        answers = put(store, f"answers{number}", "Conversations", {"target": target, "prompts": prompts})
        features = put(store, f"features{number}", "Features", {"target": target, "answers": answers})
        draft = put(store, f"draft{number}", "Draft", {"features": features}, {"method": "fern"})
        policy = put(store, f"policy{number}", "DepthPolicy", {})
        others = {"target": target, "drafts": [draft, "draft0"], "policy": policy, "acceptance": [], "end_to_end": "e"}
        key = put(store, f"release{number}", "Release", others, {"draft_key": draft, "target_key": target})
        client.create_model_version(NAME, "nowhere", tags={KEY_TAG: key})
    client.create_model_version(NAME, "nowhere")
    client.set_registered_model_alias(NAME, "champion", "1")
    return store


def test_a_registered_version_is_an_input_of_any_step(
    released: Store, plan_of: Callable[..., Plan], engine_of: Callable[..., Engine]
) -> None:
    sources = Sources(released)
    for kind in OFFERED:
        assert sources.kind_of(f"registry:{NAME}@champion ({kind})") == kind
    assert [artifact.key for artifact in sources.artifacts.values()] == [
        "release1",
        "draft1",
        "target",
        "policy1",
        "features1",
        "answers1",
        "prompts1",
    ]
    plan = plan_of(PIPELINE)
    assert plan.step("judged").inputs["draft"] == f"registry:{NAME}@champion (Draft)"
    assert plan.step("judged").parts["inputs"]["draft"] == "draft1"
    assert plan.step("judged").key == plan_of(PIPELINE, {"who": "1"}).step("judged").key, (
        "it is the content that counts"
    )
    engine_of(plan).run()
    assert plan_of(PIPELINE).num_reused == 2
    open_client(released.home).set_registered_model_alias(NAME, "champion", "2")
    moved = plan_of(PIPELINE)
    assert [(step.name, step.reason) for step in moved.steps if not step.reused] == [("judged", "input draft changed")]
    assert engine_of(moved).run()["judged"].info["lines"] == len("draft2")

    for who, says in [
        ("nosuch", r"no version has the alias 'nosuch' \(champion: 2\)"),
        ("9", "there is no version 9"),
        ("3", "version 3 has no tag draftsmith.key: it was not registered by Draftsmith"),
        ("a b", "write registry:NAME@champion"),
    ]:
        with pytest.raises(UserError, match=rf"^pipelines.yaml:7: step 'judged': .*{says}"):
            plan_of(PIPELINE, {"who": who})
    with pytest.raises(UserError, match=r"no registered model 'other' \(known: builtin\)"):
        plan_of(PIPELINE.with_inputs("judged", draft="registry:other@champion"))
    shutil.rmtree(released.path_of("draft2"))
    with pytest.raises(
        UserError, match=r"its Draft draft2 is not in the store any more; `draftsmith run garden` makes"
    ):
        plan_of(PIPELINE)


def test_without_a_registry_there_is_no_champion_and_none_is_made(plan_of: Callable[..., Plan], home: Path) -> None:
    with pytest.raises(UserError, match=r"there is no registered model 'builtin' \(known: none yet\)"):
        plan_of(PIPELINE)
    assert not (home / "mlflow").exists()


def test_check_asks_no_service(store: Store) -> None:
    assert kind_of_source("registry:still-to-come@champion (Draft)", store) == "Draft"
    for wrong in (
        "registry:x",
        "registry:x@",
        "registry:@champion",
        "registry:a/b@c",
        "registry:x@c (Draft)",
        "registry:",
    ):
        assert reference_error(wrong), wrong
