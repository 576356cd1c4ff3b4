"""A small language model as the drafter: vanilla speculative decoding (Leviathan et al. 2023, arXiv:2211.17192; Chen et
al. 2023, arXiv:2302.01318).

The draft model reads tokens alone, no features of the target, with its own embedding, layers, head and KV cache. It is
either *trained* here on the target's answers, a Llama of a few layers with the target's tokenizer, by the distances of
losses.py (soft cross-entropy by default, which is DistillSpec's forward KL, Zhou et al. 2024, arXiv:2310.08461, on the
target's own text), or *given*: a pretrained causal LM of the same tokenizer, used as it is.

Either way it decodes as an AbstractTarget does: our forward pass where it applies, over a cache of its own. Column t
reads x_{t+1}; after n columns the cache holds x_1..x_n, draft tokens are appended and dropped. A Proposer never sees
x_0; a given model whose tokenizer starts texts with a BOS token is fed that one instead, which is the same token
wherever the prompt starts with BOS, too.

Deviation: when trained here, embedding and LM head start as the target's where the width is the same, and the LM head
covers the draft vocabulary only.

A given model is located, checked against the target's tokenizer and referenced by digests. Rejection sampling compares
probabilities token by token, so every id must mean the same to both models: the whole vocabularies are compared, not
their sizes. Models may pad their vocabularies differently; ids that only one of them has are never drafted.

Tensors of a trained one bear their Hugging Face names, so the weights are a Llama checkpoint less its config.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from components.contract import Target, UserError
from components.drafts.interface import (
    AbstractDraft,
    Batch,
    Branches,
    CommittedPositions,
    EveryPosition,
    Proposal,
    Sampling,
    StepLosses,
    UntrainedRecord,
)
from components.drafts.methods.training_time_test import attend
from components.drafts.network.layers import (
    BlockShape,
    CausalMask,
    LlamaLayer,
    RmsNorm,
    Rope,
    Sight,
    finish_block,
    head_rows,
    initialise,
    shift_left,
)
from components.drafts.network.sampling import Ancestry, DraftSampler, most_likely, most_likely_at
from components.drafts.settings import DraftModelSettings
from components.drafts.training.losses import StepLossAccumulator, Teacher, row_loss, teacher_at_target_columns
from components.targets.forward.llama import FastTarget
from components.targets.interface import AbstractCache, AbstractTarget, TreeRows
from components.targets.load import open_target, open_tokenizer
from components.targets.source import find_folder, load_target_fingerprint
from components.tensor_files import headers_in

MAX_DEPTH = 16  # any chain length would work; this bounds cost and cache
MAX_NODES = 256  # draft tokens of one tree


@final
class LlamaStack(nn.Module):
    """The tensors of `model.*`."""

    def __init__(self, shape: BlockShape, num_layers: int, vocab_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(num_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, tokens: Tensor, causal: CausalMask) -> Tensor:
        """Tokens int64 [B, T] and the mask of their columns -> normed hidden states [B, T, H]."""
        hidden = self.embed_tokens(tokens).float()
        rope, visible = Rope(self.shape, causal.positions), causal.visible
        for layer in self.layers:
            hidden = layer(hidden, rope, visible)
        return self.norm(hidden)


@final
class Chains:
    """Step 0 reads every column; step k then reads, for each column t from `first` on, draft token k of the chain that
    begins there.

    The mask is [causal | I | I | ...] in every layer, as in training_time_test.py. S columns of one sequence.
    """

    def __init__(self, stack: LlamaStack, first: int = 0) -> None:
        self.stack, self.first = stack, first
        self.columns = torch.empty(0)
        self.keys_values: list[
            list[tuple[Tensor, Tensor]]
        ] = []  # for each step and layer: keys and values [1, G, S, D]

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token a column, int64 [1, S], then one a chain, [1, R]; returns normed hidden states [1, R, H]."""
        shape, number = self.stack.shape, len(self.keys_values)
        if not number:
            self.columns = torch.arange(tokens.shape[1], device=tokens.device)
        rows = self.columns[self.first :] if number else self.columns
        rope = Rope(shape, rows + number)
        sight = Sight(CausalMask(len(self.columns), rows.device), rows[None])
        hidden, keys_values = self.stack.embed_tokens(tokens).float(), []
        for index, layer in enumerate(self.stack.layers):
            assert isinstance(layer, LlamaLayer)
            normed = layer.input_layernorm(hidden)
            keys_values.append(layer.self_attn.keys_values(normed, rope))
            steps = [*(step_cache[index] for step_cache in self.keys_values), keys_values[-1]]
            queries = layer.self_attn.queries(normed, rope)
            hidden = finish_block(layer, hidden, attend(shape, queries, *steps[0], sight, steps[1:]))
        self.keys_values.append(keys_values)
        return self.stack.norm(hidden if number else hidden[:, self.first :])


