"""Every rule of cleaning drops what it is for, in English and in Chinese, and keeps what only looks like it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data.cleaning.encoding import repair
from components.data.cleaning.rules import REASONS, drop_reason
from components.data.formats.chats import Chat
from components.data.settings import Cleaning, pattern_faults

EN = "A thing of beauty is a joy for ever: its loveliness increases; it will never pass into nothingness."
ZH = "床前明月光，疑是地上霜。举头望明月，低头思故乡。这首诗写的是秋日夜晚，诗人于屋内抬头望月的所感。"


def chat(*said: str, first: str = "user") -> Chat:
    """Turns that alternate, the user first."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return of([{"role": roles[number % 2], "content": text} for number, text in enumerate(said)])


def of(messages: list[dict[str, Any]]) -> Chat:
    """A row of any messages, those of a careless writer too."""
    return Chat("0" * 16, "s", "f:1", messages=tuple(messages))


def document(text: str) -> Chat:
    return Chat.of(source="s", where="f:1", text=text)


def why(row: Chat, **settings: Any) -> str | None:
    return drop_reason(row, Cleaning(**settings))


CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "content": "", "tool_call_id": "1"}
USER, ANSWER = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is this."}

DROPPED = [
    ("malformed_turn", of([USER, {"role": "assistant", "content": 3}])),
    ("malformed_turn", of([USER, {"role": "narrator", "content": "And then"}])),
    ("malformed_turn", of([USER, {"role": "assistant"}])),
    ("empty_turn", chat("What is it?", "")),
    ("empty_turn", chat("你好吗？", "\u3000\n\u200b")),
    ("wrong_role_order", chat("Hello!", "What is it?", "This.", first="assistant")),
    ("wrong_role_order", of([USER, USER, ANSWER])),
    ("wrong_role_order", of([USER, ANSWER, ANSWER])),
    ("wrong_role_order", of([USER, ANSWER, RESULT, ANSWER])),
    ("wrong_role_order", of([USER, {"role": "system", "content": "Be brief."}, ANSWER])),
    ("wrong_role_order", of([{"role": "system", "content": "Be brief."}])),
    ("too_short", chat("?", "What do you mean?")),
    ("too_short", document("Too short.")),
    ("too_long", chat("Tell me.", "word " * 20_000)),
    ("too_many_turns", chat(*[f"{number} and more" for number in range(130)])),
    ("replacement_characters", chat("Was ist das?", "Ein sch\ufffdner Tag")),
    ("replacement_characters", chat("这是什么？", "阿尔伯特·爱因斯\ufffd")),
    ("control_characters", chat("What is it?", "a\x00b")),
    ("control_characters", document(f"{EN}\x1b[31m")),
    ("mojibake", chat("Qu'est-ce que c'est ?", "Une journÃ©e d'Ã©tÃ© Ã  la plage")),
    ("mojibake", chat("是什么？", ZH.encode().decode("latin-1"))),
    ("mojibake", chat("是什么？", ZH.encode("gbk").decode("latin-1"))),
    ("mojibake", chat("是什么？", ZH.encode().decode("gb18030", "ignore").replace("\ufffd", ""))),
    ("mojibake", chat("是什么？", "价格是锟斤拷元")),
    ("template_marks", chat("What is it?", "This.<|im_end|>\n<|im_start|>user")),
    ("template_marks", chat("是什么？", "[INST] 这个 [/INST]")),
    ("html", chat("Tell me a fact.", '<div class="markdown prose"><p>Bees <b>dance</b>.</p></div>')),
    ("html", chat("讲个事实。", "<p><span>蜜蜂</span>会<br/>跳舞</p>&nbsp;&nbsp;")),
    ("url_only", chat("https://example.org/a/b", "A page.")),
    ("url_only", chat("给我一个链接", "https://example.org/图片 。")),
    ("refusal", chat("Do it.", "I'm sorry, but I cannot assist with that request.")),
    ("refusal", chat("Do it.", "I’m sorry, but as an AI language model, I can’t do that.")),
    ("refusal", chat("Do it.", "Sorry, I am unable to open links.")),
    ("refusal", chat("Do it.", "As an AI, I don't have access to real-time data.")),
    ("refusal", chat("Do it.", "Sure.", "And now this.", "I cannot provide that.")),
    ("refusal", chat("做吧。", "很抱歉，我无法满足您的请求。")),
    ("refusal", chat("做吧。", "对不起，作为一个人工智能助手，我不能浏览网页。")),
    ("refusal", chat("做吧。", "作为AI语言模型，我无法预测未来。")),
    ("refusal", chat("做吧。", "我无法提供这方面的信息。")),
    ("refusal", chat("做吧。", "抱歉，我無法回答這個問題。")),
    ("boilerplate", chat("Who won?", "As an AI language model, I think the home team did.")),
    ("boilerplate", chat("Who won?", "The home team.\n\nRegenerate response")),
    ("boilerplate", chat("Who won?", "As of my last knowledge update in 2021, the home team.")),
    ("boilerplate", chat("谁赢了？", "作为一个人工智能语言模型，我认为主队赢了。")),
    ("boilerplate", chat("谁赢了？", "主队赢了。\n复制代码")),
    ("boilerplate", document(f"{EN} This website uses cookies.")),
    ("boilerplate", document(f"{ZH}未经授权，禁止转载。")),
    ("repeated_text", chat("Tell me.", "I am a robot and I like it. " * 12)),
    ("repeated_text", chat("讲吧。", "我是一个机器人，我很喜欢。" * 20)),
    ("repeated_text", chat("讲吧。", "哈" * 60)),
    ("repeated_text", document(f"{EN}\n" * 4)),
    ("repeated_text", of([USER, {**ANSWER, "reasoning_content": "Wait, let me think again. " * 20}])),
    ("mojibake", of([USER, {**ANSWER, "reasoning_content": ZH.encode("gbk").decode("latin-1")}])),
    ("repeated_turn", chat("What is it?", EN, "Yes, but what is it?", EN)),
    ("repeated_turn", chat("是什么？", ZH, "到底是什么？", ZH)),
]

