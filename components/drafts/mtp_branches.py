"""MTP guesses that branch: module j runs over a tree of depth j - 1, because it rests on all guesses before it.

After x_n, module j (from 1) has its columns t <= n - j committed; column n - j + m is fed the m-th guess. In a tree
that column exists once for every node of depth m: fed the node's token and h^{j-1} of the node's parent, whose column
in module j - 1 is the same one (for m = 1 that column is committed there). So the nodes of depth d are expanded by
module d + 1 over all their ancestors and themselves, each seeing the committed columns and its own path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from components.drafts.branching import Ancestry
from components.drafts.draft import Branches


@final
class MtpBranches(Branches):
    """See the module docstring. `draft` is an Mtp, `state` its MtpState: both know their fields."""

    def __init__(self, draft: Any, decoder: Any, state: Any, num_roots: int = 1) -> None:
        """Runs module 1 over the columns that wait for it; `roots` [num_roots, N] are the guesses after the last."""
        self.draft, self.decoder, self.state = draft, decoder, state
        self.ancestry = Ancestry(draft.draft_ids.device)
        self.parents: list[int] = []
        self.tokens = torch.empty(0, dtype=torch.int64, device=draft.draft_ids.device)
        self.level: list[int] = []  # nodes that the last module has rows for, ascending
        self.outputs = torch.empty(0)  # its output for them, [nodes, H]
        self.num_roots = num_roots
        self.roots = self._run_module(0, [])
        self.root = self.roots[-1]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """See Branches. Every parent must be of the level that was expanded last."""
        first = len(self.parents)
        depth = self.ancestry.add(parents)
        assert depth < len(self.decoder.modules), "no module guesses this deep"
        self.parents += parents
        self.tokens = torch.cat((self.tokens, tokens.to(self.tokens.device)))
        needed = self.ancestry.paths[first:].any(0).nonzero().squeeze(1).tolist()
        # Near the start of a text a module's columns for the first guesses lie before column 0: there are none.
        existing = [node for node in needed if self.state.num_columns - 1 - depth + self.ancestry.depths[node] >= 0]
        return self._run_module(depth, existing)[-len(parents) :]

    def _run_module(self, index: int, nodes: list[int]) -> Tensor:
        """Run module j = index + 1 over its waiting columns and over `nodes`; gives the logits of its last level.

        Without nodes (index 0) these are the logits of its last `num_roots` columns.
        """
        state, module, norm = self.state, self.decoder.modules[index], self.decoder.modules[index].block.norm
        start, device = state.committed[index], self.tokens.device
        num_final = max(0, state.num_columns - index) - start
        waiting = torch.cat(state.waiting[index])
        joined, residual = self._inputs(index, nodes, waiting, num_final)
        rows = num_final + len(nodes)
        state.caches[index] = module.block.with_room(state.caches[index], start + rows)
        positions = torch.arange(start, start + rows, device=device)
        visible = positions.new_ones(rows, start + rows, dtype=torch.bool).tril_(start)
        if nodes:
            depths = torch.tensor([self.ancestry.depths[node] for node in nodes], device=device)
            positions[num_final:] = state.num_columns - 1 - index + depths
            visible[num_final:, start + num_final :] = self.ancestry.paths[nodes][:, nodes]
        out = module.block.run_branches(joined, residual, state.caches[index], start, positions, visible)
        state.waiting[index] = [waiting[num_final:]] if num_final < waiting.shape[0] else []
        state.committed[index] = start + num_final
        if index + 1 < len(self.decoder.modules):
            state.waiting[index + 1].append(out[:num_final])
        self.level, self.outputs = nodes, out[num_final:]
        deepest = [row for row, node in enumerate(nodes) if self.ancestry.depths[node] == index]
        last = self.outputs[deepest] if nodes else out[-self.num_roots :]
        return self.decoder.head(norm(last) * module.last_norm)

    def _inputs(self, index: int, nodes: list[int], waiting: Tensor, num_final: int) -> tuple[Tensor, Tensor]:
        """(qkv, residual) of the final columns and of the nodes: what `CachedBlock.run_branches` takes."""
        state, module, norm = self.state, self.decoder.modules[index], self.decoder.modules[index].block.norm
        start = state.committed[index]
        committed_ids = state.ids[start + index + 1 : start + index + 1 + num_final]
        tokens = torch.cat((committed_ids, self.tokens[nodes]))
        hidden = [waiting[:num_final]]
        row_of = {node: row for row, node in enumerate(self.level)}
        for node in nodes:  # h^{j-1} of the parent; a first guess rests on the first column that is not committed
            parent = self.parents[node]
            own = waiting[num_final : num_final + 1] if parent < 0 else self.outputs[row_of[parent]][None]
            hidden.append(own)
        token_rows = module.token_part(tokens)
        if index == 0 and start == 0:
            token_rows[0] = 0.0  # the embedding at position 0 is zeroed, and enorm(0) = 0
        joined = token_rows + module.hidden_part(norm(torch.cat(hidden)))
        return module.qkv(norm(joined)), joined
