"""The decoding loop for many sequences, or for draft trees: one verification pass for all of them per round.

Each sequence has its own drafter state, generator and end. Rows of a pass are padded to the longest; a finished
sequence is removed from the cache, so that it costs no rows. Greedy output equals that of chain.py token for token (up
to ties: another number of rows rounds differently), and so do samples: each sequence draws from its own generator in
the order in which it would alone. With a stop rule samples are distributed alike and no longer the same: chains side by
side end together, and a chain's length decides how many numbers it draws.

chain.py is the faster loop for one sequence and a chain. Lengths of cache, committed positions and rounds are as there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from components.contract import UserError
from components.decoding.chain import (
    GREEDY,
    Clock,
    Decoded,
    RoundFacts,
    Rounds,
    check_stop,
    count_until_end,
    run_to_end,
)
from components.decoding.session import check_positions, draw, is_greedy
from components.decoding.tree import DraftTreeRows, padded_rows
from components.decoding.tree_shapes import TreeShape
from components.decoding.verification import (
    TreeVerifyResult,
    verify_greedy,
    verify_sampled,
    verify_tree_greedy,
    verify_tree_sampled,
)
from components.drafts.interface import BatchProposer, CommittedPositions, Proposal, Proposer, Sampling, TreeProposer
from components.drafts.network.sampling import probabilities
from components.methods import decoding_loop_of
from components.stop_rule import StopRule
from components.targets.interface import AbstractCache, AbstractTarget, TargetPass, check_verifies_trees


def decode_tree(
    target: AbstractTarget,
    proposer: Proposer,
    prompt_ids: Sequence[int],
    shape: TreeShape,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    rng: torch.Generator | None = None,
    eos_ids: Collection[int] | None = None,
    ignore_eos: bool = False,
    stop: StopRule | None = None,
) -> Decoded:
    """`decode_batch` for one prompt and trees of this shape."""
    return decode_batch(
        target,
        proposer,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        shape=shape,
        sampling=sampling,
        rngs=None if rng is None else [rng],
        eos_ids=eos_ids,
        ignore_eos=ignore_eos,
        stop=stop,
    )[0]


def batch_rounds(
    target: AbstractTarget,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    depth: int = 0,
    shape: TreeShape | None = None,
    sampling: Sampling = GREEDY,
    rngs: Sequence[torch.Generator] | None = None,
    eos_ids: Collection[int] | None = None,
    ignore_eos: bool = False,
    stop: StopRule | None = None,
    clock: Clock = time.perf_counter_ns,
) -> Rounds[list[Decoded]]:
    """Continue every prompt by at most `max_new_tokens` tokens, and yield after the prefill and after each round.

    The result is one Decoded per prompt, in their order.

    proposer: drafts the next tokens; None, or depth 0 without a shape, is plain decoding.
    depth:    draft tokens of a chain in every round; leave 0 where `shape` is given.
    shape:    grow trees instead of chains; needs a TreeProposer.
    rngs:     one generator on the CPU for each prompt, needed when sampling.temperature > 0.
    stop:     ends all chains before `depth` where one more draft token each is not worth it; prunes trees, each by
              itself (tree_shapes.py). Drafters that take sequences one after the other end each chain by itself.
    Times:    ttft_ns is the prefill of the whole batch; decode_ns runs from there to the sequence's own last token.
    A Decoded's rounds count the draft tokens of a tree as drafted, and those on the accepted path as accepted.

    Raises UserError for an empty prompt, a depth the proposer cannot reach, a method that cannot branch, more tokens
    than the target has positions.
    """
    proposer = None if depth == 0 and shape is None else proposer
    if proposer is not None and decoding_loop_of(proposer.method):
        raise UserError(f"decoding: {proposer.method} decodes one sequence at a time, as a chain: take batch size 1")
    deepest = 0 if proposer is None else depth if shape is None else shape.depth
    num_draft_tokens = 0 if proposer is None else depth if shape is None else shape.num_draft_tokens
    _check(target, proposer, prompts, max_new_tokens, deepest, shape, sampling, rngs)
    check_stop(proposer, stop)
    ends = frozenset[int]() if ignore_eos else frozenset(target.shape.eos_token_ids if eos_ids is None else eos_ids)
    capacity = max(map(len, prompts)) + max_new_tokens + num_draft_tokens + 1
    cache = target.new_cache(len(prompts), capacity)
    sequences = [
        SequenceState(
            prompt=list(prompt),
            state=None if proposer is None else proposer.new_state(len(prompt) + max_new_tokens + num_draft_tokens + 1),
            rng=torch.Generator() if rngs is None else rngs[index],
        )
        for index, prompt in enumerate(prompts)
    ]
    run = _BatchRun(target, proposer, cache, depth, shape, replace(sampling, stop=stop), clock)
    return (yield from run.decode(sequences, max_new_tokens, ends))


decode_batch = run_to_end(batch_rounds)
"""Continue every prompt in one call; arguments and errors are those of `batch_rounds`."""


def _check(
    target: AbstractTarget,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    deepest: int,
    shape: TreeShape | None,
    sampling: Sampling,
    rngs: Sequence[torch.Generator] | None,
) -> None:
    if not prompts or min(map(len, prompts)) == 0:
        raise UserError("decoding: a prompt has no tokens: give at least one")
    if max_new_tokens < 1:
        raise UserError(f"decoding: max_new_tokens is {max_new_tokens}: ask for at least 1")
    if proposer is not None and not 0 < deepest <= proposer.max_depth:
        raise UserError(
            f"decoding: depth {deepest} is outside what {proposer.method} can draft (1 to {proposer.max_depth})"
        )
    if proposer is not None and shape is not None and not isinstance(proposer, TreeProposer):
        raise UserError(f"decoding: the guesses of {proposer.method} do not branch: decode it as a chain (depth)")
    if shape is not None:
        check_verifies_trees(target)
    if not is_greedy(sampling) and (rngs is None or len(rngs) != len(prompts)):
        raise UserError("decoding: temperature above 0 needs a seeded generator for each prompt: pass rngs")
    check_positions(target, max(map(len, prompts)) + max_new_tokens)


class _BatchRun:
    """The constants of all rounds, so that the loop reads as its three steps: draft, verify, commit."""

    def __init__(
        self,
        target: AbstractTarget,
        proposer: Proposer | None,
        cache: AbstractCache,
        depth: int,
        shape: TreeShape | None,
        sampling: Sampling,
        clock: Clock,
    ) -> None:
        self.target, self.proposer, self.cache, self.clock = target, proposer, cache, clock
        self.depth, self.shape, self.sampling = depth, shape, sampling
        self.greedy = is_greedy(sampling)
        self.features = False if proposer is None else proposer.needs_features

    def decode(self, sequences: list[SequenceState], limit: int, ends: frozenset[int]) -> Rounds[list[Decoded]]:
        """Prefill, then rounds until every sequence has reached the limit or end-of-text."""
        start = self.clock()
        self._prefill(sequences, ends)
        first = self.clock()
        live = self._retain_live(sequences, limit)
        while live:
            yield min(sequence.num_tokens for sequence in live)
            if self.proposer is None:
                self._plain_round(live, limit, ends)
            else:
                self._round(self.proposer, live, limit, ends)
            live = self._retain_live(live, limit)
        return [sequence.decoded(start, first) for sequence in sequences]

    def _plain_round(self, live: list[SequenceState], limit: int, ends: frozenset[int]) -> None:
        """Plain decoding, one row per sequence: the baseline that speculation has to beat."""
        ids = torch.tensor([[sequence.newest] for sequence in live])
        logits = self.target.forward(ids.to(self.target.device), self.cache, logits="last").logits
        assert logits is not None
        for sequence, token in zip(live, self._sample(logits, live), strict=True):
            sequence.commit(TreeVerifyResult([0], [token]), 0, limit, ends)

    def _round(self, proposer: Proposer, live: list[SequenceState], limit: int, ends: frozenset[int]) -> None:
        trees, proposals = self._draft(proposer, live)
        out = self._pass(trees)
        results = self._verify(live, trees, proposals, out)
        for index, (sequence, result, tree) in enumerate(zip(live, results, trees, strict=True)):
            sequence.commit(result, len(tree.tokens) - 1, limit, ends)
            sequence.committed = committed_positions(result.token_ids, out, index, result.rows, self.target.device)

    def _sample(self, logits: Tensor, sequences: list[SequenceState]) -> list[int]:
        """Sample the target's token of each sequence from logits [B, 1, V]; greedy takes one copy to the host."""
        if self.greedy:
            picks: list[int] = logits[:, 0].argmax(-1).tolist()
            return picks
        return [
            int(draw(probabilities(rows, self.sampling), sequence.rng))
            for rows, sequence in zip(logits, sequences, strict=True)
        ]

    def _prefill(self, sequences: list[SequenceState], ends: frozenset[int]) -> None:
        lengths = torch.tensor([len(sequence.prompt) for sequence in sequences])
        ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence.prompt)] = torch.tensor(sequence.prompt)
        out = self.target.forward(
            ids.to(self.target.device),
            self.cache,
            num_valid=None if bool((lengths == lengths[0]).all()) else lengths,
            logits="last",
            features=self.features,
        )
        assert out.logits is not None
        for index, (sequence, token) in enumerate(zip(sequences, self._sample(out.logits, sequences), strict=True)):
            sequence.begin(token, ends)
            if self.proposer is not None:
                rows = list(range(len(sequence.prompt)))
                next_tokens = [*sequence.prompt[1:], token]
                sequence.committed = committed_positions(next_tokens, out, index, rows, self.target.device)

    def _retain_live(self, sequences: list[SequenceState], limit: int) -> list[SequenceState]:
        """The unfinished sequences; finished ones get their stop time and leave the cache."""
        now = self.clock()
        live = []
        for index, sequence in enumerate(sequences):
            if sequence.at_eos or sequence.num_tokens >= limit:
                sequence.stop_ns = now
            else:
                live.append(index)
        if live and len(live) < len(sequences):
            self.cache.select(live)
        return [sequences[index] for index in live]

    def _draft(self, proposer: Proposer, live: list[SequenceState]) -> tuple[list[DraftTreeRows], list[Proposal]]:
        """Draft a tree for each sequence; chains come with their proposals.

        Where the target's positions run out, fewer tokens are drafted; see chain.py.
        """
        committed = [sequence.committed for sequence in live if sequence.committed is not None]
        longest = self.target.shape.max_position_embeddings
        rooms = [longest - len(sequence.prompt) - sequence.num_tokens for sequence in live]
        if self.shape is not None:
            tree_proposer = cast(
                "TreeProposer", proposer
            )  # checked in _check: isinstance with a protocol costs as much as a draft step
            vocab_size = self.target.shape.vocab_size
            trees = []
            for sequence, new, room in zip(live, committed, rooms, strict=True):
                branches = tree_proposer.begin(sequence.state, new, self.shape.depth)
                tree = self.shape.grow(
                    branches, sequence.newest, tree_proposer.draft_ids, vocab_size, self.sampling, sequence.rng
                )
                trees.append(tree if room >= self.shape.depth else tree.cut_below(room))
            return trees, []
        states, rngs = [sequence.state for sequence in live], [sequence.rng for sequence in live]
        depths = [min(self.depth, room) for room in rooms]
        proposals = propose_each(proposer, states, committed, depths, self.sampling, rngs)
        chains = [[s.newest, *proposal.tokens.tolist()] for s, proposal in zip(live, proposals, strict=True)]
        return [DraftTreeRows(chain, list(range(-1, len(chain) - 1))) for chain in chains], proposals

    def _pass(self, trees: list[DraftTreeRows]) -> TargetPass:
        ids, num_valid, geometry = padded_rows(trees)
        return self.target.forward(
            ids.to(self.target.device),
            self.cache,
            num_valid=num_valid,
            features=self.features,
            tree=None if self.shape is None else geometry,
        )

    def _verify(
        self, live: list[SequenceState], trees: list[DraftTreeRows], proposals: list[Proposal], out: TargetPass
    ) -> list[TreeVerifyResult]:
        """Verify the draft tokens of each sequence and cut the cache accordingly."""
        assert out.logits is not None
        results = []
        for index, (sequence, tree) in enumerate(zip(live, trees, strict=True)):
            logits = out.logits[index, : len(tree.tokens)]
            if self.shape is None:
                results.append(self._verify_chain(logits, tree, proposals[index] if proposals else None, sequence.rng))
            elif self.greedy:
                results.append(verify_tree_greedy(logits, tree))
            else:
                results.append(verify_tree_sampled(probabilities(logits, self.sampling), tree, sequence.rng))
        start = self.cache.lengths - torch.tensor([len(tree.tokens) for tree in trees])
        if self.shape is None:
            self.cache.truncate(start + torch.tensor([len(result.rows) for result in results]))
        else:
            self.cache.keep(start, [result.rows for result in results])
        return results

    def _verify_chain(
        self, logits: Tensor, chain: DraftTreeRows, proposal: Proposal | None, rng: torch.Generator
    ) -> TreeVerifyResult:
        draft_tokens = torch.tensor(chain.tokens[1:], dtype=torch.int64, device=logits.device)
        if self.greedy:
            result = verify_greedy(logits, draft_tokens)
        else:
            draft_probs = None if proposal is None else proposal.probs
            result = verify_sampled(probabilities(logits, self.sampling), draft_tokens, draft_probs, rng)
        return TreeVerifyResult(list(range(result.num_accepted + 1)), result.token_ids)


