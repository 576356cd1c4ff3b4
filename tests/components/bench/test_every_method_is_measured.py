"""Methods without weights go through the measuring steps as trained ones do; what makes no sense is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from components.bench import measure_acceptance
from components.bench.prompts import open_drafter
from components.contract import Context, Draft, Prompts, Target
from components.decoding.chain import decode
from components.drafts import train_draft
from components.rows import AcceptanceMap, read_rows
from components.speedup.prediction.replay import replay
from components.targets.interface import AbstractTarget

UNTRAINED = ("ngram", "lookahead", "suffix")
SETTINGS = {"lookahead": {"window": 3, "pool_from_text": True}}


def untrained(method: str, target: Target, ctx: Context) -> Draft:
    return train_draft(target, method=method, settings=SETTINGS, ctx=ctx)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", UNTRAINED)
def test_acceptance_of_a_method_without_weights_is_mapped(
    method: str, target: Target, prompts: Prompts, context: Callable[[str], Context]
) -> None:
    draft = untrained(method, target, context("draft"))
    made = measure_acceptance(target, draft, prompts, max_new_tokens=24, ctx=context("maps"))
    rows = read_rows(made.path, AcceptanceMap)
    assert {row.method for row in rows} == {method} and len(rows) == 5
    assert all(len(row.accepted) == row.num_tokens - 1 for row in rows)
    assert all(0 <= kept <= row.k_max for row in rows for kept in row.accepted)
    assert made.info["k_max"] == draft.info["num_steps"]


def test_a_live_run_of_prompt_lookup_is_the_replay_of_its_map(
    target: Target, opened: AbstractTarget, prompts: Prompts, context: Callable[[str], Context]
) -> None:
    from components.bench.acceptance import acceptance_map

    drafter = open_drafter(untrained("ngram", target, context("draft")), opened)
    for start in ([5, 6, 7], [9, 8, 9, 8, 7]):
        answer = decode(opened, None, start, max_new_tokens=50, ignore_eos=True).tokens
        found = acceptance_map(opened, drafter, start, answer, 40, 4)
        run = decode(opened, drafter, start, max_new_tokens=40, depth=4, ignore_eos=True)
        assert [r.accepted for r in run.rounds] == [r.accepted for r in replay(found.accepted, 4)]
