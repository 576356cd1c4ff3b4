"""A server that hands out recorded hidden states by vLLM's protocol, for as long as a test needs it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from components.contract import Features, Target
from components.data.features.format import open_features
from components.targets.load import open_target
from tests.components.data.answering_server import AnsweringServer

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class StatesServer(AnsweringServer):
    """Hands out the recorded states as vLLM's connector does: the reply names a file that is still being written."""

    def __init__(self, target: Target, recorded: Features, folder: Path) -> None:
        super().__init__(self.said)
        self.beside = self.named
        self.folder, self.change = folder, lambda tensors: tensors
        self.states: dict[tuple[int, ...], torch.Tensor] = {}
        self.next: dict[tuple[int, ...], int] = {}
        opened, model = open_features(recorded), open_target(target, kernel="plain", layers=False)
        hidden = int(opened.manifest["hidden_size"])
        for row in [*opened.rows("train"), *opened.rows("validation")]:
            example = opened.load(row)
            ids = tuple(example.ids.tolist())
            self.states[ids] = torch.cat([example.taps.unflatten(-1, (-1, hidden)), example.last[:, None]], dim=1)
            last = example.last[-1:].float()[None]
            self.next[ids] = int(model.unembed(model.final_norm(last))[0, 0].argmax())

    change: Change

    def said(self, prompt: tuple[int, ...]) -> dict[str, Any]:
        choice = {"text": "", "finish_reason": "length"}
        return {**choice, "token_ids": [self.next[prompt]], "prompt_token_ids": list(prompt)}

    def named(self, prompt: tuple[int, ...]) -> dict[str, Any]:
        file = self.folder / f"cmpl-{len(self.bodies)}-{abs(hash(prompt))}.safetensors"
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.02, self.write, (prompt, file, lock)).start()
        return {"kv_transfer_params": {"hidden_states_path": f"/elsewhere/{file.name}"}}

    def write(self, prompt: tuple[int, ...], file: Path, lock: int) -> None:
        try:
            tensors = {"hidden_states": self.states[prompt], "token_ids": torch.tensor(prompt)}
            if changed := self.change(tensors):
                save_file(changed, file)
        finally:
            os.close(lock)
