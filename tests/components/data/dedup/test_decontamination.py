"""A benchmark prompt planted in training rows is found in any dress; what merely resembles it stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rows_for_deduplication import benchmark, chat, deduplicated, document

from components.contract import UserError
from components.data.formats.chats import Chat

PROMPT = (
    "A robe takes two bolts of blue fibre and half that much white fibre. How many bolts in total does it take, "
    "if the tailor also keeps one spare bolt for the sleeves and the collar?"
)
ANSWER = (
    "It takes two bolts of blue and one bolt of white fibre, and with the spare bolt there are four bolts in total."
)
CHINESE = "下列关于唐朝长安城的说法中，错误的一项是哪一项？请从以下四个选项中选出来并说明你的理由。"
OTHER = "Tell me how sourdough bread is made at home without a machine, from the starter to the finished loaf."


def planted(*rows: Chat, at: Path, prompts: list[Any], **settings: Any) -> list[dict[str, Any]]:
    """The rows that go when these are the benchmark's prompts."""
    return deduplicated(at, rows, [benchmark(at / "bench", *prompts)], **settings).dropped


@pytest.mark.parametrize(
    "row",
    [
        chat(PROMPT, "4"),
        chat(PROMPT.upper(), "4"),
        chat(PROMPT.replace(" ", " \n "), "4"),
        chat(PROMPT.replace(",", " -").replace(".", ";").replace("?", ""), "4"),
        chat(f"{OTHER} {PROMPT} {OTHER}", "Well."),
        chat(OTHER, f"Here is a nice one. {PROMPT} Do you know it?"),
        document(f"Collected puzzles. {OTHER} {PROMPT} {OTHER}"),
        Chat.of(
            source="s",
            where="f:1",
            messages=[
                {"role": "user", "content": OTHER},
                {"role": "assistant", "content": "Mix, wait, bake."},
                {"role": "user", "content": PROMPT},
                {"role": "assistant", "content": "4"},
            ],
        ),
        Chat.of(
            source="s",
            where="f:2",
            messages=[
                {"role": "user", "content": OTHER},
                {"role": "assistant", "content": "Bake.", "reasoning_content": PROMPT},
            ],
        ),
        chat(PROMPT.replace("blue", "ｂｌｕｅ"), "4"),
    ],
    ids=["verbatim", "case", "space", "punctuation", "embedded", "answer", "text", "later", "reasoning", "width"],
)
def test_a_planted_prompt_is_found_in_any_dress(tmp_path: Path, row: Chat) -> None:
    (gone,) = planted(row, chat(OTHER, "Mix, wait, bake."), at=tmp_path, prompts=[PROMPT])
    assert (gone["reason"], gone["where"]) == ("contaminated", row.where)
    assert (gone["kept_id"], gone["kept_where"]) == ("p0", "exam")
    assert gone["similarity"] == 1.0
    assert gone["matched"].split()[0] == "a" and "sleeves" in gone["matched"] and "sourdough" not in gone["matched"]


def test_chinese_is_found_by_characters(tmp_path: Path) -> None:
    rows = [
        chat(f"老师问：{CHINESE.replace('，', ' ')}谢谢", "第三项"),
        chat("请介绍一下唐朝的长安城有哪些名胜古迹", "有很多"),
    ]
    (gone,) = planted(*rows, at=tmp_path, prompts=[CHINESE])
    assert gone["where"] == rows[0].where


def test_a_reference_answer_counts_too(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": PROMPT}], "reference": ANSWER}
    (gone,) = planted(chat(OTHER, f"Sure: {ANSWER}"), at=tmp_path, prompts=[row])
    assert gone["reason"] == "contaminated" and "spare bolt" in gone["matched"]


def test_of_a_chat_only_what_users_ask_is_looked_for(tmp_path: Path) -> None:
    system = "You are a careful assistant that answers every question of the user step by step and in full sentences."
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": ANSWER},
        {
            "role": "user",
            "content": "And how many bolts would three such robes take, with the spare bolts counted once?",
        },
    ]
    rows = [chat(f"{system} {OTHER}", "a"), chat(OTHER, ANSWER), chat(str(messages[3]["content"]), "10")]
    (gone,) = planted(*rows, at=tmp_path, prompts=[{"messages": messages}])
    assert gone["where"] == rows[2].where


def test_only_what_is_judged_on_is_kept_out(tmp_path: Path) -> None:
    prompts = [
        {"prompt": PROMPT, "split": "train"},
        {"prompt": OTHER, "split": "warm_up"},
        {"prompt": CHINESE, "split": "validation"},
    ]
    rows = [chat(PROMPT, "4"), chat(CHINESE, "三"), chat(OTHER, "Bake.")]
    (gone,) = planted(*rows, at=tmp_path, prompts=prompts)
    assert gone["where"] == rows[2].where


