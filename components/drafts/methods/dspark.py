"""DSpark: DFlash's block with draft tokens that see the one before, and a confidence for each (arXiv:2607.05147).

Slot k (from 0) of the block has the output h_k and drafts x_{t+2+k}. What DFlash says of it is biased by the token
before, x = x_{t+1+k}, through a low rank r, and a second head says how likely the target keeps the token:
  logits_k = U h_k + W2 W1[x],   c_k = sigmoid(w [h_k ; W1[x]] + b)
with U the target's LM head, W1 [V, r], W2 [N, r]. Decoding samples left to right: slot k's distribution is that given
the token that was drawn for slot k - 1, so rejection sampling is exact at any temperature; only the bias is computed
again, the block is denoised once. In training x is the true token.

The loss of a slot is ce_weight CE + tv_weight TV + confidence_weight BCE(c_k, alpha_k), where alpha_k = 1 - TV of its
logits without a gradient: 0.1, 0.9 and 1, as the authors' code has it (whose L1 term is twice TV; speculators' is TV).
As there, every row of the block drafts, the newest token's included (sample_from_anchor), and 7 rows draft 7 tokens.
Stop rules and acceptance maps read c_k, which knows the token before draft token k and not draft token k itself.
Tensor names are speculators'. Deviations beside DFlash's: the bias is the plain first-order one, neither gated nor
recurrent; CE is against the target's distribution by default (`loss`); c_k is trained where the draft vocabulary has
the target's choice, as the rest is.

Shapes as in dflash.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.drafts.interface import (
    Batch,
    Branches,
    CommittedPositions,
    EveryPosition,
    Proposal,
    Sampling,
    StepLosses,
)
from components.drafts.methods.dflash import ROOTS_AT_ONCE, BlockDraft, BlockState, Decoder
from components.drafts.network.cached_block import linear_kernel
from components.drafts.network.layers import shift_left
from components.drafts.network.training_linear import TrainingLinear
from components.drafts.settings import DSparkSettings
from components.drafts.training.losses import (
    Step,
    StepLossAccumulator,
    Teacher,
    loss_and_variation,
    teacher_for_steps,
)
from components.targets.forward.linear import Linear, lay_out
from components.targets.interface import AbstractTarget


@final
class MarkovHead(nn.Module):
    """The bias of a token on the logits of the next: W2 W1[x]."""

    def __init__(self, vocab_size: int, rank: int, num_logits: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = TrainingLinear(rank, num_logits)


@final
class ConfidenceHead(nn.Module):
    """The logit of the confidence: [..., H + r] -> [...]."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_features, 1)

    def forward(self, features: Tensor) -> Tensor:
        confidence: Tensor = self.proj(features)[..., 0]
        return confidence


@final
class MarkovBranches(Branches):
    """One distribution per depth, biased by the node's own token."""

    def __init__(self, logits: Tensor, newest: Tensor, drafter: DSpark) -> None:
        """logits: [K, N], without bias; newest: int64 [1], the newest token."""
        self.logits, self.drafter = logits, drafter
        self.root = logits[0] + drafter.bias(newest)[0]
        self._depths: list[int] = []  # of every node

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        depths = [1 if parent < 0 else self._depths[parent] + 1 for parent in parents]
        self._depths += depths
        assert max(depths) < self.logits.shape[0], "no slot drafts this deep"
        return self.logits[depths] + self.drafter.bias(tokens)


