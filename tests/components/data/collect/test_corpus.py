"""The corpus: split by file, nothing twice, nothing leaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.contract import Context, Corpus
from components.data import collect_corpus
from components.data.collect import corpus as corpus_module
from components.data.sources.python_stdlib import HELD_OUT_PERCENT, StdlibFile, is_held_out, is_test_code, stdlib_files


def make_context(folder: Path) -> Context:
    for name in ("out", "scratch"):
        (folder / name).mkdir(parents=True)
    return Context(key="corpus", out=folder / "out", scratch=folder / "scratch")


def rows(corpus: Corpus, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (corpus.path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


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
