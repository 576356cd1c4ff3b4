"""File format and readers of Features artifacts: hidden states of the target over its training conversations.

`manifest.json` lists the shards and their rows; `shard-00000.safetensors` holds whole conversations one after the
other, so a row is a slice, and reading it maps only its pages of the file. A shard of N tokens in R rows holds:
  ids [N] int32, mask [N] bool (x_t is an answer token), taps [N, C H], last [N, H], offsets [R + 1] int64.
Taps are the HF hidden_states of the manifest's C `tap_layers` side by side; last is the last layer's output BEFORE the
final norm.

Stored states are bf16, or fp8 with one power of two for each token and state; only `encode` and `decode` know the
encoding. fp8 is e4m3 (1 sign, 4 exponent, 3 mantissa bits; Micikevicius et al. 2022, arXiv:2209.05433), half the bytes
of bf16. Hidden states have a few channels far larger than the rest, which would spoil integers of one scale; e4m3 errs
by at most a sixteenth over 14 binades below the largest value of a state, so one exponent a state is enough. The
exponent is a whole number: scaling by a power of two does not round, and an e4m3 times it is exactly a bf16 again.

An artifact of `features_on_the_fly` stores no states, only tokens and masks (5 bytes a token) and the key of their
target, which training has in memory anyway. A batch's rows go through the target together, in passes of at most
`tokens_per_pass` tokens, and are rounded to bf16. So the features equal the stored ones up to rounding, and bit for bit
where the same rows share a pass. Nothing is cached between batches, on purpose: a row's last bits would depend on the
rows that it once shared a pass with, and a run resumed after a kill, with an empty cache, would no longer end with the
same bits. Nor is the next batch computed ahead: the target's pass and the training step need the same cores or GPU.

The passes that store features and those that compute them while training are the same. Rows of similar length share a
pass and are padded on the right, which needs no mask: attention is causal, so padding cannot affect the row before it.
Another grouping changes the order of sums, so the states equal those of a pass over the row alone up to rounding. In a
mixture of experts, rounding may also route a token with nearly equal router scores to another expert, which changes
that token's states (see the tests).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NotRequired, TypedDict, final

import torch
from safetensors import safe_open
from torch import Tensor

from components.contract import Features, UserError
from components.outside_json import JsonObject
from components.targets.interface import AbstractTarget
from components.targets.shape import TapLayers

Storage = Literal["bf16", "fp8", "none"]
"""none: hidden states are not stored but computed while training, here or by a server."""

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 1.875 * 2.0**127
"""The largest e4m3 times a power of two that bf16 can hold. The few larger bf16, at most a sixteenth above, would round
up to infinity."""
OPEN_SHARDS: Final = 64
"""The most shards mapped at a time: a mapping costs only address space, but keeps a file open."""


class Example(NamedTuple):
    """One conversation with the target's features. T tokens."""

    row_id: str  # the prompt's id; unique in the artifact
    workload: str
    ids: Tensor  # [T] int64
    mask: Tensor  # [T] bool: x_t is an answer token
    taps: Tensor  # [T, C * H] bf16
    last: Tensor  # [T, H] bf16, before the final norm


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """Location and labels of a conversation, read from the manifest alone."""

    row_id: str
    workload: str
    split: str  # train | validation
    shard: str  # file name
    index: int  # place in the shard
    num_tokens: int
    num_answer_tokens: int
    language: str = ""  # of the answer (en, zh), where known
    domain: str = ""  # what it is about, where known
    place: int | None = None  # in a declared order of training, 0 first; None where none was declared


class FeaturesManifest(TypedDict):
    """The content of `manifest.json`.

    tap_layers: C indices of HF hidden_states. splits: split -> rows, tokens, answer_tokens. rows: fields of
    FeatureRow. storage: absent in old artifacts, which are bf16. tokens_per_pass: only where the target computes states
    while training. server: only where a server does (streamed.py).
    """

    target_key: str
    answers_key: str
    tap_layers: list[int]
    hidden_size: int
    vocab_size: int
    dtype: str
    splits: dict[str, dict[str, int]]
    shards: list[str]
    rows: list[JsonObject]
    storage: Storage
    tokens_per_pass: NotRequired[int]
    server: NotRequired[JsonObject]


