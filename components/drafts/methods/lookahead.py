"""Lookahead decoding: the target's own verifying pass also drafts (Fu et al. 2024, arXiv:2402.02057).

Beside the newest token x_n and the draft tokens to verify, a pass runs a Jacobi window of W columns and N-1 levels: the
estimates of later tokens in this and earlier passes. Level l of column j is at n + j + l:
  level 0                     one token a column; column 0 is x_n itself; each sees those of the columns before it
  levels 1 .. N-2             each sees level 0 up to its own column, and the earlier levels of its own column
The target's output after the last level, o_j, completes an n-gram, (level 0, .., level N-2, o_j) of column j, which
enters a pool under its first token. Then the levels move down by one, the outputs become the last level, and the window
slides over the tokens that the pass accepted. Up to G n-grams that begin with x_n are verified in the same pass, N-1
draft tokens each: rows that see x_n and the n-gram's own earlier tokens. No training, no weights, greedy only.

Deviations: the window slides by the accepted tokens too, so that its columns keep their positions in the text, and its
new far end is drawn from the text so far, as the first window is; n-grams with such tokens in their levels are left out
of the pool. `pool_from_text: true` also pools the n-grams of prompt and output.

The decoding loop is decoding/lookahead.py. Drafts depend on the passes before, not on the text alone: an acceptance
map is that of a live run (bench/acceptance.py). `propose_at_every_position` is a run over the whole
text in which every pass accepts nothing. It collects many more n-grams and overestimates: 2.26 tokens a round where a
live run had 1.43 (built-in target, N = 4).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from components.contract import Target, UserError
from components.drafts.interface import CommittedPositions, EveryPosition, Proposal, Sampling, UntrainedRecord
from components.drafts.methods.ngram import NO_TOKEN
from components.drafts.settings import LookaheadSettings
from components.targets.interface import AbstractTarget, TreeRows

Ngram = tuple[int, ...]
UNKNOWN = -1  # a window cell that no output of the target has filled yet


class PassPlan(NamedTuple):
    """The rows of one pass: row 0 is the newest token, then the window level by level, then the draft tokens."""

    tokens: list[int]  # [R]
    tree: TreeRows  # of one sequence
    draft_rows: list[list[int]]  # the rows of each n-gram that is verified


class LookaheadVerifyResult(NamedTuple):
    """The verification result of a pass."""

    rows: list[int]  # row 0 and the rows of the accepted draft tokens
    token_ids: list[int]  # the accepted draft tokens and the target's own next token
    best: list[int]  # all tokens of the n-gram with the longest accepted prefix; [] without n-grams


@dataclass
class LookaheadState:
    """One sequence. levels: N-1 lists of W tokens, UNKNOWN where nothing was computed yet; level 0, column 0 is x_n."""

    settings: LookaheadSettings
    numbers: random.Random
    ids: list[int] = field(default_factory=list)  # x_1 .. x_n
    levels: list[list[int]] = field(default_factory=list)
    pool: dict[int, dict[Ngram, None]] = field(default_factory=dict)  # first token -> the rest, the latest last
    plan: PassPlan | None = None

    @property
    def max_rows(self) -> int:
        """Rows of the largest pass."""
        settings = self.settings
        return (settings.ngram_size - 1) * (settings.window + settings.max_guesses)

    def verify(self, picks: Sequence[int]) -> LookaheadVerifyResult:
        """Greedy verification: picks [R], the target's argmax after every row of the plan."""
        assert self.plan is not None
        tokens, result = self.plan.tokens, LookaheadVerifyResult([0], [picks[0]], [])
        for rows in self.plan.draft_rows:
            accepted_rows, emitted = [0], [picks[0]]
            for row in rows:
                if tokens[row] != emitted[-1]:
                    break
                accepted_rows.append(row)
                emitted.append(picks[row])
            if not result.best or len(accepted_rows) > len(result.rows):
                result = LookaheadVerifyResult(accepted_rows, emitted, [tokens[row] for row in rows])
        return result

    def advance(self, picks: Sequence[int], num_accepted: int) -> None:
        """Pool the n-grams that the pass has completed and move the window on."""
        width, last = self.settings.window, (self.settings.ngram_size - 2) * self.settings.window
        outputs = list(picks[last : last + width])
        for column in range(width):
            gram = [level[column] for level in self.levels] + [outputs[column]]
            if UNKNOWN not in gram:
                self.add_to_pool(gram)
        moved = ((*level, *[UNKNOWN] * num_accepted) for level in (*self.levels[1:], outputs))
        self.levels = [list(level[num_accepted : num_accepted + width]) for level in moved]

    def add_to_pool(self, gram: Sequence[int]) -> None:
        """Put an n-gram into the pool; per first token the latest `max_guesses` stay."""
        first, *rest = gram
        continuations = self.pool.setdefault(first, {})
        continuations.pop(tuple(rest), None)
        continuations[tuple(rest)] = None
        if len(continuations) > self.settings.max_guesses:
            del continuations[next(iter(continuations))]


