"""However a private target is spelt, a copy that names it does not leave; what only looks like it does."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import unicodedata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_formats import drafter_state

from components.contract import UserError
from components.publish.formats.interface import Source
from components.publish.formats.registry import write_format
from components.publish.names import find_name
from components.publish.release.upload import private_names, refuse_leaks

WORD = st.text(st.sampled_from("abcdefgxyz0123456789éüñ中文кот"), min_size=1, max_size=8)
NAMES = st.lists(WORD, min_size=1, max_size=4).map("-".join).filter(lambda name: len(name) > 1)


@given(NAMES, st.sampled_from(["", "_", "-", ".", "/"]), st.sampled_from(["", "_chats.jsonl", "-v2", " is it"]))
def test_no_spelling_hides_a_name(name: str, before: str, after: str) -> None:
    for spelt in (
        name,
        name.upper(),
        name.replace("-", "_"),
        name.replace("-", "--"),
        quote(name, safe=""),
        "%2F" + quote(name),
        json.dumps(name)[1:-1],
        json.dumps(json.dumps(name)),
        unicodedata.normalize("NFD", name),
        unicodedata.normalize("NFC", name),
    ):
        assert find_name(f"it says {before}{spelt}{after}", [name]) == name, spelt


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", "LlamaForCausalLM"),
        ("the-target", "the target's own answers"),
        ("acme", "acmeist"),
        ("on-line", "online"),
        ("x-7b", "x-7bits"),
        ("secret", ""),
    ],
)
def test_a_word_that_only_begins_like_it_is_another_word(name: str, text: str) -> None:
    assert find_name(text, [name]) == ""
    assert find_name(f"by {name}, of course", [name]) == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("secret-llm", "SecretLLM"),
        ("secret llm", "secret-llm_chats.jsonl"),
        ("secret llm", "our Secret LLM"),
        ("Секрет-7b", "секрет_7B"),
        ("ﬁne-model", "fine.model"),
    ],
)
def test_words_are_known_however_they_are_joined(name: str, text: str) -> None:
    assert find_name(text, [name]) == name


@pytest.mark.parametrize(
    ("model", "folder", "told", "names"),
    [
        ("acme/secret", "/x/models--acme--secret/snapshots/" + "a" * 40, "ours", ("acme/secret", "secret")),
        ("acme/secret@v2", "/x/yard", "ours", ("acme/secret", "secret", "yard")),
        ("acme/model", "/x/models--acme--model/snapshots/" + "a" * 40, "ours", ("acme/model",)),
        ("/m/secret-llm/checkpoint-1200", "/m/secret-llm/checkpoint-1200", "ours", ("secret-llm",)),
        ("/m/secret-llm/final", "/m/secret-llm/final", "ours", ("secret-llm",)),
        ("/c/models--acme--secret/snapshots/" + "b" * 40, "", "ours", ("acme/secret", "secret")),
        ("/m/tiny-llama", "/m/tiny-llama", "meta/Tiny-Llama", ()),
        ("/m/secret-llm", "/m/secret-llm", "meta/Tiny-Llama", ("secret-llm",)),
        ("/m/secret-llm", "/m/secret-llm", "secret-llm", ("secret-llm",)),
        ("/h/.draftsmith/store/" + "c" * 64, "/h/.draftsmith/store/" + "c" * 64, "c" * 64, ()),
        ("builtin", "builtin", "builtin", ()),
        ("/home/model", "/home/model", "ours", ()),
    ],
)
def test_a_target_is_called_by_what_tells_something(
    model: str, folder: str, told: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "draftsmith").mkdir()
    (tmp_path / "draftsmith" / "target.json").write_text(json.dumps({"model": model, "folder": folder}))
    assert private_names(tmp_path, {"target": {"model": told}}) == names


@pytest.mark.parametrize(
    "file", ["secret_llm-chats.txt", "card.md", "provenance.json", "tokenizer_config.json", "a/config.json"]
)
def test_a_file_that_names_it_in_any_way_is_refused(file: str, tmp_path: Path) -> None:
    release, copy = tmp_path / "release", tmp_path / "copy"
    for folder in (release / "draftsmith", copy / "a"):
        folder.mkdir(parents=True)
    (release / "draftsmith" / "target.json").write_text(json.dumps({"model": "acme/secret-llm", "folder": ""}))
    (copy / "SHA256SUMS").write_text("")
    (copy / file).write_text("nothing here")
    if "secret" not in file:
        refuse_leaks(copy, release, ["secret-llm"])
        (copy / file).write_text('{"name_or_path": "acme%2Fsecret%2Dllm"}')
    with pytest.raises(UserError, match="names the private target 'secret-llm'"):
        refuse_leaks(copy, release, ["secret-llm"])


def test_a_tokenizer_goes_out_without_the_place_it_was_loaded_from(
    networks: Any, source: Source, tmp_path: Path
) -> None:
    """Older checkpoints bring `name_or_path` along, often a folder of the cluster that they were trained on."""
    assert source.folder is not None
    folder = tmp_path / "secret-llm"
    shutil.copytree(source.folder, folder)
    file = folder / "tokenizer_config.json"
    before = json.loads(file.read_text())
    file.write_text(json.dumps({**before, "name_or_path": "/cluster/secret-llm", "tokenizer_file": "/x/t.json"}))
    network = networks("draft-model", {"num_layers": 1})
    own = drafter_state(network, {"num_layers": 1})
    write_format("causal-lm", own, dataclasses.replace(source, folder=folder), tmp_path / "out")
    assert json.loads((tmp_path / "out" / file.name).read_text()) == before
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not any("secret" in one.read_text(errors="replace") for one in (tmp_path / "out").iterdir())


def gguf(entries: dict[str, str | list[str]]) -> bytes:
    """A GGUF file without tensors."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    raw = b"GGUF" + struct.pack("<IQQ", 3, 1, len(entries) + 1)
    for name, value in entries.items():
        if isinstance(value, str):
            raw += string(name) + struct.pack("<I", 8) + string(value)
        else:
            raw += string(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(string, value))
    return raw + string("scores") + struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 1, 2, 3)


def test_of_a_gguf_file_its_metadata_is_read_and_its_vocabulary_is_not(tmp_path: Path) -> None:
    """A chat template stands behind a vocabulary of megabytes, in which every word is a word of its own."""
    release, copy = tmp_path / "release", tmp_path / "copy"
    (release / "draftsmith").mkdir(parents=True)
    (copy / "gguf").mkdir(parents=True)
    (release / "draftsmith" / "target.json").write_text(json.dumps({"model": "acme/atlas", "folder": ""}))
    (copy / "SHA256SUMS").write_text("")
    words = ["atlas", *(f"w{number}" for number in range(300_000))]
    file = copy / "gguf" / "draft.gguf"
    file.write_bytes(gguf({"general.name": "Draft", "tokens": words, "chat_template": "You are a helper."}))
    refuse_leaks(copy, release, ["atlas"])
    file.write_bytes(gguf({"general.name": "Draft", "tokens": words, "chat_template": "You are Atlas."}))
    with pytest.raises(UserError, match=r"gguf/draft\.gguf: names the private target 'atlas'"):
        refuse_leaks(copy, release, ["atlas"])
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match="no sound GGUF file"):
        refuse_leaks(copy, release, ["atlas"])
