"""The released model as MLflow loads it: code, no pickle, and the same text as plain decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.contract import Target
from components.decoding.chain import decode
from components.targets.model import AbstractTarget

MODEL = Path(__file__).parents[3] / "components" / "publish" / "mlflow_model.py"
PROMPTS = ["w10 w20 w30", "w5 w6 w7 w8 w9"]


@pytest.fixture
def place(export: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The release as MLflow saves it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    import mlflow

    from components.publish.mlflow_model import SETTINGS

    mlflow.pyfunc.save_model(
        path=tmp_path / "model",
        python_model=str(MODEL),
        artifacts={"release": str(export().path)},
        model_config=SETTINGS,
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


def test_settings_are_given_when_loading(place: Path, opened: AbstractTarget, target: Target) -> None:
    drafted = load(place, max_new_tokens=5).predict(PROMPTS)
    assert [a["num_tokens"] for a in drafted] == [5, 5]
    elsewhere = json.loads((target.path / "target.json").read_text())["folder"]
    plain = load(place, max_new_tokens=5, depth=0, target=elsewhere).predict(PROMPTS)
    assert [a["text"] for a in plain] == [a["text"] for a in drafted]
    assert [a["num_rounds"] for a in plain] == [4, 4]


def test_the_registry_logs_the_settings_that_the_model_reads() -> None:
    """MLflow drops settings that were not logged, without a word worth reading."""
    from components.publish.mlflow_model import SETTINGS
    from storage import registry

    assert registry._SERVING == SETTINGS