KEPT = [
    chat("What is it?", EN),
    chat("是什么？", ZH),
    chat("你好", "好"),
    chat("Which one?", "A or B?", "B", "Right, it is B."),
    of([USER]),
    of([{"role": "system", "content": "Be brief."}, USER, CALL, RESULT, RESULT, ANSWER, USER, ANSWER]),
    of([USER, {**CALL, "content": None}, RESULT, ANSWER]),
    document(EN),
    document(ZH),
    chat("Un été à la plage ?", "Oui — « déjà vu », naïve façade, 20 °C, ½ prix, 10 €."),
    chat("Что это?", "Это длинный ответ на вопрос: градус ° и плюс-минус ±."),
    chat("数学", "设 α ≤ β，则 √2 × ½ ≈ 0.707，★★★。「引号」『也』可以。"),
    chat("これは何ですか？", "これは日本語の文章です。漢字とカナが混ざっています。"),
    chat("Write a page in HTML.", "<html><body><p>Hello</p></body></html>"),
    chat("写一个网页", "<html><body><p>你好</p></body></html>"),
    chat("Show me.", "Here it is:\n```html\n<p><b>bold</b></p><p><i>x</i></p>\n```\nThat is all there is to it."),
    chat("Is 3 < 4 & 5 > 4?", "Yes: 3 < 4 and 5 > 4."),
    chat("Where?", "See https://example.org/a for the details."),
    chat("Tell me a story.", "\"I'm sorry, but I can't stay,\" she said, and left."),
    chat("Song lyrics?", "I can't help falling in love with you."),
    chat("What is GPT-3?", "GPT-3 is a language model developed by OpenAI in 2020."),
    chat("介绍一下GPT-3。", "GPT-3是由OpenAI开发的自然语言处理模型，参数有1750亿个。"),
    chat("扮演专家", "作为一位AI专家，我建议从数据开始。"),
    chat("为什么会迟到？", "因为堵车，他无法按时到达，真的很抱歉。"),
    chat("Draw a table.", "\n".join(f"| {word} |\n+-----------------+" for word in EN.split())),
    chat("Code?", "def f():\n    return None\n\n\ndef g():\n    return None\n\n\ndef h():\n    return None\n" + EN),
]


@pytest.mark.parametrize(("reason", "row"), DROPPED, ids=[f"{n}-{reason}" for n, (reason, _) in enumerate(DROPPED)])
def test_what_a_rule_is_for_is_dropped_with_its_reason(reason: str, row: Chat) -> None:
    assert why(row) == reason


@pytest.mark.parametrize("row", KEPT, ids=lambda row: row.as_text()[:24])
def test_what_only_looks_like_it_is_kept(row: Chat) -> None:
    assert why(row) is None


def test_every_reason_has_a_case() -> None:
    assert {reason for reason, _ in DROPPED} == set(REASONS)


OFF: dict[str, Any] = {
    "role_order": False,
    "min_question_characters": 0,
    "min_answer_characters": 0,
    "min_text_characters": 0,
    "max_characters": 10**9,
    "max_turns": 10**6,
    "replacement_characters": False,
    "control_characters": False,
    "mojibake": False,
    "template_marks": False,
    "max_html_share": 1.0,
    "url_only": False,
    "refusals": False,
    "boilerplate": False,
    "max_repeated_share": 1.0,
    "repeated_turns": False,
}


@pytest.mark.parametrize(("reason", "row"), DROPPED, ids=[f"{n}-{reason}" for n, (reason, _) in enumerate(DROPPED)])
def test_every_rule_can_be_switched_off_but_those_for_what_nobody_could_read(reason: str, row: Chat) -> None:
    assert why(row, **OFF) == (reason if reason in ("malformed_turn", "empty_turn") else None)


def test_further_patterns_add_to_the_list() -> None:
    row = chat("Do it.", "Nope, not today, my friend.")
    assert why(row) is None
    assert why(row, also_refusals=("nope",)) == "refusal"
    assert why(chat("做吧。", "今天不行。本回答仅供参考"), also_boilerplate=("仅供参考",)) == "boilerplate"
    assert pattern_faults({"also_refusals": ["(", "a"], "also_boilerplate": []})[0].startswith("also_refusals: '('")
    assert len(pattern_faults({"also_refusals": ["(?s)a.b"]})) == 1  # right alone, wrong among the others


@pytest.mark.parametrize("row", KEPT, ids=lambda row: row.as_text()[:24])
def test_what_is_right_needs_no_repair(row: Chat) -> None:
    assert all(repair(turn["content"] or "") == (turn["content"] or "") for turn in row.messages)


def test_what_was_mended_is_kept() -> None:
    broken = ("Ã  la plage\x00", ZH.encode("gbk").decode("latin-1"))
    assert why(chat("Where?", broken[0], "什么？", broken[1])) == "mojibake"
    mended = [repair(text) for text in broken]
    assert mended == ["à la plage", ZH] and why(chat("Where?", mended[0], "什么？", mended[1])) is None


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "assistant", "tool", "x", None]),
                "content": st.one_of(st.none(), st.text(max_size=300), st.integers()),
            }
        ),
        min_size=1,
        max_size=5,
    )
)
def test_nothing_that_parses_breaks_a_rule(messages: list[dict[str, Any]]) -> None:
    row = Chat("0" * 16, "s", "f:1", messages=tuple(messages))
    reason = drop_reason(row, Cleaning())
    assert reason is None or reason in REASONS
