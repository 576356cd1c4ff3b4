"""A corpus of two groups of files, the tokenizer learnt from it, and a stream of random tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_pretraining import SHAPE
from tokenizers import Tokenizer

from components.contract import Corpus
from components.targets.pretraining.tokenizer import train_byte_bpe


@pytest.fixture(scope="module")
def stream() -> np.ndarray:
    return np.random.default_rng(0).integers(0, SHAPE.vocab_size, 6000).astype(np.uint16)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    body = "".join(f"    total = total + values[{n}] * weight_{n}  # term {n}\n" for n in range(40))
    for name, count in (("train", 24), ("held_out", 4)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for number in range(count):
                group = "stdlib" if number % 2 else "stdlib-tests"
                text = "import math\n" * 60 + f"def {name}_{number}(values):\n{body}    return total\n"
                out.write(json.dumps({"id": f"{name}{number}", "source": f"{group}/{number}.py", "text": text}) + "\n")
    return Corpus(key="corpus", path=folder, info={"licence": "PSF-2.0", "python_version": "3.11"})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_byte_bpe(["def f(x):\n    return x\n" * 50, "class A:\n    pass\n"], 300)
