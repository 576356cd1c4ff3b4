"""Shares hold to within a row at every limit."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.contract import Chats, Context, Prompts
from components.data import mix_chats
from components.data.formats.chats import Chat, ChatWriter
from components.data.mixing.sampling import sample_rows

WORDS = ("apple", "bird", "cloud", "door", "eagle", "flame", "garden", "house", "island", "jungle")


def row(source: str, number: int, words: int = 3, language: str = "en", domain: str = "general", **kw: Any) -> Chat:
    """A chat of one exchange whose answer has so many words."""
    question = kw.get("question", f"{source} question {number}?")
    answer = " ".join(WORDS[(number + n) % len(WORDS)] for n in range(words)) + f" {number}"
    messages = [*kw.get("before", []), {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Chat.of(
        source=source,
        where=f"{source}.jsonl:{number}",
        messages=[*messages, *kw.get("after", [])],
        language=language,
        domain=domain,
    )


def stored(root: Path, rows: Sequence[Chat], inputs: int = 1, rows_per_part: int = 50) -> list[Chats]:
    """The rows as Chats artifacts, one after the other."""
    made = []
    for number in range(inputs):
        place = root / uuid.uuid4().hex
        with ChatWriter(place, rows_per_part) as writer:
            for one in rows[number::inputs]:
                writer.write(one)
        made.append(Chats(key=f"c{number}", path=place))
    return made


def mixed(root: Path, chats: list[Chats], seed: int = 0, **settings_: Any) -> Prompts:
    place = root / uuid.uuid4().hex
    (place / "out").mkdir(parents=True)
    (place / "scratch").mkdir()
    ctx = Context(key="m", out=place / "out", scratch=place / "scratch", seed=seed)
    few = {"num_test": 2, "num_validation": 2, "num_warm_up": 1, "evaluation_percent": 20}
    return mix_chats(chats, ctx=ctx, **{**few, **settings_})


def got(prompts: Prompts, of: str) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in prompts.info["mix"] if entry["of"] == of}


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


SIZES = {"a": 200, "b": 40}


def two(root: Path) -> list[Chats]:
    return stored(root, [row(name, number, 6) for name, count in SIZES.items() for number in range(count)])


def counts_of(prompts: Prompts) -> dict[str, int]:
    return {name: entry["rows"] for name, entry in got(prompts, "source").items()}


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