@final
class DSpark(BlockDraft):
    """See the module docstring. Trained parameters: DFlash's, markov_head, confidence_head."""

    method: ClassVar[str] = "dspark"
    settings: DSparkSettings

    def __init__(self, target: AbstractTarget, settings: DSparkSettings, draft_ids: Tensor) -> None:
        super().__init__(target, settings, draft_ids)
        rank = settings.markov_rank
        self.markov_head = MarkovHead(target.shape.vocab_size, rank, draft_ids.numel())
        self.confidence_head = ConfidenceHead(self.shape.hidden_size + rank)
        self._markov: Linear | None = None  # W2 laid out for decoding

    @classmethod
    def build(cls, target: AbstractTarget, settings: DSparkSettings, draft_ids: Tensor) -> DSpark:
        """As AbstractDraft."""
        draft = cls(target, settings, draft_ids)
        draft.start_weights()
        generator = torch.Generator().manual_seed(draft.seed + 1)
        nn.init.normal_(draft.markov_head.markov_w1.weight, std=settings.markov_rank**-0.5, generator=generator)
        nn.init.zeros_(draft.confidence_head.proj.bias)
        return draft.to(target.device)

    @property
    def token_tables(self) -> frozenset[str]:
        return frozenset(
            {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"}
        )

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: a block from each anchor, every slot given the true token before."""
        self._decoder = None
        teacher = teacher_for_steps(self.target, batch, self.draft_ids)
        accumulator = StepLossAccumulator(batch, teacher, self.num_steps, self.settings.normaliser)
        accumulator.use_roots(self.training_roots(accumulator.roots, batch))
        accumulator.add_steps(Step(states, self._judge) for states in self.slot_states(batch, accumulator.roots.rows))
        return accumulator.result(self.settings.step_decay)

    def _judge(self, output: Tensor, embedded: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """As Step's `judge`: of what `slot` takes."""
        logits, confidence = self.slot(output, embedded)
        settings = self.settings
        distance, alpha = loss_and_variation(settings.loss, logits, teacher, settings.ce_weight, settings.tv_weight)
        surprise = F.binary_cross_entropy_with_logits(confidence.float(), alpha.clamp(0.0, 1.0), reduction="none")
        return distance + settings.confidence_weight * surprise, logits

    def slots(self, batch: Batch, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """`slot` of draft tokens 0, 1, ... from columns rows [B, R], each given the true token before."""
        return (self.slot(*states) for states in self.slot_states(batch, rows))

    def slot_states(self, batch: Batch, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What `slot` takes for draft tokens 0, 1, ... from columns rows [B, R], each given the true token before."""
        outputs = self.block_outputs(batch.taps, shift_left(batch.ids, 1), rows, batch.causal)
        before = torch.stack([shift_left(batch.ids, k + 1).gather(1, rows) for k in range(len(outputs))])
        # One lookup: its gradient is a table as large as the vocabulary.
        yield from zip(outputs, self.markov_head.markov_w1(before), strict=True)

    def slot(self, output: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., N] and the confidence's logit [...] of a slot: its output [..., H], W1 of the token before."""
        logits = self.block_logits(output) + self.markov_head.markov_w2(embedded)
        return logits, self.confidence_head(torch.cat((output, embedded), -1))

    def teacher_forced(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """Logits [B, R, N] of draft tokens 0, 1, ... from columns rows [B, R], each given the true token before."""
        return [logits for logits, _ in self.slots(batch, rows)]

    @torch.no_grad()
    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As AbstractDraft; the confidence is the head's."""
        parts = []
        for rows in torch.arange(first, ids.numel() - 1, device=ids.device).split(ROOTS_AT_ONCE):
            before, steps = ids[1:][rows], []
            for output in self.block_outputs(taps[None, :-1], ids[None, 1:], rows[None])[:depth]:
                logits, confidence = self.slot(output[0], self.markov_head.markov_w1(before))
                before = self.draft_ids[logits.argmax(-1)]
                steps.append((before, confidence.float().sigmoid()))
            parts.append(EveryPosition.of_steps(steps))
        return EveryPosition.concatenated(parts)

    def decoder(self, dtype: torch.dtype, kernel: str) -> Decoder:
        """As BatchedDraft."""
        self._markov = linear_kernel(self.markov_head.markov_w2.weight.detach().to(dtype))
        lay_out([self._markov], kernel)
        return super().decoder(dtype, kernel)

    def bias(self, tokens: Tensor) -> Tensor:
        """The bias of tokens on the logits of the next, in decoding: int64 [X] -> [X, N]."""
        assert self._markov is not None, "call prepare_decoding or new_state first"
        table = self.markov_head.markov_w1.weight.detach()
        return self._markov(F.embedding(tokens.to(table.device), table).to(self.prepared.dtype))

    @torch.inference_mode()
    def propose_batch(
        self,
        states: Sequence[BlockState],
        committed: Sequence[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """As BatchProposer: the block in one pass, then its tokens from left to right."""
        sampler, hidden = self.sampler(sampling, rngs), self.denoised(states, committed)[:, :depth].transpose(0, 1)
        tokens = torch.stack([each.next_tokens[-1] for each in committed]).to(hidden.device)
        for output, logits in zip(hidden, self.head_logits(hidden, scaled=True), strict=True):
            confidence = self._confidence(output, tokens) if sampler.reads_confidence else None
            tokens = sampler.sample(logits + self.bias(tokens), confidence)
            if sampler.ended:
                break
        return sampler.proposals()

    def _confidence(self, output: Tensor, before: Tensor) -> Tensor:
        """Of outputs before the last norm, [B, H], and the tokens before them: float32 [B]."""
        features = torch.cat((self.norm(output.float()), self.markov_head.markov_w1(before)), -1)
        return self.confidence_head(features).sigmoid()

    @torch.inference_mode()
    def begin(self, state: BlockState, committed: CommittedPositions, depth: int) -> MarkovBranches:
        """As TreeProposer."""
        hidden = self.denoised([state], [committed])[:, : min(depth, self.max_depth)]
        return MarkovBranches(self.head_logits(hidden, scaled=True)[0], committed.next_tokens[-1:], self)
