"""A small language model as the drafter: vanilla speculative decoding (Leviathan et al. 2023, arXiv:2211.17192; Chen et
al. 2023, arXiv:2302.01318).

The draft model reads tokens alone, nothing of the target, and goes on where the text ends: its own embedding, layers,
head and KV cache. It is either *trained* here on the target's answers, a Llama of a few layers with the target's
tokenizer, by the distances of row_losses.py (soft cross-entropy by default, which is DistillSpec's forward KL, Zhou et
al. 2024, arXiv:2310.08461, on the target's own text), or *given*: any causal LM of the same tokenizer, used as it is.

Either way it decodes as an AbstractTarget does: our forward pass where it applies, over a cache of its own. Column t
reads x_{t+1}; after n columns the cache holds x_1..x_n, guesses are appended and forgotten. A Proposer is never shown
x_0; a given model whose tokenizer begins texts with a token of its own (BOS) is fed that one instead, which is the same
wherever the prompt begins so, too.

Deviation: when trained here, embedding and LM head start as the target's where the width is the same, and the LM head
covers the draft vocabulary only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.contract import Target, UserError
from components.drafts.ancestry import Ancestry
from components.drafts.draft import AbstractDraft, Batch, Branches, Columns, Proposal, Sampling, StepLosses
from components.drafts.frozen import head_rows
from components.drafts.layers import BlockShape, initialise
from components.drafts.losses import StepJudge, judged_teacher
from components.drafts.masks import shift_left
from components.drafts.row_losses import Teacher, row_loss
from components.drafts.sampling import Guesses
from components.drafts.settings import DraftModelSettings
from components.drafts.small_lm import Chains, LlamaStack, narrower
from components.targets.fast import FastTarget
from components.targets.model import AbstractCache, AbstractTarget, TreeRows

MAX_DEPTH = 16  # a chain may be as long as one likes; this is where cost and cache are bounded
MAX_NODES = 256  # guesses of one tree


@dataclass
class DraftModelState:
    """The draft model's cache: `start` rows before the first column (a BOS or none), then the committed columns."""

    cache: AbstractCache
    start: int
    num_columns: int = 0


