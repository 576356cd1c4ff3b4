"""Speculative decoding by its definition: every token of every round computed anew from the whole text, no cache.

The target is transformers' model, the drafter its training graph, fed its own guesses. Nothing here is shared with
components/decoding or with a drafter's decoding path, so equal rounds mean that caches and indices are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from components.drafts.interface import AbstractDraft, Batch, CommittedPositions, Sampling
from components.drafts.methods.suffix import MOST, Trust
from components.drafts.settings import SuffixSettings

Guess = Callable[[list[int], int], list[int]]
"""(x_0 .. x_n, depth) -> guesses for x_{n+1}, ..."""


@torch.no_grad()
def states(model: Any, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """logits [T, V], taps [T, 3H], last before the final norm [T, H] of a text, by transformers' model."""
    caught: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda *call: caught.append(call[2]))
    out = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    hook.remove()
    last = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
    n = model.config.num_hidden_layers
    taps = torch.cat([out.hidden_states[place] for place in (2, n // 2, n - 3)], -1)
    return out.logits[0], taps[0], last[0]


def guess_by_training_graph(draft: AbstractDraft, model: Any) -> Guess:
    """The drafter's greedy chain from the graph it was trained with."""

    @torch.no_grad()
    def guess(ids: list[int], depth: int) -> list[int]:
        n, guesses = len(ids) - 1, list[int]()
        _, taps, last = states(model, ids[:-1])
        unknown = (0, 0, 0, draft.num_steps + 2)
        taps, last = (torch.nn.functional.pad(part, unknown)[None] for part in (taps, last))
        unread, tokens = torch.empty(0), torch.zeros(1, n + draft.num_steps + 2, dtype=torch.int64)
        batch = Batch(tokens, unread, taps, last, unread)
        for k in range(depth):
            batch.ids[0, : n + 1 + k] = torch.tensor(ids + guesses)
            logits = list(draft.teacher_forced(batch, torch.tensor([[n - 1]])))[k][0, 0]  # type: ignore[operator]
            names = (
                torch.arange(model.config.vocab_size) if logits.numel() == model.config.vocab_size else draft.draft_ids
            )
            guesses.append(int(names[logits.argmax()]))  # type: ignore[index]
        return guesses

    return guess


def accepted_in_each_round(model: Any, guess: Guess, prompt: list[int], num_tokens: int, depth: int) -> list[int]:
    """How many guesses each round of greedy decoding keeps, until `num_tokens` tokens are there."""
    ids, kept = list(prompt), list[int]()
    ids.append(int(states(model, ids)[0][-1].argmax()))
    while len(ids) - len(prompt) < num_tokens:
        guesses = guess(ids, depth)
        says = states(model, ids + guesses)[0].argmax(-1).tolist()[len(ids) - 1 :]
        right = [said == guessed for said, guessed in zip(says, guesses, strict=False)]
        kept.append(right.index(False) if False in right else len(right))
        ids += says[: kept[-1] + 1]
    return kept


@torch.no_grad()
def lookahead_accepted_in_each_round(
    model: Any, proposer: Any, prompt: list[int], num_tokens: int, depth: int
) -> list[int]:
    """The same for lookahead decoding, whose guesses come from its own passes: window, pool and text computed anew.

    What a window means is tests/components/decoding/test_lookahead.py's; here no row is ever kept from pass to pass.
    """
    ids = [*prompt, int(states(model, prompt)[0][-1].argmax())]
    state, new, kept, unread = proposer.new_state(len(prompt) + num_tokens), ids[1:], list[int](), torch.empty(0)
    while len(ids) - len(prompt) < num_tokens:
        proposer.propose(
            state, CommittedPositions(torch.tensor(new), unread, unread), depth, Sampling(), torch.Generator()
        )
        plan, n = state.plan, len(ids) - 1
        rows = torch.tensor([ids[:n] + plan.tokens])
        visible = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool).tril()
        visible[n:, n:] = plan.tree.visible[0]
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[None, None]
        positions = torch.cat((torch.arange(n), n + plan.tree.depths[0]))[None]
        logits = model(input_ids=rows, attention_mask=mask, position_ids=positions, use_cache=False).logits
        picks = logits[0, n:].argmax(-1).tolist()
        found = state.verify(picks)
        kept.append(len(found.rows) - 1)
        new = found.token_ids
        ids += new
        state.advance(picks, kept[-1])
    return kept


class Counted(NamedTuple):
    """What followed a suffix most often. expected: sum of the estimated probabilities that its first j are right."""

    tokens: list[int]
    expected: float
    match: int


def copy_by_counting(text: list[int], earlier: list[list[int]], settings: SuffixSettings) -> Counted:
    """Suffix decoding by searching: every suffix of the text in the text itself, then in the earlier answers."""
    best = Counted([], 0.0, 0)
    for sources in (None, earlier):
        trust = Trust()
        for end in range(len(text)):  # what the first tokens foretold of the next one
            past = [text[:end]] if sources is None else sources
            for match in range(min(settings.max_tree_depth - 1, end), 0, -1):
                if found := _followers(text[end - match : end], past):
                    token = max(found, key=found.__getitem__)
                    share = found[token][0] / sum(times for times, _ in found.values())
                    trust.learn(match, share, right=token == text[end])
                    break
        past, before = [text] if sources is None else sources, 0
        for match in range(min(settings.max_tree_depth - settings.max_draft_tokens, len(text)), 0, -1):
            times = sum(_occurrences(text[-match:], source) for source in past)
            if times > before:  # else the longer match has the same occurrences, and drafts instead
                copy = _continue_by_counting(text, past, match, settings, trust.rates)
                best = copy if copy.expected > best.expected else best
            before = times
    return best if best.expected >= settings.min_score else Counted([], 0.0, 0)


def _occurrences(string: list[int], source: list[int]) -> int:
    return sum(source[start : start + len(string)] == string for start in range(len(source) - len(string) + 1))


def _followers(string: list[int], sources: list[list[int]]) -> dict[int, tuple[int, int]]:
    """Token -> how often it followed the string, and where latest, counted over all sources."""
    following, before = dict[int, tuple[int, int]](), 0
    for source in sources:
        for place in range(len(string), len(source)):
            if source[place - len(string) : place] == string:
                following[source[place]] = following.get(source[place], (0, 0))[0] + 1, before + place
        before += len(source)
    return following


def _continue_by_counting(
    text: list[int], sources: list[list[int]], match: int, settings: SuffixSettings, rates: list[float]
) -> Counted:
    string, tokens, probability, expected = text[-match:], list[int](), 1.0, 0.0
    while len(tokens) < min(int(settings.max_spec_factor * match + 1e-6), settings.max_draft_tokens):
        following = _followers(string, sources)
        if not following:
            break
        token = max(following, key=following.__getitem__)
        share = following[token][0] / sum(times for times, _ in following.values())
        probability *= share * rates[min(match + len(tokens), MOST)]
        if probability < settings.min_token_prob:
            break
        tokens.append(token)
        string = [*string, token]
        expected += probability
    return Counted(tokens, expected, match)


def guess_by_counting(settings: SuffixSettings) -> Guess:
    """Suffix decoding over the request's own text; a drafter never sees x_0."""
    return lambda ids, depth: copy_by_counting(ids[1:], [], settings).tokens[:depth]


def guess_with(copied: Guess, drafted: Guess, deepest: int) -> Guess:
    """A copy where there is one, else the chain of a drafter, of `deepest` tokens at most."""
    return lambda ids, depth: copied(ids, depth) or drafted(ids, min(depth, deepest))


def guess_by_lookup(max_ngram: int) -> Guess:
    """Prompt lookup by searching the whole text: what followed the latest earlier occurrence of its longest suffix."""

    def guess(ids: list[int], depth: int) -> list[int]:
        text = ids[1:]  # a drafter never sees x_0
        for size in range(min(max_ngram, len(text) - 1), 0, -1):
            for place in range(len(text) - 1, size - 1, -1):
                if text[place - size : place] == text[-size:]:
                    period = len(text) - place
                    return [text[place + i % period] for i in range(depth)]
        return []

    return guess
