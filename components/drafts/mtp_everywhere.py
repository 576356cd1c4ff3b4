"""MTP proposals at every column at once, equal to `propose` at each of them, in a few batched passes.

Module j at root t sees its columns up to t. Those up to t - j + 1 have committed tokens and are the same for all later
roots, so one causal pass gives them. The j - 1 columns after those, t - j + 2 .. t, depend on the root's own draft
tokens: row m of that window is fed draft token m (x_{t+2+m}), and h^{j-1} from module j-1's window, whose columns begin
one later (the first one is committed there). Windows attend to the committed columns before them and, causally, to
themselves.

Shapes: S roots (= columns), w = j - 1 window rows, A heads, G key/value heads, g = A / G, D head size, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from components.drafts.layers import Rope


def propose_at_every_position(draft: Any, ids: Tensor, last: Tensor, depth: int) -> Tensor:
    """ids: int64 [T]; last: [T, H] before the final norm. Returns int64 [T-1, min(depth, modules)]."""
    num_roots = ids.numel() - 1
    columns = torch.arange(num_roots, device=ids.device)
    rope = Rope(draft.shape, columns)
    batch_ids = ids[None]
    committed = draft.initial_hidden(last[:num_roots]).float()[None]  # h^{j-1} over committed tokens, [1, S, H]
    window = committed.new_zeros(num_roots, 0, committed.shape[-1])  # h^{j-1} of module j-1's window
    draft_tokens: list[Tensor] = []
    for j, module in enumerate(draft.mtp_modules[:depth], start=1):
        embedded = draft.embedded(batch_ids, j)[:, :num_roots]
        joined = module.join(embedded, committed)
        keys, values = module.self_attn.keys_values(module.input_layernorm(joined), rope)
        previous, committed = committed, module(embedded, committed, rope)
        if j == 1:
            draft_tokens.append(draft.draft_token(module, committed[0]))
            continue
        first_column = columns - (j - 2)
        first_hidden = previous[0, first_column.clamp(min=0)].unsqueeze(1)  # the column that module j-1 has committed
        window = torch.cat((first_hidden, window), 1)
        window = _window_pass(draft, module, torch.stack(draft_tokens, 1), window, first_column, keys[0], values[0])
        draft_tokens.append(draft.draft_token(module, window[:, -1]))
    return torch.stack(draft_tokens, 1)


def _window_pass(
    draft: Any, module: Any, tokens: Tensor, hidden: Tensor, first_column: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """One module over all windows: tokens [S, w], hidden [S, w, H], committed keys, values [G, S, D] -> [S, w, H]."""
    shape, width = draft.shape, tokens.shape[1]
    heads = (shape.num_key_value_heads, shape.group)
    columns = first_column[:, None] + torch.arange(width, device=tokens.device)  # negative: no such column
    rope = Rope(shape, columns.clamp(min=0))
    joined = module.join(draft.embed(tokens), hidden)
    normed = module.input_layernorm(joined)
    queries = module.self_attn.queries(normed, rope).unflatten(1, heads) * shape.head_dim**-0.5  # [S, G, g, w, D]
    window_keys, window_values = module.self_attn.keys_values(normed, rope)  # [S, G, w, D]

    committed_columns = torch.arange(keys.shape[1], device=tokens.device)
    scores = torch.einsum("sgawd,gtd->sgawt", queries, keys)
    scores = scores.masked_fill((committed_columns >= first_column[:, None])[:, None, None, None], float("-inf"))
    window_scores = torch.einsum("sgawd,sgvd->sgawv", queries, window_keys)
    causal = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
    # A row always sees itself, so that rows before column 0, which are never read, stay finite.
    visible = causal & ((columns >= 0)[:, None, :] | torch.eye(width, dtype=torch.bool, device=tokens.device))
    window_scores = window_scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = torch.cat((scores, window_scores), -1).softmax(-1)
    mixed = torch.einsum("sgawt,gtd->sgawd", weights[..., : keys.shape[1]], values)
    mixed = mixed + torch.einsum("sgawv,sgvd->sgawd", weights[..., keys.shape[1] :], window_values)
    return module.finish(joined, mixed.flatten(1, 2))
