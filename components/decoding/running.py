"""One sequence on its way through a batch: what it has said, what its drafter knows, what its last pass committed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from components.decoding.chain import Decoded, RoundFacts, keep_until_end
from components.decoding.tree_verification import TreeVerdict
from components.drafts.draft import Columns
from components.targets.model import TargetPass


@dataclass
class Running:
    """State of one prompt; `place` below is its row in the batch of a pass, which changes as others drop out."""

    prompt: list[int]
    state: Any  # of the drafter
    rng: torch.Generator
    columns: Columns | None = None  # committed by the last pass, not yet seen by the drafter; None: nothing drafts
    raw: list[int] = field(default_factory=list)  # output tokens, the overshoot of the last round among them
    kept: int = 0
    ended: bool = False
    rounds: list[RoundFacts] = field(default_factory=list)
    stop_ns: int = 0  # when its last token was known

    @property
    def newest(self) -> int:
        """The last known token; the cache does not hold it yet."""
        return self.raw[-1]

    def begin(self, token: int, ends: frozenset[int]) -> None:
        """Take the token that follows the prompt."""
        self.raw, self.kept, self.ended = [token], 1, token in ends

    def commit(self, verdict: TreeVerdict, drafted: int, limit: int, ends: frozenset[int]) -> None:
        """Take what a round emits, cut at the limit and after end-of-text, and note the round."""
        emitted, self.ended = keep_until_end(verdict.token_ids, limit - self.kept, ends)
        kv_len = len(self.prompt) + self.kept - 1
        self.rounds.append(RoundFacts(self.kept - 1, drafted, verdict.num_accepted, emitted, kv_len))
        self.kept += emitted
        self.raw += verdict.token_ids

    def decoded(self, start_ns: int, first_ns: int) -> Decoded:
        """The finished generation; the prefill ran from start_ns to first_ns."""
        return Decoded(
            tokens=self.raw[: self.kept],
            tokens_raw=self.raw,
            rounds=self.rounds,
            status="eos" if self.ended else "ok",
            prompt_tokens=len(self.prompt),
            ttft_ns=first_ns - start_ns,
            decode_ns=max(0, self.stop_ns - first_ns),
        )


def columns_of(next_tokens: list[int], out: TargetPass, place: int, rows: list[int], device: torch.device) -> Columns:
    """These rows of one sequence of a pass, each with the token that follows it; no features where none were asked."""
    following = torch.tensor(next_tokens, device=device)
    if out.taps is None or out.last is None:
        return Columns(following, torch.empty(0, 0, device=device), torch.empty(0, 0, device=device))
    taps, last = out.taps[place], out.last[place]
    if rows == list(range(len(rows))):  # a view is enough
        return Columns(following, taps[: len(rows)], last[: len(rows)])
    chosen = torch.tensor(rows, device=device)
    return Columns(following, taps.index_select(0, chosen), last.index_select(0, chosen))
