"""The recipes are right as they stand, and every target that they offer has a configuration to rehearse with.

Their costs in docs/recipes.md are the planner's. It takes many seconds to count a training step of EAGLE-3 or DSpark,
so those rows are tried with the system tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_garden import Cli

from benchmarks.recipe_costs import BEGIN, CASES, END, HEAD, PAGE, cells
from benchmarks.tables import markdown
from components.targets.config import read_config
from components.targets.shape import shape_of
from components.targets.stand_in import shrink
from flows.planning.rehearsal import StandIns
from flows.spec.schema import load_spec

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SPEC = load_spec(RECIPES / "pipelines.yaml")
MODELS = [
    choice
    for made in SPEC.pipelines.values()
    for name, param in made.params.items()
    if name == "model"
    for choice in param.choices
]


def test_every_recipe_is_right(draftsmith: Cli, home: Path) -> None:
    code, out, err = draftsmith("check", "--file", RECIPES / "pipelines.yaml")
    assert code == 0, out + err
    assert all(name in out for name in SPEC.pipelines)


@pytest.mark.parametrize("model", MODELS)
def test_a_configuration_stands_for_every_target_and_can_be_made_small(model: str) -> None:
    folder = Path(StandIns(lambda engine: engine, None, RECIPES / "configs").model(model))
    assert folder.is_dir(), f"{model} has no configuration"
    full = read_config(folder, location=model, trust_remote_code=False)
    before, after = shape_of(full, model), shape_of(shrink(full, model), model)
    assert (after.vocab_size, after.num_layers, after.max_position_embeddings) == (
        before.vocab_size,
        before.num_layers,
        before.max_position_embeddings,
    )
    assert after.hidden_size < before.hidden_size
    assert StandIns(lambda engine: engine).model(model) == model, "with --online the hub itself is read"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.system] * (case[0] != "native-mtp")) for case in CASES], ids=" ".join
)
def test_the_documentation_has_the_costs_that_the_planner_says(case: tuple[str, str]) -> None:
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip().splitlines()
    assert len(table) == 2 + len(CASES)
    expected = [*table[:2], table[2 + CASES.index(case)]]
    assert markdown(HEAD, [cells(*case)]).splitlines() == expected, "run python -m benchmarks.recipe_costs"


@pytest.mark.system
@pytest.mark.usefixtures("fresh_fork_server")
def test_a_recipe_is_rehearsed_whole_from_configurations_alone(draftsmith: Cli, home: Path) -> None:
    code, out, err = draftsmith("rehearse", "gpu-drafters", "--file", RECIPES / "pipelines.yaml")
    assert code == 0, out + err
    assert "gpu-drafters: 19 of 19 steps passed" in out and "release.reopened" in out
    assert {path.name for path in home.iterdir()} <= {"digests.json", "logs", "rehearsals"}
    assert not list((home / "rehearsals").iterdir()), "nothing that was made is kept"
