"""MTP: sequential one-token modules in the layout of DeepSeek-V3 (arXiv:2412.19437, section 2.2).

Module j (from 1) turns h^{j-1}_t and the token x_{t+j} into h^j_t, which guesses x_{t+j+1}:
  h^j_t = Block_j( eh_proj [ enorm(e(x_{t+j})) ; hnorm(h^{j-1}_t) ] )_t      (embedding first; attention causal in t)
  q_{t+j+1} = head( shared_head.norm(h^j_t) ), with the target's own frozen embedding and head.
h^0 is the target's last hidden state, after or before its final norm (`first_hidden`; vLLM feeds DeepSeek's module the
state after it). What module j hands to module j+1 is its output before shared_head.norm. As in DeepSeek's released
code, the embedding at position 0 is zeroed; that is column 0 of module 1, since module j sits at position t + j - 1.

Every module attends over its own columns, so column t of module j is *committed* once x_{t+j} is, and a proposal after
x_n feeds module j the columns t > n - j with the guesses of the modules before it.

Deviations: the block is a Llama block (grouped-query attention, SwiGLU) with the target's head shapes, for latent
attention and mixture-of-experts targets too; losses are soft (losses.py), weighted decay^k, on exactly reachable
columns. While drafting here, the shared head is pruned to the draft vocabulary; training and an engine that loads the
modules use all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.drafts.cached_block import CachedBlock, TokenTable, linear_kernel
from components.drafts.causal_mask import CausalMask
from components.drafts.draft import AbstractDraft, Batch, Columns, Proposal, Sampling, StepLosses
from components.drafts.frozen import head_rows, norm_weight_of
from components.drafts.layers import BlockShape, Rope, initialise
from components.drafts.losses import Normaliser, judged_teacher, step_losses
from components.drafts.masks import shift_left
from components.drafts.mtp_branches import MtpBranches
from components.drafts.mtp_everywhere import guesses_everywhere
from components.drafts.mtp_module import MtpModule
from components.drafts.mtp_rows import (
    Decoder,
    ModuleDecoder,
    MtpState,
    joined_rows,
    new_rows,
    run_modules,
    settled,
)
from components.drafts.sampling import Guesses
from components.drafts.settings import LossName
from components.drafts.training_linear import linear
from components.targets.linear import lay_out


@final
class Mtp(AbstractDraft):
    """See the module docstring. Trained parameters: model.layers.{n + j}, n = the target's layers, j from 0."""

    method: ClassVar[str] = "mtp"
    packs: ClassVar[bool] = True

    def __init__(self, target: Any, shape: BlockShape, draft_ids: Tensor, num_modules: int) -> None:
        super().__init__()
        self.shape, self.num_steps, self.max_depth = shape, num_modules, num_modules
        self.step_decay, self.first_hidden = 0.8, "post_norm"
        self.normaliser: Normaliser = "token"
        self.loss_name: LossName = "soft_ce"
        self._target = (target,)  # in a tuple, so that nothing of the target becomes a parameter of the drafter
        self.draft_ids: Tensor
        self.head_weight: Tensor  # [V, H], frozen
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("head_weight", head_rows(target, torch.arange(target.shape.vocab_size)), persistent=False)
        first = target.shape.num_layers
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(first + j): MtpModule(shape) for j in range(num_modules)})
        self._decoder: Decoder | None = None

    @classmethod
    def build(cls, target: Any, settings: dict[str, Any], draft_ids: Tensor) -> AbstractDraft:
        """A new drafter for an AbstractTarget; draft_ids [N] are the target ids of its draft vocabulary, ascending.

        With `start: own` it is the model's own module (mtp_own.py).

        settings: mtp_modules, intermediate_size (0: the target's), step_decay, normaliser, loss, first_hidden,
        init_seed.
        """
        if settings.get("start") == "own":
            from components.drafts.mtp_own import MtpOwn

            return MtpOwn.build(target, settings, draft_ids)
        shape = BlockShape.of(target, int(settings.get("intermediate_size", 0)))
        draft = cls(target, shape, draft_ids, int(settings.get("mtp_modules", 3)))
        draft.step_decay = float(settings.get("step_decay", 0.8))
        draft.normaliser = settings.get("normaliser", "token")
        draft.loss_name = settings.get("loss", "soft_ce")
        draft.first_hidden = settings.get("first_hidden", "post_norm")
        initialise(draft, torch.Generator().manual_seed(int(settings.get("init_seed", 0))))
        with torch.no_grad():
            for module in draft.mtp_modules:
                # The hidden half of eh_proj starts as the identity: the module begins from what the target knows
                # (held-out AL 2.20 against 2.13 after 150 steps on a snapshot of the built-in target).
                module.eh_proj.weight[:, shape.hidden_size :] += torch.eye(shape.hidden_size)
                module.shared_head.norm.weight.copy_(norm_weight_of(target))
        return draft.to(target.device)

    @property
    def target(self) -> Any:
        """The AbstractTarget this drafter serves."""
        return self._target[0]

    @property
    def mtp_modules(self) -> list[MtpModule]:
        """Module 1, 2, ... in order."""
        return list(self.model.layers.values())  # type: ignore[operator]

    def embed(self, ids: Tensor) -> Tensor:
        """The target's frozen embedding, [...] -> [..., H] float32."""
        return F.embedding(ids, self.target.embedding).float()

    def first(self, last: Tensor) -> Tensor:
        """h^0 from the target's last-layer output: [..., H] -> [..., H]."""
        if self.first_hidden == "pre_norm":
            return last
        return self.target.final_norm(last.to(self.target.dtype))

    def embedded(self, ids: Tensor, j: int, causal: CausalMask | None = None) -> Tensor:
        """What module j reads at every column: e(x_{t+j}) for ids [B, T]; zeroed at position 0 (module 1, column 0)."""
        embedded = self.embed(shift_left(ids, j))
        if j == 1:
            causal = CausalMask(ids.shape[1], ids.device) if causal is None else causal
            embedded[causal.is_first(len(ids))] = 0.0
        return embedded

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: teacher-forced, all columns at once; the head runs on reachable columns only."""
        self._decoder = None
        teacher = judged_teacher(self.target, batch, None)
        return step_losses(
            batch,
            lambda rows: self.teacher_forced(batch, rows),
            self.num_steps,
            teacher,
            self.step_decay,
            self.normaliser,
            self.loss_name,
        )

    def teacher_forced(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """Logits [B, R, V] of modules 1, 2, ... at columns rows [B, R], each fed the true x_{t+j}."""
        sequence = torch.arange(len(rows), device=rows.device)[:, None]
        causal = batch.causal
        rope, visible = Rope(self.shape, causal.positions), causal.visible
        with torch.no_grad(), torch.autocast(batch.last.device.type, enabled=False):
            hidden = self.first(batch.last).float()
        for j, module in enumerate(self.mtp_modules, start=1):
            hidden = module(self.embedded(batch.ids, j, causal), hidden, rope, visible)
            yield linear(module.shared_head.norm(hidden[sequence, rows]), self.head_weight)

    @torch.no_grad()
    def draft_everywhere(self, ids: Tensor, taps: Tensor, last: Tensor, depth: int) -> Tensor:
        """Greedy proposals from every column at once, each fed its own guesses: [T] ids -> int64 [T-1, depth]."""
        return guesses_everywhere(self, ids, last, depth)

    def guess(self, module: MtpModule, hidden: Tensor) -> Tensor:
        """Greedy target ids from a module's output [..., H]."""
        logits = F.linear(module.shared_head.norm(hidden), self.head_weight[self.draft_ids])
        return self.draft_ids[logits.argmax(-1)]

    def prepare_decoding(self, dtype: torch.dtype = torch.float32, kernel: str = "auto") -> None:
        """Lay the weights out for decoding in `dtype`; training afterwards makes the layout stale and drops it."""
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
        head = linear_kernel(self.head_weight[self.draft_ids].to(dtype))
        self.kernel = lay_out([*(linear for module in modules for linear in module.linears), head], kernel)
        self._decoder = Decoder(modules, head, dtype)

    def new_state(self, capacity: int) -> MtpState:
        """State for one sequence of at most `capacity` tokens."""
        if self._decoder is None:
            self.prepare_decoding()
        assert self._decoder is not None
        size, modules = capacity + self.max_depth, self._decoder.modules
        return MtpState(
            ids=torch.zeros(size + 1, dtype=torch.int64, device=self.draft_ids.device),
            caches=[module.block.new_cache(size) for module in modules],
            committed=[0] * len(modules),
            waiting=[[] for _ in modules],
        )

    @torch.inference_mode()
    def propose(
        self, state: MtpState, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """See Proposer. Modules deeper than `depth` do not run; what they will need waits in the state."""
        decoder = self._decoder
        assert decoder is not None, "call new_state first"
        guesses = Guesses(self.draft_ids, self.target.shape.vocab_size, sampling, rng)
        self._take_in(state, columns, decoder.dtype)
        guessed_rows: list[Tensor] = []
        for index in range(min(depth, self.max_depth)):
            guessed_rows = self._run_module(decoder, state, index, guessed_rows, guesses)
        return guesses.proposal()

    @torch.inference_mode()
    def propose_batch(
        self,
        states: Sequence[MtpState],
        columns: Sequence[Columns],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """See BatchProposer: as `propose`, with every module's linear layers run once for all sequences."""
        decoder = self._decoder
        assert decoder is not None, "call new_state first"
        for state, taken in zip(states, columns, strict=True):
            self._take_in(state, taken, decoder.dtype)
        chains = [Guesses(self.draft_ids, self.target.shape.vocab_size, sampling, rng) for rng in rngs]
        guessed_rows: list[list[Tensor]] = [[] for _ in states]
        for index in range(min(depth, self.max_depth)):
            guessed_rows = run_modules(decoder, states, index, guessed_rows, chains)
        return [chain.proposal() for chain in chains]

    @torch.inference_mode()
    def begin(self, state: MtpState, columns: Columns, depth: int) -> MtpBranches:
        """See TreeProposer."""
        decoder = self._decoder
        assert decoder is not None, "call new_state first"
        self._take_in(state, columns, decoder.dtype)
        return MtpBranches(self, decoder, state)

    @torch.inference_mode()
    def guess_after_each(self, state: MtpState, columns: Columns) -> Tensor:
        """See TwoRowProposer. Only module 1 runs."""
        decoder = self._decoder
        assert decoder is not None, "call new_state first"
        self._take_in(state, columns, decoder.dtype)
        return MtpBranches(self, decoder, state, num_roots=columns.next_tokens.shape[0]).roots

    def forget(self, state: MtpState, count: int) -> None:
        """See TwoRowProposer."""
        state.num_columns -= count
        state.committed[0] -= count
        if count and len(state.waiting) > 1:
            state.waiting[1][-1] = state.waiting[1][-1][:-count]

    def _take_in(self, state: MtpState, columns: Columns, dtype: torch.dtype) -> None:
        """Note newly committed columns; they wait for module 1."""
        begin = state.num_columns
        state.num_columns = begin + columns.next_tokens.shape[0]
        state.ids[begin + 1 : state.num_columns + 1] = columns.next_tokens
        state.waiting[0].append(self.first(columns.last).to(dtype))

    def _run_module(
        self, decoder: Decoder, state: MtpState, index: int, guessed_rows: list[Tensor], guesses: Guesses
    ) -> list[Tensor]:
        """Run module j = index + 1 over its columns that are not final yet, and guess once.

        guessed_rows: h^{j-1} of the columns that rest on guesses (at most one tensor); returns the same for h^j.
        """
        module = decoder.modules[index]
        norm = module.block.norm
        new = new_rows(state, index, guessed_rows, guesses)
        joined = joined_rows(module, index, [new])
        last_module = index + 1 == len(decoder.modules)
        out = module.block.run(module.qkv(norm(joined)), joined, state.caches[index], new.start, last_only=last_module)
        # A greedy guess needs no last norm but its weight: a positive factor moves no argmax.
        guesses.pick(decoder.head((out[-1:] if guesses.greedy else norm(out[-1:])) * module.last_norm))
        return settled(state, index, new, None if last_module else out)
