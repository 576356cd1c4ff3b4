"""Shares hold to within a row at every limit."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixed_rows import counts_of, got, mixed, two

from components.data.mixing.sampling import sample_rows


@given(st.data())
def test_shares_hold_to_within_a_row_at_every_limit_and_limits_are_nested(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5), label="strata")
    seed = data.draw(st.integers(0, 10_000), label="seed")
    weights = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count).filter(any), label="weights")
    rng = numpy.random.default_rng(seed)
    strata = rng.integers(0, count, data.draw(st.integers(count, 300), label="rows"))
    sizes = rng.choice([1, 2, 5, 40], len(strata))
    keys = rng.permutation(len(strata)).astype(numpy.uint64)
    shares = numpy.array(weights) / sum(weights)
    shrink = data.draw(st.booleans(), label="shrink")
    before: set[int] = set()
    for limit in (*sorted(data.draw(st.lists(st.integers(1, 2000), max_size=4), label="limits")), numpy.inf):
        found = sample_rows(
            keys,
            strata,
            sizes,
            shares,
            caps=numpy.full(count, numpy.inf),
            limit=limit,
            shrink=shrink,
            passes=numpy.ones(count, dtype=numpy.int64),
        )
        rows = found.rows
        assert before <= set(rows.tolist()) and len(set(rows.tolist())) == len(rows) == (found.reasons == 0).sum()
        before = set(rows.tolist())
        assert sizes[rows].sum() <= limit
        given_ = numpy.bincount(strata[rows], weights=sizes[rows], minlength=count)
        there = numpy.bincount(strata, weights=sizes, minlength=count)
        # there is one level at which every stratum has given its share, to within half a row of it, or all it has
        open_ = [one for one in range(count) if shares[one] and (shrink or given_[one] < there[one])]
        half = [max(sizes[strata == one], default=0) / 2 for one in range(count)]
        assert (
            max(((given_[one] - half[one]) / shares[one] for one in open_), default=0.0)
            <= min(((given_[one] + half[one]) / shares[one] for one in open_), default=numpy.inf) + 1e-6
        )
        if not shrink and limit == numpy.inf:
            assert (given_ == numpy.where(shares > 0, there, 0)).all()


def test_temperature_and_caps_shape_shares(tmp_path: Path) -> None:
    chats = two(tmp_path)
    there = counts_of(mixed(tmp_path, chats, by="rows"))
    assert there["a"] > 4 * there["b"]
    warm = got(mixed(tmp_path, chats, by="rows", temperature=2.0), "source")
    assert warm["a"]["asked"] / warm["b"]["asked"] == pytest.approx((there["a"] / there["b"]) ** 0.5, rel=1e-4)
    hot = counts_of(mixed(tmp_path, chats, by="rows", temperature=100.0))
    assert abs(hot["a"] - hot["b"]) <= 2
    capped = mixed(tmp_path, chats, by="rows", caps={"a": 30})
    assert counts_of(capped) == {"a": 30, "b": there["b"]}
    assert capped.info["dropped"]["over_cap"] == there["a"] - 30
    weighed = mixed(tmp_path, chats, by="rows", weights={"a": 3.0, "b": 1.0}, caps={"a": 12}, too_small="fill")
    assert counts_of(weighed) == {"a": 12, "b": there["b"]}
