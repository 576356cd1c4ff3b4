"""Prompts as token ids: Chinese comes back whole, and a chat is the same text on every day and for every template."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from given_chats import MIXED, chat, prompts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_targets import make_tiny_tokenizer

from components.contract import Context, Prompts, UserError
from components.data import collect_prompts
from components.data.formats.prompts import (
    SPLITS,
    Prompt,
    encode_prompt,
    encode_text,
    prompt_format,
    read_prompts,
    render_chat,
)

CHINESE = "请解释：为什么天空是蓝色的？（简短）𠮷野家 👩‍👩‍👧 ｆｕｌｌ"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def templated(tokenizer: Any) -> Any:
    before = tokenizer.chat_template
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = before


def plain(text: str) -> Prompt:
    return Prompt("id", "test", "text", "s", text, None)


def test_chinese_is_intact_from_the_file_to_the_token_ids(tokenizer: Any, tmp_path: Path) -> None:
    asked = [f"{CHINESE} {number}" for number in range(60)]
    file = tmp_path / "问题.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": text}, ensure_ascii=number % 2 == 0) + "\n" for number, text in enumerate(asked)),
        encoding="utf-8",
    )
    made = collect_prompts(source=str(file), ctx=Context(key="k", out=tmp_path, scratch=tmp_path))
    assert set(made.info["workloads"]) == {"问题"}
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(made.path / "prompts.jsonl", moved)
    found = [prompt for split in SPLITS for prompt in read_prompts(Prompts("k", moved), split)]
    assert {prompt.text for prompt in found} <= set(asked) and len(found) > 50
    for prompt in found:
        assert tokenizer.decode(encode_prompt(tokenizer, prompt)) == prompt.text


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30))
def test_any_text_comes_back_from_its_token_ids(tokenizer: Any, text: str) -> None:
    if not any(token in text for token in tokenizer.all_special_tokens):
        assert tokenizer.decode(encode_prompt(tokenizer, plain(text))) == text


def test_a_chat_is_the_same_on_every_day(templated: Any) -> None:
    dated = "\n{% if strftime_now is defined %}{{ strftime_now('%d %b %Y, %A') }}{% endif %} " + TEMPLATE
    templated.chat_template = dated
    assert templated.decode(encode_prompt(templated, chat(("user", "天")))) == "\n26 Jul 2024, Friday <user>天<bot>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ '{}'.format() }}",
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ nobody.knows.this }}",
    ],
)
def test_whatever_a_template_does_is_one_line(templated: Any, template: str) -> None:
    templated.chat_template = template
    with pytest.raises(UserError, match=r"^the target's chat template refuses a chat \(.{5,200}\); use another"):
        encode_prompt(templated, chat(("user", "hello")))


def test_a_template_that_writes_a_novel_is_refused_before_it_is_tokenized(templated: Any) -> None:
    templated.chat_template = "{% for _ in range(600) %}{{ 'word ' * 20000 }}{% endfor %}"
    with pytest.raises(UserError, match=r"^the target's chat template writes 60,000,000 characters for one chat"):
        render_chat(templated, [{"role": "user", "content": "x"}])


def test_a_template_without_system_turns_gets_the_system_prompt_in_the_users(templated: Any) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    templated.chat_template = refusing
    told = encode_prompt(templated, chat(("system", "Be brief."), ("user", "Why?")))
    assert templated.decode(told) == "<user>Be brief.\n\nWhy?<bot>"
    templated.chat_template = "{{ raise_exception('no chats') }}"
    with pytest.raises(UserError, match="no chats"):
        encode_prompt(templated, chat(("system", "Be brief."), ("user", "Why?")))


def test_a_chat_with_tools_shows_them_to_the_template(templated: Any) -> None:
    templated.chat_template = "{{ tools | tojson if tools else 'none' }}" + TEMPLATE
    told = chat(("user", "天"))
    assert templated.decode(encode_prompt(templated, told)) == "none<user>天<bot>"
    offered = dataclasses.replace(told, tools=({"type": "function", "function": {"name": "weather"}},))
    assert '"name": "weather"' in templated.decode(encode_prompt(templated, offered))


def test_calls_whose_function_is_a_name_keep_their_arguments(templated: Any) -> None:
    templated.chat_template = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    call = {"function": "add", "arguments": '{"a": 1}'}
    turns = ({"role": "user", "content": "Add."}, {"role": "assistant", "content": "", "tool_calls": [call]})
    told = templated.decode(encode_prompt(templated, dataclasses.replace(chat(), messages=turns)))
    assert (
        told == '[{"arguments": {"a": 1}, "function": "add"}]' or told == '[{"function": "add", "arguments": {"a": 1}}]'
    )


def test_a_tokenizer_that_closes_every_text_does_not_close_a_prompt(tokenizer: Any) -> None:
    class Closing:
        """The same tokenizer with an end-of-text token after every text, as some tokenizers are configured."""

        chat_template, added_tokens_decoder = None, tokenizer.added_tokens_decoder
        all_special_tokens = tokenizer.all_special_tokens
        bos_token_id, eos_token_id, eos_token = None, tokenizer.eos_token_id, tokenizer.eos_token

        def __call__(self, text: str, verbose: bool, add_special_tokens: bool = True) -> dict[str, list[int]]:
            closing = [tokenizer.eos_token_id] if add_special_tokens else []
            return {"input_ids": [*tokenizer(text, verbose=verbose)["input_ids"], *closing]}

    assert encode_prompt(Closing(), plain("天空")) == encode_prompt(tokenizer, plain("天空"))


def test_older_prompt_files_are_readable(tmp_path: Path) -> None:
    from components.data.formats.prompts import read_prompts

    old = {
        "prompt_id": "a",
        "split": "train",
        "workload": "w",
        "source": "s",
        "messages": [{"role": "user", "content": "x"}],
    }
    (tmp_path / "prompts.jsonl").write_text(json.dumps(old) + "\n", encoding="utf-8")
    (found,) = read_prompts(Prompts("p", tmp_path), "train")
    assert (found.conversation, found.tools, found.domain, found.language) == (None, None, "", "")
    assert MIXED[0].conversation is not None
    again = read_prompts(prompts_of(MIXED[:1], tmp_path), "train")
    assert again == MIXED[:1]


def test_what_a_person_types_is_continued_or_is_the_turn_of_a_chat(templated: Any) -> None:
    said = "Why is it so?"
    turn = Prompt("p", "test", "w", "s", None, ({"role": "user", "content": said},))
    assert encode_text(templated, said, as_chat=True) == encode_prompt(templated, turn)
    assert encode_text(templated, said, as_chat=False) == encode_prompt(templated, plain(said))
    assert encode_prompt(templated, turn) != encode_prompt(templated, plain(said))
    kinds = [prompt_format(prompts) for prompts in ([turn], [plain(said)], [turn, turn, plain(said)])]
    assert kinds == ["chat", "text", "chat"]
