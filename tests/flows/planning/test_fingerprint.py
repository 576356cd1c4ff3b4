"""A key changes with everything that can change the result, and with nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_builder import only
from toy_garden import GARDEN

from flows.planning.plan import Plan, RunOptions, make_plan
from flows.spec.schema import load_spec
from storage.artifacts.store import Store


def keys(plan: Plan) -> dict[str, str]:
    return {step.name: step.key for step in plan.steps}


def test_the_machine_enters_only_where_it_is_measured(
    plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from components.machine import describe_machine

    other = replace(describe_machine("cpu"), machine_id="elsewhere")
    before = keys(plan_of())
    monkeypatch.setattr("flows.planning.plan.describe_machine", lambda device: other)
    after = keys(plan_of())
    assert {name for name in before if before[name] != after[name]} == {"timed[fern]", "timed[moss]"}


def test_the_seed_enters_every_key(plan_of: Callable[..., Plan]) -> None:
    before = keys(plan_of())
    after = keys(plan_of(seed=1))
    assert all(before[name] != after[name] for name in before)


def shuffled(value: object, rng: random.Random) -> object:
    if isinstance(value, dict):
        items = [(key, shuffled(item, rng)) for key, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    flow=st.sampled_from([True, False, None]),
    indent=st.integers(2, 7),
    comment=st.booleans(),
)
def test_a_key_does_not_depend_on_how_the_yaml_is_written(
    tmp_path_factory: pytest.TempPathFactory, seed: int, flow: bool | None, indent: int, comment: bool
) -> None:
    folder = tmp_path_factory.mktemp("yaml")
    store = Store(folder / "home")

    def planned(text: str) -> dict[str, str]:
        (folder / "pipelines.yaml").write_text(text)
        packages = ("components", "toybox")
        return keys(
            make_plan(
                load_spec(folder / "pipelines.yaml"), "garden", {}, RunOptions(device="cpu", packages=packages), store
            )
        )

    content = shuffled(yaml.safe_load(GARDEN.text), random.Random(seed))
    text = yaml.safe_dump(content, default_flow_style=flow, indent=indent, sort_keys=False)
    assert planned(("# words\n" if comment else "") + text) == planned(GARDEN.text)


SETTINGS = st.fixed_dictionaries(
    {
        "num_rows": st.integers(1, 1000),
        "fast": st.booleans(),
        "share": st.floats(0, 1, allow_nan=False),
        "source": st.sampled_from(["seed", "cutting"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(one=SETTINGS, two=SETTINGS)
def test_equal_settings_equal_key_different_settings_different_key(
    tmp_path_factory: pytest.TempPathFactory, one: dict[str, object], two: dict[str, object]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    file = folder / "settings.yaml"

    def key(given_settings: dict[str, object]) -> str:
        file.write_text(only("toys.plant", **given_settings).text)
        spec, store = load_spec(file), Store(folder / "no-home")
        return make_plan(spec, "p", {}, RunOptions(device="cpu", packages=("components", "toybox")), store).steps[0].key

    assert (key(one) == key(two)) == (one == two)
