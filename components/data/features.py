"""Hidden states of the target over its own answers: how they lie on disk, and how to read them back.

`manifest.json` names the shards and what is in them; `shard-00000.safetensors` holds whole conversations one after the
other, so a row is a slice and reading it maps memory instead of copying the file. Per shard, N tokens of R rows:
  ids [N] int32, mask [N] bool (x_t is an answer token), taps [N, 3H] bf16, last [N, H] bf16, offsets [R + 1] int64.
taps are HF hidden_states[2], [n//2], [n-3] side by side; last is the last layer's output BEFORE the final norm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from components.contract import Features, UserError


class Example(NamedTuple):
    """One conversation with the target's features. T tokens."""

    row_id: str  # the prompt's id; unique in the artifact
    workload: str
    ids: Tensor  # [T] int64
    mask: Tensor  # [T] bool: x_t is an answer token
    taps: Tensor  # [T, 3H] bf16
    last: Tensor  # [T, H] bf16, before the final norm


@dataclass(frozen=True)
class FeatureRow:
    """Where a conversation lies, known without touching a tensor."""

    row_id: str
    workload: str
    split: str  # train | validation
    shard: str  # file name
    index: int  # place in the shard
    num_tokens: int
    num_answer_tokens: int


class FeatureSet:
    """The conversations of a Features artifact; tensors are read when asked for, a row at a time."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._rows = [FeatureRow(**row) for row in manifest["rows"]]
        self._open: tuple[str, Any, Tensor] | None = None  # the shard read last: its name, its handle, its offsets

    def rows(self, split: str) -> list[FeatureRow]:
        """The rows of a split ("train" or "validation") in their stored order, without their tensors."""
        return [row for row in self._rows if row.split == split]

    def load(self, row: FeatureRow) -> Example:
        """The tensors of one row."""
        shard, offsets = self._shard(row.shard)
        start, stop = int(offsets[row.index]), int(offsets[row.index + 1])

        def part(name: str) -> Tensor:
            return shard.get_slice(name)[start:stop]

        return Example(row.row_id, row.workload, part("ids").long(), part("mask"), part("taps"), part("last"))

    def examples(self, split: str) -> Iterator[Example]:
        """Every conversation of a split in the stored order, one in memory at a time."""
        for row in self.rows(split):
            yield self.load(row)

    def token_counts(self, split: str) -> Tensor:
        """How often each token occurs as an answer token: int64 [V], V = the target's vocabulary."""
        counts = torch.zeros(int(self.manifest["vocab_size"]), dtype=torch.int64)
        for row in self.rows(split):
            shard, offsets = self._shard(row.shard)
            start, stop = int(offsets[row.index]), int(offsets[row.index + 1])
            ids = shard.get_slice("ids")[start:stop][shard.get_slice("mask")[start:stop]]
            counts += torch.bincount(ids.long(), minlength=counts.numel())
        return counts

    def _shard(self, name: str) -> tuple[Any, Tensor]:
        if self._open is None or self._open[0] != name:
            handle = safe_open(self.path / name, framework="pt")
            self._open = (name, handle, handle.get_tensor("offsets"))
        return self._open[1], self._open[2]


def open_features(features: Features) -> FeatureSet:
    """Read a Features artifact's manifest.

    `manifest` has target_key, tap_layers (three HF hidden_states indices), hidden_size, vocab_size, dtype, splits
    (name -> {"rows", "tokens", "answer_tokens"}), shards (file names) and rows (the fields of FeatureRow).
    Raises UserError when the directory is not a Features artifact.
    """
    file = features.path / "manifest.json"
    if not file.is_file():
        raise UserError(
            f"{features.path}: no manifest.json: not a Features artifact; make one with data.record_features"
        )
    return FeatureSet(features.path, json.loads(file.read_text(encoding="utf-8")))
