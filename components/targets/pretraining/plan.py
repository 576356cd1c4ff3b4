"""The plan of a pre-training run: its settings, and the phase, learning rate and tokens of every step.

The schedule is warmup-stable-decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395): no step before the decay depends on
when the decay begins, so its start can be moved while a run is under way. Training tokens are a pure function of the
step number, so that a resumed run needs no saved position.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from components.outside_json import JsonObject
from components.targets.pretraining.llama import LlamaShape
from components.targets.pretraining.tokenizer import BOS_ID, EOS_ID

AFTER_STABLE = frozenset(
    {
        "num_steps",
        "decay_steps",
        "decay_sequence_length",
        "decay_group_repeats",
        "repetition_weight",
        "repetition_ratio",
        "unlikelihood_weight",
        "unlikelihood_every",
    }
)
"""Fields that change nothing before the decay begins."""


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of the language-model phase; `pretrain_target` explains each of them."""

    shape: LlamaShape = field(default_factory=LlamaShape)
    num_steps: int = 6000
    warmup_steps: int = 100
    decay_steps: int = 1700
    tokens_per_step: int = 8192
    sequence_length: int = 256
    decay_sequence_length: int = 1024
    matrix_lr: float = 0.02
    vector_lr: float = 3e-3
    weight_decay: float = 0.02
    decay_group_repeats: Mapping[str, int] = field(default_factory=dict)
    repetition_weight: float = 0.0
    repetition_ratio: float = 0.5
    unlikelihood_weight: float = 0.0
    unlikelihood_every: int = 2
    max_grad_norm: float = 1.0
    microbatch_tokens: int = 2048
    num_processes: int = 2
    dtype: str = "bfloat16"
    compile_layers: bool = False
    device: str = "cpu"
    seed: int = 0

    @property
    def decay_start(self) -> int:
        """The first step of the decay phase."""
        return self.num_steps - self.decay_steps

    def lr_scale(self, step: int) -> float:
        """Learning rate at a step as a fraction of its peak: linear up, flat, linear to zero."""
        if step >= self.decay_start:
            return (self.num_steps - step) / max(1, self.decay_steps)
        return min(1.0, (step + 1) / max(1, self.warmup_steps))

    def windows_at(self, step: int) -> tuple[int, int]:
        """(tokens in a window, number of the step's first window among those of its phase)."""
        if step >= self.decay_start:
            return self.decay_sequence_length, (step - self.decay_start) * (
                self.tokens_per_step // self.decay_sequence_length
            )
        return self.sequence_length, step * (self.tokens_per_step // self.sequence_length)

    def unlikelihood_at(self, step: int) -> bool:
        """Whether the step has the unlikelihood loss."""
        return (
            self.unlikelihood_weight > 0
            and step >= self.decay_start
            and (step - self.decay_start) % self.unlikelihood_every == 0
        )

    def stable_identity(self) -> JsonObject:
        """The settings that determine the weights before the decay."""
        return {name: value for name, value in asdict(self).items() if name not in AFTER_STABLE}

    def may_resume(self, step: int, saved_plan: JsonObject) -> bool:
        """Whether the weights after `step` steps of another plan equal those of this plan.

        saved_plan: `asdict` of the other plan, as read back from JSON.
        """
        other = plan_from_json(saved_plan)
        if self.stable_identity() != other.stable_identity() or step > self.num_steps:
            return False
        return self == other or step <= min(self.decay_start, other.decay_start)


def plan_from_json(facts: JsonObject) -> TrainingPlan:
    """The plan from its `asdict`."""
    return TrainingPlan(**{**facts, "shape": LlamaShape(**facts["shape"])})


def read_documents(path: Path) -> Iterator[tuple[str, str]]:
    """(source, text) of every line of a corpus file."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield row["source"], row["text"]


def source_group(source: str) -> str:
    """The group of a document: the part of its source before the first slash ("stdlib", "stdlib-tests")."""
    return source.partition("/")[0]


def pack_documents(path: Path, tokenizer: Tokenizer, repeats: Mapping[str, int]) -> np.ndarray:
    """All documents as one token stream [tokens] uint16: bos, text, eos, bos, ...

    repeats: how often a group's documents occur in the stream (default once).
    """
    copies: list[list[str]] = []
    for source, text in read_documents(path):
        for copy in range(repeats.get(source_group(source), 1)):
            if copy == len(copies):
                copies.append([])
            copies[copy].append(text)
    pieces: list[np.ndarray] = []
    for texts in copies:
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            pieces.append(np.array([BOS_ID, *encoding.ids, EOS_ID], dtype=np.uint16))
    return np.concatenate(pieces)


class TokenWindows:
    """Windows of `length` tokens (plus the next one) out of a stream, in a new random order and offset every epoch.

    stream: token ids [tokens]. Window number n of the run is window n % per_epoch of epoch n // per_epoch.
    """

    def __init__(self, stream: np.ndarray, length: int, seed: int) -> None:
        self.stream, self.length, self.seed = stream, length, seed
        self.per_epoch = (len(stream) - 1) // length - 1
        if self.per_epoch < 1:
            raise ValueError(f"{len(stream)} tokens are too few for windows of {length}")
        self._epoch = -1
        self._starts = np.zeros(0, dtype=np.int64)

    def batch(self, first: int, count: int) -> np.ndarray:
        """Windows first .. first + count - 1 of the run: [count, length + 1] int64."""
        rows = [self._start(number) for number in range(first, first + count)]
        return np.stack([self.stream[start : start + self.length + 1] for start in rows]).astype(np.int64)

    def _start(self, number: int) -> int:
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            random = np.random.default_rng((self.seed, self.length, epoch))
            offset = int(random.integers(self.length))
            self._starts = offset + self.length * random.permutation(self.per_epoch)
            self._epoch = epoch
        return int(self._starts[index])
