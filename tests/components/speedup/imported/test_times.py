"""Units and misprints in times: what no depth explains is refused, what a machine can measure is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.contract import UserError
from components.speedup.imported.columns import MS_PER_UNIT
from components.speedup.imported.rows import ImportedRow, SourcedRow, read_imported_rows
from components.speedup.imported.times import STEP_TIMES, check_times

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
