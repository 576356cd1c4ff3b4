"""The released drafter as an MLflow model: prompts in, texts out, drafted at the chosen depth.

MLflow stores this file itself ("models from code") and runs it when the model is loaded, so nothing is pickled. The
model needs one artifact, `release`: a directory made by publish.export_release, whose `draftsmith/target.json` says
where the target is.

    mlflow.pyfunc.load_model("models:/NAME@champion").predict(["def add(a, b):"])
    mlflow.pyfunc.load_model("models:/NAME@champion", model_config={"max_new_tokens": 64})

Settings are passed when the model is loaded, as its model config (MLflow accepts only keys that it was logged with):
target ("": as recorded; else a folder or hub id), max_new_tokens, temperature (0: greedy), seed, depth (-1: the chosen
one), prompt_format ("": as the prompts that it was measured on; "chat": a prompt is the user's turn, in the target's
chat template; "text": a prompt is continued).

MLflow runs this file when it logs a version, too: what answers (answering.py), and with it torch, is loaded late.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext

from components.contract import UserError
from components.outside_json import JsonObject

SETTINGS: JsonObject = {
    "target": "",
    "max_new_tokens": 128,
    "temperature": 0.0,
    "seed": 0,
    "depth": -1,
    "prompt_format": "",
}


class DraftedTarget(PythonModel):
    """The target, decoding with its drafter."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load tokenizer, target and drafter; called once by MLflow."""
        from components.publish.release.answering import Answering

        settings = SETTINGS | dict(context.model_config or {})
        self.answering = Answering(Path(context.artifacts["release"]), settings)

    def predict(self, context: PythonModelContext, model_input: list[str]) -> list[JsonObject]:
        """One row a prompt: {"text", "num_tokens", "num_rounds", "num_accepted", "al"}: al None without rounds.

        model_input: a list of prompts, or a DataFrame with a column `prompt`.
        """
        return [self.answering.answer(prompt) for prompt in _prompts(model_input)]


def _prompts(model_input: Any) -> list[str]:
    """The prompts in pyfunc's input: a list, or a DataFrame with a column `prompt` or only one column."""
    columns = getattr(model_input, "columns", None)
    if columns is None:
        return [str(prompt) for prompt in model_input]
    if "prompt" not in columns and len(columns) != 1:
        raise UserError(f"columns {', '.join(map(str, columns))}: give the prompts in a column named 'prompt'")
    return [str(prompt) for prompt in model_input["prompt" if "prompt" in columns else columns[0]]]


# MLflow executes this file to obtain the model; importing it without MLflow's loader does the same and costs nothing.
set_model(DraftedTarget())
