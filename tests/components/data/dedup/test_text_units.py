"""Units are words, characters of scripts without spaces, and symbols; a batch gives each text what it gives alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.dedup.text_units import Units, ngrams, normalised, units_of

TEXTS = st.lists(st.text(st.sampled_from("ab Z9é,.\n世界+ก😀ß"), max_size=30), max_size=6)


def said(text: str) -> list[str]:
    """The units of one text, spelled out."""
    units = units_of([normalised(text)])
    return [normalised(text)[first:last] for first, last in zip(units.begins, units.ends, strict=True)]


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("Hello, world!", ["hello", "world"]),
        ("  Two\n\twords ", ["two", "words"]),
        ("你好，世界！", ["你", "好", "世", "界"]),
        ("用Python写2行", ["用", "python", "写", "2", "行"]),
        ("ＡＢＣ １２", ["abc", "12"]),
        ("3+4=7", ["3", "+", "4", "=", "7"]),
        ("naïve Straße", ["naïve", "strasse"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("ひらがなカナ", list("ひらがなカナ")),
        ("🙂?!", ["🙂"]),
        ("...", []),
        ("", []),
    ],
)
def test_units_are_words_characters_and_symbols(text: str, units: list[str]) -> None:
    assert said(text) == units


def test_composed_and_decomposed_letters_are_one() -> None:
    assert said("caf\u00e9") == said("cafe\u0301")


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_a_batch_gives_each_text_what_it_gives_alone(texts: list[str]) -> None:
    together = units_of([normalised(text) for text in texts])
    for number, text in enumerate(texts):
        alone = units_of([normalised(text)])
        mine = slice(together.offsets[number], together.offsets[number + 1])
        np.testing.assert_array_equal(together.hashes[mine], alone.hashes)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 4))
def test_ngrams_are_those_of_a_plain_loop(texts: list[str], n: int) -> None:
    hashes, firsts, offsets = ngrams(units_of([normalised(text) for text in texts]), n)
    names: dict[tuple[str, ...], int] = {}
    for number, text in enumerate(texts):
        units = said(text)
        grams = [tuple(units[at : at + n]) for at in range(len(units) - n + 1)]
        found = hashes[offsets[number] : offsets[number + 1]].tolist()
        assert len(found) == len(grams)
        for gram, value in zip(grams, found, strict=True):
            assert names.setdefault(gram, value) == value  # one hash for one n-gram, wherever it stands
    assert len(set(names.values())) == len(names)  # and another one for another
    assert len(firsts) == len(hashes)


def test_turns_joined_are_one_text_without_a_seam() -> None:
    turns = units_of(["one two", "three", "four five six"])
    joined = turns.joined([2, 1])
    whole: Units = units_of(["one two three", "four five six"])
    np.testing.assert_array_equal(ngrams(joined, 2)[0], ngrams(whole, 2)[0])