def test_shared_boilerplate_is_no_contamination(tmp_path: Path) -> None:
    frame = (
        "Read the passage and answer the question with the letter of the one option that fits best, then explain why. "
    )
    prompts = [f"{frame}The {animal} crossed the {place} at dawn." for animal, place in ANIMALS]
    rows = [chat(f"{frame}{OTHER}", "A"), chat(f"{frame}The otter crossed the field at noon.", "B")]
    rows.append(chat(prompts[2], "C"))
    (gone,) = planted(*rows, at=tmp_path, prompts=list(prompts))
    assert (gone["where"], gone["kept_id"]) == (rows[2].where, "p2")


ANIMALS = [
    ("fox", "river"),
    ("cat", "street"),
    ("wolf", "valley"),
    ("bear", "bridge"),
    ("hare", "meadow"),
    ("owl", "barn"),
]


@pytest.mark.parametrize(
    ("template", "questions"),
    [
        (
            "{}\n\nThink step by step, then give the final answer as one number.",
            [
                f"How many legs do {n} {animal}s in the {place} have in total?"
                for n, (animal, place) in enumerate(ANIMALS)
            ],
        ),
        (
            "{}\n\n请先简要分析各个选项，再给出正确答案的字母。",
            [
                "唐朝的首都在哪一座城市",
                "长江流经多少个省份和直辖市",
                "谁写了红楼梦的前八十回呢",
                "水在多少度的时候会沸腾",
                "光合作用需要哪些条件才行",
            ],
        ),
    ],
    ids=["english", "chinese"],
)
def test_a_question_is_found_without_the_template_around_it(
    tmp_path: Path, template: str, questions: list[str]
) -> None:
    prompts = [template.format(question) for question in questions]
    rows = [chat(OTHER, f"Try this: {question} I wonder.") for question in questions]
    rows.append(chat(template.format("What is the height of the tallest tower in the old town?"), "41"))
    gone = planted(*rows, at=tmp_path, prompts=list(prompts))
    assert [row["where"] for row in gone] == [row.where for row in rows[:-1]]
    assert [row["kept_id"] for row in gone] == [f"p{number}" for number in range(len(questions))]


def test_a_quotation_counts_from_the_stated_share_on(tmp_path: Path) -> None:
    words = PROMPT.split()
    row = chat(f"{OTHER} {' '.join(words[: len(words) * 2 // 3])}", "4")
    share = (len(words) * 2 // 3 - 12) / (len(words) - 12)
    (gone,) = planted(row, at=tmp_path, prompts=[PROMPT], benchmark_overlap=share - 0.01)
    assert gone["similarity"] == pytest.approx(share)
    assert not deduplicated(
        tmp_path, [row], [benchmark(tmp_path / "b", PROMPT)], benchmark_overlap=share + 0.01
    ).dropped


def test_short_prompts_are_found_whole_and_very_short_ones_only_as_a_turn(tmp_path: Path) -> None:
    nine, five = "Name the three largest lakes of northern Italy please", "Rewrite it as a limerick"
    rows = [
        chat(f"Could you help? {nine} now.", "Garda"),
        chat("Name the three largest lakes of southern Sweden please", "Vänern"),
        chat(f"{five}!", "There was"),
        chat(f"{five} and then as a sonnet", "Shall I"),
        chat("Go on", "And so"),
    ]
    gone = planted(*rows, at=tmp_path, prompts=[nine, five, "Go on"])
    assert {row["where"] for row in gone} == {rows[0].where, rows[2].where}


@pytest.mark.parametrize(
    ("template", "places"),
    [
        ("What is the capital city of the country {}?", ["France", "Ghana", "Peru", "Chad", "Oman", "Laos"]),
        ("{}的首都是哪座城市呢", ["法国", "加纳", "秘鲁", "乍得", "阿曼", "老挝"]),
    ],
    ids=["english", "chinese"],
)
def test_short_prompts_of_one_template_are_each_found_whole(tmp_path: Path, template: str, places: list[str]) -> None:
    asked = [template.format(place) for place in places]
    rows = [chat(asked[0], "That one."), chat(template.format("Sweden"), "Stockholm")]
    (gone,) = planted(*rows, at=tmp_path, prompts=list(asked))
    assert (gone["where"], gone["kept_id"]) == (rows[0].where, "p0")


def test_the_prompt_held_most_of_is_named_whatever_the_order_of_benchmarks(tmp_path: Path) -> None:
    half = " ".join(PROMPT.split()[:26])
    row = chat(PROMPT, "4")
    one = benchmark(tmp_path / "one", {"prompt": f"{half} and nothing that anybody else has ever asked about robes"})
    two = benchmark(tmp_path / "two", {"prompt": PROMPT, "prompt_id": "whole"})
    for keep_out in ([one, two], [two, one]):
        (gone,) = deduplicated(tmp_path, [row], keep_out).dropped
        assert gone["kept_id"] == "whole"


def test_prompts_that_nobody_is_judged_on_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"keep_out: .*no prompt in its splits test and warm_up"):
        planted(chat("a", "b"), at=tmp_path, prompts=[{"prompt": PROMPT, "split": "train"}])
