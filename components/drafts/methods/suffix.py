"""Suffix decoding: draft what followed the end of the text most often, as far as it can be trusted (no weights).

After Oliaro et al. 2024 (arXiv:2411.04975) and Snowflake's Arctic Inference, which serves it in vLLM. Every suffix of
the text, up to `max_tree_depth` - `max_draft_tokens` tokens, is looked up in the request's own text and in a cache of
earlier answers (`cached_tokens`). A match of m tokens drafts at most `max_spec_factor` m: a long match goes far, a
short one a few words. Token by token the most frequent continuation is followed. P_j estimates the probability that j
tokens are right: the product of their shares among the continuations, and of how often such a share held in this text
after a match of that length (`Trust`). A copy ends where P_j falls below `min_token_prob`; its score is sum_j P_j, the
expected number of right tokens. The copy of the highest score drafts (of equals the longest match, and the request's
own text before earlier answers), unless its score is below `min_score`: text that does not repeat is decoded plainly.

Deviations: a suffix automaton counts in place of a tree; a share is one of all continuations seen, where Arctic also
counts the text's own end as an occurrence that went on nowhere; `Trust` and `min_score` are ours; of continuations
equally frequent the latest is followed. The copy does not depend on the depth asked for, which only cuts it: an
acceptance map holds for every depth. `max_spec_factor` is the paper's 4, Arctic's default is 1.

Nothing here changes while drafting but the request's own state, so that results do not depend on the order of prompts.
Earlier answers are those of `train_draft`'s features; a server adds its own by `remember`, and may then say in other
rounds what it says anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from components.drafts.interface import CommittedPositions, EveryPosition, Proposal, Sampling
from components.drafts.methods.ngram import MEASURED_DEPTH, NO_TOKEN, FromSettings
from components.drafts.settings import SuffixSettings

DEFAULTS = SuffixSettings()
KEPT_SHARE = 0.75
"""What eviction leaves of a full cache. An automaton forgets by being built again, so several answers go at once."""
ROOT = 0
NONE = -1
EPSILON = 1e-6  # products such as 0.1 * 30 are meant to be whole
MOST = 16
"""Longer matches are trusted as those of so many tokens."""
PRIOR = 2.0
"""Tries that a rate begins with, at m / (m + 1.5), about what held over functions of Python's standard library."""


class Place(NamedTuple):
    """How far the end of a text is known: `state` holds its last `depth` tokens, and no longer suffix is in it."""

    state: int
    depth: int


START = Place(ROOT, 0)


class Limits(NamedTuple):
    """What bounds a copy. A match of m tokens, at most `match`, drafts at most `factor` m, and `tokens`.

    least_share: a copy ends where the estimated probability that all of it is right falls below this.
    """

    match: int
    tokens: int
    factor: float
    least_share: float


class Copy(NamedTuple):
    """What followed a match before. expected: the estimated number of its tokens that are right.

    match: tokens that matched. position: index, among all tokens of the automaton, of an occurrence's first one.
    """

    tokens: list[int]
    expected: float
    match: int
    position: int


NO_COPY = Copy([], 0.0, 0, NONE)


class Trust:
    """How often what followed a match of m tokens before has followed it again, learnt from the text itself."""

    def __init__(self) -> None:
        usual = [length / (length + 1.5) for length in range(MOST + 1)]
        self._tries, self._hits = [PRIOR] * (MOST + 1), [PRIOR * rate for rate in usual]
        self.rates = usual
        """By the length of the match, MOST for longer ones: right guesses over those that their shares promised."""

    def learn(self, match: int, share: float, *, right: bool) -> None:
        """Note whether the likeliest token, of this share after a match, came."""
        index = min(match, MOST)
        self._tries[index] += share
        self._hits[index] += right
        self.rates[index] = min(1.0, self._hits[index] / self._tries[index])


