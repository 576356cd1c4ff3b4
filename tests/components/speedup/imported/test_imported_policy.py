"""What may be true of outside rows and probably is not: flags with names; numbers at fault choose nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from components.engines.depth_settings import engine_settings
from components.policy import Policy
from components.rows import QualityFlag
from components.speedup.imported.policy import policy_from
from components.speedup.imported.rows import ImportedRow, SourcedRow
from components.speedup.policy_markdown import policy_text
from components.speedup.prediction.predict import Rule

RULE = Rule(tolerance=0.01, confidence=0.95, num_draws=400, include_host=True)
Rows = list[dict[str, Any]]
VERIFY, DRAFT = {1: 90.0, 2: 104.0, 3: 117.0}, {1: 8.0, 2: 14.0, 3: 22.0}


def costs(scale: float = 1.0, **of: Any) -> Rows:
    times: Rows = [{"k": k, "t_verify": VERIFY[k] * scale, "t_draft": DRAFT[k] * scale, **of} for k in VERIFY]
    return [{"t_target": 76.0, **of}, *times]


def lengths(*values: float, **of: Any) -> Rows:
    return [{"k": k, "al": al, **of} for k, al in enumerate(values, 1)]


def policy_of(rows: Rows) -> Policy:
    return policy_from([SourcedRow(f"row {i}", ImportedRow(**row)) for i, row in enumerate(rows, 1)], RULE, {}, 0)


def flag(policy: Policy, code: str) -> QualityFlag:
    return next(f for f in policy.flags if f.code == code)


def test_numbers_at_fault_choose_nothing_anywhere() -> None:
    """A round below the price of a plain step: 16.91x would be read off, if anything let it."""
    for rows in (
        [*lengths(1.8, 2.39, 2.79), *costs(0.15)],
        [*lengths(1.8, 2.39, 2.79, workload="code"), *lengths(1.6, 2.0, 2.2, workload="chat"), *costs(0.15)],
        [*lengths(1.8, 2.39, 2.79), *costs(0.15, kv_len=128), *costs(0.2, kv_len=4096)],
    ):
        policy = policy_of(rows)
        assert policy.verdict == "invalid" and policy.winner is None and engine_settings(policy, ()) == {}
        assert policy.mixtures == [] and "bad_baseline" in policy.reasons[0]
        for choice in (*policy.choices, *policy.contexts):
            assert (choice.verdict, choice.depth_k, choice.speedup_pred, choice.p_beats_no_spec) == ("invalid", 0, 1, 0)
        for candidate in policy.ranking:
            assert (candidate.depth_k, candidate.speedup_pred) == (0, 1.0)
        assert "| use |" not in policy_text(policy) and json.dumps(asdict(policy), allow_nan=False)


def test_a_drafter_at_fault_leaves_the_choice_to_the_others() -> None:
    rows = [*lengths(1.8, 2.39, 2.79, drafter="bad"), *costs(0.3, drafter="bad")]
    rows += [*lengths(1.8, 2.39, 2.79, drafter="good"), *costs(drafter="good")]
    policy = policy_of(rows)
    assert policy.winner is not None and policy.winner.draft_key == "good"
    # Lengths alone carry no interval, so that the good one is the one to try, and no more.
    assert policy.verdict == "undecided"
    assert {c.draft_key: c.verdict for c in policy.choices} == {"bad": "invalid", "good": "undecided"}
    assert {c.draft_key: c.chosen for c in policy.ranking} == {"bad": False, "good": True}


def test_steps_that_one_run_cannot_take_are_flagged() -> None:
    over_one = policy_of([*lengths(1.5, 2.9, 3.2), *costs()])
    assert over_one.verdict == "invalid" and flag(over_one, "al_step_above_one").value == pytest.approx(1.4)
    growing = policy_of([*lengths(1.4, 1.9, 2.2), *costs()])
    assert growing.verdict != "invalid" and flag(growing, "al_steps_grow").value == pytest.approx(0.1)
    assert flag(growing, "al_steps_grow").severity == "warning"
    steady = policy_of([*lengths(1.4, 1.83, 2.2), *costs()])  # by no more than rounding
    assert "al_steps_grow" not in {f.code for f in steady.flags}


def counted(num_prompts: int, second: float, rng: np.random.Generator) -> Rows:
    """Prompts of 20 rounds at each of two depths; a first draft is kept in 40 %, a second in `second` of the rounds."""
    rows: Rows = []
    for prompt in range(num_prompts):
        first, more = int(rng.binomial(20, 0.4)), int(rng.binomial(20, second))
        rows.append({"prompt": str(prompt), "k": 1, "tokens": 20 + first, "rounds": 20})
        rows.append({"prompt": str(prompt), "k": 2, "tokens": 20 + first + more, "rounds": 20})
    return rows


@pytest.mark.parametrize(
    ("num_prompts", "second", "num_draws", "least", "most"),
    [(8, 0.4, 100, 0, 7), (60, 0.4, 30, 0, 1), (60, 0.6, 30, 30, 30)],
)
def test_steps_that_grow_by_chance_are_not_flagged(
    num_prompts: int, second: float, num_draws: int, least: int, most: int
) -> None:
    """A difference of steps has a standard deviation of 0.055 over 8 prompts, 0.02 over 60.

    Growth of 0.2 is found always (z = 10). None at all passes the interval in 3 of 100 draws of 8 prompts, where the
    0.05 for rounding alone would let 16 pass; over 60 prompts less than one in a hundred passes both.
    """
    rng = np.random.default_rng(5)
    found = [policy_of([*counted(num_prompts, second, rng), *costs()[:3]]) for _ in range(num_draws)]
    assert least <= sum("al_steps_grow" in {f.code for f in policy.flags} for policy in found) <= most


@pytest.mark.parametrize(
    ("change", "code", "value"),
    [
        ({1: {"t_verify": 700.0}}, "uneven_verify", 700 / 90),
        ({2: {"t_verify": 80.0}}, "uneven_verify", 80 / 104),
        ({0: {"t_verify": 70.0}}, "verify_below_plain", 70 / 76),
        ({0: {"t_draft": 0.0}}, "draft_nearly_free", 0.0),
    ],
)
def test_times_that_are_strange_are_flagged(change: dict[int, dict[str, float]], code: str, value: float) -> None:
    rows = costs()
    for index, values in change.items():
        rows[index + 1] |= values
    found = flag(policy_of([*lengths(1.8, 2.39, 2.79), *rows]), code)
    assert (found.severity, found.value) == ("warning", pytest.approx(value))


def heavy_tailed() -> list[tuple[str, int, int]]:
    """Prompt, tokens, rounds: nine short answers that are easy to guess, and a long one that is not."""
    return [*((f"short{i}", 29, 10) for i in range(9)), ("long", 2600, 2000)]


def test_lengths_by_prompt_are_called_the_mean_that_they_are() -> None:
    counts = [{"prompt": p, "k": 2, "tokens": t, "rounds": r} for p, t, r in heavy_tailed()]
    bare = [{"prompt": p, "k": 2, "al": t / r} for p, t, r in heavy_tailed()]
    pooled, macro = (policy_of([*rows, *costs()]) for rows in (counts, bare))
    said = flag(macro, "macro_mean")
    harmonic = 10 / sum(r / t for _, t, r in heavy_tailed())
    assert macro.evals[1].al == pytest.approx(harmonic) == said.value
    assert said.severity == "warning" and "macro mean" in said.detail and "tokens or rounds" in said.detail
    assert "macro_mean" not in {f.code for f in pooled.flags}
    assert pooled.evals[1].al == pytest.approx(2861 / 2090)
    assert pooled.evals[1].al < 0.6 * macro.evals[1].al


@pytest.mark.parametrize("weight", ["tokens", "rounds"])
def test_lengths_with_tokens_or_rounds_are_pooled_as_counts_are(weight: str) -> None:
    told = {"tokens": 1, "rounds": 2}[weight]
    counts = [{"prompt": p, "k": 2, "tokens": t, "rounds": r} for p, t, r in heavy_tailed()]
    weighed = [{"prompt": row[0], "k": 2, "al": row[1] / row[2], weight: row[told]} for row in heavy_tailed()]
    one, other = (policy_of([*rows, *costs()]) for rows in (counts, weighed))
    assert [e.al for e in one.evals] == pytest.approx([e.al for e in other.evals])
    assert [e.pred_lo for e in one.evals] == pytest.approx([e.pred_lo for e in other.evals])
    assert [f.code for f in one.flags] == [f.code for f in other.flags]


def test_lengths_of_workloads_are_a_macro_mean_too_and_equal_ones_are_none() -> None:
    apart = policy_of([*lengths(1.9, workload="code"), *lengths(1.5, workload="chat"), *costs()])
    assert flag(apart, "macro_mean").value == pytest.approx(2 / (1 / 1.9 + 1 / 1.5))
    alike = policy_of([*lengths(1.9, workload="code"), *lengths(1.9, workload="chat"), *costs()])
    assert "macro_mean" not in {f.code for f in alike.flags}


def test_prompts_that_lack_a_depth_are_counted() -> None:
    rows = [{"prompt": p, "k": k, "tokens": 100, "rounds": 60} for p in "abcde" for k in (1, 2)]
    assert flag(policy_of([*rows[:-1], *costs()]), "prompts_left_out").value == 1
    assert "prompts_left_out" not in {f.code for f in policy_of([*rows, *costs()]).flags}


def test_prompts_weigh_in_speedup_as_they_do_in_time() -> None:
    """Two prompts, 10 ms a token plain, 2.5 and 10 ms with drafts: 20 / 12.5, not the mean of 4 and 1."""
    for told in ("tpot", "speedup"):
        rows: Rows = [{"prompt": p, "k": 2, "al": 2.9} for p in "ab"]
        rows[0] |= {"tpot": 2.5} if told == "tpot" else {"speedup": 4.0}
        rows[1] |= {"tpot": 10.0} if told == "tpot" else {"speedup": 1.0}
        plain: Rows = [{"k": 0, "tpot": 10.0}] if told == "tpot" else []
        policy = policy_of([*rows, *plain])
        assert [e.speedup_meas for e in policy.evals if e.depth_k] == [pytest.approx(1.6)]
