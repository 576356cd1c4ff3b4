"""A release that answers: the target and its drafter, opened where the release says, on a prompt at a time.

On the machine that it was measured on it runs on the same threads and kernels in the same dtype, so that loading times
no kernels; elsewhere a machine times those that it does not remember.
"""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch
from transformers import AutoTokenizer

from components.contract import Draft
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


@final
class Answering:
    """Tokenizer, target and drafter of a release. settings: those of mlflow_model.py, each with a value."""

    def __init__(self, release: Path, settings: JsonObject) -> None:
        self.serve, folder = read_serve(release), release / "draftsmith"
        self.settings = settings
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

    def answer(self, prompt: str) -> JsonObject:
        """Continue one prompt; the row that `predict` of mlflow_model.py gives for it."""
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