def narrower(shape: BlockShape, hidden_size: int, intermediate_size: int) -> BlockShape:
    """Scale a block to another width, with the same head size and about the same proportions.

    hidden_size: a multiple of the head size. intermediate_size: 0 keeps the proportion.
    """
    heads = hidden_size // shape.head_dim
    group = max(divisor for divisor in range(1, shape.group + 1) if heads % divisor == 0)
    return BlockShape(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or shape.intermediate_size * hidden_size // shape.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=heads // group,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
    )


def resolve_model(target: Target, settings: DraftModelSettings) -> DraftModelSettings:
    """Check a given model and fill its files' digests and its first token into the settings.

    Raises:
        UserError: no such model, or its tokenizer is not the target's.
    """
    model = settings.model
    folder = find_folder(model)
    draft_tokenizer, target_tokenizer = open_tokenizer(folder), open_tokenizer(target)
    reason = vocabulary_difference(draft_tokenizer.get_vocab(), target_tokenizer.get_vocab())
    if reason := reason or _tokenization_difference(draft_tokenizer, target_tokenizer):
        raise UserError(
            f"draft-model: {model} does not share the target's tokenizer ({reason}); take one of its family"
        )
    first_ids = draft_tokenizer("").input_ids
    first_token = int(first_ids[0]) if first_ids and first_ids[0] == draft_tokenizer.bos_token_id else None
    return settings.model_copy(
        update={
            "model": model if "/" in model and not Path(model).exists() else str(folder),
            "model_files": load_target_fingerprint({"model": str(folder)}),
            "first_token": settings.first_token if settings.first_token is not None else first_token,
        }
    )


def num_parameters_of(settings: DraftModelSettings) -> int:
    """Numbers in the given model's weights, from the headers of its files."""
    folder = find_folder(settings.model)
    headers = headers_in(folder, settings.model)
    return sum(math.prod(entry["shape"]) for _, header in headers for entry in header.values())


def vocabulary_difference(drafts: Mapping[str, int], targets: Mapping[str, int]) -> str:
    """Describe the first difference of two vocabularies (token -> id); "" where every target token agrees."""
    for token, token_id in sorted(targets.items(), key=lambda item: item[1]):
        if drafts.get(token) != token_id:
            return f"token {token!r} is {token_id} for the target and {drafts.get(token, 'absent')} for the draft model"
    extra_tokens = sorted(drafts.keys() - targets.keys())
    return f"token {extra_tokens[0]!r} is unknown to the target" if extra_tokens else ""


def _tokenization_difference(draft_tokenizer: Any, target_tokenizer: Any) -> str:
    """Describe a difference in tokenizing a sample: equal vocabularies may have other merges; "" where equal."""
    text = "def add(a, b):\n    return a + b  # Grüße, 你好 1234\n"
    ids = [tokenizer(text, add_special_tokens=False).input_ids for tokenizer in (draft_tokenizer, target_tokenizer)]
    return "" if ids[0] == ids[1] else f"{text.strip()!r} is cut otherwise"


