"""Language and domain of a text: scripts first, unknown rather than wrong, code and addresses have no language."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data.cleaning.language import domain_of, language_of, language_of_messages

LANGUAGES = [
    ("en", "The children are playing in the garden behind the house."),
    ("de", "Die Kinder spielen im Garten hinter dem Haus."),
    ("fr", "Les enfants jouent dans le jardin derrière la maison."),
    ("es", "Los niños juegan en el jardín detrás de la casa."),
    ("it", "I bambini giocano nel giardino dietro la casa."),
    ("pt", "As crianças estão brincando no jardim atrás da casa."),
    ("nl", "De kinderen spelen in de tuin achter het huis."),
    ("pl", "Dzieci bawią się w ogrodzie za domem."),
    ("tr", "Çocuklar evin arkasındaki bahçede oynuyorlar."),
    ("vi", "Bọn trẻ đang chơi trong vườn phía sau nhà."),
    ("zh", "孩子们在房子后面的花园里玩耍。"),
    ("zh", "孩子們在房子後面的花園裡玩耍。"),
    ("zh", "用Python写一个function来sort一个list"),
    ("ja", "子供たちは家の裏の庭で遊んでいます。"),
    ("ko", "아이들이 집 뒤 정원에서 놀고 있어요."),
    ("ru", "Дети играют в саду за домом."),
    ("uk", "Діти граються в саду за будинком."),
    ("ar", "يلعب الأطفال في الحديقة خلف المنزل."),
    ("fa", "بچه‌ها در باغ پشت خانه بازی می‌کنند."),
    ("hi", "बच्चे घर के पीछे बगीचे में खेल रहे हैं।"),
    ("th", "เด็กๆ กำลังเล่นอยู่ในสวนหลังบ้าน"),
    ("el", "Τα παιδιά παίζουν στον κήπο πίσω από το σπίτι."),
    ("he", "הילדים משחקים בגינה מאחורי הבית."),
    ("en", "The word 你好 means hello in Chinese, as most people know."),
    ("", ""),
    ("", "42 + 1 = 43"),
    ("", "ok"),
    ("", "```python\nfor child in garden:\n    child.play()\n```"),
    ("", "https://example.org/the/children/are/playing"),
]


@pytest.mark.parametrize(("language", "text"), LANGUAGES)
def test_the_language_is_told(language: str, text: str) -> None:
    assert language_of(text) == language


def test_answers_speak_before_questions() -> None:
    turns = [
        {"role": "user", "content": "Say it in Chinese, please."},
        {"role": "assistant", "content": "好的，没问题。"},
    ]
    assert language_of_messages(turns) == "zh"
    assert language_of_messages([turns[0], {"role": "assistant", "content": "42"}]) == "en"


@given(st.text(max_size=400))
def test_any_text_has_a_language_or_none_and_always_the_same(text: str) -> None:
    found = language_of(text)
    assert found == "" or (len(found) == 2 and found.isalpha() and found.islower())
    assert language_of(text) == found and domain_of(text) in ("", "code", "mathematics", "general")


def test_no_network_and_the_same_in_another_process() -> None:
    program = (
        "import socket\n"
        "def refuse(*a, **k): raise OSError('no network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from components.data.cleaning.language import language_of\n"
        f"print([language_of(text) for text in {[text for _, text in LANGUAGES]!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([language for language, _ in LANGUAGES])


@pytest.mark.parametrize(
    ("domain", "text"),
    [
        ("code", "Sort it.\n```python\nprint(sorted(x))\n```"),
        ("code", "def add(a, b):\n    total = a + b\n    return total"),
        ("code", "写一个函数\nint main() {\n  int x = 1;\n  return x;\n}"),
        ("mathematics", r"We have $x^2 = 4$, so $x = \pm 2$, and \frac{1}{2} of it is \sqrt{1}."),
        ("mathematics", "She has 3 + 4 = 7 apples and sells 7 - 2 = 5 of them for 5 * 2 = 10 dollars."),
        ("general", "The children are playing in the garden.\nTheir mother is reading.\nIt is warm."),
        ("general", "孩子们在花园里玩耍。"),
        ("", "  \n"),
    ],
)
def test_the_domain_is_told(domain: str, text: str) -> None:
    assert domain_of(text) == domain
