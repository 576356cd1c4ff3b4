"""Every method is told what it knows and nothing else, and that is found out before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafts import new_context

from components.contract import Draft, Target, UserError
from components.drafts import train_draft
from components.drafts.settings import settings_class
from components.drafts.storage.files import open_draft
from components.methods import METHODS
from components.targets.interface import AbstractTarget
from flows.planning.step_signature import resolve

Folder = Callable[[str], Path]


def faults(**given: Any) -> list[str]:
    return [what for _, what in resolve("drafts.train_draft").settings(given)[1]]


def test_a_setting_that_a_method_does_not_know_is_refused_at_check_time() -> None:
    (said,) = faults(method="eagle3", settings={"eagle3": {"ttt_step": 3}})
    assert said.startswith("method eagle3 knows no setting 'ttt_step' (did you mean 'ttt_steps'?); it knows ")
    (said,) = faults(method="eagle3", settings={"mtp": {"ttt_steps": 3}})
    assert said.startswith("method mtp knows no setting 'ttt_steps'")
    (said,) = faults(method="eagle3", settings={"eagel3": {}})
    assert said == "unknown drafting method 'eagel3' (did you mean 'eagle3'?)"
    (said,) = faults(method="mtp", settings={"mtp": {"mtp_modules": "2"}})
    assert said == "setting 'mtp_modules' of method mtp: must be a valid integer, not '2'"
    (said,) = faults(method="ngram", settings={"ngram": {"max_ngram": 1, "min_ngram": 2}})
    assert said == "settings of method ngram: min_ngram 2 is larger than max_ngram 1"


def test_only_the_settings_of_the_method_itself_enter_the_key_with_defaults_filled_in() -> None:
    step = resolve("drafts.train_draft")
    plain, _ = step.settings({"method": "mtp"})
    others, _ = step.settings({"method": "mtp", "settings": {"eagle3": {"ttt_steps": 2}, "ngram": {"max_ngram": 5}}})
    own, _ = step.settings({"method": "mtp", "settings": {"mtp": {"mtp_modules": 2}}})
    assert plain == others != own
    assert plain["settings"] == {"mtp": settings_class("mtp")().model_dump(mode="json")}


@pytest.mark.parametrize("method", [name for name in METHODS if not settings_class(name)().trained])
def test_an_untrained_method_makes_a_draft_of_its_settings_alone_in_no_time(
    method: str, tmp_path: Path, tiny_folder: Folder, tiny_target: Callable[[str], AbstractTarget]
) -> None:
    tiny_target("llama")
    ctx = new_context(tmp_path)
    made = train_draft(Target(key="t", path=tiny_folder("llama")), method=method, ctx=ctx)  # type: ignore[arg-type]
    assert [file.name for file in ctx.out.iterdir()] == ["draft.json"]
    record = json.loads((ctx.out / "draft.json").read_text())
    assert record["settings"] == settings_class(method)().model_dump(mode="json")
    assert (record["trained"], record["num_parameters"], made.info["method"]) == (False, 0, method)
    opened = open_draft(made, tiny_target("llama"))
    assert (opened.method, opened.num_steps, opened.max_depth) == (method, record["num_steps"], record["max_depth"])


def test_settings_of_an_untrained_method_reach_the_proposer(
    tmp_path: Path, tiny_folder: Folder, tiny_target: Callable[[str], AbstractTarget]
) -> None:
    ctx = new_context(tmp_path)
    target = Target(key="t", path=tiny_folder("llama"))
    made = train_draft(target, method="ngram", settings={"ngram": {"max_ngram": 2, "min_ngram": 2}}, ctx=ctx)
    ids = torch.tensor([9, 5, 6, 7, 6, 5, 6])
    guessed = (
        open_draft(made, tiny_target("llama")).propose_at_every_position(ids, torch.empty(0), torch.empty(0), 2).tokens
    )
    assert guessed.tolist() == [[-1, -1]] * 5 + [[7, 6]]


def test_wrong_wiring_is_refused_in_one_line(tmp_path: Path, tiny_folder: Folder) -> None:
    target, ctx = Target(key="t", path=tiny_folder("llama")), new_context(tmp_path)
    with pytest.raises(UserError, match=r"method mtp is trained: wire data\.record_features into `features`"):
        train_draft(target, method="mtp", ctx=ctx)
    with pytest.raises(UserError, match="method ngram learns nothing that start_from could go on from"):
        train_draft(target, None, Draft(key="d", path=tmp_path), method="ngram", ctx=ctx)
    with pytest.raises(UserError, match=r"train_draft: settings.mtp.depth: method mtp knows no setting 'depth'"):
        train_draft(target, method="ngram", settings={"mtp": {"depth": 3}}, ctx=ctx)