def open_model(
    settings: DraftModelSettings, device: str, dtype: Literal["float32", "bfloat16"], kernel: str
) -> AbstractTarget:
    """The given model, ready to decode on `kernel` (see open_target).

    Raises UserError when its files have changed since the draft was made.
    """
    folder = find_folder(settings.model)
    digests = load_target_fingerprint({"model": str(folder)})
    if settings.model_files and digests != settings.model_files:
        changed = sorted(
            name for name in {*digests, *settings.model_files} if digests.get(name) != settings.model_files.get(name)
        )
        raise UserError(
            f"{settings.model}: {changed[0]} changed since the draft was made; run drafts.train_draft again"
        )
    return open_target(folder, device=device, dtype=dtype, kernel=kernel, tapped=False)


@dataclass
class DraftModelState:
    """The draft model's cache: `start` rows before the first column (BOS or none), then the committed positions."""

    cache: AbstractCache
    start: int
    num_columns: int = 0


@final
class DraftModel(AbstractDraft):
    """See the module docstring. Trained parameters: model.*, lm_head; none where the model is given."""

    method: ClassVar[str] = "draft-model"
    packs: ClassVar[bool] = True
    needs_features: ClassVar[bool] = False

    def __init__(self, target: AbstractTarget, settings: DraftModelSettings, draft_ids: Tensor) -> None:
        super().__init__(target, draft_ids)
        self.settings, self.num_steps, self.max_depth = settings, settings.chain_depth, MAX_DEPTH
        self._decoder: AbstractTarget | None = None
        if settings.model:
            return
        shape = BlockShape.of(target, settings.intermediate_size)
        width = settings.hidden_size or shape.hidden_size
        if width != shape.hidden_size:
            if width % shape.head_dim:
                raise UserError(f"draft-model: hidden_size {width} is no multiple of the head size {shape.head_dim}")
            shape = narrower(shape, width, settings.intermediate_size)
        self.shape = shape
        self.model = LlamaStack(shape, settings.num_layers, target.shape.vocab_size)
        self.lm_head = nn.Linear(shape.hidden_size, draft_ids.numel(), bias=False)

    @classmethod
    def build(cls, target: AbstractTarget, settings: DraftModelSettings, draft_ids: Tensor) -> DraftModel:
        """As AbstractDraft. With `model`, all ids of both models can be drafted."""
        draft = cls(target, settings, draft_ids.to(target.device))
        if settings.model:
            return draft
        generator = torch.Generator().manual_seed(settings.init_seed or 0)
        initialise(draft, generator)
        with torch.no_grad():
            if draft.shape.hidden_size == target.shape.hidden_size:
                draft.model.embed_tokens.weight.copy_(target.embedding)
                draft.lm_head.weight.copy_(head_rows(target, draft_ids))
            else:
                draft.model.embed_tokens.weight.normal_(0.0, 1.0, generator=generator)
        return draft.to(target.device)

    @classmethod
    def untrained_record(cls, target: Target, settings: DraftModelSettings) -> UntrainedRecord:
        """The entries of a given model."""
        resolved = resolve_model(target, settings)
        return UntrainedRecord(resolved, resolved.chain_depth, MAX_DEPTH, num_parameters_of(resolved))

    @property
    def token_tables(self) -> frozenset[str]:
        return frozenset({"lm_head.weight", "model.embed_tokens.weight"})

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: every column drafts once; step k of a chain is the draft token k columns later."""
        self._decoder = None
        teacher = teacher_at_target_columns(self.target, batch, self.draft_ids)
        accumulator = StepLossAccumulator(batch, teacher, self.num_steps, self.settings.normaliser)
        rows = accumulator.roots.rows
        sequence = torch.arange(len(rows), device=rows.device)[:, None]
        logits = self._logits(self.model(shift_left(batch.ids, 1), batch.causal)[sequence, rows])
        losses = row_loss(self.settings.loss, logits, teacher.at(accumulator.target_columns()))
        # The row of each column: where M_k allows root t, column t + k is a root itself.
        row_of_column = (accumulator.reachable_at_step[0].long().cumsum(1) - 1).clamp(min=0)
        for k in range(self.num_steps):
            row = row_of_column.gather(1, (rows + k).clamp(max=batch.ids.shape[1] - 1))
            accumulator.add(logits.detach()[sequence, row], partial(_precomputed, losses.gather(1, row)))
        return accumulator.result(self.settings.step_decay)

    def teacher_forced(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """Logits [B, R, N] of steps 0, 1, ... from columns rows [B, R], each fed the true x_{t+1+k}."""
        sequence = torch.arange(len(rows), device=rows.device)[:, None]
        hidden = self.model(shift_left(batch.ids, 1), batch.causal)
        for k in range(self.num_steps):
            yield self._logits(hidden[sequence, (rows + k).clamp(max=batch.ids.shape[1] - 1)])

    def _logits(self, normed: Tensor) -> Tensor:
        """Normed hidden states [..., H] -> draft-vocabulary logits [..., N]."""
        return F.linear(normed, self.lm_head.weight)

    @torch.no_grad()
    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As AbstractDraft."""
        if self.settings.model:
            return self._propose_one_by_one(ids, depth, first)
        chains, tokens, steps = Chains(self.model, first), ids[None, 1:], []
        for _ in range(depth):
            tokens, confidence = most_likely_at(self._logits, chains.step(tokens), self.draft_ids)
            steps.append((tokens[0], confidence[0]))
        return EveryPosition.of_steps(steps)

    def _propose_one_by_one(self, ids: Tensor, depth: int, first: int) -> EveryPosition:
        """Propose column by column, for a given model, whose layers are not ours."""
        state, empty, columns = self.new_state(ids.numel()), torch.empty(0), []
        for column, token in enumerate(ids[1:].split(1)):
            logits, steps = self._commit(state, CommittedPositions(token, empty, empty)), list[tuple[Tensor, Tensor]]()
            if column < first:
                continue
            for k in range(depth):
                if k > 0:
                    logits = self._pass(steps[-1][0], state.cache)
                steps.append(most_likely(logits, self.draft_ids))
            _drop_draft_tokens(state)
            columns.append(EveryPosition.of_steps(steps))
        tokens, confidence = zip(*columns, strict=True)
        return EveryPosition(torch.cat(tokens), torch.cat(confidence))

    def prepare_decoding(self, dtype: torch.dtype = torch.float32, kernel: str = "auto") -> None:
        """Lay the weights out for decoding in `dtype`; training afterwards makes the layout stale and drops it."""
        if self.settings.model:
            name = "bfloat16" if dtype == torch.bfloat16 else "float32"
            self._decoder = open_model(self.settings, str(self.draft_ids.device), name, kernel)  # type: ignore[arg-type]
            self.kernel = self._decoder.kernel
            self.draft_ids = self.draft_ids[: self._decoder.shape.vocab_size]
            return
        weights = {name: weight.detach() for name, weight in self.state_dict().items()}
        shape = replace(
            self.target.shape,
            architecture="LlamaForCausalLM",
            model_type="llama",
            num_layers=self.settings.num_layers,
            hidden_size=self.shape.hidden_size,
            intermediate_size=self.shape.intermediate_size,
            num_attention_heads=self.shape.num_attention_heads,
            num_key_value_heads=self.shape.num_key_value_heads,
            head_dim=self.shape.head_dim,
        )
        config = _llama_config(self.shape, shape.num_layers, shape.vocab_size)
        device = self.draft_ids.device
        self._decoder = FastTarget(
            config, shape, weights.__getitem__, device=device, dtype=dtype, kernel=kernel, has_lm_head=True
        )
        self.kernel = self._decoder.kernel

    def new_state(self, capacity: int) -> DraftModelState:
        """State for one sequence of at most `capacity` tokens."""
        if self._decoder is None:
            self.prepare_decoding()
        decoder = self._decoder
        assert decoder is not None
        cache = decoder.new_cache(1, capacity + 1 + MAX_NODES)
        if self.settings.first_token is None:
            return DraftModelState(cache, 0)
        decoder.forward(torch.tensor([[self.settings.first_token]]), cache, logits="none")
        return DraftModelState(cache, 1)

    @torch.inference_mode()
    def propose(
        self,
        state: DraftModelState,
        committed: CommittedPositions,
        depth: int,
        sampling: Sampling,
        rng: torch.Generator,
    ) -> Proposal:
        """As Proposer: the pass over the new positions drafts the first token, then one pass per draft token."""
        sampler = DraftSampler(self.draft_ids, self.target.shape.vocab_size, sampling, [rng])
        logits = self._commit(state, committed)
        for k in range(min(depth, self.max_depth)):
            if k > 0:
                logits = self._pass(sampler.tokens[-1], state.cache)
            sampler.sample(logits)
            if sampler.ended:
                break
        _drop_draft_tokens(state)
        return sampler.proposals()[0]

    @torch.inference_mode()
    def begin(self, state: DraftModelState, committed: CommittedPositions, depth: int) -> LmBranches:
        return LmBranches(self, state, self._commit(state, committed)[0])

    def _commit(self, state: DraftModelState, committed: CommittedPositions) -> Tensor:
        """Commit new positions; logits [1, N] of the next draft token."""
        state.num_columns += committed.next_tokens.shape[0]
        return self._pass(committed.next_tokens, state.cache)

    def _pass(self, tokens: Tensor, cache: AbstractCache) -> Tensor:
        """Run tokens [T]; logits [1, N] after the last."""
        assert self._decoder is not None, "call new_state first"
        logits = self._decoder.forward(tokens[None], cache, logits="last").logits
        assert logits is not None
        return logits[0, :, : self.draft_ids.numel()]

    def forward_tree(self, tree: TreeRows, tokens: Tensor, cache: AbstractCache) -> Tensor:
        """Run M tree nodes; logits [M, N] after each. The cache then holds them after its columns."""
        assert self._decoder is not None, "call new_state first"
        logits = self._decoder.forward(tokens[None], cache, tree=tree).logits
        assert logits is not None
        return logits[0, :, : self.draft_ids.numel()]


