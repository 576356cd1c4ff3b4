"""Draft trees of MTP: module j runs over a tree of depth j - 1, because it depends on all draft tokens before it.

After x_n, module j (from 1) has its columns t <= n - j committed; column n - j + m is fed the m-th draft token. In a
tree that column exists once for every node of depth m: fed the node's token and h^{j-1} of the node's parent, whose
column in module j - 1 is the same one (for m = 1 that column is committed there). So the nodes of depth d are expanded
by module d + 1 over all their ancestors and themselves, each seeing the committed columns and its own path.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from components.drafts.ancestry import Ancestry, ancestor_sets, as_mask
from components.drafts.draft import Branches


@final
class MtpBranches(Branches):
    """See the module docstring. `draft` is an Mtp, `state` its MtpState: both know their fields."""

    def __init__(self, draft: Any, decoder: Any, state: Any, num_roots: int = 1) -> None:
        """Run module 1 over its waiting columns; `roots` [num_roots, N] are the logits after the last num_roots."""
        self.decoder, self.state, self.device = decoder, state, draft.draft_ids.device
        self.ancestry = Ancestry()
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self.row_of: dict[int, int] = {-1: -1}  # node -> its row of `outputs`, of the module that ran last
        self.outputs = torch.empty(0)  # [nodes, H]
        self.roots = self._run_module(0, [], num_roots)
        self.root = self.roots[-1]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """As Branches; every parent must be of the level that was expanded last."""
        first, depth = len(self.parents), self.ancestry.add(parents)
        assert depth < len(self.decoder.modules), "no module drafts this deep"
        self.parents += parents
        self.tokens += tokens.tolist()
        needed = functools.reduce(operator.or_, self.ancestry.sets[first:])
        # Near the start of a text, a module's columns for the first draft tokens would lie before column 0.
        least, depths = depth + 1 - self.state.num_columns, self.ancestry.depths
        nodes = [node for node in range(len(self.parents)) if needed >> node & 1 and depths[node] >= least]
        return self._run_module(depth, nodes, len(parents))

    def _run_module(self, index: int, nodes: list[int], num_logits: int) -> Tensor:
        """Run module j = index + 1 over its waiting columns and over `nodes`; logits of the last `num_logits` rows."""
        state, module, norm = self.state, self.decoder.modules[index], self.decoder.modules[index].block.norm
        is_last, start = index + 1 == len(self.decoder.modules), state.committed[index]
        num_final = max(0, state.num_columns - index) - start
        waiting = torch.cat(state.waiting[index])
        qkv, residual = self._inputs(index, nodes, waiting, num_final)
        num_rows = num_final + len(nodes)
        state.caches[index] = module.block.with_room(state.caches[index], start + num_rows)
        # The final columns are a chain; the first draft tokens follow its end.
        row_of = {-1: num_final - 1} | {node: num_final + row for row, node in enumerate(nodes)}
        parent_rows = [*range(-1, num_final - 1), *(row_of.get(self.parents[node], num_final - 1) for node in nodes)]
        num_skipped = num_rows - num_logits if is_last else 0  # rows that need only keys and values
        if parent_rows == list(range(-1, num_rows - 1)):
            last_only = is_last and num_logits == 1
            out = module.block.run(qkv, residual, state.caches[index], start, last_only)
        else:
            last_final = state.num_columns - 1 - index
            positions = [*range(start, start + num_final), *(last_final + self.ancestry.depths[node] for node in nodes)]
            visible = as_mask(ancestor_sets(parent_rows)[num_skipped:], num_rows)
            out = module.block.run_branches(qkv, residual, state.caches[index], start, positions, visible)
        state.waiting[index] = [waiting[num_final:]] if num_final < waiting.shape[0] else []
        state.committed[index] = start + num_final
        if not is_last:
            state.waiting[index + 1].append(out[:num_final])
            self.outputs = out[num_final:]
            self.row_of = {-1: -1} | {node: row for row, node in enumerate(nodes)}
        return self.decoder.head(norm(out[-num_logits:]) * module.last_norm)

    def _inputs(self, index: int, nodes: list[int], waiting: Tensor, num_final: int) -> tuple[Tensor, Tensor]:
        """(qkv, residual) of the final columns and of the nodes, for `CachedBlock.run`."""
        state, module, norm = self.state, self.decoder.modules[index], self.decoder.modules[index].block.norm
        start = state.committed[index]
        tokens = state.ids[start + index + 1 : start + index + 1 + num_final]
        hidden = waiting[:num_final]
        if nodes:
            tokens = torch.cat((tokens, torch.tensor([self.tokens[node] for node in nodes], device=self.device)))
            # h^{j-1} of the parent; a first draft token reads the first column that is not committed.
            rows = [self.row_of[self.parents[node]] for node in nodes]
            indices = [*range(num_final), *(num_final if row < 0 else waiting.shape[0] + row for row in rows)]
            hidden = torch.cat((waiting, self.outputs)).index_select(0, torch.tensor(indices, device=self.device))
        token_rows = module.token_part(tokens)
        if index == 0 and start == 0:
            token_rows[0] = 0.0  # the embedding at position 0 is zeroed, and enorm(0) = 0
        joined = token_rows + module.hidden_part(norm(hidden))
        return module.qkv(norm(joined)), joined
