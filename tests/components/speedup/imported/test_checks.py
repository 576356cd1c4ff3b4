"""Rows that cannot stand together are refused; rows that one text and one machine can give never are.

Of times, what no depth explains is refused, and what a machine can measure is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from components.contract import UserError
from components.policy import Policy
from components.speedup.imported.checks import STEP_TIMES, check_times, check_together
from components.speedup.imported.columns import MS_PER_UNIT
from components.speedup.imported.policy import policy_from
from components.speedup.imported.rows import ImportedRow, SourcedRow, read_imported_rows
from components.speedup.prediction.predict import Rule
from components.speedup.prediction.replay import count, replay

RULE = Rule(tolerance=0.01, confidence=0.95, num_draws=400, include_host=True)
VERIFY, DRAFT = {1: 90.0, 2: 104.0, 3: 117.0}, {1: 8.0, 2: 14.0, 3: 22.0}
COSTS = [{"t_target": 76.0}, *({"k": k, "t_verify": VERIFY[k], "t_draft": DRAFT[k]} for k in VERIFY)]
Rows = list[dict[str, Any]]


def placed(rows: Rows) -> list[SourcedRow]:
    return [SourcedRow(f"row {i}", ImportedRow(**row)) for i, row in enumerate(rows, 1)]


def policy_of(rows: Rows) -> Policy:
    return policy_from(placed(rows), RULE, {}, 0)


def refusal(rows: Rows) -> str:
    with pytest.raises(UserError) as caught:
        policy_of(rows)
    return str(caught.value)


def lengths(*values: float, **other: Any) -> Rows:
    return [{"k": k, "al": al, **other} for k, al in enumerate(values, 1)]


maps = st.lists(st.integers(0, 9), min_size=1, max_size=60)


@given(maps)
@example([2, 1, 0] * 20)
@example([9, 0, 9, 0, 0] * 9)
def test_no_deeper_run_keeps_more_drafts_than_depth_allows(accepted: list[int]) -> None:
    """The bound of checks.py, on any map: kept(m) <= m * kept(k), but for what the end of the text cuts."""
    kept = {k: sum(r.accepted for r in replay(accepted, k)) for k in range(1, 8)}
    for k in kept:
        for m in range(k + 1, 8):
            assert kept[m] <= m * (kept[k] + 1)


@given(st.lists(maps, min_size=1, max_size=4), st.sampled_from([1, 2, 3]))
@example([[2, 1, 0] * 20], 1)
def test_what_was_replayed_from_one_text_is_never_refused(texts: list[list[int]], step: int) -> None:
    """Counts at several depths, with and without prompts, however wild the map."""
    depths = range(1, 8, step)
    by_prompt: Rows = [
        {"prompt": str(i), "k": k, "tokens": found.tokens, "rounds": found.rounds}
        for i, accepted in enumerate(texts)
        for k in depths
        for found in [count(accepted, k)]
    ]
    check_together(placed(by_prompt))
    together: dict[int, list[int]] = {k: [0, 0] for k in depths}
    for row in by_prompt:
        together[row["k"]][0] += row["tokens"]
        together[row["k"]][1] += row["rounds"]
    check_together(placed([{"k": k, "tokens": t, "rounds": r} for k, (t, r) in together.items()]))


def test_short_runs_of_sampled_text_are_not_refused() -> None:
    """Each depth decodes a text of its own, 10 rounds, drafts kept in 10, 30 or 60 %: 600 pairs of chance alone."""
    rng = np.random.default_rng(3)
    for rate in (0.1, 0.3, 0.6):
        for _ in range(200):
            kept = {k: np.cumprod(rng.random((10, k)) < rate, axis=1).sum() for k in (1, 2, 4)}
            check_together(placed([{"k": k, "tokens": 10 + int(n), "rounds": 10} for k, n in kept.items()]))


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9))
def test_lengths_of_one_set_of_rounds_are_never_refused(p: list[float]) -> None:
    """1 + p1 + p1 p2 + ... at every depth, printed with one decimal, raises nothing about its steps either."""
    survival, al, told = 1.0, 1.0, []
    for k, p_k in enumerate(p, 1):
        survival *= p_k
        al += survival
        told.append({"k": k, "al": min(round(al, 2), k + 1.0), "t_verify": 20.0 + k, "t_draft": 1.0 + k})
    codes = {flag.code for flag in policy_of([*told, {"t_target": 20.0}]).flags}
    assert not codes & {"al_step_above_one", "al_steps_grow"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (lengths(1.10, 2.80, 3.90), "row 2: drafter, batch 1: acceptance length 2.80 at k = 2 beside 1.10 at k = 1"),
        (lengths(1.8, 2.39) + lengths(1.6), "row 3: acceptance of drafter at k = 1 was already told (row 1)"),
        ([*lengths(1.8), {"k": 1, "p": 0.8}], "row 2: acceptance of drafter at k = 1 was already told (row 1)"),
        (lengths(1.8, prompt="a") * 2, "row 2: acceptance of prompt a at k = 1 was already told (row 1)"),
        ([{"prompt": "a", "accepted": [1, 0]}] * 2, "row 2: acceptance of prompt a was already told (row 1)"),
        ([{"prompt": "a", "accepted": [1, 0]}, *lengths(1.5, prompt="a")], "row 2: acceptance of prompt a was already"),
        ([{"k": 1, "num_drafts": 9, "accepted_per_pos": [4]}] * 2, "number repetitions in a column rep"),
        ([{"k": 1, "speedup": 1.2}, {"k": 1, "speedup": 1.3}], "row 2: speedup of drafter at k = 1 was already told"),
        ([{"k": 0, "tpot": 9.0}, {"k": 0, "tpot": 8.0}], "row 2: tpot of drafter at k = 0 was already told (row 1)"),
        ([{"k": 1, "p": 0.8}, {"k": 3, "p": 0.6}], "row 2: drafter, batch 1: p of position 2 is missing"),
        (
            lengths(1.8, workload="code") + lengths(1.7),
            "row 2: drafter, batch 1: acceptance names no workload, at row 1",
        ),
        (lengths(1.8, prompt="a") + lengths(1.7), "row 2: drafter, batch 1: acceptance names no prompt, at row 1"),
        (
            [*lengths(1.8, prompt="a"), {"prompt": "b", "k": 1, "tokens": 90, "rounds": 60}],
            "row 1: drafter, batch 1: a length without tokens or rounds cannot be weighed against the counts at row 2",
        ),
    ],
)
def test_rows_that_cannot_stand_together_are_refused(rows: Rows, said: str) -> None:
    assert said in refusal([*rows, *COSTS])


@pytest.mark.parametrize("column", ["rep", "block", "prompt", "workload", "drafter", "batch_size", "kv_len"])
def test_two_figures_for_one_depth_stand_where_a_column_tells_them_apart(column: str) -> None:
    check_together(placed([{"k": 1, "al": al, column: i} for i, al in enumerate((1.6, 1.8), 1)]))


def test_one_figure_may_stand_in_every_row_of_a_table() -> None:
    """Repeated timings beside the same lengths or p: nothing is counted twice."""
    for first in ({"al": 1.8}, {"p": 0.8}):
        rows = [{"k": 1, **first, "t_verify": 90.0 + i, "t_draft": 8.0, "t_target": 76.0, "block": i} for i in range(5)]
        once = [{**row, "block": None} for row in rows]
        for told in (rows, once):
            found = policy_of(told)
            assert [e.al for e in found.evals] == pytest.approx([1.0, 1.8])
            assert {f.code for f in found.flags} == {"no_interval"}


def test_counted_repetitions_add_up() -> None:
    rows = [{"prompt": p, "k": 1, "tokens": 90, "rounds": 60, "rep": r} for p in "abcd" for r in (1, 2)]
    rows[-1] |= {"tokens": 110}
    found = policy_of([*rows, *COSTS[:2]])
    assert found.evals[1].al == pytest.approx((7 * 90 + 110) / 480)


def test_p_gives_the_articles_numbers() -> None:
    """Each of the three ways to print them: p, AL, and both depths and times in one row."""
    p = {1: 0.80, 2: 0.74, 3: 0.67}
    wide = [{"k": k, "p": p[k], "t_target": 76.0, "t_verify": VERIFY[k], "t_draft": DRAFT[k]} for k in (3, 1, 2)]
    for rows in (wide, [*({"k": k, "p": p[k]} for k in p), *COSTS]):
        found = policy_of(rows)
        assert [round(e.al, 2) for e in found.evals] == [1.0, 1.80, 2.39, 2.79]
        assert [round(e.speedup_pred, 2) for e in found.evals] == [1.0, 1.40, 1.54, 1.52]
        assert [c.depth_k for c in found.choices] == [2]
        assert {f.code for f in found.flags} == {"no_interval"}


Rows = list[dict[str, Any]]


def table(scales: dict[str, float] | None = None) -> Rows:
    """The worked example's times, some columns in another unit: what stands in them times `scales`."""
    times = {"t_verify": (90, 104, 117), "t_draft": (8, 14, 22), "t_target": (76, 76, 76), "t_host": (2, 2, 3)}
    found: Rows = [{"k": 1}, {"k": 2}, {"k": 3}]
    for name, values in times.items():
        for row, value in zip(found, values, strict=True):
            row[name] = value * (scales or {}).get(name, 1.0)
    return found