class Shards:
    """The shards of an artifact, mapped on first use; any row is read in constant time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: OrderedDict[str, tuple[Any, list[int]]] = OrderedDict()  # name -> handle and offsets, oldest first

    def part(self, row: FeatureRow, name: str, max_tokens: int | None = None) -> Tensor:
        """The row's (first `max_tokens`) tokens of the tensor `name`: a view of the mapped file."""
        handle, offsets = self._shard(row.shard)
        start, stop = offsets[row.index], offsets[row.index + 1]
        return handle.get_slice(name)[start : stop if max_tokens is None else min(stop, start + max_tokens)]

    def _shard(self, name: str) -> tuple[Any, list[int]]:
        if name in self._open:
            self._open.move_to_end(name)
        else:
            handle = safe_open(self.path / name, framework="pt")
            self._open[name] = handle, handle.get_tensor("offsets").tolist()
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        return self._open[name]


class FeatureSource(ABC):
    """The conversations of a Features artifact with their features, stored or computed.

    A source depends on the artifact (and the target) alone: the result of `load_all` depends on its arguments, not on
    what was loaded before, so that a resumed run gets the same numbers.
    """

    @property
    def needs_passes(self) -> bool:
        """Whether the target computes the features here."""
        return False

    def __init__(self, path: Path, manifest: FeaturesManifest) -> None:
        self.path, self.manifest = path, manifest
        self.shards = Shards(path)
        self._rows = [FeatureRow(**row) for row in manifest["rows"]]

    @abstractmethod
    def load_all(self, rows: Sequence[FeatureRow], max_tokens: int | None = None) -> list[Example]:
        """The examples of a batch of rows, each cut to its first `max_tokens` tokens."""

    def computed_by(self, target: AbstractTarget) -> FeatureSource:
        """The same source with a target to compute features with; stored features do not need one."""
        return self

    def expect(self, batches: Iterable[Sequence[FeatureRow]]) -> None:  # noqa: B027 - most need not know
        """Say which rows will be loaded, batch by batch; only a server is asked ahead."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of whatever computes the features."""

    @cached_property
    def _by_id(self) -> dict[str, FeatureRow]:
        return {row.row_id: row for row in self._rows}

    def row(self, row_id: str) -> FeatureRow:
        """The row of this id; KeyError where there is none."""
        return self._by_id[row_id]

    def rows(self, split: str) -> list[FeatureRow]:
        """The rows of a split ("train" or "validation") in their stored order, without their tensors."""
        return [row for row in self._rows if row.split == split]

    def load(self, row: FeatureRow) -> Example:
        """The example of one row."""
        return self.load_all([row])[0]

    def examples(self, split: str) -> Iterator[Example]:
        """Every conversation of a split in the stored order, one in memory at a time."""
        for row in self.rows(split):
            yield self.load(row)

    def token_counts(self, split: str) -> Tensor:
        """How often each token occurs as an answer token: int64 [V], V = the target's vocabulary."""
        counts = torch.zeros(int(self.manifest["vocab_size"]), dtype=torch.int64)
        for row in self.rows(split):
            counts += torch.bincount(self.answer_ids(row), minlength=counts.numel())
        return counts

    def answer_ids(self, row: FeatureRow) -> Tensor:
        """The answer tokens of one row, int64."""
        return self.shards.part(row, "ids")[self.shards.part(row, "mask")].long()


@final
class StoredFeatures(FeatureSource):
    """Features read from their shards."""

    def load_all(self, rows: Sequence[FeatureRow], max_tokens: int | None = None) -> list[Example]:
        """See FeatureSource. bf16 tensors are views of the mapped file."""
        storage: Storage = self.manifest.get("storage", "bf16")

        def example(row: FeatureRow) -> Example:
            def part(name: str) -> Tensor:
                return self.shards.part(row, name, max_tokens)

            states = (decode(name, part, storage) for name in STATES)
            return Example(row.row_id, row.workload, part("ids").long(), part("mask"), *states)

        return [example(row) for row in rows]


@final
class LiveFeatures(FeatureSource):
    """Features computed by the target on demand."""

    def __init__(self, path: Path, manifest: FeaturesManifest, target: AbstractTarget | None = None) -> None:
        super().__init__(path, manifest)
        self.target = target

    @property
    def needs_passes(self) -> bool:
        """See FeatureSource."""
        return "server" not in self.manifest

    def computed_by(self, target: AbstractTarget) -> LiveFeatures:
        """See FeatureSource."""
        return LiveFeatures(self.path, self.manifest, target)

    def load_all(self, rows: Sequence[FeatureRow], max_tokens: int | None = None) -> list[Example]:
        """See FeatureSource. Features are on the target's device."""
        assert self.target is not None, "features on the fly need `computed_by` first"
        ids = [self.shards.part(row, "ids", max_tokens).long() for row in rows]
        states: dict[int, States] = {}
        taps = tuple(self.manifest["tap_layers"])
        for passed in forward_passes(self.target, ids, int(self.manifest["tokens_per_pass"]), taps):
            states |= passed
        return [
            Example(row.row_id, row.workload, ids[place], self.shards.part(row, "mask", max_tokens), *states[place])
            for place, row in enumerate(rows)
        ]


