"""One sequence of a batch: its output, its drafter's state, and the positions its last pass committed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from components.decoding.chain import Decoded, RoundFacts, count_until_end
from components.decoding.tree_verification import TreeVerifyResult
from components.drafts.draft import CommittedPositions
from components.targets.model import TargetPass


@dataclass
class SequenceState:
    """State of one prompt while it is decoded in a batch."""

    prompt: list[int]
    state: Any  # of the drafter
    rng: torch.Generator
    committed: CommittedPositions | None = None  # by the last pass, not yet passed to the drafter; None: plain decoding
    raw: list[int] = field(default_factory=list)  # output tokens, including the overshoot of the last round
    num_tokens: int = 0
    at_eos: bool = False
    rounds: list[RoundFacts] = field(default_factory=list)
    stop_ns: int = 0  # when its last token was computed

    @property
    def newest(self) -> int:
        """The last known token; the cache does not hold it yet."""
        return self.raw[-1]

    def begin(self, token: int, ends: frozenset[int]) -> None:
        """Store the first output token."""
        self.raw, self.num_tokens, self.at_eos = [token], 1, token in ends

    def commit(self, result: TreeVerifyResult, drafted: int, limit: int, ends: frozenset[int]) -> None:
        """Append the tokens of a round, cut at the limit and after end-of-text, and record the round."""
        emitted, self.at_eos = count_until_end(result.token_ids, limit - self.num_tokens, ends)
        kv_len = len(self.prompt) + self.num_tokens - 1
        self.rounds.append(RoundFacts(self.num_tokens - 1, drafted, result.num_accepted, emitted, kv_len))
        self.num_tokens += emitted
        self.raw += result.token_ids

    def decoded(self, start_ns: int, first_ns: int) -> Decoded:
        """The finished generation; the prefill ran from start_ns to first_ns."""
        return Decoded(
            tokens=self.raw[: self.num_tokens],
            tokens_raw=self.raw,
            rounds=self.rounds,
            status="eos" if self.at_eos else "ok",
            prompt_tokens=len(self.prompt),
            ttft_ns=first_ns - start_ns,
            decode_ns=max(0, self.stop_ns - first_ns),
        )


def committed_positions(
    next_tokens: list[int], out: TargetPass, index: int, rows: list[int], device: torch.device
) -> CommittedPositions:
    """Rows of sequence `index` of a pass, each with its next token; empty features where the pass has none."""
    following = torch.tensor(next_tokens, device=device)
    if out.taps is None or out.last is None:
        return CommittedPositions(following, torch.empty(0, 0, device=device), torch.empty(0, 0, device=device))
    taps, last = out.taps[index], out.last[index]
    if rows == list(range(len(rows))):  # a view is enough
        return CommittedPositions(following, taps[: len(rows)], last[: len(rows)])
    row_indices = torch.tensor(rows, device=device)
    return CommittedPositions(following, taps.index_select(0, row_indices), last.index_select(0, row_indices))
