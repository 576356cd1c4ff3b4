"""However a private target is spelt, a copy that names it does not leave; what only looks like it does."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.contract import UserError
from components.publish.names import find_name, public_settings
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


def test_a_folder_of_this_machine_is_named_by_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "acme-secret").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for model in ("models/acme-secret", str(tmp_path / "models" / "acme-secret"), "/nowhere/acme-secret"):
        assert public_settings({"model": model, "num_layers": 1}) == {"model": "acme-secret", "num_layers": 1}
    for model in ("builtin", "org/name", ""):
        assert public_settings({"model": model}) == {"model": model}
    assert public_settings({"ttt_steps": 3}) == {"ttt_steps": 3}
