"""The released model as MLflow loads it: code, no pickle, and the same text as plain decoding."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.contract import Draft, Target, UserError
from components.decoding.chain import decode
from components.machine import describe_machine
from components.targets.interface import AbstractTarget
from storage.registry.log_version import copy_of_components
from storage.registry.versions import MODEL_CODE, ROOT

PROMPTS = ["w10 w20 w30", "w5 w6 w7 w8 w9"]


@pytest.fixture
def place(export: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The release as MLflow saves it; loading it puts its code first on sys.path, for this test alone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    import mlflow

    from components.publish.release.mlflow_model import SETTINGS

    mlflow.pyfunc.save_model(
        path=tmp_path / "model",
        python_model=str(MODEL_CODE),
        artifacts={"release": str(export().path)},
        model_config=SETTINGS,
        code_paths=[str(copy_of_components(tmp_path / "copy", with_builtin=False))],
        pip_requirements=["torch"],
    )
    return tmp_path / "model"


def load(place: Path, **settings: Any) -> Any:
    import mlflow

    return mlflow.pyfunc.load_model(str(place), model_config=settings)


def test_served_text_equals_plain_decoding(place: Path, opened: AbstractTarget) -> None:
    import pandas

    assert not list(place.rglob("*.pkl")), "nothing is pickled"
    served = load(place)
    answers = served.predict(PROMPTS)
    assert answers == served.predict(pandas.DataFrame({"prompt": PROMPTS}))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = [int(word[1:]) for word in prompt.split()]
        plain = decode(opened, None, ids, max_new_tokens=128)
        assert answer["text"] == " ".join(f"w{token}" for token in plain.tokens if token > 2)
        assert answer["num_tokens"] == len(plain.tokens)
        assert answer["num_rounds"] + answer["num_accepted"] >= len(plain.tokens) - 1


# Without this repository: neither the path nor the import hook by which it is installed.
ELSEWHERE = """
import json, sys
from pathlib import Path
root = Path(sys.argv[2])
sys.path = [place for place in sys.path if place and Path(place).resolve() != root]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import mlflow
served = mlflow.pyfunc.load_model(sys.argv[1], model_config={"max_new_tokens": 9})
answers = served.predict(json.loads(sys.argv[3]))
import components
assert not Path(components.__path__[0]).is_relative_to(root) and "storage" not in sys.modules
print(json.dumps([answer["text"] for answer in answers]))
"""


def test_a_clean_process_elsewhere_answers_with_the_code_that_the_model_brings(place: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ELSEWHERE, str(place), str(ROOT), json.dumps(PROMPTS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = load(place, max_new_tokens=9).predict(PROMPTS)
    assert json.loads(done.stdout.splitlines()[-1]) == [answer["text"] for answer in expected]


COLUMNS = "mixed[32x32:tc,32x48:cp,64x32:cc,96x32:cp]"
"""Kernels that no timing picks on its own: 2 rows at most, and then the last."""


def test_where_it_was_measured_it_runs_on_those_threads_and_kernels(
    export: Callable[..., Any], evidence: dict[str, Any], drafts: dict[str, Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.pyfunc import PythonModelContext

    from components.publish.release.mlflow_model import DraftedTarget

    before, here = torch.get_num_threads(), describe_machine().machine_id
    facts = {"machine_id": here, "dtype": "bfloat16", "num_threads": before + 1, "kernel": COLUMNS}
    kernels = {draft.key: "columns" for draft in drafts.values()}
    compared = dataclasses.replace(evidence["end_to_end"], info={**facts, "draft_kernels": kernels})
    monkeypatch.setitem(evidence, "end_to_end", compared)
    served, context = DraftedTarget(), PythonModelContext({"release": str(export().path)}, None)
    try:
        served.load_context(context)
        answering = served.answering
        opened = (answering.target.kernel, answering.draft.kernel, answering.target.dtype)
        assert opened == (COLUMNS, "columns", torch.bfloat16)
        assert torch.get_num_threads() == before + 1
        assert served.predict(context, PROMPTS)
        torch.set_num_threads(before)
        monkeypatch.setattr("components.machine.num_usable_cores", lambda: 99)
        served.load_context(context)
        assert served.answering.target.kernel != COLUMNS and torch.get_num_threads() == before, "another machine"
    finally:
        torch.set_num_threads(before)


def test_settings_are_given_when_loading(place: Path, opened: AbstractTarget, target: Target) -> None:
    drafted = load(place, max_new_tokens=5).predict(PROMPTS)
    assert [a["num_tokens"] for a in drafted] == [5, 5]
    elsewhere = json.loads((target.path / "target.json").read_text())["folder"]
    plain = load(place, max_new_tokens=5, depth=0, target=elsewhere).predict(PROMPTS)
    assert [a["text"] for a in plain] == [a["text"] for a in drafted]
    assert [a["num_rounds"] for a in plain] == [4, 4]


def test_a_prompt_is_a_turn_of_the_targets_chat_where_that_is_asked(
    place: Path, target: Target, tmp_path: Path
) -> None:
    """The tokenizer of words has no word for a chat, which only rendering one finds out."""
    folder = tmp_path / "templated"
    shutil.copytree(json.loads((target.path / "target.json").read_text())["folder"], folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}w40 {{ m.content }} w41{% endfor %}")
    served = load(place, max_new_tokens=5, target=str(folder), prompt_format="text")
    assert served.predict(PROMPTS) == load(place, max_new_tokens=5).predict(PROMPTS)
    chatting = load(place, max_new_tokens=5, target=str(folder), prompt_format="chat")
    with pytest.raises(UserError, match="what the chat template writes"):
        chatting.predict(PROMPTS)
