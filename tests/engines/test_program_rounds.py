"""llama-speculative-simple's limit on drafts near the end, which our replay of its rounds follows; needs no engine."""

from __future__ import annotations

import pytest

from benchmarks.engine_llama_cpp import program_rounds

LIMIT = 8


@pytest.mark.parametrize(
    ("accepted_from", "expected"),
    [
        # a round of 4 tokens from 4 on would end at the limit: its draft is whole
        ({0: 3, 4: 3, 8: 3}, [(3, 3), (3, 3), (3, 3)]),
        # one more token said: room for 2 drafts, so the third guess, right as it is, is left to a round of its own
        ({0: 3, 4: 0, 5: 3, 8: 0}, [(3, 3), (3, 0), (2, 2), (3, 0)]),
        # and room for one
        ({0: 3, 4: 1, 6: 3, 8: 0}, [(3, 3), (3, 1), (1, 1), (3, 0)]),
        # one token before the limit nothing bounds the draft, and the answer runs past it
        ({0: 3, 4: 2, 7: 3}, [(3, 3), (3, 2), (3, 3)]),
    ],
)
def test_a_draft_ends_at_the_limit_until_no_room_is_left(
    accepted_from: dict[int, int], expected: list[tuple[int, int]]
) -> None:
    accepted = [accepted_from.get(said, 0) for said in range(LIMIT + 1)]
    assert program_rounds(accepted, 3, LIMIT, LIMIT + 4) == expected


def test_a_text_that_ends_early_ends_its_rounds() -> None:
    assert program_rounds([0, 3, 0, 0, 0], 3, 100, 5) == [(3, 0), (3, 3)]