@final
class Lookahead:
    """A Drafter without weights. `propose` plans the rows of the next pass for decoding/lookahead.py."""

    method: ClassVar[str] = "lookahead"
    needs_features: ClassVar[bool] = False

    def __init__(self, target: AbstractTarget, settings: LookaheadSettings) -> None:
        self.target, self.settings = target, settings
        self.num_steps = self.max_depth = settings.ngram_size - 1
        self.kernel = "plain"

    @classmethod
    def build(cls, target: AbstractTarget, settings: LookaheadSettings, draft_ids: Tensor) -> Lookahead:
        """As AbstractDraft.build; every token can be drafted."""
        return cls(target, settings)

    @classmethod
    def untrained_record(cls, target: Target, settings: LookaheadSettings) -> UntrainedRecord:
        """Its entries of draft.json; raises UserError for a target that cannot verify several guesses in one pass."""
        if any("state" in kind for kind in target.info.get("layers", ())):
            raise UserError(
                f"lookahead: {target.info.get('model', 'the target')} has layers that keep a state of one text, so it"
                " cannot verify several guesses in one pass; take another method"
            )
        return UntrainedRecord(settings, settings.ngram_size - 1, settings.ngram_size - 1, 0)

    def new_state(self, capacity: int) -> LookaheadState:
        """State for one sequence; the same text gives the same drafts every time."""
        state = LookaheadState(self.settings, random.Random(0))
        state.levels = [[UNKNOWN] * self.settings.window for _ in range(self.settings.ngram_size - 1)]
        return state

    def propose(
        self, state: LookaheadState, committed: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """Plan the next pass in `state.plan` and return its rows after row 0. depth: draft tokens per n-gram."""
        for token in committed.next_tokens.tolist():
            state.ids.append(token)
            if self.settings.pool_from_text and len(state.ids) >= self.settings.ngram_size:
                state.add_to_pool(state.ids[-self.settings.ngram_size :])
        newest = state.ids[-1]
        state.levels[0][0] = newest
        window = [
            token if token != UNKNOWN else state.numbers.choice(state.ids) for level in state.levels for token in level
        ]
        grams = list(dict.fromkeys(gram[:depth] for gram in reversed(state.pool.get(newest, {}))))
        tree, draft_rows = _geometry(self.settings.window, self.settings.ngram_size, len(grams), depth)
        state.plan = PassPlan([*window, *(token for gram in grams for token in gram)], tree, draft_rows)
        return Proposal(torch.tensor(state.plan.tokens[1:], dtype=torch.int64), None)

    @torch.inference_mode()
    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As Drafter: the n-gram of longest accepted prefix after each column; -1 without one.

        One pass a column, in order; each accepts nothing and continues with the next token of `ids`.
        """
        state, empty, rows = self.new_state(ids.numel()), torch.empty(0), []
        cache = self.target.new_cache(1, ids.numel() + state.max_rows + 1)
        self.target.forward(ids[None, :1], cache, logits="none")
        for column, token in enumerate(ids[1:].split(1), start=1):
            draft_tokens = self.propose(
                state, CommittedPositions(token, empty, empty), depth, Sampling(), torch.Generator()
            ).tokens
            assert state.plan is not None
            out = self.target.forward(torch.cat((token.cpu(), draft_tokens))[None], cache, tree=state.plan.tree)
            assert out.logits is not None
            picks = out.logits[0].argmax(-1).tolist()
            best = state.verify(picks).best
            rows.append(best + [NO_TOKEN] * (depth - len(best)))
            cache.keep(torch.tensor([column]), [[0]])
            state.advance(picks, 0)
        return EveryPosition(torch.tensor(rows[first:], dtype=torch.int64, device=ids.device), None)


@functools.lru_cache(maxsize=256)
def _geometry(width: int, size: int, num_grams: int, depth: int) -> tuple[TreeRows, list[list[int]]]:
    """Positions and visibility of a pass, and the rows of each n-gram; cached, since few different ones occur."""
    num_window = (size - 1) * width
    draft_rows = [[num_window + gram * depth + i for i in range(depth)] for gram in range(num_grams)]
    num_rows = num_window + num_grams * depth
    depths, visible = torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows, num_rows, dtype=torch.bool)
    for level in range(size - 1):
        for column in range(width):
            row = level * width + column
            depths[row] = level + column
            visible[row, : column + 1] = True  # level 0, x_n first
            visible[row, column : row + 1 : width] = True  # its own column
    for rows in draft_rows:
        for i, row in enumerate(rows):
            depths[row] = i + 1
            visible[row, 0] = True
            visible[row, rows[: i + 1]] = True
    return TreeRows(depths[None], visible[None]), draft_rows