@final
class SuffixAutomaton:
    """Occurrences of all strings of up to `longest` tokens in the texts so far; the last text may still grow.

    A state stands for strings that end at the same places, each a suffix of the longest of them, `_length[state]`
    tokens; `_link[state]` is the state of the longest suffix that ends at more places. A text of n tokens makes at most
    2n states (Blumer et al. 1985), where a tree of all suffixes cut at depth D makes up to D n nodes; a token costs
    amortised constant time (several texts share an automaton: Mohri et al. 2009). Only states whose shortest string has
    at most `longest` tokens are counted or read, so a token updates at most `longest` of them, also in a text that
    repeats one token for ever.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.num_tokens = 0
        self.place = START
        """The last `longest` tokens of the text that grows, all of it where it is shorter."""
        self._whole = ROOT  # the state of the whole text that grows
        self._children: list[dict[int, int]] = [{}]
        self._link, self._length = [NONE], [0]
        self._count, self._latest = [0], [NONE]  # occurrences, and the index of the last token of the latest

    @property
    def num_states(self) -> int:
        """States, the root among them: at most two a token, and one."""
        return len(self._link)

    def start_text(self) -> None:
        """Begin another text: no string reaches across."""
        self._whole, self.place = ROOT, START

    def add_text(self, tokens: Iterable[int]) -> None:
        """Add a whole text of its own."""
        self.start_text()
        for token in tokens:
            self.extend(token)
        self.start_text()

    def extend(self, token: int) -> None:
        """Add a token to the end of the text that grows."""
        self._whole = self._insert(self._whole, token)
        state, depth = self.place
        self.place = place = self._settle(self._children[state][token], depth + 1)
        state, link, count, latest = place.state, self._link, self._count, self._latest
        while state:  # every suffix of the text has occurred once more
            count[state] += 1
            latest[state] = self.num_tokens
            state = link[state]
        self.num_tokens += 1

    def follow(self, place: Place, token: int) -> Place:
        """The place of another text after its next token, where that text is not in the automaton itself."""
        state, depth = place
        while token not in self._children[state]:
            if state == ROOT:
                return START
            state = self._link[state]
            depth = min(depth, self._length[state])
        return self._settle(self._children[state][token], depth + 1)

    def count_of(self, string: Iterable[int]) -> int:
        """How often a string of 1 to `longest` tokens occurred."""
        state = ROOT
        for token in string:
            if token not in self._children[state]:
                return 0
            state = self._children[state][token]
        return self._count[state]

    def likeliest(self, place: Place) -> tuple[int, float, int]:
        """The most frequent token after the longest match at `place`, its share, and the match; (NONE, 0, 0): none."""
        state, depth = place if place.depth < self.longest else self._settle(place.state, self.longest - 1)
        while state and not self._children[state]:
            state = self._link[state]
        if not state:
            return NONE, 0.0, 0
        token, _, share = self._most_frequent(state)
        return token, share, min(depth, self._length[state])

    def best_copy(self, place: Place, limits: Limits, rates: Sequence[float]) -> Copy:
        """The copy of most expected tokens, over every suffix that ends at `place`; of equals that of longest match.

        Of the matches that one state holds only the longest counts: all go on alike, and it may draft the most.
        rates: those of `Trust`.
        """
        assert limits.match + limits.tokens <= self.longest, "longer strings are not counted"
        best = NO_COPY
        state, depth = self._settle(place.state, min(place.depth, limits.match)) if place.depth else START
        while state:
            match = min(depth, self._length[state])
            room = min(int(limits.factor * match + EPSILON), limits.tokens)
            if room <= best.expected:
                break  # a shorter match drafts no more than that, so it expects no more
            if self._children[state]:
                copy = self._copy(state, match, room, limits.least_share, rates)
                best = copy if copy.expected > best.expected else best
            state = self._link[state]
        return best

    def _copy(self, state: int, match: int, room: int, least_share: float, rates: Sequence[float]) -> Copy:
        """What followed a state's string most often, up to `room` tokens."""
        tokens: list[int] = []
        expected, probability, position, children = 0.0, 1.0, NONE, self._children
        while len(tokens) < room and children[state]:
            token, state, share = self._most_frequent(state)
            probability *= share * rates[min(match + len(tokens), MOST)]
            if probability < least_share:
                break
            if not tokens:
                position = self._latest[state]
            tokens.append(token)
            expected += probability
        return Copy(tokens, expected, match, position)

    def _most_frequent(self, state: int) -> tuple[int, int, float]:
        """The token that followed a state's string most often, of equals latest; the state with it, and its share."""
        following = self._children[state]
        if len(following) == 1:
            ((token, child),) = following.items()
            return token, child, 1.0
        count, latest = self._count, self._latest
        most = total = token = likeliest = 0
        for candidate, child in following.items():  # a plain loop: in the way of every round
            number = count[child]
            total += number
            if number > most or (number == most and latest[child] > latest[likeliest]):
                most, token, likeliest = number, candidate, child
        return token, likeliest, most / total

    def _settle(self, state: int, depth: int) -> Place:
        """The place of the last `depth` tokens of a state's strings, `longest` at most."""
        depth = min(depth, self.longest)
        while self._length[self._link[state]] >= depth:
            state = self._link[state]
        return Place(state, depth)

    def _new_state(self, length: int) -> int:
        self._children.append({})
        self._link.append(ROOT)
        self._length.append(length)
        self._count.append(0)
        self._latest.append(NONE)
        return len(self._link) - 1

    def _insert(self, whole: int, token: int) -> int:
        """The state of the text `whole` with one token more."""
        children, length = self._children, self._length
        known = children[whole].get(token)
        if known is not None:  # in an earlier text
            return known if length[known] == length[whole] + 1 else self._split(whole, token, known)
        new, state = self._new_state(length[whole] + 1), whole
        while state != NONE and token not in children[state]:
            children[state][token] = new
            state = self._link[state]
        if state != NONE:
            after = children[state][token]
            fits = length[after] == length[state] + 1
            self._link[new] = after if fits else self._split(state, token, after)
        return new

    def _split(self, state: int, token: int, after: int) -> int:
        """Part from `after` its strings of up to length[state] + 1 tokens, which are about to end at more places."""
        short = self._new_state(self._length[state] + 1)
        self._children[short] = self._children[after].copy()
        self._link[short], self._count[short] = self._link[after], self._count[after]
        self._latest[short] = self._latest[after]
        self._link[after] = short
        while state != NONE and self._children[state].get(token) == after:
            self._children[state][token] = short
            state = self._link[state]
        return short


