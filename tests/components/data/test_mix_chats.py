"""A mix keeps to its shares, its limits are nested, nothing leaks, and only content, settings and seed decide."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contract import Chats, Context, Prompts, Target, UserError
from components.data import mix_chats
from components.data.formats.chats import Chat, ChatWriter, read_dropped
from components.data.formats.prompts import SPLITS, Prompt, read_prompts
from components.data.formats.splits import question_of
from components.data.mixing.mix_chats import mix_chats_settings
from components.data.mixing.sampling import sample_rows
from components.targets.source import BUILTIN, local_folder
from flows.planning.step_signature import resolve

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


def text_of(prompts: Prompts) -> bytes:
    return (prompts.path / "prompts.jsonl").read_bytes()


def trained(prompts: Prompts) -> list[Prompt]:
    return read_prompts(prompts, "train")


def got(prompts: Prompts, of: str) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in prompts.info["mix"] if entry["of"] == of}


@st.composite
def sources(draw: st.DrawFn) -> list[Chat]:
    """Two to four sources of very different sizes, with rows of very different lengths."""
    seed = draw(st.integers(0, 10_000))
    chance = random.Random(seed)
    rows = []
    for name in "abcd"[: draw(st.integers(2, 4))]:
        for number in range(draw(st.sampled_from([25, 40, 90]))):
            language, domain = chance.choice(["en", "zh", ""]), chance.choice(["code", "general"])
            rows.append(row(name, number, chance.choice([1, 3, 10, 40]), language, domain))
    return rows


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


def test_a_larger_limit_holds_the_smaller_mix(tmp_path: Path) -> None:
    chats = stored(tmp_path, [row(name, n, 1 + n % 30) for name in "abc" for n in range(80)])
    before: set[str] = set()
    judged = set()
    for limit in (50, 100, 400, 1000, None):
        mix = mixed(tmp_path, chats, weights={"a": 5.0, "b": 3.0, "c": 2.0}, limit=limit)
        now = {prompt.prompt_id for prompt in trained(mix)}
        assert before < now and (limit is None or mix.info["num_train_tokens"] <= limit)
        before = now
        judged.add(tuple(prompt.prompt_id for prompt in read_prompts(mix, "test")))
    assert len(judged) == 1


@settings(max_examples=6)
@given(sources(), st.integers(1, 3), st.sampled_from([7, 50]), st.randoms(use_true_random=False))
def test_neither_order_nor_number_of_parts_and_inputs_matters(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Chat], inputs: int, per_part: int, chance: random.Random
) -> None:
    root = tmp_path_factory.mktemp("mix")
    shuffled = list(rows)
    chance.shuffle(shuffled)
    for settings_ in ({"limit": 100}, {"temperature": 3.0, "order": "easy_first", "strata": "language"}):
        one = mixed(root, stored(root, rows), **settings_)
        other = mixed(root, stored(root, shuffled, inputs, per_part), **settings_)
        assert text_of(one) == text_of(other)
        assert (one.path / "mix.json").read_bytes() == (other.path / "mix.json").read_bytes()


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
        found = mixed(root, stored(root, rows), seed=seed, ask_once=ask_once, limit=60, by="rows")
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
    one, other = (mixed(tmp_path, chats, seed=seed, limit=50, by="rows") for seed in (0, 1))
    assert {p.prompt_id for p in trained(one)} != {p.prompt_id for p in trained(other)}
    judged = {question_of(p) for split in SPLITS if split != "train" for p in read_prompts(one, split)}
    assert not judged & {question_of(p) for p in trained(other)}


def test_a_further_source_moves_no_question_to_the_other_side(tmp_path: Path) -> None:
    first = [row("a", number) for number in range(100)]
    alone = mixed(tmp_path, stored(tmp_path, first), num_test=99)
    together = mixed(tmp_path, stored(tmp_path, [*first, *(row("b", n) for n in range(100))]), num_test=99)
    judged = {question_of(p) for p in read_prompts(alone, "test")}
    assert judged and not judged & {question_of(p) for p in trained(together)}


SIZES = {"a": 200, "b": 40}


def two(root: Path) -> list[Chats]:
    return stored(root, [row(name, number, 6) for name, count in SIZES.items() for number in range(count)])


def counts_of(prompts: Prompts) -> dict[str, int]:
    return {name: entry["rows"] for name, entry in got(prompts, "source").items()}


def test_what_is_too_small_for_its_share_is_told_and_never_repeated_unasked(tmp_path: Path) -> None:
    chats, even = two(tmp_path), {"a": 1.0, "b": 1.0}
    both = {"weights": even, "by": "rows"}
    there = counts_of(mixed(tmp_path, chats, by="rows"))
    shrunk = mixed(tmp_path, chats, **both, limit=100)
    assert counts_of(shrunk) == {"a": there["b"], "b": there["b"]}
    assert "'b' has" in shrunk.info["said"][0] and "of 100 rows so that the shares hold" in shrunk.info["said"][0]
    filled = mixed(tmp_path, chats, **both, limit=100, too_small="fill")
    assert counts_of(filled) == {"a": 100 - there["b"], "b": there["b"]}
    assert "the others go on" in filled.info["said"][0]
    repeated = mixed(tmp_path, chats, **both, limit=100, too_small="repeat")
    assert counts_of(repeated) == {"a": 50, "b": 50}
    assert "gone through again" in repeated.info["said"][0]
    ids = [prompt.prompt_id for prompt in trained(repeated)]
    assert len(set(ids)) == len(ids) == 100 and sum(one.endswith("-2") for one in ids) == 50 - there["b"]
    with pytest.raises(UserError, match=r"'b' has .* too few for its share of 50.0%"):
        mixed(tmp_path, chats, **both, limit=100, too_small="refuse")
    with pytest.raises(UserError, match=r"gone through 2 times .max_turns 1"):
        mixed(tmp_path, chats, **both, limit=100, too_small="repeat", max_turns=1)
    assert not mixed(tmp_path, chats, **both, limit=40).info["said"]


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


def test_languages_and_domains_can_be_weighed_and_the_report_shows_what_was_not(tmp_path: Path) -> None:
    rows = [row("a", n, language="en", domain="code") for n in range(80)]
    rows += [row("b", n, language="zh" if n % 4 else "en") for n in range(80)]
    by_language = mixed(tmp_path, stored(tmp_path, rows), strata="language", weights={"en": 1.0, "zh": 1.0}, by="rows")
    assert {name: entry["got"] for name, entry in got(by_language, "language").items()} == {"en": 0.5, "zh": 0.5}
    by_source = mixed(tmp_path, stored(tmp_path, rows), weights={"a": 1.0, "b": 1.0}, by="rows")
    zh = got(by_source, "language")["zh"]
    assert 0.3 < zh["asked"] < 0.45 and zh["got"] == pytest.approx(zh["asked"], abs=0.03)
    assert got(by_source, "domain")["code"]["asked"] == pytest.approx(0.5)


def test_evaluation_follows_its_own_weights_in_every_split(tmp_path: Path) -> None:
    rows = [row(name, number) for name in "ab" for number in range(200)]
    settings_ = {"weights": {"a": 1.0, "b": 0.0}, "evaluation_weights": {"a": 1.0, "b": 1.0}, "num_warm_up": 4}
    found = mixed(tmp_path, stored(tmp_path, rows), num_test=10, num_validation=20, **settings_)
    assert {prompt.source for prompt in trained(found)} == {"a"}
    for split, each in (("test", 5), ("validation", 10), ("warm_up", 2)):
        counted = Counter(prompt.source for prompt in read_prompts(found, split))
        assert abs(counted["a"] - each) <= 1 and abs(counted["b"] - each) <= 1


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


def test_a_prompt_asks_the_first_exchange_and_carries_the_whole_chat(tmp_path: Path) -> None:
    before = [{"role": "system", "content": "Be brief."}]
    after = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No more."}]
    text = Chat.of(source="t", where="t:1", text="It was a dark and stormy night; the rain fell in torrents. " * 12)
    asked = Chat.of(source="t", where="t:2", messages=[{"role": "user", "content": "Nobody answers?"}])
    silent = Chat.of(source="t", where="t:3", messages=[{"role": "system", "content": "Nobody asks."}])
    rows = [*(row("a", n, before=before, after=after) for n in range(60)), text, asked, silent]
    found = mixed(tmp_path, stored(tmp_path, rows), evaluation_percent=10)
    prompts = {prompt.prompt_id: prompt for split in SPLITS for prompt in read_prompts(found, split)}
    one = next(prompt for prompt in prompts.values() if prompt.source == "a")
    assert one.messages is not None and [m["role"] for m in one.messages] == ["system", "user"]
    assert one.conversation is not None and [m["role"] for m in one.conversation[2:]] == [
        "assistant",
        "user",
        "assistant",
    ]
    assert one.reference == one.conversation[2]["content"]
    whole = prompts[text.row_id]
    assert whole.text and whole.messages is None and whole.text + whole.reference == text.text
    assert prompts[asked.row_id].conversation is None
    assert found.info["dropped"]["no_question"] == 1


def test_the_target_counts_where_it_is_given_and_languages_are_estimated_apart(tmp_path: Path) -> None:
    folder = local_folder(BUILTIN)
    assert folder is not None
    rows = [row("a", n, language="en") for n in range(40)] + [row("b", n, language="zh") for n in range(40)]
    chats = stored(tmp_path, rows)
    estimated, exact = (mixed(tmp_path, chats, by="rows", **kw) for kw in ({}, {"target": Target(key="", path=folder)}))
    assert exact.info["tokens_are"] == "counted by the target" != estimated.info["tokens_are"]
    guessed = {name: entry["tokens"] / entry["rows"] for name, entry in got(estimated, "source").items()}
    assert guessed["b"] / guessed["a"] == pytest.approx(4.0 / 1.6, rel=0.15)


def test_wrong_settings_are_one_line_before_anything_runs() -> None:
    step = resolve("data.mix_chats")
    for given_, said in [
        ({"weights": {"a": 1.0}, "temperature": 2.0}, "'temperature'"),
        ({"weights": {"a": 0.0}}, "one at least must be above 0"),
        ({"too_small": "repeat"}, "needs a limit"),
        ({"evaluation_percent": 0}, "nothing for 76 prompts"),
        ({"weights": {"a": -1.0}}, "greater than or equal to 0"),
        ({"order": "long_first"}, "must be one of"),
    ]:
        _, faults = step.settings(given_)
        assert len(faults) == 1 and said in faults[0][1], (given_, faults)
    resolved, faults = step.settings({})
    assert not faults and mix_chats_settings(resolved) == (resolved, [])


def test_wrong_names_and_empty_sides_are_one_line(tmp_path: Path) -> None:
    chats = two(tmp_path)
    for given_, said in [
        ({"weights": {"a": 1.0, "c": 1.0}}, "weights: there is no row of source 'c'; there are 'a', 'b'"),
        ({"weights": {"a": 1.0}}, "weights: no weight for source 'b'; give one"),
        ({"caps": {"x": 3}}, "caps: there is no row of source 'x'"),
        ({"limit": 1}, "nothing is left to train on"),
        ({"evaluation_percent": 0}, "num_test: no row is left for split test"),
    ]:
        with pytest.raises(UserError, match=said):
            mixed(tmp_path, chats, **given_)
    with pytest.raises(UserError, match="there are no rows"):
        mixed(tmp_path, stored(tmp_path, []))


def test_buckets_on_disk_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = two(tmp_path)
    once = text_of(mixed(tmp_path, chats))
    monkeypatch.setattr("components.data.mixing.mix_chats._BUCKET_CHARACTERS", 900)
    assert text_of(mixed(tmp_path, chats)) == once
    assert not list(tmp_path.glob("*/scratch/*"))
    assert [json.loads(line)["split"] for line in once.splitlines()][:3] == ["test", "test", "warm_up"]
