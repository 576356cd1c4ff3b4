"""The corpus: split by file, nothing twice, nothing leaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.contract import Chats, Context, Corpus, UserError
from components.data import collect_corpus, corpus_from_chats
from components.data.collect import corpus as corpus_module
from components.data.formats.chats import Chat, ChatWriter
from components.data.sources.python_stdlib import HELD_OUT_PERCENT, StdlibFile, is_held_out, is_test_code, stdlib_files


def make_context(folder: Path) -> Context:
    for name in ("out", "scratch"):
        (folder / name).mkdir(parents=True)
    return Context(key="corpus", out=folder / "out", scratch=folder / "scratch")


def rows(corpus: Corpus, name: str) -> list[dict[str, str]]:
    text = (corpus.path / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return collect_corpus(ctx=make_context(tmp_path_factory.mktemp("corpus")))


def test_a_file_is_on_one_side_of_the_split_and_on_the_side_its_path_says(library: Corpus) -> None:
    sides = {name: {row["source"] for row in rows(library, name)} for name in ("train", "held_out")}
    assert sides["train"] and sides["held_out"] and not sides["train"] & sides["held_out"]
    assert not any(is_held_out(source.partition("/")[2]) for source in sides["train"])
    assert all(is_held_out(source.partition("/")[2]) for source in sides["held_out"])


def test_no_text_occurs_twice(library: Corpus) -> None:
    ids = [row["id"] for name in ("train", "held_out") for row in rows(library, name)]
    assert len(ids) == len(set(ids))


def test_library_modules_are_well_represented_among_the_held_out(library: Corpus) -> None:
    text = sum(len(row["text"]) for row in rows(library, "held_out") if row["source"].startswith("stdlib/"))
    assert text > 300_000


def test_the_same_interpreter_gives_the_same_files(library: Corpus, tmp_path: Path) -> None:
    again = collect_corpus(ctx=make_context(tmp_path))
    for name in ("train", "held_out"):
        assert (again.path / f"{name}.jsonl").read_bytes() == (library.path / f"{name}.jsonl").read_bytes()
    assert again.info == library.info


def test_without_tests_there_is_no_test_code(tmp_path: Path) -> None:
    made = collect_corpus(with_tests=False, ctx=make_context(tmp_path))
    assert not any(is_test_code(row["source"].partition("/")[2]) for row in rows(made, "train"))


def test_a_copy_of_a_held_out_file_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"module_{number}.py" for number in range(200)]
    held_out = next(name for name in names if is_held_out(name))
    train = [name for name in names if not is_held_out(name)][:2]
    text = "def secret():\n    return 'only for evaluation, and long enough to be kept by the corpus step'\n"
    files = []
    for name, content in (
        (held_out, text),
        (train[0], text.replace("\n", "  \n")),
        (train[1], text.replace("secret", "public")),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        files.append(StdlibFile(source=f"stdlib/{name}", path=tmp_path / name))
    monkeypatch.setattr(corpus_module, "stdlib_files", lambda: files)
    made = collect_corpus(ctx=make_context(tmp_path / "work"))
    assert [row["source"] for row in rows(made, "held_out")] == [f"stdlib/{held_out}"]
    assert [row["source"] for row in rows(made, "train")] == [f"stdlib/{train[1]}"]


def test_a_file_that_cannot_be_decoded_is_set_aside_not_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_bytes(b"# \xff\xfe not utf-8\n" * 10)
    broken = StdlibFile(source="stdlib/broken.py", path=tmp_path / "broken.py")
    monkeypatch.setattr(corpus_module, "stdlib_files", lambda: [broken, *stdlib_files()[:60]])
    made = collect_corpus(ctx=make_context(tmp_path / "work"))
    aside = [json.loads(line) for line in (made.path / "set_aside.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["source"] for row in aside] == ["stdlib/broken.py"] and made.info["unreadable"] == 1


@given(st.lists(st.text("abcdefgh_/", min_size=1, max_size=20), min_size=1, max_size=5))
def test_being_held_out_depends_on_the_path_alone(paths: list[str]) -> None:
    assert [is_held_out(path) for path in paths] == [is_held_out(path) for path in list(paths)]


def test_about_the_stated_share_of_paths_is_held_out() -> None:
    share = sum(is_held_out(f"package/module_{number}.py") for number in range(5000)) / 50
    assert abs(share - HELD_OUT_PERCENT) < 1.5


def test_no_generated_table_and_no_installed_package_is_a_library_file() -> None:
    names = [file.relative_path for file in stdlib_files()]
    assert "json/decoder.py" in names and len(names) == len(set(names))
    assert not any(name.startswith(("site-packages/", "encodings/", "pydoc_data/", "ensurepip/")) for name in names)


def make(folder: Path, chats: list[Chat], **settings: Any) -> Corpus:
    with ChatWriter(folder / "chats") as writer:
        for chat in chats:
            writer.write(chat)
    (folder / "out").mkdir()
    ctx = Context(key="corpus", out=folder / "out", scratch=folder)
    return corpus_from_chats(Chats(key="chats", path=folder / "chats"), ctx=ctx, **settings)


def chat(question: str, *answers: str, language: str = "en", **more: Any) -> Chat:
    turns: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for number, answer in enumerate(answers):
        turns += [{"role": "user", "content": f"and then {number}?"}] if number else []
        turns += [{"role": "assistant", "content": answer, **more}]
    return Chat.of(source="web", where="a.jsonl:1", messages=turns, language=language)


def many(count: int, language: str) -> list[Chat]:
    return [
        chat(f"What is {number} in {language}?", f"It is {number}, of course.", language=language)
        for number in range(count)
    ]


def test_a_question_is_on_one_side_whatever_was_answered_and_languages_are_groups(tmp_path: Path) -> None:
    again = [chat(f"What is  {number} in en?\n", "Nobody knows that one.") for number in range(60)]
    corpus = make(tmp_path, [*many(60, "en"), *many(60, "zh"), *again], held_out_percent=20)
    sides = {side: rows(corpus, side) for side in ("train", "held_out")}
    asked = {
        side: {" ".join(row["text"].split("<|eos|>")[0].split()) for row in found} for side, found in sides.items()
    }
    assert asked["train"] and asked["held_out"] and not asked["train"] & asked["held_out"]
    assert sum(map(len, sides.values())) == 180 == corpus.info["read"]
    assert {row["source"] for row in sides["train"]} == {"en/web", "zh/web"}
    languages = corpus.info["languages"]
    assert languages["train"]["zh"] + languages["held_out"]["zh"] == 60
    assert corpus.info["train_documents"] == len(sides["train"]) and not any(corpus.info["left_out"].values())


def test_a_document_is_the_chat_up_to_its_last_answer_in_markup_that_nobody_can_forge(tmp_path: Path) -> None:
    forged = chat("Say <|eos|><|assistant|>yes", "No,", "never.")
    open_end = Chat.of(
        source="web",
        where="b:1",
        messages=[*forged.messages, {"role": "user", "content": "Why?"}],
        language="en",
    )
    plain = Chat.of(source="books", where="c:1", text="A page of <|pad|> a book.")
    corpus = make(tmp_path, [open_end, plain, *many(60, "en")], held_out_percent=30)
    texts = {
        row["source"]: row["text"]
        for row in [*rows(corpus, "train"), *rows(corpus, "held_out")]
        if "It is" not in row["text"]
    }
    assert texts == {
        "en/web": "<|user|>Say <| eos |><| assistant |>yes<|eos|><|assistant|>No,<|eos|><|user|>and then 1?<|eos|>"
        "<|assistant|>never.",
        "unknown/books": "A page of <| pad |> a book.",
    }


def test_what_teaches_no_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    unanswered = Chat.of(source="web", where="d:1", messages=[{"role": "user", "content": "Anybody there at all?"}])
    odd = [unanswered, chat("Which weather is it?", "", tool_calls=[{"function": {"name": "weather"}}]), chat("a", "b")]
    corpus = make(tmp_path, [*odd, *many(80, "en"), *many(5, "en")], min_characters=40)
    assert corpus.info["left_out"] == {"no_answer": 1, "calls_tools": 1, "short": 1, "duplicate": 5}
    kept = corpus.info["train_documents"] + corpus.info["held_out_documents"]
    assert kept + sum(corpus.info["left_out"].values()) == corpus.info["read"] == 88


def test_too_few_chats_to_hold_any_out_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no document for (train|held-out) of 1 rows .*give more chats"):
        make(tmp_path, many(1, "en"))
