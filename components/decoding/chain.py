"""The decoding loop: draft a chain, verify it in one pass, commit the accepted tokens. Depth 0 is plain decoding.

Output tokens are numbered from 0; token 0 comes from the prefill. A round starts when output token i is the newest
known token. It drafts `depth` tokens for i+1, i+2, ..., verifies them in one pass of depth+1 rows, keeps the
`accepted` correct ones and adds one token of the target's own.

The depth does not change near the end: a round that runs past end-of-text or the limit is cut (emitted < accepted + 1),
and what was cut is recorded, not kept. A live run is therefore the replay of an acceptance map, round for round. Only
where the target's positions run out are fewer tokens drafted; measurements stay away from that limit.

Every loop is a generator that yields after each round, so that several generations can take turns on one machine
(bench/measurement/slices.py); `decode` runs one to its end.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from components.contract import UserError
from components.decoding.session import Session, draw, is_greedy
from components.decoding.verification import EXACT, BlockRule, VerifyResult, verify_block, verify_greedy, verify_sampled
from components.drafts.interface import CommittedPositions, Proposer, Sampling
from components.drafts.network.sampling import probabilities
from components.methods import decoding_loop_of, is_trained, load_object
from components.stop_rule import StopRule
from components.targets.interface import AbstractCache, AbstractTarget, TargetPass

GREEDY = Sampling()

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
Rounds = Generator[int, None, Result]
"""A generation that yields after the prefill and after each round, and returns its result.

It yields the number of output tokens so far, in a batch the smallest of the unfinished sequences.

