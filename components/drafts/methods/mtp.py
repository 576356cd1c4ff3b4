"""MTP: sequential one-token modules in the layout of DeepSeek-V3 (arXiv:2412.19437, section 2.2).

Module j (from 1) turns h^{j-1}_t and the token x_{t+j} into h^j_t, which drafts x_{t+j+1}:
  h^j_t = Block_j( eh_proj [ enorm(e(x_{t+j})) ; hnorm(h^{j-1}_t) ] )_t      (embedding first; attention causal in t)
  q_{t+j+1} = head( shared_head.norm(h^j_t) ), with the target's own frozen embedding and head.
h^0 is the target's last hidden state, after or before its final norm (`first_hidden`; vLLM feeds DeepSeek's module the
state after it). Module j+1 reads module j's output before shared_head.norm. As in DeepSeek's released
code, the embedding at position 0 is zeroed; that is column 0 of module 1, since module j sits at position t + j - 1.

Every module attends over its own columns, so column t of module j is *committed* once x_{t+j} is, and a proposal after
x_n feeds module j the columns t > n - j with the draft tokens of the modules before it.

Deviations: the block is a Llama block (grouped-query attention, SwiGLU) with the target's head shapes, for latent
attention and mixture-of-experts targets too; losses are soft (losses.py), weighted decay^k, on exactly reachable
columns. While drafting here, the shared head is pruned to the draft vocabulary; training and an engine that loads the
modules use all of it.

Module j's columns are final once their tokens are committed ; the rest depend on draft tokens and are run again in the
next round. For many sequences the new rows of all stand one after the other, ragged as they are: every linear
layer reads its weights once, attention runs per sequence.

Trees: module j runs over a tree of depth j - 1, because it depends on all draft tokens before it. After x_n, module j
(from 1) has its columns t <= n - j committed; column n - j + m is fed the m-th draft token. In a tree that column
exists once for every node of depth m: fed the node's token and h^{j-1} of the node's parent, whose column in module j -
1 is the same one (for m = 1 that column is committed there). So the nodes of depth d are expanded by module d + 1 over
all their ancestors and themselves, each seeing the committed columns and its own path.

Proposals at every column at once equal `propose` at each of them, in a few batched passes. Module j at root t sees its
columns up to t. Those up to t - j + 1 have committed tokens and are the same for all later roots, so one causal pass
gives them. The j - 1 columns after those, t - j + 2 .. t, depend on the root's own draft tokens: row m of that window
is fed draft token m (x_{t+2+m}), and h^{j-1} from module j-1's window, whose columns begin one later (the first one is
committed there). Windows attend to the committed columns before them and, causally, to themselves.

Tensors are named as in DeepSeek-V3. Shapes: T rows or columns, B sequences, S roots (= columns),
w = j - 1 window rows, A heads, G key/value heads, g = A / G, D head size, H hidden size.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from components.drafts.interface import (
    AbstractDraft,
    Batch,
    Branches,
    CommittedPositions,
    EveryPosition,
    Proposal,
    Sampling,
    StepLosses,
)
from components.drafts.methods.batched import BatchedDraft
from components.drafts.methods.mtp_native import MtpNative, TargetHeadDraft
from components.drafts.network.cached_block import CachedBlock, KvCache, TokenTable, last_rows, linear_kernel
from components.drafts.network.layers import (
    AttentionProjections,
    BlockShape,
    CausalMask,
    RmsNorm,
    Rope,
    SwiGlu,
    TargetHead,
    embedded,
    finish_block,
    initialise,
    norm_weight_of,
    run_llama_block,
    shift_left,
)
from components.drafts.network.sampling import Ancestry, DraftSampler, ancestor_sets, as_mask, most_likely_at
from components.drafts.network.training_linear import TrainingLinear
from components.drafts.settings import MtpSettings
from components.targets.forward.linear import Linear, lay_out
from components.targets.interface import AbstractTarget

SCORES_AT_ONCE = 1 << 24
"""Of windows of roots over all columns: 64 MiB in float32, a few times."""


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


def pending_rows(state: MtpState, index: int, draft_rows: list[Tensor], draft_tokens: Sequence[Tensor]) -> PendingRows:
    """The rows that module j = index + 1 runs now, of one sequence.

    draft_rows: at most one tensor, h^{j-1} after draft tokens. draft_tokens: those so far, int64 [1] each.
    """
    start, count = state.committed[index], state.num_columns
    # Near the start, the first draft tokens lie before this module's first token.
    unused = max(0, start + index - count)
    tokens = torch.cat([state.ids[start + index + 1 : count + 1], *draft_tokens[unused:]])
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


def run_module(
    decoder: Decoder,
    states: Sequence[MtpState],
    index: int,
    draft_rows: Sequence[list[Tensor]],
    sampler: DraftSampler,
) -> list[list[Tensor]]:
    """Run module j = index + 1 for B sequences over their columns that are not final, and draft one token for each.

    draft_rows: for each sequence h^{j-1} of the columns that depend on draft tokens; returns the same for h^j.
    """
    module = decoder.modules[index]
    norm, last_module = module.block.norm, index + 1 == len(decoder.modules)
    each = zip(states, draft_rows, sampler.tokens_of_each(), strict=True)
    rows = [pending_rows(state, index, own_rows, own_tokens) for state, own_rows, own_tokens in each]
    starts, counts = [new.start for new in rows], [new.tokens.shape[0] for new in rows]
    joined, caches = project_rows(module, index, rows), [state.caches[index] for state in states]
    out = module.block.run_each(module.qkv(norm(joined)), joined, caches, starts, counts, last_only=last_module)
    last = out if last_module else last_rows(out, counts)
    # A greedy token needs only the weight of the last norm: a positive factor moves no argmax.
    scaled = sampler.scaled or decoder.head.bias is not None  # else a row's size changes no order
    sampler.sample(decoder.head((norm(last) if scaled else last) * module.last_norm))
    outs = [None] * len(rows) if last_module else out.split(counts)
    return [
        finalize_committed(state, index, new, output) for state, new, output in zip(states, rows, outs, strict=True)
    ]


@final
class MtpBranches(Branches):
    """See the module docstring."""

    def __init__(self, decoder: Decoder, state: MtpState, num_roots: int = 1) -> None:
        """Run module 1 over its waiting columns; `roots` [num_roots, N] are the logits after the last num_roots."""
        self.decoder, self.state, self.device = decoder, state, state.ids.device
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
        module.block.with_room(state.caches[index], start + num_rows)
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
        state, module = self.state, self.decoder.modules[index]
        start = state.committed[index]
        tokens = state.ids[start + index + 1 : start + index + 1 + num_final]
        hidden = waiting[:num_final]
        if nodes:
            tokens = torch.cat((tokens, torch.tensor([self.tokens[node] for node in nodes], device=self.device)))
            # h^{j-1} of the parent; a first draft token reads the first column that is not committed.
            rows = [self.row_of[self.parents[node]] for node in nodes]
            indices = [*range(num_final), *(num_final if row < 0 else waiting.shape[0] + row for row in rows)]
            hidden = torch.cat((waiting, self.outputs)).index_select(0, torch.tensor(indices, device=self.device))
        joined = project_rows(module, index, [PendingRows(start, hidden, tokens)])
        return module.qkv(module.block.norm(joined)), joined


@final
class SharedHead(nn.Module):
    """The norm before the LM head; the head itself is the target's."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)


