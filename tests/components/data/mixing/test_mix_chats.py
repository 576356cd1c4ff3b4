"""A mix keeps to its shares, its limits are nested, nothing leaks, and only content, settings and seed decide."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_rows import got, mixed, row, stored, trained, two

from components.contract import Prompts, UserError
from components.data.formats.chats import Chat
from components.data.formats.prompts import read_prompts


def text_of(prompts: Prompts) -> bytes:
    return (prompts.path / "prompts.jsonl").read_bytes()


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


def test_a_larger_limit_holds_the_smaller_mix(tmp_path: Path) -> None:
    chats = stored(tmp_path, [row(name, n, 1 + n % 30) for name in "abc" for n in range(80)])
    before: set[str] = set()
    judged = set()
    for limit in (300, 400, 1000, 2000, None):
        mix = mixed(tmp_path, chats, weights={"a": 5.0, "b": 3.0, "c": 2.0}, limit_tokens=limit)
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
    for settings_ in ({"limit_tokens": 1000}, {"temperature": 3.0, "order": "easy_first", "strata": "language"}):
        one = mixed(root, stored(root, rows), **settings_)
        other = mixed(root, stored(root, shuffled, inputs, per_part), **settings_)
        assert text_of(one) == text_of(other)
        assert (one.path / "mix.json").read_bytes() == (other.path / "mix.json").read_bytes()


def test_languages_and_domains_can_be_weighed_and_the_report_shows_what_was_not(tmp_path: Path) -> None:
    rows = [row("a", n, language="en", domain="code") for n in range(80)]
    rows += [row("b", n, language="zh" if n % 4 else "en") for n in range(80)]
    by_language = mixed(tmp_path, stored(tmp_path, rows), strata="language", weights={"en": 1.0, "zh": 1.0}, by="rows")
    assert {name: entry["got"] for name, entry in got(by_language, "language").items()} == {"en": 0.5, "zh": 0.5}
    by_source = mixed(tmp_path, stored(tmp_path, rows), weights={"a": 1.0, "b": 1.0}, by="rows")
    zh = got(by_source, "language")["zh"]
    assert 0.3 < zh["asked"] < 0.45 and zh["got"] == pytest.approx(zh["asked"], abs=0.03)
    assert got(by_source, "domain")["code"]["asked"] == pytest.approx(0.5)


def test_wrong_names_and_empty_sides_are_one_line(tmp_path: Path) -> None:
    chats = two(tmp_path)
    for given_, said in [
        ({"weights": {"a": 1.0, "c": 1.0}}, "weights: there is no row of source 'c'; there are 'a', 'b'"),
        ({"weights": {"a": 1.0}}, "weights: no weight for source 'b'; give one"),
        ({"caps": {"x": 3}}, "caps: there is no row of source 'x'"),
        ({"limit_tokens": 1}, "nothing is left to train on"),
        ({"limit_tokens": 48}, "limit_tokens: 48 tokens are . conversations to train on, and a drafter needs 8"),
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