def open_features(features: Features) -> FeatureSource:
    """Read a Features artifact's manifest; raises UserError where the directory holds none."""
    file = features.path / "manifest.json"
    if not file.is_file():
        raise UserError(
            f"{features.path}: no manifest.json: not a Features artifact; make one with data.record_features"
        )
    manifest = json.loads(file.read_text(encoding="utf-8"))
    if manifest.get("storage") == "none":
        return LiveFeatures(features.path, manifest)
    return StoredFeatures(features.path, manifest)


def encode(name: str, states: Tensor, storage: Storage, num_states: int) -> dict[str, Tensor]:
    """The tensors to write for num_states C states [N, C * H]: `name`, and with fp8 `name`_exponents int8 [N, C]."""
    if storage == "bf16":
        return {name: states.to(torch.bfloat16)}
    assert storage == "fp8", storage
    apart = states.float().unflatten(-1, (num_states, -1)).clamp(-LARGEST, LARGEST)
    largest = apart.abs().amax(-1, keepdim=True)
    # frexp: largest / max = m 2^e with m < 1: scaled by 2^-e nothing exceeds the largest e4m3, which has no infinity.
    exponents = torch.frexp(largest / torch.finfo(FP8).max).exponent.clamp(-126, 127)
    scaled = torch.ldexp(apart, -exponents).to(FP8)
    return {name: scaled.flatten(-2), f"{name}_exponents": exponents[..., 0].to(torch.int8)}


def decode(name: str, part: Callable[[str], Tensor], storage: Storage) -> Tensor:
    """States bf16 [N, C * H] from the written tensors; part: tensor name -> the requested rows of it."""
    written = part(name)
    if storage == "bf16":
        return written
    assert storage == "fp8", storage
    exponents = part(f"{name}_exponents").int()
    apart = written.float().unflatten(-1, (exponents.shape[-1], -1))
    return torch.ldexp(apart, exponents[..., None]).flatten(-2).to(torch.bfloat16)


def bytes_per_token(hidden_size: int, storage: Storage, num_taps: int) -> int:
    """Bytes on disk of a token: its states (the taps and the last), a token id and a mask byte."""
    states = num_taps + 1
    return {"bf16": states * 2 * hidden_size, "fp8": states * (hidden_size + 1), "none": 0}[storage] + 4 + 1


class States(NamedTuple):
    """One row's states, bf16, on the target's device."""

    taps: Tensor  # [T, C * H]
    last: Tensor  # [T, H], before the final norm


STATES: Final = States._fields
"""Names of the tensors that hold states."""


def group_rows(lengths: Sequence[int], tokens_per_pass: int) -> list[list[int]]:
    """Groups of row indices that share a pass: similar lengths, at most `tokens_per_pass` tokens with padding."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if groups and (len(groups[-1]) + 1) * lengths[index] <= tokens_per_pass:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def padded_tokens(lengths: Sequence[int], tokens_per_pass: int) -> int:
    """Tokens in the passes over rows of these lengths, padding included."""
    return sum(len(group) * max(lengths[index] for index in group) for group in group_rows(lengths, tokens_per_pass))


def forward_pass(model: AbstractTarget, rows: Sequence[Tensor], taps: TapLayers = ()) -> list[States]:
    """Compute the states of rows of token ids, int64 [T] each, in one forward pass. taps: (): the target's own.

    Raises UserError where a state is infinite or not a number: a drafter could not learn from it.
    """
    lengths = [len(row) for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    passed = model.forward(ids, model.new_cache(*ids.shape), logits="none", features=taps or True)
    assert passed.taps is not None and passed.last is not None
    both = zip(passed.taps, passed.last, lengths, strict=True)
    states = [States(taps[:n].to(torch.bfloat16), last[:n].to(torch.bfloat16)) for taps, last, n in both]
    if not all(bool(torch.isfinite(part).all()) for row in states for part in row):
        raise UserError(
            "the target's hidden states are not finite on these conversations; record in float32, or mend it"
        )
    return states


def forward_passes(
    model: AbstractTarget, rows: Sequence[Tensor], tokens_per_pass: int, taps: TapLayers = ()
) -> Iterator[dict[int, States]]:
    """For each pass, {index into `rows`: states} of the rows in it."""
    for group in group_rows([len(row) for row in rows], tokens_per_pass):
        yield dict(zip(group, forward_pass(model, [rows[index] for index in group], taps), strict=True))
