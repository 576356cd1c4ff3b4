"""`runs_on:` says where, never what: wrong places cost one line, keys stay as they are, a wide step knows itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_builder import only

from components.contract import UserError
from flows.execution.engine import Engine
from flows.orchestration import flow
from flows.planning.plan import Plan
from flows.planning.step_signature import resolve
from flows.spec.placement import HERE, RunsOn, is_wide, parse_pipeline_placement, parse_step_placement
from storage.artifacts.store import Store

WIDE = "pipelines:\n  p:\n    steps:\n      only:\n        uses: toys.weed\n"
ONE = "pipelines:\n  p:\n    steps:\n      only:\n        uses: toys.plant\n"
MEASURES = (
    "pipelines:\n  p:\n    steps:\n      corpus: {uses: toys.plant}\n"
    "      draft: {uses: toys.grow, in: {corpus: corpus}}\n      only:\n"
    "        uses: toys.measure\n        in: {draft: draft}\n"
)


def test_what_can_be_said() -> None:
    assert parse_pipeline_placement(None) == parse_step_placement(None) == HERE
    assert parse_pipeline_placement("gpu pool") == RunsOn(pool="gpu pool")
    assert parse_pipeline_placement({"gpus": 2}) == RunsOn(gpus=2)
    assert str(parse_pipeline_placement({"pool": "h100", "gpus": 1})) == "pool h100, 1 GPU"
    assert parse_step_placement({"cluster": "dask"}) == RunsOn(cluster="dask", workers=2)
    assert parse_step_placement({"cluster": "ray", "workers": 3}) == RunsOn(cluster="ray", workers=3)
    assert parse_step_placement({"cluster": "ray", "gpus_per_shard": 0.5}).gpus_per_shard == 0.5
    assert parse_step_placement({"cluster": "dask", "address": "tcp://10.0.0.1:8786"}).workers is None
    assert parse_step_placement({"cluster": "ray", "address": "ray://head:10001"}).address == "ray://head:10001"


@pytest.mark.parametrize(
    ("said", "line", "answer"),
    [
        ("gpu", 6, "a work pool takes whole pipelines: give it to the pipeline, or {cluster: dask} to this step"),
        ("[dask]", 6, "'runs_on' must be like {cluster: dask, workers: 2}, not ['dask']"),
        ("{workers: 2}", 6, "runs_on: 'cluster' must be dask or ray (it is missing)"),
        ("\n          cluster: dsak", 7, "runs_on: 'cluster' must be dask or ray, not 'dsak'"),
        ("\n          cluster: dask\n          wrokers: 2", 8, "unknown key 'wrokers' (did you mean 'workers'?)"),
        ("{cluster: ray, workers: 0}", 6, "runs_on: 'workers' must be 1 to 256, not 0"),
        ("{cluster: ray, workers: true}", 6, "runs_on: 'workers' must be 1 to 256, not true"),
        ("{cluster: ray, workers: 2, address: ray://h:1}", 6, "has its own workers: leave 'workers' out"),
        ("{cluster: dask, gpus_per_shard: 1}", 6, "only Ray sets GPUs aside for a shard: take cluster: ray"),
        ("{cluster: ray, gpus_per_shard: 1.5}", 6, "must be a whole number or below 1, like 0.5, not 1.5"),
        ("{cluster: ray, gpus_per_shard: true}", 6, "must be a whole number or below 1, like 0.5, not true"),
        ("{cluster: dask, address: localhost}", 6, "'address' must be like tcp://HOST:8786, not 'localhost'"),
        ("{cluster: ray, address: 'tcp://h:1'}", 6, "'address' must be like ray://HOST:10001, not 'tcp://h:1'"),
    ],
)
def test_a_wrong_place_costs_one_line(
    said: str, line: int, answer: str, pipelines: Callable[[str], Path], draftsmith: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = draftsmith("check", "-f", pipelines(f"{WIDE}        runs_on: {said}\n"))
    assert code == 2
    (told,) = err.splitlines()
    assert f"pipelines.yaml:{line}: step 'only': " in told and answer in told


@pytest.mark.parametrize(
    ("text", "line", "answer"),
    [
        (ONE, 6, "it is one piece of work, nothing to spread over dask: leave 'runs_on' out"),
        (MEASURES, 9, "it measures this machine; on dask it would measure another: leave 'runs_on' out"),
    ],
    ids=["not wide", "measures"],
)
def test_a_cluster_is_for_wide_steps_only(
    text: str, line: int, answer: str, pipelines: Callable[[str], Path], draftsmith: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = draftsmith("check", "-f", pipelines(f"{text}        runs_on: {{cluster: dask}}\n"))
    assert (code, err.splitlines()) == (2, [f"pipelines.yaml:{line}: step 'only': {answer} (docs: scale)"])


def test_a_pipeline_names_a_pool(
    pipelines: Callable[[str], Path], draftsmith: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = draftsmith("check", "-f", pipelines(only("toys.weed").with_keys(runs_on={"cluster": "dask"}).text))
    assert code == 2
    told = "pipelines.yaml:3: 'runs_on' of a pipeline names a work pool; a cluster goes to a wide step"
    assert err.strip() == f"{told} (docs: scale)"
    assert draftsmith("check", "-f", pipelines(only("toys.weed").with_keys(runs_on="gpu-box").text))[0] == 0


@pytest.mark.parametrize(
    ("said", "line", "answer"),
    [
        ({"gpu": 1}, 4, "runs_on: unknown key 'gpu' (did you mean 'gpus'?)"),
        ({"gpus": True}, 4, "runs_on: 'gpus' must be 0 to 64, all of one node, not true"),
        ({"gpus": 65}, 4, "runs_on: 'gpus' must be 0 to 64, all of one node, not 65"),
        ({"pool": 3}, 4, "runs_on: 'pool' must be the name of a work pool, not 3"),
        ({}, 3, "'runs_on' must be the name of a work pool, or like {gpus: 1}, not {}"),
    ],
)
def test_wrong_gpus_cost_one_line(
    said: dict[str, object],
    line: int,
    answer: str,
    pipelines: Callable[[str], Path],
    draftsmith: Callable[..., tuple[int, str, str]],
) -> None:
    code, _, err = draftsmith("check", "-f", pipelines(only("toys.weed").with_keys(runs_on=said).text))
    assert code == 2
    (told,) = err.splitlines()
    assert answer in told, told


def test_the_place_is_not_in_the_key_but_in_the_plan(
    plan_of: Callable[..., Plan], pipelines: Callable[[str], Path], draftsmith: Callable[..., tuple[int, str, str]]
) -> None:
    here = plan_of(WIDE)
    there = f"{WIDE}        runs_on: {{cluster: ray, workers: 3}}\n"
    assert plan_of(there).step("only").key == here.step("only").key
    assert plan_of(there).step("only").runs_on == RunsOn(cluster="ray", workers=3)
    code, out, _ = draftsmith("plan", "p", "-f", pipelines(there))
    assert code == 0 and "ray, 3 workers here" in out


def test_without_prefect_the_same_command_works_here_and_says_so(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], store: Store
) -> None:
    notes: list[str] = []
    plan = plan_of(f"{WIDE}        runs_on: {{cluster: dask}}\n")
    made = engine_of(plan, on_event=lambda step, event: notes.append(str(event.get("message")))).run()
    assert "without Prefect here, not on dask" in notes
    assert (made["only"].path / "bed-2.txt").read_text() == "2 of 3\n"
    assert store.record_of(plan.step("only").key)["record"]["runs_on"] == "here"


def test_a_cluster_that_is_not_installed_is_told_before_anything_runs(
    plan_of: Callable[..., Plan], engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(flow.PACKAGE_OF, "dask", "a_package_that_nobody_has")
    engine = engine_of(plan_of(f"{WIDE}        runs_on: {{cluster: dask}}\n"))
    with pytest.raises(UserError, match=r"yaml:4: step 'only' runs on dask, not installed: pip install 'draftsmith\["):
        flow.connect_clusters(engine)


@pytest.mark.parametrize("address", ["data.write_answers", "data.record_features", "bench.measure_acceptance"])
def test_these_steps_are_wide(address: str) -> None:
    assert is_wide(resolve(address).function)