def check(rows: Rows, units: frozenset[str] = frozenset(), tree_budget: int | None = None) -> None:
    placed = [SourcedRow(f"row {i}", ImportedRow(**row), units) for i, row in enumerate(rows, 1)]
    check_times("x, batch 1", placed, tree_budget)


@pytest.mark.parametrize("unit", ["us", "s", "ns"])
@pytest.mark.parametrize("name", ["t_verify", "t_draft", "t_target"])
def test_one_column_in_another_unit_is_refused_and_mended_by_its_name(name: str, unit: str, tmp_path: Path) -> None:
    told = table({name: 1.0 / MS_PER_UNIT[unit]})
    with pytest.raises(UserError, match=rf"{name}_ms, {name}_us, {name}_s|t_target_ms|t_verify_ms") as caught:
        check(told)
    assert "another unit" in str(caught.value) and "row 1" in str(caught.value)
    header = ["k", *STEP_TIMES]
    lines = [",".join(f"{name}_{unit}" if column == name else column for column in header)]
    lines += [",".join(repr(row[column]) for column in header) for row in told]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    placed = read_imported_rows([tmp_path / "rows.csv"])
    check_times("x", placed, None)
    assert [p.row.t_target for p in placed] == pytest.approx([76.0] * 3)
    assert [p.row.t_draft for p in placed] == pytest.approx([8.0, 14.0, 22.0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {1: {"t_verify": 9000.0}},
            "row 2: x, batch 1: t_verify 9000 ms at k = 2 is 100 times t_verify 90 ms at k = 1",
        ),
        ({0: {"t_verify": 9000.0}}, "row 2: x, batch 1: t_verify 104 ms at k = 2 is 1/86.54 of t_verify 9000 ms"),
        ({2: {"t_verify": 5.0}}, "row 3: x, batch 1: t_verify 5 ms at k = 3 is 1/20.8 of t_verify 104 ms at k = 2"),
        ({2: {"t_draft": 900.0}}, "row 3: x, batch 1: t_draft 900 ms at k = 3 is 64.29 times t_draft 14 ms"),
        ({2: {"t_target": 7.0}}, "row 3: x, batch 1: t_target 7 ms is 1/10.86 of t_target 76 ms"),
        ({1: {"t_host": 9000.0}}, "row 2: x, batch 1: t_host 9000 ms at k = 2 is 118.4 times t_target 76 ms"),
    ],
)
def test_a_misprint_is_refused_where_it_stands(change: dict[int, dict[str, float]], said: str) -> None:
    rows = table()
    for index, values in change.items():
        rows[index] |= values
    with pytest.raises(UserError) as caught:
        check(rows)
    assert str(caught.value).startswith(said)


