"""Two-row validation says the same tokens in the same rounds as a chain of depth 1, and samples without bias."""

from __future__ import annotations

import pytest
import torch
from cheap_drafter import Cheap, exact_triples
from chi_square import LEVEL, chi_square_p_value
from torch import Tensor
from twin import ColumnTwin

from benchmarks.two_row import TwoRowMtp, decode_two_row
from components.contract import UserError
from components.decoding.chain import decode
from components.decoding.session import Session
from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.methods.mtp import Mtp
from components.drafts.methods.ngram import Ngram
from components.drafts.storage.files import build_draft
from components.targets.interface import AbstractTarget

LENGTH = 40
PROMPTS = ([5, 9, 2, 7], [3], [11, 4, 4, 8, 30, 2, 6, 19, 25])


class CheapColumns(Cheap):
    """The cheap drafter, asked after every column."""

    def draft_logits_after_each(self, state: list[int], columns: CommittedPositions) -> Tensor:
        nothing = torch.empty(0)
        one_by_one = (CommittedPositions(token, nothing, nothing) for token in columns.next_tokens.split(1))
        return torch.stack([self.begin(state, column, 1).root for column in one_by_one])

    def rollback(self, state: list[int], count: int) -> None:
        del state[len(state) - count :]


def new_mtp(target: AbstractTarget, **settings: int) -> Mtp:
    draft: Mtp = build_draft("mtp", target, settings, torch.arange(0, 32, 2))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 2 * weight.shape[-1] ** -0.5, generator=generator)
    draft.prepare_decoding()
    return draft


def test_it_is_a_chain_of_depth_one_in_the_same_rounds(target: AbstractTarget) -> None:
    accepted = 0
    for drafter in (ColumnTwin(target), new_mtp(target), new_mtp(target, mtp_modules=1)):
        for prompt in PROMPTS:
            chain = decode(target, drafter, prompt, max_new_tokens=LENGTH, depth=1, ignore_eos=True)
            columns = TwoRowMtp(drafter) if isinstance(drafter, Mtp) else drafter
            run = decode_two_row(target, columns, prompt, max_new_tokens=LENGTH, ignore_eos=True)
            assert (run.tokens, run.tokens_raw, run.rounds) == (chain.tokens, chain.tokens_raw, chain.rounds)
            assert run.tokens == decode(target, None, prompt, max_new_tokens=LENGTH, ignore_eos=True).tokens
            accepted += sum(r.accepted for r in run.rounds)
    assert accepted > 20


def test_end_of_text_stops_it(target: AbstractTarget) -> None:
    answer = decode(target, None, PROMPTS[0], max_new_tokens=LENGTH, ignore_eos=True).tokens
    run = decode_two_row(target, ColumnTwin(target), PROMPTS[0], max_new_tokens=LENGTH, eos_ids=[answer[9]])
    assert run.tokens == answer[: answer.index(answer[9]) + 1] and run.status == "eos"


def test_columns_taken_back_leave_no_trace(target: AbstractTarget) -> None:
    """Whatever was guessed and forgotten, MTP's next guesses are those of a state that only saw what was kept."""
    ids = torch.randint(2, 32, (1, 24), generator=torch.Generator().manual_seed(5))
    out = target.forward(ids, target.new_cache(1, 24), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    taps, last, draft = out.taps[0], out.last[0], new_mtp(target)
    two_row = TwoRowMtp(draft)

    def columns(start: int, stop: int) -> CommittedPositions:
        return CommittedPositions(ids[0, start + 1 : stop + 1], taps[start:stop], last[start:stop])

    state, done = draft.new_state(40), 0
    for size, kept in ((5, 5), (2, 1), (2, 2), (2, 1), (2, 1), (1, 1), (2, 2)):
        said = two_row.draft_logits_after_each(state, columns(done, done + size))
        two_row.rollback(state, size - kept)
        assert said.shape == (size, 16)
        for row in range(size):
            fresh = draft.begin(draft.new_state(40), columns(0, done + row + 1), 1)
            torch.testing.assert_close(said[row], fresh.root, rtol=1e-4, atol=1e-4)
        done += kept
    rng = torch.Generator().manual_seed(0)
    after = draft.propose(state, columns(done, done + 2), 3, Sampling(), rng).tokens
    assert (
        after.tolist() == draft.propose(draft.new_state(40), columns(0, done + 2), 3, Sampling(), rng).tokens.tolist()
    )


@pytest.mark.parametrize("rule", ["right", "wrong"])
def test_sampled_rounds_keep_the_distribution(
    target: AbstractTarget, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens of N = 600 generations against their exact distribution (27 cells), chi-square at level 1e-4.

    Power: the same test must reject a loop that keeps the guess whenever the target could say it.
    """
    if rule == "wrong":

        def keeps_what_is_possible(probs: Tensor, guess: Tensor, drafted: Tensor, rng: torch.Generator) -> object:
            return verify(probs, guess, drafted * 1e-6, rng)

        from components.decoding.verification import verify_sampled as verify

        monkeypatch.setattr("benchmarks.two_row.verify_sampled", keeps_what_is_possible)
    hot, session = Sampling(temperature=1.0, top_k=3), Session(target)
    cells = exact_triples(target, PROMPTS[0], hot)
    drafter = CheapColumns(cells)
    seen, accepted = dict.fromkeys(cells, 0), 0
    for seed in range(600):
        rng = torch.Generator().manual_seed(seed)
        run = decode_two_row(
            target, drafter, PROMPTS[0], max_new_tokens=3, sampling=hot, rng=rng, ignore_eos=True, session=session
        )
        seen[tuple(run.tokens)] += 1
        accepted += run.rounds[0].accepted
    assert accepted > 100
    p_value = chi_square_p_value(torch.tensor(list(seen.values())), torch.tensor(list(cells.values())))
    assert (p_value > LEVEL) == (rule == "right")


def test_methods_that_do_not_fit_are_refused(target: AbstractTarget) -> None:
    with pytest.raises(UserError, match="chain of depth 1"):
        decode_two_row(target, Ngram(), [1, 2], max_new_tokens=4)
    with pytest.raises(UserError, match="at least one"):
        decode_two_row(target, ColumnTwin(target), [], max_new_tokens=4)
    with pytest.raises(UserError, match="the target has 256"):
        decode_two_row(target, ColumnTwin(target), [1] * 250, max_new_tokens=40)
