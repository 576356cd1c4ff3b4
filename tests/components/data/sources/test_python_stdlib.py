"""Prompts from Python sources: cut where the body begins, split by file."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.contract import Context, Prompts
from components.data import collect_prompts
from components.data.formats.prompts import SPLITS, encode_prompt, read_prompts
from components.data.sources.python_stdlib import functions_in, is_held_out, stdlib_files

MODULE = '''import os
\x0c
class Queue:
    @property
    @cached(size=3)
    def first(
        self, default=None
    ):
        """The oldest.

        None if empty.
        """
        if not self.items:
            return default
        return self.items[0]

    def stub(self): pass

    def documented_only(self):
        """Nothing else."""

    async def drain(self):
        # comment
        while self.items:
            await self.get()

def one_line(): return 1
'''


def test_functions_are_cut_after_signature_and_docstring() -> None:
    found = {function.name: function for function in functions_in(MODULE)}
    assert set(found) == {"first", "drain"}
    assert found["first"].head.startswith("    @property\n    @cached(size=3)\n    def first(")
    assert found["first"].head.endswith('None if empty.\n        """')
    assert found["first"].body.startswith("\n        if not self.items:")
    assert found["first"].body.endswith("return self.items[0]\n")
    assert found["drain"].head.startswith("    async def drain(self):")
    for function in found.values():
        assert function.head + function.body in MODULE


def test_what_is_not_python_gives_nothing() -> None:
    assert list(functions_in("print 'Python 2'\n")) == []
    assert list(functions_in("a\0b")) == []


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    folder = tmp_path_factory.mktemp("prompts")
    return collect_prompts(num_train=200, ctx=Context(key="k", out=folder, scratch=folder))


def test_counts_are_as_asked(prompts: Prompts) -> None:
    assert [len(read_prompts(prompts, split)) for split in SPLITS] == [200, 48, 24, 4]
    ids = [prompt.prompt_id for split in SPLITS for prompt in read_prompts(prompts, split)]
    assert len(set(ids)) == len(ids)


def test_no_source_file_is_in_two_splits(prompts: Prompts) -> None:
    sources = {split: {prompt.source for prompt in read_prompts(prompts, split)} for split in SPLITS}
    for split in SPLITS:
        for other in SPLITS:
            assert split == other or not sources[split] & sources[other]


def test_only_held_out_files_are_evaluated_on(prompts: Prompts) -> None:
    relative = {entry.source: entry.relative_path for entry in stdlib_files()}
    for split in SPLITS:
        for prompt in read_prompts(prompts, split):
            assert is_held_out(relative[prompt.source]) == (split != "train")


def test_another_seed_draws_other_prompts_of_the_same_files(prompts: Prompts, tmp_path: Path) -> None:
    again = collect_prompts(num_train=200, ctx=Context(key="k", out=tmp_path, scratch=tmp_path, seed=0))
    assert (again.path / "prompts.jsonl").read_bytes() == (prompts.path / "prompts.jsonl").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    drawn = collect_prompts(num_train=200, ctx=Context(key="k", out=other, scratch=other, seed=1))
    before = {prompt.prompt_id for prompt in read_prompts(prompts, "train")}
    now = {prompt.prompt_id for prompt in read_prompts(drawn, "train")}
    assert len(before & now) < 100


def test_prompts_and_chats_become_token_ids(tmp_path: Path, prompts: Prompts) -> None:
    from tiny_targets import make_tiny_tokenizer

    from components.data.formats.prompts import Prompt

    tokenizer = make_tiny_tokenizer(tmp_path)
    first = read_prompts(prompts, "test")[0]
    assert tokenizer.decode(encode_prompt(tokenizer, first)) == first.text
    chat = Prompt("id", "test", "chat", "rows.jsonl", None, ({"role": "user", "content": "Why?"},))
    assert tokenizer.decode(encode_prompt(tokenizer, chat)) == "user: Why?\n\nassistant:"
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    assert tokenizer.decode(encode_prompt(tokenizer, chat)) == "<user>Why?<bot>"
