"""Shares hold to within a row at every limit.

No question is on both sides of a mix, and a stratum that is too small is named.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_rows import WORDS, counts_of, got, mixed, row, stored, trained, two

from components.contract import UserError
from components.data.formats.chats import read_dropped
from components.data.formats.prompts import SPLITS, Prompt, question_of, read_prompts
from components.data.mixing.selection import sample_rows


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


@settings(max_examples=8)
@given(st.integers(0, 1000))
def test_no_question_is_on_both_sides_and_every_row_is_counted(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = random.Random(seed)
    rows = []
    for number in range(120):
        asked = f"What  about {chance.randrange(40)}?".replace("  ", chance.choice([" ", "  "]))
        before = chance.choice([[], [{"role": "system", "content": f"Be {chance.choice(WORDS)}."}]])
        later = {"role": "user", "content": f"What about {chance.randrange(40)}?"}
        after = chance.choice([[], [later, {"role": "assistant", "content": "Well."}]])
        rows.append(row(chance.choice("ab"), number, question=asked, before=before, after=after))
    rows += rows[:7]
    root = tmp_path_factory.mktemp("mix")
    for ask_once in (True, False):
        found = mixed(root, stored(root, rows), seed=seed, ask_once=ask_once, limit_rows=60, by="rows")
        judged = {question_of(p) for split in SPLITS if split != "train" for p in read_prompts(found, split)}
        for prompt in trained(found):
            for message in prompt.conversation or ():
                assert message["role"] != "user" or " ".join(message["content"].split()) not in judged
        kept = sum(len(read_prompts(found, split)) for split in SPLITS)
        dropped = Counter(entry["reason"] for entry in read_dropped(found.path))
        assert kept + sum(dropped.values()) == len(rows) == found.info["num_read"]
        assert dict(dropped) == found.info["dropped"] and kept == found.info["num_kept"]
        ids = [prompt.prompt_id for split in SPLITS for prompt in read_prompts(found, split)]
        assert len(set(ids)) == len(ids)


def test_another_seed_chooses_others_and_the_sides_stay(tmp_path: Path) -> None:
    chats = stored(tmp_path, [row("a", number) for number in range(200)])
    one, other = (mixed(tmp_path, chats, seed=seed, limit_rows=50, by="rows") for seed in (0, 1))
    assert {p.prompt_id for p in trained(one)} != {p.prompt_id for p in trained(other)}
    judged = {question_of(p) for split in SPLITS if split != "train" for p in read_prompts(one, split)}
    assert not judged & {question_of(p) for p in trained(other)}


def test_a_further_source_moves_no_question_to_the_other_side(tmp_path: Path) -> None:
    first = [row("a", number) for number in range(100)]
    alone = mixed(tmp_path, stored(tmp_path, first), num_test=99)
    together = mixed(tmp_path, stored(tmp_path, [*first, *(row("b", n) for n in range(100))]), num_test=99)
    judged = {question_of(p) for p in read_prompts(alone, "test")}
    assert judged and not judged & {question_of(p) for p in trained(together)}


def test_evaluation_follows_its_own_weights_in_every_split(tmp_path: Path) -> None:
    rows = [row(name, number) for name in "ab" for number in range(200)]
    settings_ = {"weights": {"a": 1.0, "b": 0.0}, "evaluation_weights": {"a": 1.0, "b": 1.0}, "num_warm_up": 4}
    found = mixed(tmp_path, stored(tmp_path, rows), num_test=10, num_validation=20, **settings_)
    assert {prompt.source for prompt in trained(found)} == {"a"}
    for split, each in (("test", 5), ("validation", 10), ("warm_up", 2)):
        counted = Counter(prompt.source for prompt in read_prompts(found, split))
        assert abs(counted["a"] - each) <= 1 and abs(counted["b"] - each) <= 1


def test_what_is_too_small_for_its_share_is_told_and_never_repeated_unasked(tmp_path: Path) -> None:
    chats, even = two(tmp_path), {"a": 1.0, "b": 1.0}
    both = {"weights": even, "by": "rows"}
    there = counts_of(mixed(tmp_path, chats, by="rows"))
    shrunk = mixed(tmp_path, chats, **both, limit_rows=100)
    assert counts_of(shrunk) == {"a": there["b"], "b": there["b"]}
    assert "'b' has" in shrunk.info["said"][0] and "of 100 rows so that the shares hold" in shrunk.info["said"][0]
    filled = mixed(tmp_path, chats, **both, limit_rows=100, too_small="fill")
    assert counts_of(filled) == {"a": 100 - there["b"], "b": there["b"]}
    assert "the others go on" in filled.info["said"][0]
    repeated = mixed(tmp_path, chats, **both, limit_rows=100, too_small="repeat")
    assert counts_of(repeated) == {"a": 50, "b": 50}
    assert "gone through again" in repeated.info["said"][0]
    ids = [prompt.prompt_id for prompt in trained(repeated)]
    assert len(set(ids)) == len(ids) == 100 and sum(one.endswith("-2") for one in ids) == 50 - there["b"]
    with pytest.raises(UserError, match=r"'b' has .* too few for its share of 50.0%"):
        mixed(tmp_path, chats, **both, limit_rows=100, too_small="refuse")
    with pytest.raises(UserError, match=r"gone through 2 times .max_turns 1"):
        mixed(tmp_path, chats, **both, limit_rows=100, too_small="repeat", max_turns=1)
    assert not mixed(tmp_path, chats, **both, limit_rows=40).info["said"]


def test_orders_are_what_they_say(tmp_path: Path) -> None:
    rows = [row(name, n, 1 + (n * 7) % 30, domain="code" if n % 3 else "chat") for name in "ba" for n in range(60)]
    chats = stored(tmp_path, rows)

    def lines(order: str) -> list[Prompt]:
        return trained(mixed(tmp_path, chats, order=order))

    random_ = lines("random")
    sizes = [len(prompt.reference) for prompt in lines("short_first")]
    assert sizes == sorted(sizes) and [len(prompt.reference) for prompt in random_] != sizes
    assert [p.source for p in lines("by_source")] == sorted(p.source for p in random_)
    assert [p.domain for p in lines("by_domain")] == sorted(p.domain for p in random_)
    easy = lines("easy_first")
    assert sum(len(p.reference) for p in easy[:40]) < sum(len(p.reference) for p in easy[-40:])
    assert Counter(p.source for p in easy[:40]).most_common()[-1][1] >= 18  # both sources from the first line on
    assert {p.prompt_id for p in easy} == {p.prompt_id for p in random_}
