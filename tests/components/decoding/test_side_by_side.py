"""The child of `draftsmith generate` answers with both continuations of a prompt, or with one line of what is wrong."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_targets import make_tiny_target

from components.contract import Target
from components.decoding.side_by_side import main
from components.drafts.settings import NgramSettings
from components.drafts.storage.files import save_untrained


def test_both_continuations_are_the_same_text_and_a_missing_drafter_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(request: dict[str, Any]) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
        return (main(), *capsys.readouterr())

    folder, draft = make_tiny_target("llama", tmp_path / "target"), tmp_path / "draft"
    draft.mkdir()
    save_untrained(draft, "ngram", NgramSettings(), Target(key="", path=folder))
    capsys.readouterr()  # what transformers told while it wrote the target
    request: dict[str, Any] = {"target": str(folder), "prompt": "def add(a, b): return a + b", "depth_k": 3}
    request |= {"max_new_tokens": 24, "device": "cpu", "dtype": "auto", "num_threads": 1, "as_chat": False}
    code, out, err = ask({**request, "draft": str(draft)})
    assert (code, err) == (0, "")
    answer = json.loads(out)
    plain, speculative = answer["plain"], answer["speculative"]
    assert answer["identical"] and plain["text"] == speculative["text"]
    assert plain["num_tokens"] == speculative["num_tokens"] <= 24
    assert 0 < speculative["rounds"] <= plain["rounds"] and min(plain["ms"], speculative["ms"]) > 0
    code, out, err = ask({**request, "draft": "", "depth_k": 0})
    assert (code, err) == (0, "") and json.loads(out).keys() == {"plain"}
    assert json.loads(out)["plain"]["text"] == plain["text"], "without a drafter: plain decoding alone"
    code, out, err = ask({**request, "draft": str(tmp_path / "nowhere")})
    assert (code, out) == (2, "") and err.count("\n") == 1 and "no draft.json: not a drafter" in err