def test_a_draft_that_costs_nothing_is_believed_where_its_unit_is_told_or_nothing_was_trained() -> None:
    free = table({"t_draft": 1e-3})
    check(free, units=frozenset({"t_draft"}))
    check([{**row, "method": "ngram"} for row in free])
    check([{**row, "t_draft": 0.0} for row in free])
    with pytest.raises(UserError, match="t_draft_ms if it does"):
        check([{**row, "method": "eagle3"} for row in free])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"k": 0, "tpot": 7.07}, {"k": 3, "tpot": 0.0043}], "row 2: x, batch 1: tpot 0.0043 ms at k = 3 is 1/1644 of"),
        ([{"k": 0, "tpot": 0.00707}, {"k": 3, "tpot": 4.3}], "row 2: x, batch 1: tpot 4.3 ms at k = 3 is 608.2 times"),
        (
            [{"k": 3, "al": 2.0, "speedup": 143.0}],
            "row 1: x, batch 1: speedup 143 at k = 3, where a round keeps at most",
        ),
    ],
)
def test_end_to_end_figures_are_factors_of_one_unit(rows: Rows, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check(rows)
    assert str(caught.value).startswith(said)


machine = st.tuples(
    st.floats(0.01, 1000.0),  # a plain step
    st.floats(1.0, 4.0),  # what a pass of two rows costs against it
    st.floats(0.0, 1.0),  # what each row more costs, as a share of a plain step
    st.floats(0.01, 1.0),  # what a draft costs, likewise
    st.lists(st.integers(1, 16), min_size=1, max_size=6, unique=True),
)


@given(machine, st.lists(st.floats(0.7, 1.4), min_size=16, max_size=16))
def test_no_machine_is_refused(of: tuple[float, float, float, float, list[int]], noise: list[float]) -> None:
    """From bound by memory to bound by arithmetic, drafters a hundredth of the target or as dear as it, 40 % noise."""
    plain, first, row, draft, depths = of
    rows = [
        {
            "k": k,
            "t_target": plain,
            "t_verify": plain * (first + row * (k - 1)) * noise[k - 1],
            "t_draft": plain * draft * k * noise[-k],
        }
        for k in depths
    ]
    check(rows)
    check([{**r, "tree_budget": 8, "t_verify": plain * first * noise[r["k"] - 1]} for r in rows], tree_budget=8)