@final
class LmBranches(Branches):
    """Draft trees of a draft model. Each level reruns all nodes so far: they are few, and it takes one pass."""

    def __init__(self, draft: DraftModel, state: DraftModelState, root: Tensor) -> None:
        """root: [N]."""
        self.draft, self.state, self.root = draft, state, root
        self.ancestry = Ancestry()
        self.tokens = torch.empty(0, dtype=torch.int64)

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        self.ancestry.add(parents)
        self.tokens = torch.cat((self.tokens, tokens.to(self.tokens)))
        assert len(self.tokens) <= MAX_NODES, f"a tree has at most {MAX_NODES} nodes"
        # Node d follows x_n, the last column, so its position is d - 1 past the cached columns.
        depths = torch.tensor([self.ancestry.depths]) - 1
        logits = self.draft.forward_tree(TreeRows(depths, self.ancestry.visible()[None]), self.tokens, self.state.cache)
        _drop_draft_tokens(self.state)
        return logits[-len(parents) :]


def _precomputed(losses: Tensor, _logits: Tensor, _teacher: Teacher) -> Tensor:
    """The loss callback of StepLossAccumulator.add for losses that are already computed."""
    return losses


def _drop_draft_tokens(state: DraftModelState) -> None:
    """Drop the draft tokens after the committed positions."""
    state.cache.truncate(torch.tensor([state.start + state.num_columns]))


def _llama_config(shape: BlockShape, num_layers: int, vocab_size: int) -> Any:
    """The transformers configuration of a trained draft model."""

    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=False,
    )
