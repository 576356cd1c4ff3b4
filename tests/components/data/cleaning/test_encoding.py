"""Text in the wrong encoding is recognised and mended to what was written; text in the right one is never touched."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from components.data.cleaning.encoding import is_mojibake, repair
from components.data.cleaning.rules import repeated_share

COMMON = (
    "的一是不了在人有我他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生自会那后能对着事其里所去行过家"
)
CHINESE = st.text(alphabet=COMMON, min_size=12, max_size=80)
FRENCH = st.lists(
    st.sampled_from(["été", "déjà", "façade", "naïve", "où", "garçon", "Noël", "cœur", "plage", "le"]), min_size=6
)


@given(CHINESE)
def test_chinese_is_left_alone(text: str) -> None:
    assert not is_mojibake(text) and repair(text) == text


@given(CHINESE)
def test_gbk_read_as_latin_is_mended(text: str) -> None:
    assume(len(set(text)) > 3)  # a row of two signs might be ornament
    broken = text.encode("gbk").decode("latin-1")
    assert is_mojibake(broken) and repair(broken) == text


@given(CHINESE)
def test_utf8_read_as_gbk_is_mended_where_no_byte_was_lost(text: str) -> None:
    try:
        broken = text.encode().decode("gb18030")
    except UnicodeDecodeError:
        assume(False)
    assert is_mojibake(broken) and repair(broken) == text
    assert is_mojibake(f"这是正常的中文。{broken}")


@given(FRENCH)
def test_utf8_read_as_latin_is_mended(words: list[str]) -> None:
    text = " ".join(words)
    assert not is_mojibake(text) and repair(text) == text
    if not text.isascii():
        broken = text.encode().decode("cp1252", "replace")
        if "\ufffd" not in broken and "à " not in text:  # its byte A0 looks like a space once read
            assert is_mojibake(broken) and repair(broken) == text


@given(st.text(max_size=200))
def test_mending_twice_is_mending_once_and_keeps_what_a_person_typed(text: str) -> None:
    once = repair(text)
    assert repair(once) == once


@pytest.mark.parametrize(
    "text", ["“quotes” and ﬁ", "ｆｕｌｌ　ｗｉｄｔｈ！", "a &amp; b", "line\r\nbreak\tand\fpage", "e\u0301"]
)
def test_the_writers_own_choices_stay(text: str) -> None:
    assert repair(text) == text


@given(st.text(alphabet=COMMON, min_size=8, max_size=20), st.integers(24, 60))
def test_a_loop_is_seen_in_any_language_and_prose_is_not(text: str, times: int) -> None:
    assert repeated_share(text * times, 0.5) > 0.5
    assert repeated_share("".join(chr(0x4E00 + (7 * n * n + n) % 8000) for n in range(400)), 0.5) < 0.1
