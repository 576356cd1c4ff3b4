"""However a private target is spelt, a copy that names it does not leave; what only looks like it does."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.publish.names import find_name, public_settings

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


def test_a_folder_of_this_machine_is_named_by_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "acme-secret").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for model in ("models/acme-secret", str(tmp_path / "models" / "acme-secret"), "/nowhere/acme-secret"):
        assert public_settings({"model": model, "num_layers": 1}) == {"model": "acme-secret", "num_layers": 1}
    for model in ("builtin", "org/name", ""):
        assert public_settings({"model": model}) == {"model": model}
    assert public_settings({"ttt_steps": 3}) == {"ttt_steps": 3}
