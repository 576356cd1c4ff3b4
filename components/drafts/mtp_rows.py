"""The rows that the sequential modules of `mtp` run while decoding, of one sequence or of many.

Module j's columns are final once their tokens are committed (mtp.py); the rest depend on draft tokens and are run again
in the next round. For many sequences the new rows of all stand one after the other, ragged as they are: every linear
layer reads its weights once, attention runs per sequence.

Shapes: T rows, H hidden size, B sequences; h^j is module j's output, h^0 the target's last state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from components.drafts.cached_block import CachedBlock, KvCache, TokenTable
from components.drafts.sampling import DraftSampler
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
    """All modules and the pruned head that they share."""

    modules: list[ModuleDecoder]
    head: Linear
    dtype: torch.dtype


@dataclass
class MtpState:
    """The state left by committed positions.

    ids:         x_0 .. x_n; x_0 is never read.
    num_columns: n.
    committed:   for each module, how many of its columns are final in its cache.
    waiting:     for each module j, the final rows h^{j-1} from column committed[j] on. A column waits until its token
                 is committed and a proposal is deep enough to run its module.
    """

    ids: Tensor
    caches: list[KvCache]
    committed: list[int]
    waiting: list[list[Tensor]]
    num_columns: int = 0


class PendingRows(NamedTuple):
    """The columns of one module that are run in this round."""

    start: int  # the first of them
    hidden: Tensor  # [T, H]: h^{j-1}; waiting rows first, then those that depend on draft tokens
    tokens: Tensor  # int64 [T]: x_{t+j}, committed ones first, then draft tokens


def pending_rows(state: MtpState, index: int, draft_rows: list[Tensor], sampler: DraftSampler) -> PendingRows:
    """The rows that module j = index + 1 runs now; draft_rows: at most one tensor, h^{j-1} after draft tokens."""
    start, count = state.committed[index], state.num_columns
    unused = max(
        0, start + index - count
    )  # near the start, the first draft tokens lie before this module's first token
    tokens = torch.cat([state.ids[start + index + 1 : count + 1], *sampler.tokens[unused:]])
    return PendingRows(start, torch.cat(state.waiting[index] + draft_rows), tokens)


def project_rows(module: ModuleDecoder, index: int, rows: Sequence[PendingRows]) -> Tensor:
    """The block input of module j = index + 1 from tokens and states, sequence after sequence: [T, H]."""
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


def finalize_committed(state: MtpState, index: int, new: PendingRows, out: Tensor | None) -> list[Tensor]:
    """Record which rows of module j = index + 1 are final now; returns its output for those after draft tokens.

    out: [T, H], its output for all rows; None after the last module, whose output is not needed.
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
    draft_rows: Sequence[list[Tensor]],
    samplers: Sequence[DraftSampler],
) -> list[list[Tensor]]:
    """Run module j = index + 1 for B sequences and draft one token for each; see Mtp._run_module for one.

    draft_rows: for each sequence h^{j-1} of the columns that depend on draft tokens; returns the same for h^j.
    """
    module = decoder.modules[index]
    norm, last_module = module.block.norm, index + 1 == len(decoder.modules)
    each = zip(states, draft_rows, samplers, strict=True)
    rows = [pending_rows(state, index, rows_of_sequence, sampler) for state, rows_of_sequence, sampler in each]
    starts, counts = [new.start for new in rows], [new.tokens.shape[0] for new in rows]
    joined, caches = project_rows(module, index, rows), [state.caches[index] for state in states]
    out = module.block.run_each(module.qkv(norm(joined)), joined, caches, starts, counts, last_only=last_module)
    last = out if last_module else out[[end - 1 for end in accumulate(counts)]]
    # A greedy token needs only the weight of the last norm: a positive factor moves no argmax.
    logits = decoder.head((last if samplers[0].greedy else norm(last)) * module.last_norm)
    for sampler, row in zip(samplers, logits.split(1), strict=True):
        sampler.sample(row)
    outs = [None] * len(rows) if last_module else out.split(counts)
    return [
        finalize_committed(state, index, new, output) for state, new, output in zip(states, rows, outs, strict=True)
    ]
