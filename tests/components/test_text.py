"""Messages are one line, a misspelt word gets the nearest one, and what hides in a text is spelled out."""

from __future__ import annotations

import pytest

from components.text import did_you_mean, kernel_in_words, message_of, nearest, one_line, shorten, visible


def test_a_text_becomes_one_line_of_the_asked_length() -> None:
    assert one_line("a\n b\x1b[0m \u202ec") == "a b [0m c"
    assert shorten("a\n  b", 5) == "a b" and shorten("abcdefgh", 6) == "abc..."


@pytest.mark.parametrize(
    ("error", "message"),
    [(ValueError("two\nlines."), "two lines"), (KeyError(), "KeyError"), (ValueError("x" * 400), "x" * 300)],
)
def test_an_error_is_told_in_one_line_or_by_its_class(error: Exception, message: str) -> None:
    assert message_of(error) == message


def test_a_misspelt_word_gets_the_nearest_or_the_few_there_are() -> None:
    assert nearest("eagel3", ["eagle3", "mtp"]) == "eagle3" and nearest("x", ["eagle3"]) is None
    assert did_you_mean("eagel3", ["eagle3", "mtp"]) == " (did you mean 'eagle3'?)"
    assert did_you_mean("zzz", ["eagle3", "mtp"]) == " (known: eagle3, mtp)"
    assert did_you_mean("zzz", ["eagle3", "mtp"], most_named=1) == did_you_mean("zzz", []) == ""


def test_hidden_characters_are_spelled_out_and_lines_stay() -> None:
    assert visible("a\nb\u202e\x00") == "a\nb\\u202e\\u0000"


def test_kernels_are_said_in_words_and_never_as_they_are_stored() -> None:
    assert kernel_in_words("prepacked") == "prepacked kernels"
    words = kernel_in_words("mixed[288x288:tccccttt,4096x288:33tccooo]")
    assert "2 layer shapes" in words and "[" not in words and ":" not in words