@final
class DraftModel(AbstractDraft):
    """See the module docstring. Trained parameters: model.*, lm_head; none where the model is given."""

    method: ClassVar[str] = "draft-model"
    packs: ClassVar[bool] = True
    needs_features: ClassVar[bool] = False

    def __init__(self, target: Any, settings: DraftModelSettings, draft_ids: Tensor) -> None:
        super().__init__()
        self.settings, self.num_steps, self.max_depth = settings, settings.chain_depth, MAX_DEPTH
        self._target = (target,)  # in a tuple, so that nothing of the target becomes a parameter of the drafter
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self._decoder: AbstractTarget | None = None
        if settings.model:
            return
        shape = BlockShape.of(target, settings.intermediate_size)
        wanted = settings.hidden_size or shape.hidden_size
        if wanted != shape.hidden_size:
            if wanted % shape.head_dim:
                raise UserError(f"draft-model: hidden_size {wanted} is no multiple of the head size {shape.head_dim}")
            shape = narrower(shape, wanted, settings.intermediate_size)
        self.shape = shape
        self.model = LlamaStack(shape, settings.num_layers, target.shape.vocab_size)
        self.lm_head = nn.Linear(shape.hidden_size, draft_ids.numel(), bias=False)

    @classmethod
    def build(cls, target: Any, settings: dict[str, Any], draft_ids: Tensor) -> DraftModel:
        """A new drafter for an AbstractTarget; draft_ids [N] are the target ids of its draft vocabulary, ascending.

        settings: DraftModelSettings. With `model` given, every id that both models have can be guessed.
        """
        chosen = DraftModelSettings.model_validate(settings)
        draft = cls(target, chosen, draft_ids.to(target.device))
        if chosen.model:
            return draft
        generator = torch.Generator().manual_seed(chosen.init_seed or 0)
        initialise(draft, generator)
        with torch.no_grad():
            if draft.shape.hidden_size == target.shape.hidden_size:
                draft.model.embed_tokens.weight.copy_(target.embedding)
                draft.lm_head.weight.copy_(head_rows(target, draft_ids))
            else:
                draft.model.embed_tokens.weight.normal_(0.0, 1.0, generator=generator)
        return draft.to(target.device)

    @classmethod
    def written_down(cls, target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What draft.json says of a given model: settings, num_steps, max_depth, num_parameters."""
        from components.drafts.given_model import checked_model, num_parameters_of

        found = checked_model(target, DraftModelSettings.model_validate(dict(settings)))
        depths = {"num_steps": found.chain_depth, "max_depth": MAX_DEPTH}
        return {"settings": found.model_dump(mode="json"), **depths, "num_parameters": num_parameters_of(found)}

    @property
    def token_tables(self) -> frozenset[str]:
        """See AbstractDraft."""
        return frozenset({"lm_head.weight", "model.embed_tokens.weight"})

    @property
    def target(self) -> Any:
        """The AbstractTarget this drafter serves."""
        return self._target[0]

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: every column guesses once; step k of a chain is the guess k columns on."""
        self._decoder = None
        teacher = judged_teacher(self.target, batch, self.draft_ids)
        judge = StepJudge(batch, teacher, self.num_steps, self.settings.normaliser)
        rows = judge.roots.rows
        sequence = torch.arange(len(rows), device=rows.device)[:, None]
        logits = self._logits(self.model(shift_left(batch.ids, 1), batch.causal)[sequence, rows])
        losses = row_loss(self.settings.loss, logits, teacher.at(judge.judged()))
        # Where a column stands among the rows: where M_k allows t, column t + k is a root of its own.
        places = (judge.reached[0].long().cumsum(1) - 1).clamp(min=0)
        for k in range(self.num_steps):
            place = places.gather(1, (rows + k).clamp(max=batch.ids.shape[1] - 1))
            judge.add(logits.detach()[sequence, place], partial(_looked_up, losses.gather(1, place)))
        return judge.result(self.settings.step_decay)

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
    def draft_everywhere(self, ids: Tensor, taps: Tensor, last: Tensor, depth: int) -> Tensor:
        """Greedy proposals from every column at once, each fed its own guesses: [T] ids -> int64 [T-1, depth]."""
        if self.settings.model:
            return self._proposed_everywhere(ids, depth)
        chains, tokens, guesses = Chains(self.model), ids[None, 1:], []
        for _ in range(depth):
            tokens = self.draft_ids[self._logits(chains.step(tokens)).argmax(-1)]
            guesses.append(tokens[0])
        return torch.stack(guesses, 1)

    def _proposed_everywhere(self, ids: Tensor, depth: int) -> Tensor:
        """The same column by column, for a model whose layers are not ours."""
        state, nothing, rows = self.new_state(ids.numel()), torch.empty(0), []
        for token in ids[1:].split(1):
            columns = Columns(token, nothing, nothing)
            rows.append(self.propose(state, columns, depth, Sampling(), torch.Generator()).tokens)
        return torch.stack(rows)

    def prepare_decoding(self, dtype: torch.dtype = torch.float32, kernel: str = "auto") -> None:
        """Lay the weights out for decoding in `dtype`; training afterwards makes the layout stale and drops it."""
        if self.settings.model:
            from components.drafts.given_model import open_model

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
        self, state: DraftModelState, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """See Proposer. The last new column makes the first guess, then one pass a guess."""
        guesses = Guesses(self.draft_ids, self.target.shape.vocab_size, sampling, rng)
        logits = self._take_in(state, columns)
        for k in range(min(depth, self.max_depth)):
            if k > 0:
                logits = self._pass(guesses.tokens[-1], state.cache)
            guesses.pick(logits)
        _forget(state)
        return guesses.proposal()

    @torch.inference_mode()
    def begin(self, state: DraftModelState, columns: Columns, depth: int) -> LmBranches:
        """See TreeProposer."""
        return LmBranches(self, state, self._take_in(state, columns)[0])

    def _take_in(self, state: DraftModelState, columns: Columns) -> Tensor:
        """Commit the columns; logits [1, N] of the next guess."""
        state.num_columns += columns.next_tokens.shape[0]
        return self._pass(columns.next_tokens, state.cache)

    def _pass(self, tokens: Tensor, cache: AbstractCache) -> Tensor:
        """Logits [1, N] after tokens [T]."""
        assert self._decoder is not None, "call new_state first"
        logits = self._decoder.forward(tokens[None], cache, logits="last").logits
        assert logits is not None
        return logits[0, :, : self.draft_ids.numel()]

    def pass_over(self, tree: TreeRows, tokens: Tensor, cache: AbstractCache) -> Tensor:
        """Logits [M, N] after each of M nodes; the cache then holds them behind its columns."""
        assert self._decoder is not None, "call new_state first"
        logits = self._decoder.forward(tokens[None], cache, tree=tree).logits
        assert logits is not None
        return logits[0, :, : self.draft_ids.numel()]


@final
class LmBranches(Branches):
    """Guesses of a draft model that branch. A level runs all nodes so far again: they are few, and one pass does it."""

    def __init__(self, draft: DraftModel, state: DraftModelState, root: Tensor) -> None:
        """root: [N]."""
        self.draft, self.state, self.root = draft, state, root
        self.ancestry = Ancestry()
        self.tokens = torch.empty(0, dtype=torch.int64)

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """See Branches."""
        self.ancestry.add(parents)
        self.tokens = torch.cat((self.tokens, tokens.to(self.tokens)))
        assert len(self.tokens) <= MAX_NODES, "a tree of so many guesses was not planned for"
        # Node d follows x_n, the last column, so it stands d - 1 positions behind the cache.
        depths = torch.tensor([self.ancestry.depths]) - 1
        logits = self.draft.pass_over(TreeRows(depths, self.ancestry.visible()[None]), self.tokens, self.state.cache)
        _forget(self.state)
        return logits[-len(parents) :]


def _looked_up(losses: Tensor, _said: Tensor, _wanted: Teacher) -> Tensor:
    """Losses that are known already, as StepJudge asks for them."""
    return losses


def _forget(state: DraftModelState) -> None:
    """Drop the guesses behind the committed columns."""
    state.cache.truncate(torch.tensor([state.start + state.num_columns]))


def _llama_config(shape: BlockShape, num_layers: int, vocab_size: int) -> Any:
    """The transformers configuration of a trained draft model."""
    from transformers import LlamaConfig

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
