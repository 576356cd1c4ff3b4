"""Lookahead decoding: the target's own verifying pass also makes the guesses (Fu et al. 2024, arXiv:2402.02057).

Beside the newest token x_n and the guesses to verify, a pass runs a Jacobi window of W columns and N-1 levels, a guess
of what stands at later positions and what stood there in earlier passes. Level l of column j is at n + j + l:
  level 0                     one token a column; column 0 is x_n itself; each sees those of the columns before it
  levels 1 .. N-2             each sees level 0 up to its own column, and the earlier levels of its own column
What the target says after the last level, o_j, closes an n-gram, (level 0, .., level N-2, o_j) of column j, which
enters a pool under its first token. Then the levels move down by one, the outputs become the last level, and the window
slides over the tokens that the pass accepted. Up to G n-grams that begin with x_n are verified in the same pass, N-1
guesses each: rows that see x_n and the n-gram's own earlier guesses. No training, no weights, greedy only.

Deviations: the window slides by the accepted tokens too, so that its columns keep their positions in the text, and what
comes in at its far end is drawn from the text so far, as the first window is; n-grams that hold such tokens in their
levels are left out of the pool. `pool_from_text: true` also pools the n-grams of prompt and output.

The decoding loop is decoding/lookahead.py. Guesses depend on the passes before, not on the text alone: an acceptance
map is that of a live run (bench/acceptance_map.py). `draft_everywhere` tells of a run over the whole text in which
every pass accepts nothing. It has seen many more n-grams and flatters: 2.26 tokens a round where a live run had 1.43
(built-in target, N = 4).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from components.contract import Target
from components.drafts.draft import Columns, Proposal, Sampling
from components.drafts.ngram import NO_TOKEN
from components.drafts.settings import LookaheadSettings
from components.targets.model import TreeRows

Ngram = tuple[int, ...]
UNKNOWN = -1  # a window place that no output of the target has reached yet


class PassPlan(NamedTuple):
    """What one pass computes: row 0 the newest token, then the window level by level, then the guesses."""

    tokens: list[int]  # [R]
    tree: TreeRows  # of one sequence
    guesses: list[list[int]]  # the rows of each n-gram that is verified


class Matched(NamedTuple):
    """The verdict on the guesses of a pass."""

    rows: list[int]  # row 0 and the rows of the accepted guesses
    token_ids: list[int]  # the accepted guesses and the target's own next token
    best: list[int]  # the tokens of the n-gram that held longest, accepted or not; none: []


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
        chosen = self.settings
        return (chosen.ngram_size - 1) * (chosen.window + chosen.max_guesses)

    def judge(self, picks: Sequence[int]) -> Matched:
        """Greedy verification: picks [R], the target's argmax after every row of the plan."""
        assert self.plan is not None
        tokens, found = self.plan.tokens, Matched([0], [picks[0]], [])
        for rows in self.plan.guesses:
            kept, said = [0], [picks[0]]
            for row in rows:
                if tokens[row] != said[-1]:
                    break
                kept.append(row)
                said.append(picks[row])
            if not found.best or len(kept) > len(found.rows):
                found = Matched(kept, said, [tokens[row] for row in rows])
        return found

    def advance(self, picks: Sequence[int], num_accepted: int) -> None:
        """Pool the n-grams that the pass has closed and move the window on."""
        width, last = self.settings.window, (self.settings.ngram_size - 2) * self.settings.window
        outputs = list(picks[last : last + width])
        for column in range(width):
            gram = [level[column] for level in self.levels] + [outputs[column]]
            if UNKNOWN not in gram:
                self.remember(gram)
        moved = ((*level, *[UNKNOWN] * num_accepted) for level in (*self.levels[1:], outputs))
        self.levels = [list(level[num_accepted : num_accepted + width]) for level in moved]

    def remember(self, gram: Sequence[int]) -> None:
        """Put an n-gram into the pool; of those with one first token the latest `max_guesses` stay."""
        first, *rest = gram
        known = self.pool.setdefault(first, {})
        known.pop(tuple(rest), None)
        known[tuple(rest)] = None
        if len(known) > self.settings.max_guesses:
            del known[next(iter(known))]


