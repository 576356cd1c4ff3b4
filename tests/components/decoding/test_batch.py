"""A batch says for every sequence what that sequence alone would be told, and finished ones cost no more rows."""

from __future__ import annotations

import pytest
import torch
from batched_and_alone import batched_and_alone, generators
from torch import Tensor
from twin import Twin, TwinState

from components.contract import UserError
from components.decoding.batch import decode_batch
from components.decoding.chain import Decoded, decode
from components.decoding.tree_shapes import DynamicShape, StaticShape
from components.drafts.interface import CommittedPositions, Proposal, Sampling
from components.drafts.methods.ngram import Ngram
from components.targets.forward.llama import FastTarget
from components.targets.interface import AbstractTarget

LENGTH = 24
PROMPTS = [[5, 9, 2, 7], [3], [11, 4, 4, 8, 30, 2, 6, 19, 25], [11, 4, 4], [8, 8]]
HOT = Sampling(temperature=1.2, top_k=12)


def facts(run: Decoded) -> tuple[list[int], list[int], list[object], str, int]:
    return run.tokens, run.tokens_raw, list(run.rounds), run.status, run.prompt_tokens


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_a_batch_of_chains_is_chain_decoding_of_each(target: AbstractTarget, depth: int, sampling: Sampling) -> None:
    for _, run, alone in batched_and_alone(target, Twin(target), PROMPTS, depth, sampling, LENGTH):
        if depth:
            assert facts(run) == facts(alone)
        else:  # plain decoding writes no overshoot
            assert run.tokens == alone.tokens and run.rounds == alone.rounds


@pytest.mark.parametrize("shape", [StaticShape.branching([2, 2]), DynamicShape(4, 3, 9)], ids=["static", "dynamic"])
@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_a_batch_of_trees_is_tree_decoding_of_each(
    target: AbstractTarget, shape: StaticShape | DynamicShape, sampling: Sampling
) -> None:
    for _, run, alone in batched_and_alone(target, Twin(target), PROMPTS, shape, sampling, LENGTH):
        assert facts(run) == facts(alone)


def test_guesses_of_different_lengths_share_a_pass(target: AbstractTarget) -> None:
    """Prompt lookup guesses nothing for some and many tokens for others."""
    prompts = [[5, 9, 5, 9, 5], [3], [7, 7, 7, 7]]
    pairs = list(batched_and_alone(target, Ngram(), prompts, 5, Sampling(), LENGTH))
    for _, run, alone in pairs:
        assert facts(run) == facts(alone)
    assert len({r.drafted for _, run, _ in pairs for r in run.rounds}) > 1


def test_finished_sequences_cost_no_rows(target: FastTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended by end-of-text at different times; the sequences of each pass are those still running."""
    answers = [decode(target, None, prompt, max_new_tokens=LENGTH, ignore_eos=True).tokens for prompt in PROMPTS]
    end = answers[0][5]
    lengths = [answer.index(end) + 1 if end in answer else LENGTH for answer in answers]
    assert len(set(lengths)) > 1
    sequences: list[int] = []
    forward = FastTarget.forward

    def counted(self: FastTarget, ids: Tensor, *rest: object, **named: object) -> object:
        sequences.append(ids.shape[0])
        return forward(self, ids, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(FastTarget, "forward", counted)
    runs = decode_batch(target, None, PROMPTS, max_new_tokens=LENGTH, eos_ids=[end])
    assert [run.tokens for run in runs] == [answer[:length] for answer, length in zip(answers, lengths, strict=True)]
    assert [run.status for run in runs] == ["eos" if end in answer else "ok" for answer in answers]
    assert sequences == [sum(length > place for length in lengths) for place in range(max(lengths))]


def test_times_run_to_each_sequence_own_end(target: AbstractTarget) -> None:
    answer = decode(target, None, PROMPTS[0], max_new_tokens=LENGTH, ignore_eos=True).tokens
    runs = decode_batch(target, None, PROMPTS[:2], max_new_tokens=LENGTH, eos_ids=[answer[3]])
    longest = max(runs, key=lambda run: len(run.tokens))
    shortest = min(runs, key=lambda run: len(run.tokens))
    assert 0 < shortest.decode_ns < longest.decode_ns
    assert shortest.ttft_ns == longest.ttft_ns > 0


class Together(Twin):
    """Drafts for all sequences in one call."""

    calls = 0

    def propose_batch(
        self,
        states: list[TwinState],
        columns: list[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: list[torch.Generator],
    ) -> list[Proposal]:
        self.calls += 1
        pairs = zip(states, columns, rngs, strict=True)
        return [self.propose(state, taken, depth, sampling, rng) for state, taken, rng in pairs]


def test_a_drafter_with_a_batched_way_is_asked_that_way(target: AbstractTarget) -> None:
    drafter = Together(target)
    runs = decode_batch(target, drafter, PROMPTS, max_new_tokens=LENGTH, depth=3, ignore_eos=True)
    assert drafter.calls == max(len(run.rounds) for run in runs)
    expected = decode_batch(target, Twin(target), PROMPTS, max_new_tokens=LENGTH, depth=3, ignore_eos=True)
    assert [facts(run) for run in runs] == [facts(run) for run in expected]


def test_wrong_requests_are_refused_in_one_line(target: AbstractTarget) -> None:
    with pytest.raises(UserError, match="no tokens"):
        decode_batch(target, None, [[1], []], max_new_tokens=4)
    with pytest.raises(UserError, match="no tokens"):
        decode_batch(target, None, [], max_new_tokens=4)
    with pytest.raises(UserError, match="depth 9 is outside"):
        decode_batch(target, Twin(target), [[1]], max_new_tokens=4, depth=9)
    with pytest.raises(UserError, match="generator for each prompt"):
        decode_batch(target, None, [[1], [2]], max_new_tokens=4, sampling=HOT, rngs=generators(1))