def propose_each(
    proposer: Proposer,
    states: Sequence[Any],
    committed: Sequence[CommittedPositions],
    depths: Sequence[int],
    sampling: Sampling,
    rngs: Sequence[torch.Generator],
) -> list[Proposal]:
    """Propose a chain for every sequence: batched where the drafter can, else one after the other."""
    if isinstance(proposer, BatchProposer) and min(depths) == max(depths):
        return proposer.propose_batch(states, committed, depths[0], sampling, rngs)
    return [
        proposer.propose(state, new, depth, sampling, rng)
        for state, new, depth, rng in zip(states, committed, depths, rngs, strict=True)
    ]


@dataclass
class SequenceState:
    """State of one prompt while it is decoded in a batch."""

    prompt: list[int]
    state: Any  # of the drafter
    rng: torch.Generator
    committed: CommittedPositions | None = None  # by the last pass, not yet passed to the drafter; None: plain decoding
    raw: list[int] = field(default_factory=list)  # output tokens, including the overshoot of the last round
    num_tokens: int = 0
    at_eos: bool = False
    rounds: list[RoundFacts] = field(default_factory=list)
    stop_ns: int = 0  # when its last token was computed

    @property
    def newest(self) -> int:
        """The last known token; the cache does not hold it yet."""
        return self.raw[-1]

    def begin(self, token: int, ends: frozenset[int]) -> None:
        """Store the first output token."""
        self.raw, self.num_tokens, self.at_eos = [token], 1, token in ends

    def commit(self, result: TreeVerifyResult, drafted: int, limit: int, ends: frozenset[int]) -> None:
        """Append the tokens of a round, cut at the limit and after end-of-text, and record the round."""
        emitted, self.at_eos = count_until_end(result.token_ids, limit - self.num_tokens, ends)
        kv_len = len(self.prompt) + self.num_tokens - 1
        self.rounds.append(RoundFacts(self.num_tokens - 1, drafted, result.num_accepted, emitted, kv_len))
        self.num_tokens += emitted
        self.raw += result.token_ids

    def decoded(self, start_ns: int, first_ns: int) -> Decoded:
        """The finished generation; the prefill ran from start_ns to first_ns."""
        return Decoded(
            tokens=self.raw[: self.num_tokens],
            tokens_raw=self.raw,
            rounds=self.rounds,
            status="eos" if self.at_eos else "ok",
            prompt_tokens=len(self.prompt),
            ttft_ns=first_ns - start_ns,
            decode_ns=max(0, self.stop_ns - first_ns),
        )


def committed_positions(
    next_tokens: list[int], out: TargetPass, index: int, rows: list[int], device: torch.device
) -> CommittedPositions:
    """Rows of sequence `index` of a pass, each with its next token; empty features where the pass has none."""
    following = torch.tensor(next_tokens, device=device)
    if out.taps is None or out.last is None:
        return CommittedPositions(following, torch.empty(0, 0, device=device), torch.empty(0, 0, device=device))
    taps, last = out.taps[index], out.last[index]
    if rows == list(range(len(rows))):  # a view is enough
        return CommittedPositions(following, taps[: len(rows)], last[: len(rows)])
    row_indices = torch.tensor(rows, device=device)
    return CommittedPositions(following, taps.index_select(0, row_indices), last.index_select(0, row_indices))
