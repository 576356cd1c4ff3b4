"""What the sequential modules of `mtp` run over while decoding: which rows are new, of one sequence or of many.

Module j's columns are final once their tokens are committed (mtp.py); the rest rest on guesses and are run again after
the next round. For many sequences the new rows of all stand one after the other, ragged as they are: every linear layer
reads its weights once, attention stays a sequence's own.

Shapes: T rows, H hidden size, B sequences; h^j is what module j puts out, h^0 the target's last state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from components.drafts.cached_block import CachedBlock, KvCache, TokenTable
from components.drafts.sampling import Guesses
from components.targets.linear import Linear


class ModuleDecoder(NamedTuple):
    """One module's weights, laid out for decoding."""

    token_part: TokenTable  # the embedding half of eh_proj
    hidden_part: Linear  # the hidden half of eh_proj, hnorm's weight folded in
    qkv: Linear  # input_layernorm's weight folded in
    block: CachedBlock
    last_norm: Tensor  # shared_head.norm's weight times sqrt(H)

    @property
    def linears(self) -> list[Linear]:
        """The module's linear layers in the order they run."""
        return [self.hidden_part, self.qkv, *self.block.linears]


class Decoder(NamedTuple):
    """All modules and the pruned head, one for all: it is most of what they read."""

    modules: list[ModuleDecoder]
    head: Linear
    dtype: torch.dtype


@dataclass
class MtpState:
    """What committed columns leave behind.

    ids:         x_0 .. x_n; x_0 is never read.
    num_columns: n.
    committed:   for each module, how many of its columns are final in its cache.
    waiting:     for each module j, the rows h^{j-1} from column committed[j] on that are final themselves. A column
                 waits until its token is committed and a proposal is deep enough to run its module.
    """

    ids: Tensor
    caches: list[KvCache]
    committed: list[int]
    waiting: list[list[Tensor]]
    num_columns: int = 0


class NewRows(NamedTuple):
    """The columns of one module that are run in this round."""

    start: int  # the first of them
    hidden: Tensor  # [T, H]: h^{j-1}; rows that waited first, then those that rest on guesses
    tokens: Tensor  # int64 [T]: x_{t+j}, committed ones first, then guesses


def new_rows(state: MtpState, index: int, guessed_rows: list[Tensor], guesses: Guesses) -> NewRows:
    """Of module j = index + 1; guessed_rows: h^{j-1} of the columns that rest on guesses (at most one tensor)."""
    start, count = state.committed[index], state.num_columns
    unused = max(0, start + index - count)  # near the start, the first guesses lie before this module's first token
    tokens = torch.cat([state.ids[start + index + 1 : count + 1], *guesses.tokens[unused:]])
    return NewRows(start, torch.cat(state.waiting[index] + guessed_rows), tokens)


def joined_rows(module: ModuleDecoder, index: int, rows: Sequence[NewRows]) -> Tensor:
    """What module j = index + 1 makes of tokens and states before its block, all sequences' rows in turn: [T, H]."""
    alone = len(rows) == 1
    token_rows = module.token_part(rows[0].tokens if alone else torch.cat([new.tokens for new in rows]))
    if index == 0:
        first = 0
        for new in rows:
            if new.start == 0:
                token_rows[first] = 0.0  # the embedding at position 0 is zeroed, and enorm(0) = 0
            first += new.tokens.shape[0]
    hidden = rows[0].hidden if alone else torch.cat([new.hidden for new in rows])
    return token_rows + module.hidden_part(module.block.norm(hidden))


def settled(state: MtpState, index: int, new: NewRows, out: Tensor | None) -> list[Tensor]:
    """Note which rows of module j = index + 1 are final now; returns its output for those that rest on guesses.

    out: [T, H], its output for all of them; None after the last module, whose output nobody reads.
    """
    num_final = max(0, state.num_columns - index) - new.start  # columns t <= n - j have their token x_{t+j}
    num_waiting = sum(rows.shape[0] for rows in state.waiting[index])
    state.waiting[index] = [new.hidden[num_final:num_waiting]] if num_final < num_waiting else []
    state.committed[index] = new.start + num_final
    if out is None:
        return []
    state.waiting[index + 1].append(out[:num_final])
    return [out[num_final:]]


def run_modules(
    decoder: Decoder,
    states: Sequence[MtpState],
    index: int,
    guessed_rows: Sequence[list[Tensor]],
    chains: Sequence[Guesses],
) -> list[list[Tensor]]:
    """Run module j = index + 1 for B sequences and guess once for each; see Mtp._run_module for one.

    guessed_rows: for each sequence h^{j-1} of the columns that rest on guesses; returns the same for h^j.
    """
    module = decoder.modules[index]
    norm, last_module = module.block.norm, index + 1 == len(decoder.modules)
    each = zip(states, guessed_rows, chains, strict=True)
    rows = [new_rows(state, index, guessed, chain) for state, guessed, chain in each]
    starts, counts = [new.start for new in rows], [new.tokens.shape[0] for new in rows]
    joined, caches = joined_rows(module, index, rows), [state.caches[index] for state in states]
    out = module.block.run_each(module.qkv(norm(joined)), joined, caches, starts, counts, last_only=last_module)
    last = out if last_module else out[[end - 1 for end in accumulate(counts)]]
    # A greedy guess needs no last norm but its weight: a positive factor moves no argmax.
    logits = decoder.head((last if chains[0].greedy else norm(last)) * module.last_norm)
    for chain, row in zip(chains, logits.split(1), strict=True):
        chain.pick(row)
    outs = [None] * len(rows) if last_module else out.split(counts)
    return [settled(state, index, new, own) for state, new, own in zip(states, rows, outs, strict=True)]
