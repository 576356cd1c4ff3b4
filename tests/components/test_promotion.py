"""Margins, serving setups and checks of the promotion gate, as storage and the comparison share them."""

from __future__ import annotations

import pytest

from components.promotion import MAX_ACCEPTANCE_LOSS, MAX_SLOWDOWN, Check, Margins, ServingSetup


def test_one_workload_has_twice_the_margin_of_acceptance_and_none_of_speed() -> None:
    margins = Margins()
    assert margins.of("decode_speed", pooled=True) == margins.of("speedup", pooled=False) == MAX_SLOWDOWN
    assert margins.of("acceptance_length", pooled=True) == MAX_ACCEPTANCE_LOSS
    assert Margins(acceptance=0.03).of("acceptance_length", pooled=False) == pytest.approx(0.06)


def test_depth_zero_without_a_tree_is_plain_decoding() -> None:
    assert ServingSetup("champion", "d", 0).is_plain
    assert not ServingSetup("challenger", "d", 2).is_plain and not ServingSetup("tree", "d", 0, tree_budget=16).is_plain


def test_a_check_is_one_line_with_its_interval_where_it_has_one() -> None:
    speed = Check("speed_against_champion", True, 1.0425, 0.9871, 1.1049, "lower bound >= 0.98")
    assert speed.summary() == (
        "decoding speed, as a share of the champion's: measured 1.042 [0.987, 1.105], asked lower bound at least 0.98"
    )
    size = Check("size", True, 0.5, None, None, "<= 1.50")
    assert size.summary() == "weights, as a multiple of the champion's: measured 0.5, asked at most 1.50"
    assert size.refusal() == f"{size.summary()} (train a smaller drafter)"
    assert Check("acceptance[all]", False, None, None, None, "maps").measured() == "not measured"
