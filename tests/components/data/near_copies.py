"""Prose that differs by a word or by all of them, for tests of near duplicates."""

from __future__ import annotations

import random

from rows_for_deduplication import chat, document

from components.data.formats.chats import Chat

WORDS = [
    f"{first}{second}" for first in ("ba", "co", "di", "fu", "ge", "ho") for second in ("lan", "mer", "nok", "pit")
]


def prose(seed: int, length: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [rng.choice(WORDS) + str(rng.randrange(50)) for _ in range(length)]


def changed(words: list[str], *places: int) -> str:
    return " ".join("other" if number in places else word for number, word in enumerate(words))


def some_rows() -> list[Chat]:
    """Plain rows, exact and near duplicates of some across sources, a chain, short rows, and two languages."""
    rows = [chat(f"question {n} {changed(prose(n)[:8])}", changed(prose(n)), f"s{n % 3}") for n in range(24)]
    rows += [
        chat(f"QUESTION  {n} {changed(prose(n)[:8])}", changed(prose(n)), f"s{(n + 1) % 3}", f"x:{n}") for n in range(6)
    ]
    rows += [chat(f"question {n} {changed(prose(n)[:8])}", changed(prose(n), 30), f"s{n % 2}") for n in range(4, 12)]
    rows += [document(changed(prose(99), *range(5, 5 + 10 * step, 10)), "chain") for step in range(4)]
    rows += [chat("hi", "Hello!", "s0", "h:1"), chat("Hi", "hello!", "s1", "h:2"), chat("hi", "hello?", "s1", "h:3")]
    chinese = "唐朝的首都是长安城里有许多来自远方的商人他们带来了香料和丝绸以及各种各样的故事"
    rows += [document(chinese, "zh"), document(chinese.replace("故事", "传说"), "zh"), document(chinese[::-1], "zh")]
    return rows
