"""Training tokens as a pure function of the step number, so that a resumed run needs no saved position."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from components.targets.byte_bpe import BOS_ID, EOS_ID


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
