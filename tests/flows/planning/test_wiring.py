"""Steps fan out along matrices, zip where they share an axis, gather in lists, and vanish with what they need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pipeline_builder import only
from toy_garden import GARDEN

from components.contract import UserError
from flows.planning.plan import Plan


def names(plan: Plan) -> list[str]:
    return [step.name for step in plan.steps]


def test_a_single_kind_fans_out_and_a_list_gathers(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    assert names(plan) == [
        "corpus", "draft[fern]", "draft[moss]", "judged[fern]", "judged[moss]", "timed[fern]", "timed[moss]", "page",
    ]  # fmt: skip
    assert plan.step("judged[moss]").inputs == {"draft": "draft[moss]", "corpus": "corpus"}
    assert plan.step("page").inputs == {"judged": ["judged[fern]", "judged[moss]"]}


def test_two_axes_name_both_and_keep_types(plan_of: Callable[..., Plan]) -> None:
    axes = {"matrix": {"method": ["fern", "moss"], "pause": [0.5, 2]}}
    plan = plan_of(GARDEN.with_step_keys("draft", axes).with_setting("draft", pause_s="${matrix.pause}"))
    assert names(plan)[1:5] == ["draft[fern,0.5]", "draft[fern,2]", "draft[moss,0.5]", "draft[moss,2]"]
    assert plan.step("draft[moss,2]").settings == {"method": "moss", "num_steps": 6, "pause_s": 2.0}
    assert plan.step("page").inputs == {"judged": [f"judged[{m},{p}]" for m in ("fern", "moss") for p in ("0.5", "2")]}


def test_inputs_that_share_an_axis_are_zipped_others_are_crossed(plan_of: Callable[..., Plan]) -> None:
    sown = GARDEN.with_step_keys("corpus", {"matrix": {"n": [3, 4]}}).with_setting("corpus", num_rows="${matrix.n}")
    plan = plan_of(sown)
    drafts = [name for name in names(plan) if name.startswith("draft")]
    assert drafts == ["draft[3,fern]", "draft[3,moss]", "draft[4,fern]", "draft[4,moss]"]
    judged = [step for step in plan.steps if step.name.startswith("judged")]
    assert [step.name for step in judged] == [name.replace("draft", "judged") for name in drafts]
    for step in judged:
        assert step.inputs["corpus"] == f"corpus[{step.name[7]}]"
        assert step.inputs["draft"] == step.name.replace("judged", "draft")


def test_one_combination_can_be_named(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(GARDEN.with_inputs("timed", draft="draft[moss]"))
    assert plan.step("timed").inputs == {"draft": "draft[moss]"}


def test_an_unknown_combination_is_refused(plan_of: Callable[..., Plan]) -> None:
    with pytest.raises(
        UserError, match=r"yaml:16: step 'timed': unknown step 'draft\[mos\]' \(did you mean 'draft\[moss\]'"
    ):
        plan_of(GARDEN.with_inputs("timed", draft="draft[mos]"))


@pytest.mark.parametrize(
    ("condition", "left_out"),
    [("params.sunny", False), ("not params.sunny", True), ("machine.cuda", True), ("not machine.cuda", False)],
)
def test_if_leaves_out_a_step_and_what_needs_it(plan_of: Callable[..., Plan], condition: str, left_out: bool) -> None:
    plan = plan_of(GARDEN.with_step_keys("judged", {"if": condition}))
    assert ("page" not in names(plan)) == left_out
    why = {"judged": f"if: {condition}", "page": "it needs 'judged', which is left out"}
    assert dict(plan.skipped) == (why if left_out else {})


def test_a_pipeline_of_which_nothing_is_left_says_what_left_it_out(plan_of: Callable[..., Plan]) -> None:
    with pytest.raises(UserError, match=r"^nothing to run: every step is left out, only \(if: machine.cuda\)$"):
        plan_of(only("toys.plant", keys={"if": "machine.cuda"}))


def test_an_insert_keeps_its_type_and_text_around_it_makes_text(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(GARDEN.with_setting("page", title="after ${params.steps} steps, ${params.sunny}"), {"steps": 9})
    assert plan.step("page").settings == {"title": "after 9 steps, true"}
    assert plan.step("draft[fern]").settings["num_steps"] == 9


def test_plan_reads_the_real_pipelines_without_torch() -> None:
    import subprocess
    import sys

    from toy_garden import ROOT

    program = (
        "import sys; from flows.cli import main; code = main(['check'])\n"
        "heavy = ('torch', 'transformers', 'prefect', 'mlflow', 'duckdb', 'numpy')\n"
        "print(code, [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
