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

On the machine that it was measured on it runs on the same threads and kernels in the same dtype, so that loading times
no kernels; elsewhere a machine times those that it does not remember.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext
from transformers import AutoTokenizer

from components.contract import Draft, UserError
from components.data.formats.prompts import encode_text
from components.decoding.chain import decode
from components.decoding.session import Session
from components.definitions import al
from components.drafts.interface import Sampling
from components.drafts.storage.files import open_draft
from components.machine import describe_machine
from components.outside_json import JsonObject
from components.release_record import read_serve
from components.targets.load import open_target
from components.targets.source import find_folder, open_record

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
        release = Path(context.artifacts["release"])
        self.serve, folder = read_serve(release), release / "draftsmith"
        self.settings = SETTINGS | dict(context.model_config or {})
        other_target = str(self.settings["target"])
        target_source = find_folder(other_target) if other_target else folder
        model_folder, record = open_record(target_source)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        draft, measured_on = Draft(key=self.serve["draft_key"], path=folder), self.serve.get("measured_on")
        is_here = measured_on is not None and measured_on["machine_id"] == describe_machine(device).machine_id
        if measured_on is not None and is_here and not other_target:
            torch.set_num_threads(measured_on["num_threads"])
            self.target = open_target(
                target_source, device=device, dtype=measured_on["dtype"], kernel=measured_on["kernel"]
            )
            self.draft = open_draft(draft, self.target, dtype=self.target.dtype, kernel=measured_on["draft_kernel"])
        else:
            self.target = open_target(target_source, device=device)
            self.draft = open_draft(draft, self.target, dtype=self.target.dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(
            model_folder, local_files_only=True, trust_remote_code=bool(record["trust_remote_code"])
        )
        self.session = Session(self.target)

    def predict(self, context: PythonModelContext, model_input: list[str]) -> list[JsonObject]:
        """One row a prompt: {"text", "num_tokens", "num_rounds", "num_accepted", "al"}: al None without rounds.

        model_input: a list of prompts, or a DataFrame with a column `prompt`.
        """
        return [self._answer(prompt) for prompt in _prompts(model_input)]

    def _answer(self, prompt: str) -> JsonObject:
        """Continue one prompt."""
        settings = self.settings
        prompt_format = settings["prompt_format"] or self.serve.get("prompt_format", "text")
        ids = encode_text(self.tokenizer, prompt, as_chat=prompt_format == "chat")
        depth = int(settings["depth"]) if int(settings["depth"]) >= 0 else self.serve["depth_k"]
        decoded = decode(
            self.target,
            self.draft if depth else None,
            ids,
            max_new_tokens=int(settings["max_new_tokens"]),
            depth=depth,
            sampling=Sampling(temperature=float(settings["temperature"])),
            rng=torch.Generator().manual_seed(int(settings["seed"])),
            session=self.session,
        )
        rounds = len(decoded.rounds)
        return {
            "text": self.tokenizer.decode(decoded.tokens, skip_special_tokens=True),
            "num_tokens": len(decoded.tokens),
            "num_rounds": rounds,
            "num_accepted": sum(r.accepted for r in decoded.rounds),
            "al": al(len(decoded.tokens) - 1, rounds),
        }


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
