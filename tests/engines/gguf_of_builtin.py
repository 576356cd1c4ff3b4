"""Run llama.cpp's converter on a model with the built-in target's tokenizer: arguments as convert_hf_to_gguf.py takes.

The converter knows byte-level BPE tokenizers by a hash of what they make of a test text, and a self-trained one has
none there. The built-in target splits text as GPT-2 does, so that is what it is answered.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main(source: Path) -> None:
    """source: the folder with convert_hf_to_gguf.py, conversion/, gguf-py/ and packages/."""
    sys.path[:0] = [str(source), str(source / "gguf-py"), str(source / "packages")]
    os.chdir(source)
    from conversion import base  # type: ignore[import-not-found]

    for kind in vars(base).values():
        if isinstance(kind, type) and "get_vocab_base_pre" in vars(kind):
            kind.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    runpy.run_path("convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    main(folder)