@final
class AnswerCache:
    """Earlier answers in one automaton, at most `max_tokens` of them; the least recently used go first."""

    def __init__(self, max_tokens: int, longest: int) -> None:
        self.max_tokens, self.longest = max_tokens, longest
        self.automaton = SuffixAutomaton(longest)
        self._answers: OrderedDict[int, Sequence[int]] = OrderedDict()  # by number, the least recently used first
        self._starts: list[int] = []  # of the answers in the automaton: index of the first token, and number
        self._numbers: list[int] = []
        self._next_number = 0

    @property
    def answers(self) -> list[Sequence[int]]:
        """The answers, the least recently used first."""
        return list(self._answers.values())

    def remember(self, answer: Sequence[int]) -> None:
        """Add an answer, its last `max_tokens` tokens, and evict others where there are too many tokens."""
        answer = list(answer[max(0, len(answer) - self.max_tokens) :])
        if not answer:
            return
        if self.automaton.num_tokens + len(answer) > self.max_tokens:
            self._evict(max(0, int(KEPT_SHARE * self.max_tokens) - len(answer)))
        self._answers[self._next_number] = answer
        self._add(self._next_number)
        self._next_number += 1

    def use(self, position: int) -> None:
        """Note that a copy came from the answer of this token of the automaton."""
        self._answers.move_to_end(self._numbers[bisect_right(self._starts, position) - 1])

    def _add(self, number: int) -> None:
        self._starts.append(self.automaton.num_tokens)
        self._numbers.append(number)
        self.automaton.add_text(self._answers[number])

    def _evict(self, num_tokens: int) -> None:
        """Keep the most recently used answers that together have `num_tokens` tokens at most."""
        total = self.automaton.num_tokens
        while total > num_tokens:
            _, answer = self._answers.popitem(last=False)
            total -= len(answer)
        self.automaton = SuffixAutomaton(self.longest)  # requests that still draft from the old one keep it
        self._starts, self._numbers = [], []
        for number in self._answers:
            self._add(number)


