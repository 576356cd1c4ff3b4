"""Rows from anywhere, right and wrong, mixed by chance: an answer that is JSON, or one line of complaint."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from components.contract import UserError
from components.engines.depth_settings import engine_settings
from components.speedup.imported.policy import policy_from
from components.speedup.imported.rows import ImportedRow, SourcedRow, read_imported_rows
from components.speedup.policy_markdown import policy_text
from components.speedup.prediction.predict import Rule

RULE = Rule(tolerance=0.01, confidence=0.95, num_draws=200, include_host=True)
ODD_VALUES: list[Any] = [0, -1, 1.5, "x", "", None, [1, 0, 2], [], "1 2", True, 1e308, 10**30, {"a": 1}]
CASES: dict[str, list[Any]] = {
    "workload": ["code", "chat"],
    "batch_size": [1, 4],
    "kv_len": [128, 512],
    "drafter": ["x", "y"],
    "tree_budget": [8],
    "trained_depth": [1],
    "draft_vocab": [100, 200],
}


def acceptance_rows(kind: int, k: int, rng: random.Random) -> list[dict[str, Any]]:
    """One depth of one way to tell acceptance, of a drafter whose every draft is kept about seven times in ten."""
    al = sum(0.7**i for i in range(k + 1)) + rng.uniform(-0.02, 0.02)
    if kind == 0:
        return [{"k": k, "al": al}]
    if kind == 1:
        return [{"prompt": p, "k": k, "tokens": round(60 * al) + rng.randint(-3, 3), "rounds": 60} for p in "abc"]
    if kind == 2:
        return [{"k": k, "num_drafts": 60, "accepted_per_pos": [round(60 * 0.7**i) for i in range(1, k + 1)]}]
    if kind == 3:
        return [{"k": position, "p": rng.uniform(0.0, 1.0)} for position in range(1, k + 1)]
    return [{"prompt": p, "accepted": [rng.randint(0, 3) for _ in range(9)], "k_max": 3} for p in "abc"]


def cost_rows(kind: int, k: int, rng: random.Random) -> list[dict[str, Any]]:
    """One depth of one way to tell cost."""
    if kind == 0:
        return [
            {
                "k": k,
                "t_verify": rng.uniform(1, 5),
                "t_draft": rng.uniform(0.5, 2),
                "t_target": rng.uniform(1, 3),
                "block": b,
            }
            for b in (0, 1)
        ]
    if kind == 1:
        return [{"k": 0, "tpot": 2.0}, {"k": k, "tpot": rng.uniform(0.5, 3)}]
    return [{"k": k, "speedup": rng.uniform(0.5, 3)}]


def some_rows(seed: int) -> list[dict[str, Any]]:
    """Rows of one study, set apart by a column or two, now and then spoilt."""
    rng = random.Random(seed)
    columns = rng.sample(sorted(CASES), rng.randint(0, 2))
    acceptance, cost = rng.randrange(5), rng.randrange(3)
    depths = [3] if acceptance > 2 else sorted(rng.sample([1, 2, 3], rng.randint(1, 3)))
    rows = []
    several = sum(len(CASES[name]) > 1 for name in columns) > 0
    for case in range(rng.randint(1, 2) if several else 1):
        apart = {name: CASES[name][case % len(CASES[name])] for name in columns}
        for k in depths:
            rows += [{**row, **apart} for row in acceptance_rows(acceptance, k, rng)]
        for k in [1, 2, 3] if rng.random() < 0.8 else depths[:1]:
            rows += [{**row, **apart} for row in cost_rows(cost, k, rng)]
    if rng.random() < 0.3:
        rng.choice(rows)[rng.choice(sorted(ImportedRow.model_fields))] = rng.choice(ODD_VALUES)
    rng.shuffle(rows)
    return rows


def test_any_rows_end_in_an_answer_or_in_one_line(tmp_path: Path) -> None:
    file, answers = tmp_path / "rows.json", 0
    for seed in range(250):
        file.write_text(json.dumps(some_rows(seed)))
        try:
            policy = policy_from(read_imported_rows([file]), RULE, {"code": 1.0} if seed % 7 == 0 else {}, seed)
        except UserError as error:
            assert str(error) and "\n" not in str(error), f"seed {seed}"
            continue
        assert isinstance(engine_settings(policy, ()), dict), f"seed {seed}"
        assert json.loads(json.dumps(asdict(policy), allow_nan=False)) and policy_text(policy), f"seed {seed}"
        # A winner is named where it is worth using, or is the one to try where nothing tells how far chance could go.
        assert (policy.choices and policy.verdict in ("use", "undecided")) or policy.winner is None, f"seed {seed}"
        assert policy.verdict != "use" or policy.winner is not None, f"seed {seed}"
        answers += 1
    assert answers > 120, "most rows are right; too few were understood"


def test_what_a_round_costs_is_borrowed_from_the_other_workloads() -> None:
    """Three workloads, one cost: a speedup out of line is predicted by the two others and flagged."""
    speeds = {"code": 2.0, "chat": 1.5, "maths": 2.4}
    rows = [ImportedRow(workload=name, k=3, al=1.25 * speed, speedup=speed) for name, speed in speeds.items()]
    odd = [row if row.workload != "maths" else row.model_copy(update={"speedup": 1.6}) for row in rows]
    for given, gap in ((rows, 0.0), (odd, 0.5)):
        policy = policy_from([SourcedRow("", row) for row in given], RULE, {}, 0)
        maths = next(c for c in policy.choices if c.workload == "maths")
        assert maths.speedup_pred == pytest.approx(2.4)
        assert maths.pred_error == pytest.approx(gap)
        assert ("prediction_gap" in {f.code for f in policy.flags}) is (gap > 0)


def test_trees_alone_are_chosen_among_but_told_to_no_engine() -> None:
    rows = [
        ImportedRow(drafter="eagle3", tree_budget=b, k=4, al=al, speedup=al / 1.5) for b, al in ((8, 2.8), (32, 3.3))
    ]
    policy = policy_from([SourcedRow("", row) for row in rows], RULE, {}, 0)
    assert policy.verdict == "undecided" and policy.winner is not None, "one figure has no interval to decide by"
    assert policy.winner.draft_key == "eagle3, tree of 32" and policy.winner.depth_k == 4
    assert engine_settings(policy, ()) == {}


def policy_of(rows: list[dict[str, Any]]) -> Any:
    return policy_from([SourcedRow("", ImportedRow(**row)) for row in rows], RULE, {}, 0)


@pytest.mark.parametrize("column", ["drafter", "method", "draft_vocab", "tree_budget"])
def test_a_cost_that_names_a_drafter_or_its_setting_is_no_other_drafters(column: str) -> None:
    """Two settings of the same acceptance; one of them drafts three times as dear."""
    ones, others = ({"drafter": "x"}, {"drafter": "y"}) if column == "drafter" else ({column: 12}, {column: 16})
    if column == "method":
        ones, others = {"method": "eagle3"}, {"method": "mtp"}
    rows = [{"k": 2, "al": 2.5, **setting} for setting in (ones, others)]
    rows += [{"k": 2, "t_verify": 10.0, "t_draft": draft, **to} for draft, to in ((2.0, ones), (18.0, others))]
    policy = policy_of([*rows, {"t_target": 10.0}])
    assert [e.t_draft_ms for e in policy.evals if e.depth_k == 2 and e.workload == "all"] == [2.0, 18.0]


def test_maps_of_two_depths_are_replayed_as_deep_as_both_were_drafted() -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "accepted": [2] * 9, "k_max": 2}]
    rows += [{"prompt": "b", "accepted": [4] * 9, "k_max": 4}, {"t_target": 10.0}]
    policy = policy_of([*rows, *({"k": k, "t_verify": 10.0, "t_draft": 1.0} for k in (1, 2, 3, 4))])
    assert {e.depth_k for e in policy.evals} == {0, 1, 2}


def test_a_plain_step_told_once_holds_at_every_context_length() -> None:
    rows: list[dict[str, Any]] = [{"k": 1, "al": 1.8}, {"k": 2, "al": 2.4}, {"t_target": 10.0}]
    for kv_len, verify in ((128, 11.0), (4096, 16.0)):
        rows += [{"k": k, "kv_len": kv_len, "t_verify": verify, "t_draft": 0.5 * k} for k in (1, 2)]
    policy = policy_of(rows)
    assert {c.kv_len: round(c.speedup_pred, 6) for c in policy.contexts} == {
        128: round(2.4 * 10.0 / 12.0, 6),
        4096: round(2.4 * 10.0 / 17.0, 6),
    }
    assert {e.t_target_ms for e in policy.evals} == {10.0}