@final
class Lookahead:
    """A Drafter without weights. `propose` says the rows of the next pass; decoding/lookahead.py reads them."""

    method: ClassVar[str] = "lookahead"
    needs_features: ClassVar[bool] = False

    def __init__(self, target: Any, settings: LookaheadSettings) -> None:
        """target: an AbstractTarget; `draft_everywhere` runs passes of it."""
        self.target, self.settings = target, settings
        self.num_steps = self.max_depth = settings.ngram_size - 1
        self.kernel = "plain"

    @classmethod
    def build(cls, target: Any, settings: Mapping[str, Any], draft_ids: Tensor) -> Lookahead:
        """As every method is built; every token can be guessed. settings: LookaheadSettings."""
        return cls(target, LookaheadSettings.model_validate(dict(settings)))

    @classmethod
    def written_down(cls, target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What draft.json says beside names and sizes: settings, num_steps, max_depth, num_parameters."""
        built = cls.build(None, settings, torch.empty(0))
        depths = {"num_steps": built.num_steps, "max_depth": built.max_depth}
        return {"settings": dict(settings), **depths, "num_parameters": 0}

    def new_state(self, capacity: int) -> LookaheadState:
        """State for one sequence; the same text gives the same guesses every time."""
        state = LookaheadState(self.settings, random.Random(0))
        state.levels = [[UNKNOWN] * self.settings.window for _ in range(self.settings.ngram_size - 1)]
        return state

    def propose(
        self, state: LookaheadState, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """The rows of the next pass without row 0; `state.plan` says what they are. depth: guesses of an n-gram."""
        for token in columns.next_tokens.tolist():
            state.ids.append(token)
            if self.settings.pool_from_text and len(state.ids) >= self.settings.ngram_size:
                state.remember(state.ids[-self.settings.ngram_size :])
        newest = state.ids[-1]
        state.levels[0][0] = newest
        window = [
            token if token != UNKNOWN else state.numbers.choice(state.ids) for level in state.levels for token in level
        ]
        grams = list(dict.fromkeys(gram[:depth] for gram in reversed(state.pool.get(newest, {}))))
        tree, guesses = _geometry(self.settings.window, self.settings.ngram_size, len(grams), depth)
        state.plan = PassPlan([*window, *(token for gram in grams for token in gram)], tree, guesses)
        return Proposal(torch.tensor(state.plan.tokens[1:], dtype=torch.int64), None)

    @torch.inference_mode()
    def draft_everywhere(self, ids: Tensor, taps: Tensor, last: Tensor, depth: int) -> Tensor:
        """See Drafter: the n-gram that holds longest after each column, int64 [T-1, depth]; -1 where there is none.

        One pass a column, in order; each accepts nothing and goes on with the next known token.
        """
        state, nothing, rows = self.new_state(ids.numel()), torch.empty(0), []
        cache = self.target.new_cache(1, ids.numel() + state.max_rows + 1)
        self.target.forward(ids[None, :1], cache, logits="none")
        for column, token in enumerate(ids[1:].split(1), start=1):
            said = self.propose(state, Columns(token, nothing, nothing), depth, Sampling(), torch.Generator()).tokens
            assert state.plan is not None
            out = self.target.forward(torch.cat((token.cpu(), said))[None], cache, tree=state.plan.tree)
            picks = out.logits[0].argmax(-1).tolist()
            best = state.judge(picks).best
            rows.append(best + [NO_TOKEN] * (depth - len(best)))
            cache.keep(torch.tensor([column]), [[0]])
            state.advance(picks, 0)
        return torch.tensor(rows, dtype=torch.int64, device=ids.device)


@functools.lru_cache(maxsize=256)
def _geometry(width: int, size: int, num_grams: int, depth: int) -> tuple[TreeRows, list[list[int]]]:
    """Positions and visibility of a pass, and the rows of each n-gram; a handful of different ones occur."""
    num_window = (size - 1) * width
    guesses = [[num_window + gram * depth + i for i in range(depth)] for gram in range(num_grams)]
    num_rows = num_window + num_grams * depth
    depths, visible = torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows, num_rows, dtype=torch.bool)
    for level in range(size - 1):
        for column in range(width):
            row = level * width + column
            depths[row] = level + column
            visible[row, : column + 1] = True  # level 0, x_n first
            visible[row, column : row + 1 : width] = True  # its own column
    for rows in guesses:
        for i, row in enumerate(rows):
            depths[row] = i + 1
            visible[row, 0] = True
            visible[row, rows[: i + 1]] = True
    return TreeRows(depths[None], visible[None]), guesses