@dataclass
class SuffixState:
    """One sequence. own: its text from x_1 on. place: the end of that text in `earlier`, the automaton of the cache."""

    own: SuffixAutomaton
    earlier: SuffixAutomaton
    place: Place = START
    own_trust: Trust = field(default_factory=Trust)
    earlier_trust: Trust = field(default_factory=Trust)


@final
class Suffix(FromSettings):
    """A Drafter without a network."""

    method: ClassVar[str] = "suffix"
    needs_features: ClassVar[bool] = False

    def __init__(self, settings: SuffixSettings = DEFAULTS) -> None:
        self.settings, self.max_depth = settings, settings.max_draft_tokens
        self.num_steps, self.kernel = min(MEASURED_DEPTH, self.max_depth), "plain"
        longest_match = settings.max_tree_depth - settings.max_draft_tokens
        self.limits = Limits(longest_match, self.max_depth, settings.max_spec_factor, settings.min_token_prob)
        self.cache = AnswerCache(settings.cached_tokens, settings.max_tree_depth)

    def remember(self, answers: Iterable[Sequence[int]]) -> None:
        """Add answers to the cache, for the requests that begin after it."""
        for answer in answers:
            self.cache.remember(answer)

    def new_state(self, capacity: int) -> SuffixState:
        """State for one sequence; it grows with the text."""
        return SuffixState(SuffixAutomaton(self.settings.max_tree_depth), self.cache.automaton)

    def propose(
        self, state: SuffixState, committed: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """As Proposer: deterministic at every temperature, hence no probabilities; no tokens without a match."""
        self.commit(state, committed.next_tokens.tolist())
        tokens = self.best_copy(state).tokens[:depth]
        return Proposal(torch.tensor(tokens, dtype=torch.int64, device=committed.next_tokens.device), None)

    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As Drafter: `propose` after each column; taps and last are not read."""
        state, rows = self.new_state(len(ids)), []
        for token in ids[1:].tolist():
            self.commit(state, [token])
            tokens = self.best_copy(state).tokens[:depth]
            rows.append(tokens + [NO_TOKEN] * (depth - len(tokens)))
        return EveryPosition(torch.tensor(rows[first:], dtype=torch.int64, device=ids.device).view(-1, depth), None)

    def commit(self, state: SuffixState, tokens: Iterable[int]) -> None:
        """Add tokens to the end of the sequence's text, and learn whether they were expected."""
        for token in tokens:
            guess, share, match = state.own.likeliest(state.own.place)
            if match:
                state.own_trust.learn(match, share, right=guess == token)
            state.own.extend(token)
            if state.earlier.num_tokens:
                guess, share, match = state.earlier.likeliest(state.place)
                if match:
                    state.earlier_trust.learn(match, share, right=guess == token)
                state.place = state.earlier.follow(state.place, token)

    def best_copy(self, state: SuffixState) -> Copy:
        """The copy that drafts now; without tokens where none is worth it."""
        copy = state.own.best_copy(state.own.place, self.limits, state.own_trust.rates)
        from_cache = False
        if state.earlier.num_tokens:
            earlier = state.earlier.best_copy(state.place, self.limits, state.earlier_trust.rates)
            from_cache = earlier.expected > copy.expected
            copy = earlier if from_cache else copy
        if copy.expected < self.settings.min_score:
            return NO_COPY
        if from_cache and state.earlier is self.cache.automaton:
            self.cache.use(copy.position)
        return copy