@final
class MtpModule(nn.Module):
    """The tensors of one module, named as in DeepSeek-V3."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.enorm, self.hnorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.eh_proj = TrainingLinear(2 * hidden, hidden)
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = AttentionProjections(shape, hidden)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = SwiGlu(shape)
        self.shared_head = SharedHead(shape)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Embedding first, then the hidden state: [B, T, H] each -> [B, T, H]."""
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1)).float()

    def forward(self, embedded: Tensor, hidden: Tensor, rope: Rope, visible: Tensor | None = None) -> Tensor:
        """All columns at once, causal or masked by `visible`: [B, T, H] each -> [B, T, H]."""
        return run_llama_block(self, self.join(embedded, hidden), rope, visible)


@final
class Mtp(TargetHeadDraft, BatchedDraft[Decoder]):
    """See the module docstring. Trained parameters: model.layers.{n + j}, n = the target's layers, j from 0."""

    method: ClassVar[str] = "mtp"
    packs: ClassVar[bool] = True

    def __init__(self, target: AbstractTarget, settings: MtpSettings, draft_ids: Tensor) -> None:
        super().__init__(target, draft_ids)
        self.settings, self.shape = settings, BlockShape.of(target, settings.intermediate_size)
        self.num_steps = self.max_depth = settings.mtp_modules
        self.head = TargetHead.of(target)
        first = target.shape.num_layers
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(first + j): MtpModule(self.shape) for j in range(self.num_steps)})

    @classmethod
    def build(cls, target: AbstractTarget, settings: MtpSettings, draft_ids: Tensor) -> AbstractDraft:
        """As AbstractDraft; with `start: own` it is an MtpNative."""
        if settings.start == "own":
            return MtpNative.build(target, settings, draft_ids)
        draft = cls(target, settings, draft_ids)
        hidden = draft.shape.hidden_size
        initialise(draft, torch.Generator().manual_seed(settings.init_seed or 0))
        with torch.no_grad():
            for module in draft.mtp_modules:
                # The hidden half of eh_proj starts as the identity: the module starts from the target's state
                # (held-out AL 2.20 against 2.13 after 150 steps on a snapshot of the built-in target).
                module.eh_proj.weight[:, hidden:] += torch.eye(hidden)
                module.shared_head.norm.weight.copy_(norm_weight_of(target))
        return draft.to(target.device)

    @property
    def mtp_modules(self) -> list[MtpModule]:
        """Module 1, 2, ... in order."""
        return list(self.model.layers.values())  # type: ignore[operator]

    def embedded(self, ids: Tensor, j: int, causal: CausalMask) -> Tensor:
        """Embeddings read by module j: e(x_{t+j}) for ids [B, T], zeroed at position 0 (module 1, column 0)."""
        rows = embedded(self.target, shift_left(ids, j))
        if j == 1:
            rows[causal.is_first(len(ids))] = 0.0
        return rows

    def losses(self, batch: Batch) -> StepLosses:
        """As AbstractDraft."""
        self._decoder = None
        return super().losses(batch)

    def states(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """As `teacher_forced`, before the head: [B, R, H]."""
        sequence = torch.arange(len(rows), device=rows.device)[:, None]
        causal = batch.causal
        rope, visible = Rope(self.shape, causal.positions), causal.visible
        hidden = self.initial_hidden(batch.last)
        for j, module in enumerate(self.mtp_modules, start=1):
            hidden = module(self.embedded(batch.ids, j, causal), hidden, rope, visible)
            yield module.shared_head.norm(hidden[sequence, rows])

    @torch.no_grad()
    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As AbstractDraft, at most as deep as there are modules; see the module docstring."""
        num_columns = ids.numel() - 1
        columns = torch.arange(num_columns, device=ids.device)
        rope, causal, roots = Rope(self.shape, columns), CausalMask(ids.numel(), ids.device), columns[first:]
        committed = self.initial_hidden(last[:num_columns])[None]  # h^{j-1} over committed tokens, [1, S, H]
        window = committed.new_zeros(len(roots), 0, committed.shape[-1])  # h^{j-1} of module j-1's window
        steps: list[tuple[Tensor, Tensor]] = []
        for j, module in enumerate(self.mtp_modules[:depth], start=1):
            embedded = self.embedded(ids[None], j, causal)[:, :num_columns]
            joined = module.join(embedded, committed)
            keys, values = module.self_attn.keys_values(module.input_layernorm(joined), rope)
            previous, committed = committed, module(embedded, committed, rope)
            if j == 1:
                steps.append(self.draft_token(module, committed[0, first:]))
                continue
            first_column = roots - (j - 2)
            first_hidden = previous[0, first_column.clamp(min=0)].unsqueeze(
                1
            )  # the column that module j-1 has committed
            window = torch.cat((first_hidden, window), 1)
            tokens = EveryPosition.of_steps(steps).tokens
            at_once = max(1, SCORES_AT_ONCE // (num_columns * (j - 1) * self.shape.num_attention_heads))
            parts = zip(tokens.split(at_once), window.split(at_once), first_column.split(at_once), strict=True)
            window = torch.cat(
                [self._window_pass(module, drafted, of, where, keys[0], values[0]) for drafted, of, where in parts]
            )
            steps.append(self.draft_token(module, window[:, -1]))
        return EveryPosition.of_steps(steps)

    def _window_pass(
        self, module: MtpModule, tokens: Tensor, hidden: Tensor, first_column: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """One module over all windows: tokens [S, w], hidden [S, w, H], committed keys, values [G, S, D]: [S, w, H]."""
        shape, width = self.shape, tokens.shape[1]
        heads = (shape.num_key_value_heads, shape.group)
        columns = first_column[:, None] + torch.arange(width, device=tokens.device)  # negative: no such column
        rope = Rope(shape, columns.clamp(min=0))
        joined = module.join(embedded(self.target, tokens), hidden)
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
        return finish_block(module, joined, mixed.flatten(1, 2))

    def draft_token(self, module: MtpModule, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy draft tokens (target ids) from a module's output [..., H], and their confidence."""
        return most_likely_at(self.head.rows(self.draft_ids), module.shared_head.norm(hidden), self.draft_ids)

    def decoder(self, dtype: torch.dtype, kernel: str) -> Decoder:
        """As BatchedDraft."""
        hidden, modules = self.shape.hidden_size, []
        for module in self.mtp_modules:
            block = CachedBlock(self.shape, module.self_attn, module.post_attention_layernorm, module.mlp, dtype)
            projection, norm = module.eh_proj.weight.detach(), block.norm
            modules.append(
                ModuleDecoder(
                    token_part=TokenTable(self.target.embedding, module.enorm, projection[:, :hidden], dtype),
                    hidden_part=linear_kernel(norm.folded(projection[:, hidden:], module.hnorm).to(dtype)),
                    qkv=linear_kernel(norm.folded(block.qkv_weight, module.input_layernorm).to(dtype)),
                    block=block,
                    last_norm=(module.shared_head.norm.weight.detach() * norm.scale).to(dtype),
                )
            )
        drafted = self.head.rows(self.draft_ids)
        head = linear_kernel(drafted.weight.to(dtype), drafted.bias)
        self.kernel = lay_out([*(linear for module in modules for linear in module.linears), head], kernel)
        return Decoder(modules, head, dtype)

    def empty_state(self, decoder: Decoder, capacity: int) -> MtpState:
        size, modules = capacity + self.max_depth, decoder.modules
        return MtpState(
            ids=torch.zeros(size + 1, dtype=torch.int64, device=self.draft_ids.device),
            caches=[module.block.new_cache(size) for module in modules],
            committed=[0] * len(modules),
            waiting=[[] for _ in modules],
        )

    @torch.inference_mode()
    def propose_batch(
        self,
        states: Sequence[MtpState],
        committed: Sequence[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """As BatchProposer. Modules deeper than `depth` do not run; their inputs wait in the states."""
        decoder, sampler = self.prepared, self.sampler(sampling, rngs)
        for state, new in zip(states, committed, strict=True):
            self.commit(state, new)
        draft_rows: list[list[Tensor]] = [[] for _ in states]
        for index in range(min(depth, self.max_depth)):
            draft_rows = run_module(decoder, states, index, draft_rows, sampler)
            if sampler.ended:
                break
        return sampler.proposals()

    @torch.inference_mode()
    def begin(self, state: MtpState, committed: CommittedPositions, depth: int) -> MtpBranches:
        decoder = self.prepared
        self.commit(state, committed)
        return MtpBranches(decoder, state)

    def commit(self, state: MtpState, committed: CommittedPositions) -> None:
        """Store newly committed positions; they wait for module 1."""
        start = state.num_columns
        state.num_columns = start + committed.next_tokens.shape[0]
        state.ids[start + 1 : state.num_columns + 1] = committed.next_tokens
        state.waiting[0].append(self.initial_hidden(committed.last).to(self.prepared.dtype))
