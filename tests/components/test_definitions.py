"""Every number has one definition: a name, a formula on the page, a column in its views, values worked by hand."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest

from components import definitions
from components.definitions import DEFINITIONS, position_counts, steady
from components.policy import AcceptanceSummary, MeasuredArm
from storage.history.query import query

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
FORMER = ("al_pooled_incl_bonus", "al_macro_incl_bonus", "accepted_per_round_excl_bonus", "al_kept", "tok_s_decode")
FORMER += ("al_incl_bonus", "accepted_macro_excl_bonus", "tok_s_e2e", "speedup_decode_vs_best_plain")


def on_the_page() -> dict[str, list[str]]:
    """Name -> formula, unit and what it counts, of every table of our own numbers."""
    own = PAGE.partition("## Other tools")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in own.splitlines() if line.startswith("| `")
    ]
    found = {row[0].strip("`"): row[1:] for row in rows}
    assert len(found) == len(rows), "a name twice"
    return found


def test_every_number_stands_on_the_page_with_its_formula_and_unit() -> None:
    page = on_the_page()
    assert page.keys() == DEFINITIONS.keys()
    for name, one in DEFINITIONS.items():
        assert page[name][:2] == [one.formula, one.unit], name
        assert page[name][2] and one.counts


def test_other_tools_are_told_in_our_names() -> None:
    other = PAGE.partition("## Other tools")[2]
    named = set(re.findall(r"`([a-z_0-9]+)`", other)) - {"spec_accept_length", "spec_accept_rate"}
    assert len(named) >= 7 and named <= DEFINITIONS.keys()


def test_every_view_that_a_definition_names_has_its_column(tmp_path: Path) -> None:
    for name, one in DEFINITIONS.items():
        for view in one.views:
            assert name in query(f"SELECT * FROM {view} LIMIT 0", tmp_path)[0], f"{view}.{name}"


def test_no_view_says_a_defined_name_that_its_definition_does_not_list(tmp_path: Path) -> None:
    views = re.findall(r"^CREATE VIEW (v_\w+)", (ROOT / "storage" / "history" / "views.sql").read_text(), re.MULTILINE)
    others = {"v_choice": {"speedup_meas"}, "v_latest": {"speedup_meas", "speedup_pred", "pred_error"}}
    others["v_engine_comparison"] = {"speedup_pred"}
    for view in views:
        columns = set(query(f"SELECT * FROM {view} LIMIT 0", tmp_path)[0]) & DEFINITIONS.keys()
        listed = {name for name, one in DEFINITIONS.items() if view in one.views}
        assert columns == listed | (columns & others.get(view, set())), view


def test_policies_say_the_same_names() -> None:
    lengths = {name for name in AcceptanceSummary.__dataclass_fields__ if name.startswith("al")}
    assert lengths == {"al", "al_uncut", "al_macro", "al_proxy"} <= DEFINITIONS.keys()
    said = {"al", "al_replayed", "draft_acceptance_rate", "tokens_per_s", "speedup", "speedup_pred"}
    assert said <= MeasuredArm.__dataclass_fields__.keys() and said <= DEFINITIONS.keys()


def test_former_names_are_gone_but_where_old_champions_are_read() -> None:
    sources = [p for room in ("components", "flows", "storage") for p in (ROOT / room).rglob("*") if p.is_file()]
    for path in sources:
        if path.suffix in (".py", ".sql", ".jinja") and path.name != "policy.py":
            text = path.read_text(encoding="utf-8")
            assert not [name for name in FORMER if re.search(rf"\b{name}\b", text)], path


def test_every_function_of_a_number_bears_its_name() -> None:
    functions = {name for name, _ in inspect.getmembers(definitions, inspect.isfunction)}
    of_rows = {"al", "al_uncut", "al_with_overshoot", "al_proxy", "al_macro", "accepted_per_round", "speedup_e2e"}
    of_rows |= {"accept_uncond", "accept_cond", "accept_joint", "accept_of_rounds", "draft_acceptance_rate", "speedup"}
    of_rows |= {"tokens_per_s", "tokens_per_s_e2e", "throughput_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50"}
    assert of_rows <= functions & DEFINITIONS.keys()


def test_the_three_lengths_of_one_answer_are_three_numbers() -> None:
    """Rounds of depth 3 keep 3 and 1; the third accepts 3, but the answer ends after its first token: 1 + 4 + 2 + 1."""
    rounds = [(3, 3, 4), (3, 1, 2), (3, 3, 1)]
    kept, accepted = sum(e for _, _, e in rounds), sum(a for _, a, _ in rounds)
    assert definitions.al(kept, 3) == pytest.approx(7 / 3)
    assert definitions.al_with_overshoot(accepted, 3) == pytest.approx(1 + 7 / 3)
    assert definitions.al_uncut(4, 2) == 3.0
    second = position_counts(rounds, 2)
    assert second == (2, 2, 1, 3, 2, 3)
    rates = (definitions.accept_uncond(second), definitions.accept_cond(second), definitions.accept_of_rounds(second))
    assert rates == (0.5, 0.5, 2 / 3)


def test_what_nobody_reached_is_none() -> None:
    nothing = position_counts([(1, 0, 1)], 2)
    assert (definitions.accept_cond(nothing), definitions.accept_of_rounds(nothing)) == (None, None)
    assert definitions.al(0, 0) is None and definitions.tokens_per_s([]) is None
    assert definitions.speedup([], []) is None and definitions.tpot_ms_p99([]) is None
    assert definitions.accept_joint([0.5, None, None]) == [0.5, None, None]
    assert definitions.al_macro([1.5, None]) is None and definitions.macro([1.5, None]) == 1.5


def test_a_steady_time_is_the_mean_of_the_shortest_tenth_of_three_at_least_or_of_the_lower_half() -> None:
    assert steady([5.0]) == 5.0
    assert steady([9.0, 4.0]) == 4.0
    assert steady([1.0, 2.0, 30.0]) == 1.5
    assert steady([1.0, 2.0, 30.0, math.nan, 40.0]) == 1.5
    assert steady(range(1, 31)) == steady(range(1, 7)) == 2.0
    assert steady(range(1, 32)) == 2.5 and steady(range(1, 101)) == 5.5
    assert math.isnan(steady([])) and math.isnan(steady([math.nan]))


def test_other_work_hardly_moves_a_steady_time() -> None:
    """A third of the timings take up to three times as long: the mean moves by a tenth and more, it does not."""
    rng = np.random.default_rng(0)
    quiet = 10.0 * (1.0 + 0.01 * rng.gamma(1.0, 1.0, size=60))
    busy = np.where(rng.random(60) < 0.33, quiet * rng.uniform(1.2, 3.0, size=60), quiet)
    assert busy.mean() > 1.1 * quiet.mean()
    assert steady(busy) == pytest.approx(steady(quiet), rel=0.01)
