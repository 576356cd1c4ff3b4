"""Run llama.cpp's converter in a process of its own: gguf_converter.py FOLDER PRE ARGUMENTS OF convert_hf_to_gguf.py.

The converter recognises byte-level BPE tokenizers by a hash of their tokens of a test text and refuses unknown ones,
such as a self-trained tokenizer. PRE, unless it is "-", is the pre-tokenizer that it then uses: the built-in target
splits text as GPT-2 does.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main(source: Path, pre: str) -> None:
    """source: the folder with convert_hf_to_gguf.py, conversion/, gguf-py/ and maybe packages/ that it imports."""
    sys.path[:0] = [str(source), str(source / "gguf-py"), str(source / "packages")]
    os.chdir(source)
    if pre != "-":
        for kind in vars(importlib.import_module("conversion.base")).values():  # llama.cpp's, not installed
            if isinstance(kind, type) and "get_vocab_base_pre" in vars(kind):
                original = vars(kind)["get_vocab_base_pre"]
                setattr(kind, "get_vocab_base_pre", _with_fallback(original, pre))  # noqa: B010 - not its own class
    runpy.run_path("convert_hf_to_gguf.py", run_name="__main__")


def _with_fallback(original: Any, pre: str) -> Any:
    def get_vocab_base_pre(self: Any, tokenizer: Any) -> Any:
        try:
            return original(self, tokenizer)
        except NotImplementedError:
            return pre

    return get_vocab_base_pre


if __name__ == "__main__":
    folder, answer = Path(sys.argv.pop(1)), sys.argv.pop(1)
    main(folder, answer)
