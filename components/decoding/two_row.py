"""Two-row validation: verification and the next drafting share a pass, one guess ahead (DeepSeek-V3's MTP, module 1).

The text ends in the newest token E, and X is guessed after it. Rows E and X go through the target, which says F after E
and G after X; then both go through the drafter, paired with F and G, which guesses Y after F and Z after G. Only now is
it asked whether X holds:
  X != F  keep E F: row X is forgotten by both caches, and Y is the next guess;
  X == F  keep E F G, and Z is the next guess.
A chain of depth 1 says the same tokens in the same rounds, but waits for the verdict between target and drafter; here
nothing is read back before both have run, which is what a GPU wants. The worst case costs two rows instead of one.

Sampled, F is decided by rejection sampling of X (verification.py), so that X == F means that it was accepted, and G is
a draw from the target after X; whichever of Y and Z is wanted is then drawn.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from components.contract import UserError
from components.decoding.chain import GREEDY, Decoded, RoundFacts, keep_until_end
from components.decoding.sampling import draw, is_greedy
from components.decoding.session import Session
from components.decoding.verification import verify_sampled
from components.drafts.draft import Columns, Sampling, TwoRowProposer
from components.drafts.sampling import probabilities
from components.targets.model import AbstractTarget, TargetPass


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
    """Continue `prompt_ids`; arguments as those of chain.decode, and one guess a round.

    Raises UserError for an empty prompt, a method without `guess_after_each`, more tokens than there are positions.
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
    n, raw, rounds, kept = len(prompt_ids), list[int](), list[RoundFacts](), 1
    with torch.inference_mode():
        run = _TwoRows(target, proposer, needed, sampling, rng or torch.Generator())
        ids = torch.tensor(prompt_ids, dtype=torch.int64, device=target.device)
        start = time.perf_counter_ns()
        out = target.forward(ids[None], cache, logits="last", features=True)
        assert out.logits is not None
        newest = run.own(out.logits[0])  # E
        raw += newest.tolist()
        first = time.perf_counter_ns()
        logits = run.after_each(torch.cat((ids[1:], newest)), out)[-1:]
        guess = run.pick(logits)  # X
        ended = raw[0] in ends
        while not ended and kept < max_new_tokens:
            out = target.forward(torch.cat((newest, guess))[None], cache, features=True)
            said = run.said(out, guess, logits)  # F, G
            both = run.after_each(said, out)  # what gives Y and Z
            known = torch.cat((guess, said)).tolist()
            accepted = int(known[0] == known[1])
            token_ids = known[1 : 2 + accepted]
            emitted, ended = keep_until_end(token_ids, max_new_tokens - kept, ends)
            rounds.append(RoundFacts(kept - 1, 1, accepted, emitted, n + kept - 1))
            cache.truncate(torch.tensor([n + kept + accepted]))
            proposer.forget(run.state, 1 - accepted)
            kept += emitted
            raw += token_ids
            newest, logits = said[accepted : accepted + 1], both[accepted : accepted + 1]
            guess = run.pick(logits)
        stop = time.perf_counter_ns()
    return Decoded(raw[:kept], raw, rounds, "eos" if ended else "ok", n, first - start, stop - first)


class _TwoRows:
    """Drafter, its state and how tokens are picked."""

    def __init__(
        self, target: AbstractTarget, proposer: TwoRowProposer, capacity: int, sampling: Sampling, rng: torch.Generator
    ) -> None:
        self.proposer, self.state = proposer, proposer.new_state(capacity)
        self.sampling, self.rng, self.greedy = sampling, rng, is_greedy(sampling)
        self.vocab_size = target.shape.vocab_size

    def own(self, logits: Tensor) -> Tensor:
        """The target's token from [1, V]: int64 [1]."""
        return logits.argmax(-1) if self.greedy else draw(probabilities(logits, self.sampling), self.rng)

    def pick(self, logits: Tensor) -> Tensor:
        """The drafter's token from [1, N]: a target id, int64 [1]."""
        choice = logits.argmax(-1) if self.greedy else draw(probabilities(logits, self.sampling), self.rng)
        return self.proposer.draft_ids[choice]

    def after_each(self, next_tokens: Tensor, out: TargetPass) -> Tensor:
        """The drafter's logits [T, N] after each row of a pass, which these tokens follow."""
        assert out.taps is not None and out.last is not None
        return self.proposer.guess_after_each(self.state, Columns(next_tokens, out.taps[0], out.last[0]))

    def said(self, out: TargetPass, guess: Tensor, logits: Tensor) -> Tensor:
        """F and G, int64 [2]; logits: [1, N], what the guess was picked from."""
        assert out.logits is not None
        if self.greedy:
            return out.logits[0].argmax(-1)
        probs = probabilities(out.logits[0], self.sampling)
        drafted = torch.zeros(1, self.vocab_size, device=probs.device)
        drafted.index_copy_(1, self.proposer.draft_ids, probabilities(logits, self.sampling))
        verdict = verify_sampled(probs, guess, drafted, self.rng)
        if verdict.num_accepted:
            return verdict.emitted
        return torch.cat((verdict.emitted, draw(probs[1:], self.rng)))
