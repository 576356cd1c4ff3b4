"""Two-row validation: verification and the next draft share a pass, one token ahead (DeepSeek-V3's MTP, module 1).

The text ends in the newest token E, and X is drafted after it. Rows E and X go through the target, which gives F after
E and G after X; then both go through the drafter, paired with F and G, which drafts Y after F and Z after G. Only now
is X compared with F:
  X != F  keep E F: both caches drop row X, and Y is the next draft token;
  X == F  keep E F G, and Z is the next draft token.
A chain of depth 1 gives the same tokens in the same rounds, but waits for verification between target and drafter; here
nothing is read back before both have run, which suits a GPU. The worst case costs two rows instead of one.

Sampled, F is decided by rejection sampling of X (verification.py), so that X == F means that it was accepted, and G is
a draw from the target after X; whichever of Y and Z is needed is then drawn.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from components.contract import UserError
from components.decoding.chain import GREEDY, Decoded, RoundFacts, count_until_end
from components.decoding.session import Session, draw, is_greedy
from components.decoding.verification import verify_sampled
from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.methods.mtp import Mtp, MtpBranches, MtpState
from components.drafts.network.sampling import probabilities
from components.targets.interface import AbstractTarget, TargetPass


@runtime_checkable
class TwoRowProposer(Protocol):
    """A drafter that drafts one token after every new position, before verification of those positions."""

    method: ClassVar[str]
    draft_ids: Tensor  # int64 [N], the target ids that the N logits stand for

    def new_state(self, capacity: int) -> Any:
        """State for one sequence of at most `capacity` tokens."""

    def draft_logits_after_each(self, state: Any, committed: CommittedPositions) -> Tensor:
        """Commit T positions and return the logits of the first draft token after each: [T, N]."""

    def rollback(self, state: Any, count: int) -> None:
        """Undo the last `count` positions of the latest `draft_logits_after_each`: they were rejected."""


@final
class TwoRowMtp:
    """Module 1 of an Mtp as a TwoRowProposer."""

    method: ClassVar[str] = "mtp"

    def __init__(self, draft: Mtp) -> None:
        self.draft, self.draft_ids = draft, draft.draft_ids

    def new_state(self, capacity: int) -> MtpState:
        """As TwoRowProposer."""
        state: MtpState = self.draft.new_state(capacity)
        return state

    @torch.inference_mode()
    def draft_logits_after_each(self, state: MtpState, committed: CommittedPositions) -> Tensor:
        """As TwoRowProposer."""
        self.draft.commit(state, committed)
        return MtpBranches(self.draft.prepared, state, num_roots=committed.next_tokens.shape[0]).roots

    def rollback(self, state: MtpState, count: int) -> None:
        """As TwoRowProposer."""
        state.num_columns -= count
        state.committed[0] -= count
        if count and len(state.waiting) > 1:
            state.waiting[1][-1] = state.waiting[1][-1][:-count]


def decode_two_row(
    target: AbstractTarget,
    proposer: Any,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    rng: torch.Generator | None = None,
    eos_ids: Collection[int] | None = None,
    ignore_eos: bool = False,
    session: Session | None = None,
) -> Decoded:
    """Continue `prompt_ids`; arguments as those of chain.decode, and one draft token a round.

    Raises UserError for an empty prompt, a method without `draft_logits_after_each`, more tokens than there are
    positions.
    """
    if not isinstance(proposer, TwoRowProposer):
        raise UserError(
            f"decoding: {proposer.method} does not guess after every column: decode it as a chain of depth 1"
        )
    if len(prompt_ids) == 0 or max_new_tokens < 1:
        raise UserError("decoding: give a prompt of at least one token, and ask for at least one")
    if rng is None and not is_greedy(sampling):
        raise UserError("decoding: temperature above 0 needs a seeded generator: pass rng")
    needed = len(prompt_ids) + max_new_tokens + 2
    cache = (session or Session(target, needed)).empty_cache(len(prompt_ids) + max_new_tokens, 2)
    ends = frozenset[int]() if ignore_eos else frozenset(target.shape.eos_token_ids if eos_ids is None else eos_ids)
    n, tokens, rounds, num_tokens = len(prompt_ids), list[int](), list[RoundFacts](), 1
    with torch.inference_mode():
        run = _TwoRows(target, proposer, needed, sampling, rng or torch.Generator())
        ids = torch.tensor(prompt_ids, dtype=torch.int64, device=target.device)
        start = time.perf_counter_ns()
        out = target.forward(ids[None], cache, logits="last", features=True)
        assert out.logits is not None
        newest = run.sample_target(out.logits[0])  # E
        tokens += newest.tolist()
        first = time.perf_counter_ns()
        logits = run.draft_logits(torch.cat((ids[1:], newest)), out)[-1:]
        draft_token = run.sample_draft(logits)  # X
        at_eos = tokens[0] in ends
        while not at_eos and num_tokens < max_new_tokens:
            out = target.forward(torch.cat((newest, draft_token))[None], cache, features=True)
            following = run.verify(out, draft_token, logits)  # F, G
            next_logits = run.draft_logits(following, out)  # of Y and Z
            compared = torch.cat((draft_token, following)).tolist()
            accepted = int(compared[0] == compared[1])
            token_ids = compared[1 : 2 + accepted]
            emitted, at_eos = count_until_end(token_ids, max_new_tokens - num_tokens, ends)
            rounds.append(RoundFacts(num_tokens - 1, 1, accepted, emitted, n + num_tokens - 1))
            cache.truncate(torch.tensor([n + num_tokens + accepted]))
            proposer.rollback(run.state, 1 - accepted)
            num_tokens += emitted
            tokens += token_ids
            newest, logits = following[accepted : accepted + 1], next_logits[accepted : accepted + 1]
            draft_token = run.sample_draft(logits)
        stop = time.perf_counter_ns()
    return Decoded(tokens[:num_tokens], tokens, rounds, "eos" if at_eos else "ok", n, first - start, stop - first)


class _TwoRows:
    """The drafter, its state and the sampling of tokens."""

    def __init__(
        self, target: AbstractTarget, proposer: TwoRowProposer, capacity: int, sampling: Sampling, rng: torch.Generator
    ) -> None:
        self.proposer, self.state = proposer, proposer.new_state(capacity)
        self.sampling, self.rng, self.greedy = sampling, rng, is_greedy(sampling)
        self.vocab_size = target.shape.vocab_size

    def sample_target(self, logits: Tensor) -> Tensor:
        """Sample the target's token from logits [1, V]: int64 [1]."""
        return logits.argmax(-1) if self.greedy else draw(probabilities(logits, self.sampling), self.rng)

    def sample_draft(self, logits: Tensor) -> Tensor:
        """Sample a draft token from logits [1, N]: a target id, int64 [1]."""
        choice = logits.argmax(-1) if self.greedy else draw(probabilities(logits, self.sampling), self.rng)
        return self.proposer.draft_ids[choice]

    def draft_logits(self, next_tokens: Tensor, out: TargetPass) -> Tensor:
        """The drafter's logits [T, N] after each row of a pass, given the next tokens of the rows."""
        assert out.taps is not None and out.last is not None
        return self.proposer.draft_logits_after_each(
            self.state, CommittedPositions(next_tokens, out.taps[0], out.last[0])
        )

    def verify(self, out: TargetPass, draft_token: Tensor, logits: Tensor) -> Tensor:
        """F and G, int64 [2]; logits: [1, N], from which the draft token was sampled."""
        assert out.logits is not None
        if self.greedy:
            return out.logits[0].argmax(-1)
        probs = probabilities(out.logits[0], self.sampling)
        draft_probs = torch.zeros(1, self.vocab_size, device=probs.device)
        draft_probs.index_copy_(1, self.proposer.draft_ids, probabilities(logits, self.sampling))
        result = verify_sampled(probs, draft_token, draft_probs, self.rng)
        if result.num_accepted:
            return result.emitted
        return torch.cat((result.emitted, draw(probs[1:], self.rng)))
