"""The report shows in colour what a drafter learns to guess, and a stranger's text is shown there and never run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_study import make_ctx

from components.contract import Conversations
from components.report import write_page

NASTY = "<script>alert('x')</script>\u202e\x1b[31m"


def answers(folder: Path, rows: int = 9, text: str = "What grows?") -> Conversations:
    folder.mkdir()
    row = {"row_id": "r", "split": "train", "workload": "chat", "language": "en", "domain": "", "answered_by": "target"}
    pieces = [
        {"role": "user", "masked": False, "text": text},
        {"role": "template", "masked": False, "text": "<|assistant|>"},
        {"role": "assistant", "masked": True, "text": f"peas & {text}"},
    ]
    sample = {"rows": [{**row, "pieces": pieces} for _ in range(rows)]}
    (folder / "sample.json").write_text(json.dumps(sample), encoding="utf-8")
    counts = {"num_tokens": 5000, "num_answer_tokens": 1200, "languages": {"en": 700, "zh": 500}}
    return Conversations("a" * 64, folder, {**counts, "mask_methods": {"prefix": 9}})


def page(study: dict[str, Any], folder: Path, given: list[Conversations] | None) -> str:
    wanted = {name: artifact for name, artifact in study.items() if name != "chosen"}
    made = write_page(**wanted, answers=given, ctx=make_ctx(folder, "g" * 64))
    return (made.path / "index.html").read_text(encoding="utf-8")


def test_answers_are_marked_and_nothing_else(study: dict[str, Any], tmp_path: Path) -> None:
    text = page(study, tmp_path / "out", [answers(tmp_path / "a"), answers(tmp_path / "b", rows=1)])
    samples = re.findall(r'<pre class="sample">(.*?)</pre>', text, flags=re.DOTALL)
    assert len(samples) == 4  # three of nine, and the one
    for sample in samples:
        assert re.findall(r"<mark>(.*?)</mark>", sample) == ["peas &amp; What grows?"]
        assert '<span class="user">What grows?</span><span class="template">&lt;|assistant|&gt;</span>' in sample
    assert text.count("1,200 answer tokens of 5,000; languages: en 700, zh 500; masks agreed by: prefix 9.") == 2


def test_a_strangers_text_is_shown_and_never_run(study: dict[str, Any], tmp_path: Path) -> None:
    text = page(study, tmp_path / "out", [answers(tmp_path / "a", text=NASTY * 30)])
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "\u202e" not in text and "\x1b" not in text and "\\u202e" in text and "\\u001b" in text
    assert re.search(r"\[\.\.\. \d+ characters \.\.\.\]", text)


@pytest.mark.parametrize("without_sample", [True, False])
def test_without_answers_there_is_no_such_section(study: dict[str, Any], tmp_path: Path, without_sample: bool) -> None:
    given = None
    if without_sample:  # of an older run
        given = [answers(tmp_path / "a")]
        (given[0].path / "sample.json").unlink()
    assert "What is trained on" not in page(study, tmp_path / "out", given)
