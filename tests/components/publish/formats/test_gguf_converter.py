"""llama.cpp's converter runs in a process of its own; for a tokenizer unknown to it the pre-tokenizer is stated."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.contract import UserError
from components.publish.formats.gguf import run_converter

BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer == "known":
            return "llama-bpe"
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
"""
SCRIPT = """
import sys
from pathlib import Path
from conversion.base import TextModel

source, out = sys.argv[1:]
Path(out).write_text(TextModel().get_vocab_base_pre(source))
"""


@pytest.fixture
def converter(tmp_path: Path) -> Path:
    """A folder laid out as llama.cpp's sources."""
    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion" / "base.py").write_text(BASE)
    (tmp_path / "convert_hf_to_gguf.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(("tokenizer", "written"), [("known", "llama-bpe"), ("unknown", "gpt-2")])
def test_the_stated_pre_tokenizer_is_for_unknown_tokenizers_alone(
    tokenizer: str, written: str, converter: Path, tmp_path: Path
) -> None:
    run_converter(converter, [tokenizer, str(tmp_path / "out")], pre="gpt-2")
    assert (tmp_path / "out").read_text() == written


def test_without_one_the_converters_refusal_is_one_line(converter: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gguf: llama\.cpp's converter refused it: .*was not recognized") as error:
        run_converter(converter, ["unknown", str(tmp_path / "out")])
    assert "\n" not in str(error.value)
