"""Training rows follow the settings, and a stratum that is too small is named."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from components.contract import Chats, Context, Prompts, UserError
from components.data import mix_chats
from components.data.formats.chats import Chat, ChatWriter
from components.data.formats.prompts import Prompt, read_prompts

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


def trained(prompts: Prompts) -> list[Prompt]:
    return read_prompts(prompts, "train")


def got(prompts: Prompts, of: str) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in prompts.info["mix"] if entry["of"] == of}


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