It runs inside the caller's torch.inference_mode(): generations that take turns would switch each other's off.
"""
Clock = Callable[[], int]
"""Returns nanoseconds. Generations that take turns get one that stops while others run."""


class RoundFacts(NamedTuple):
    """One verification round; the fields of rows.Round."""

    out_pos: int  # the newest known output token when it started
    drafted: int
    accepted: int  # of the drafted tokens, including those past the end
    emitted: int  # tokens kept: accepted + 1, fewer in a cut tail round
    kv_len: int  # tokens in the target's cache when it started


@dataclass(frozen=True)
class Decoded:
    """One generation. Times in ns: decode_ns runs from the first token to the last kept one."""

    tokens: list[int]  # kept: up to the limit, up to and including end-of-text
    tokens_raw: list[int]  # kept tokens and the overshoot of the tail round
    rounds: list[RoundFacts]
    status: str  # "ok": stopped at the limit; "eos": stopped at end-of-text
    prompt_tokens: int
    ttft_ns: int
    decode_ns: int

    @property
    def overshoot(self) -> int:
        """Tokens computed past the end and thrown away."""
        return len(self.tokens_raw) - len(self.tokens)


def decode_rounds(
    target: AbstractTarget,
    proposer: Proposer | None,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    depth: int = 0,
    sampling: Sampling = GREEDY,
    rng: torch.Generator | None = None,
    eos_ids: Collection[int] | None = None,
    ignore_eos: bool = False,
    session: Session | None = None,
    rule: BlockRule = EXACT,
    stop: StopRule | None = None,
    clock: Clock = time.perf_counter_ns,
) -> Rounds[Decoded]:
    """Continue `prompt_ids` by at most `max_new_tokens` tokens, and yield after the prefill and after each round.

    proposer:  drafts the next tokens; None, or depth 0, is plain decoding with nothing else computed.
    depth:     draft tokens requested in every round.
    rng:       needed when sampling.temperature > 0, on the CPU; the same seed gives the same tokens.
    eos_ids:   end-of-text tokens, default those of the target.
    session:   reuses its cache; without one a cache is allocated for this call.
    rule:      when greedy decoding accepts a draft token; all but the default change the output (verification.py).
    stop:      ends a round's chain before `depth`; the output stays what it is (components/stop_rule.py).
    clock:     measures the times of the result.

    Raises UserError for an empty prompt, a depth the proposer cannot reach, more tokens than the target has positions.
    """
    proposer = None if depth == 0 else proposer
    depth = 0 if proposer is None else depth
    _check(proposer, prompt_ids, max_new_tokens, depth, sampling, rng)
    if not rule.lossless and not is_greedy(sampling):
        raise UserError("decoding: a block rule is for greedy decoding: set temperature 0, or leave the rule out")
    ends = frozenset[int]() if ignore_eos else frozenset(target.shape.eos_token_ids if eos_ids is None else eos_ids)
    check_stop(proposer, stop)
    if proposer is not None and (loop := decoding_loop_of(proposer.method)):
        if not rule.lossless:
            raise UserError(f"decoding: {proposer.method} has a loop of its own and no block rule: leave the rule out")
        options = {"max_new_tokens": max_new_tokens, "depth": depth, "sampling": sampling, "ends": ends, "clock": clock}
        decoded: Decoded = yield from load_object(loop)(target, proposer, prompt_ids, session=session, **options)
        return decoded
    needed = len(prompt_ids) + max_new_tokens + depth + 1
    cache = (session or Session(target, needed)).empty_cache(len(prompt_ids) + max_new_tokens, depth + 1)
    rng = rng if rng is not None else torch.Generator()
    ids = torch.tensor(prompt_ids, dtype=torch.int64, device=target.device)
    run = _ChainRun(target, proposer, cache, needed, depth, replace(sampling, stop=stop), rng, rule)
    return (yield from run.decode(ids, max_new_tokens, ends, clock))


def run_to_end(start: Callable[Arguments, Rounds[Result]]) -> Callable[Arguments, Result]:
    """Turn a round-by-round generation into a function that runs it to its end."""

    @functools.wraps(start)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.inference_mode():
            rounds = start(*args, **kwargs)
            while True:
                try:
                    next(rounds)
                except StopIteration as end:
                    result: Result = end.value
                    return result

    return run


decode = run_to_end(decode_rounds)
"""Continue a prompt in one call; arguments and errors are those of `decode_rounds`."""


def _check(
    proposer: Proposer | None,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    depth: int,
    sampling: Sampling,
    rng: torch.Generator | None,
) -> None:
    if len(prompt_ids) == 0:
        raise UserError("decoding: the prompt has no tokens: give at least one")
    if max_new_tokens < 1:
        raise UserError(f"decoding: max_new_tokens is {max_new_tokens}: ask for at least 1")
    if proposer is not None and not 0 < depth <= proposer.max_depth:
        raise UserError(
            f"decoding: depth {depth} is outside what {proposer.method} can draft (1 to {proposer.max_depth})"
        )
    if rng is None and not is_greedy(sampling):
        raise UserError("decoding: temperature above 0 needs a seeded generator: pass rng")


def check_stop(proposer: Proposer | None, stop: StopRule | None) -> None:
    """Raises UserError for a stop rule with a method that finds its draft tokens and has no distribution of them."""
    if proposer is not None and stop is not None and not is_trained(proposer.method):
        raise UserError(f"decoding: {proposer.method} reports no confidence: leave the stop rule out")


class _ChainRun:
    """One generation, so that the loop below reads as its three steps; without a proposer nothing is drafted."""

    def __init__(
        self,
        target: AbstractTarget,
        proposer: Proposer | None,
        cache: AbstractCache,
        capacity: int,
        depth: int,
        sampling: Sampling,
        rng: torch.Generator,
        rule: BlockRule,
    ) -> None:
        self.rule = rule
        self.target, self.proposer, self.cache = target, proposer, cache
        self.state = None if proposer is None else proposer.new_state(capacity)
        self.depth, self.sampling, self.rng = depth, sampling, rng
        self.greedy = is_greedy(sampling)
        self.features = False if proposer is None else proposer.needs_features
        self.empty = torch.empty(0, 0, dtype=target.dtype, device=target.device)

    def decode(self, prompt: Tensor, max_new_tokens: int, ends: frozenset[int], clock: Clock) -> Rounds[Decoded]:
        """Prefill, then draft, verify, commit until the limit or end-of-text."""
        n = prompt.shape[0]
        start = clock()
        out = self.target.forward(prompt.unsqueeze(0), self.cache, logits="last", features=self.features)
        assert out.logits is not None
        newest = self._sample(out.logits[0])
        tokens = newest.tolist()
        first = clock()
        committed = self._committed(torch.cat((prompt[1:], newest)), out, n)
        rounds: list[RoundFacts] = []
        num_tokens = 1
        at_eos = tokens[0] in ends
        while not at_eos and num_tokens < max_new_tokens:
            yield num_tokens
            if self.proposer is None:
                (result, _), drafted = self._plain_round(newest), 0
            else:
                room = self.target.shape.max_position_embeddings - n - num_tokens
                result, out, drafted = self._round(self.proposer, newest, committed, room)
            emitted, at_eos = count_until_end(result.token_ids, max_new_tokens - num_tokens, ends)
            rounds.append(RoundFacts(num_tokens - 1, drafted, result.num_accepted, emitted, n + num_tokens - 1))
            num_tokens += emitted
            tokens += result.token_ids
            newest = result.emitted[-1:]
            if drafted:
                # The cache holds x_n and all draft tokens; drop the rejected ones. The newest token is not in it yet.
                self.cache.truncate(torch.tensor([n + num_tokens - 1]))
            if self.proposer is not None:
                committed = self._committed(result.emitted, out, result.num_accepted + 1)
        stop = clock()
        status = "eos" if at_eos else "ok"
        return Decoded(tokens[:num_tokens], tokens, rounds, status, n, first - start, stop - first)

    def _sample(self, logits: Tensor) -> Tensor:
        """Sample the target's token from logits [1, V]: int64 [1]."""
        return logits.argmax(-1) if self.greedy else draw(probabilities(logits, self.sampling), self.rng)

    def _plain_round(self, newest: Tensor) -> tuple[VerifyResult, TargetPass]:
        """Plain decoding, one row per pass: the baseline that speculation has to beat."""
        out = self.target.forward(newest.unsqueeze(0), self.cache, logits="last", features=self.features)
        assert out.logits is not None
        token = self._sample(out.logits[0])
        return VerifyResult(0, token, token.tolist()), out

    def _round(
        self, proposer: Proposer, newest: Tensor, committed: CommittedPositions, room: int
    ) -> tuple[VerifyResult, TargetPass, int]:
        """Draft at most `room` tokens after the newest token and verify them in one pass."""
        proposal = proposer.propose(self.state, committed, min(self.depth, room), self.sampling, self.rng)
        draft_tokens = proposal.tokens.to(newest.device)
        if not draft_tokens.shape[0]:  # a look-up without a match: nothing to verify, nothing to cut off
            return (*self._plain_round(newest), 0)
        ids = torch.cat((newest, draft_tokens)).unsqueeze(0)
        out = self.target.forward(ids, self.cache, features=self.features)
        assert out.logits is not None
        if self.greedy:
            exact = self.rule.lossless
            result = (
                verify_greedy(out.logits[0], draft_tokens)
                if exact
                else verify_block(out.logits[0], draft_tokens, self.rule)
            )
        else:
            result = verify_sampled(probabilities(out.logits[0], self.sampling), draft_tokens, proposal.probs, self.rng)
        return result, out, draft_tokens.shape[0]

    def _committed(self, next_tokens: Tensor, out: TargetPass, count: int) -> CommittedPositions:
        """The first `count` rows of a pass, each with its next token."""
        if not self.features:
            return CommittedPositions(next_tokens, self.empty, self.empty)
        assert out.taps is not None and out.last is not None
        return CommittedPositions(next_tokens, out.taps[0, :count], out.last[0, :count])


def count_until_end(token_ids: list[int], room: int, ends: frozenset[int]) -> tuple[int, bool]:
    """How many of a round's tokens are output, and whether the last of those is end-of-text."""
    for index, token in enumerate(token_ids[:room]):
        if token in ends:
            return index + 1, True
    return min(len(token_ids), room), False
