"""The exact loss mask on an example small enough to check by hand, and packing of the wanted columns."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from components.drafts.network.layers import CausalMask, Documents, packed_rows, reachable, shift_left


def test_six_token_example() -> None:
    """Prompt x_0 x_1, answer x_2 x_3 x_4, then x_5 of the next turn's prompt.

    The target gives x_2 after column 1. Root column 1 is fed x_2 and guesses x_3 (step 0), then x_4 (step 1); column 2
    is fed x_3 and guesses x_4 (step 0). Nothing guesses x_5, and column 0 is never a root: x_1 is not an answer.
    """
    mask = torch.tensor([[False, False, True, True, True, False]])
    expected = [
        [False, True, True, False, False, False],
        [False, True, False, False, False, False],
        [False, False, False, False, False, False],
    ]
    assert reachable(mask, 3)[:, 0].tolist() == expected


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 6))
def test_a_step_is_reached_exactly_when_root_and_chain_are_answer_tokens(answer: list[bool], num_steps: int) -> None:
    found = reachable(torch.tensor([answer]), num_steps)[:, 0]
    for k in range(num_steps):
        for t in range(len(answer)):
            chain = [answer[t + j] if t + j < len(answer) else False for j in range(1, k + 3)]
            assert bool(found[k, t]) == all(chain)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_packing_keeps_every_wanted_column_once_and_in_order(wanted: list[list[bool]]) -> None:
    rows, valid = packed_rows(torch.tensor(wanted))
    for sequence, kept, ok in zip(wanted, rows.tolist(), valid.tolist(), strict=True):
        chosen = [column for column, keep in zip(kept, ok, strict=True) if keep]
        assert chosen == [column for column, want in enumerate(sequence) if want]


def test_shifting_left_ends_in_zeros() -> None:
    values = torch.tensor([[1, 2, 3]])
    assert shift_left(values, 1).tolist() == [[2, 3, 0]]
    assert shift_left(values, 5).tolist() == [[0, 0, 0]]


def test_with_a_window_a_packed_column_sees_the_last_positions_of_its_own_document() -> None:
    numbers = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1]])
    causal = CausalMask(9, numbers.device, Documents(numbers, torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0]])))
    seen, rows = causal.within(3), torch.tensor([[4, 7]])
    assert seen is not None
    for column in range(8):
        expected = [number == numbers[0, column] and 0 <= column - i < 3 for i, number in enumerate(numbers[0])]
        assert seen[0, 0, column].tolist() == expected
    assert torch.equal(~causal.masked_columns(rows, 3)[0, 0, 0], seen[0, 0, rows[0]])
    two_ahead = ~causal.masked_columns(rows, 3, 2)[0, 0, 0]
    assert two_ahead.nonzero().tolist() == [[0, 4], [1, 7]]
