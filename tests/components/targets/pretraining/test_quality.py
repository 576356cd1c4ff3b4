"""Quality is measured on what it says: bigrams of continuations after prompts of a group."""

from __future__ import annotations

from tokenizers import Tokenizer

from components.contract import Corpus
from components.targets.pretraining.quality import cut_prompts, distinct_bigram_ratio, until_eos
from components.targets.pretraining.tokenizer import EOS_ID


def test_distinct_bigrams_of_loops_and_of_plain_text() -> None:
    assert distinct_bigram_ratio([1, 2, 3, 4, 5]) == 1.0
    assert distinct_bigram_ratio([7] * 97) == 1 / 96
    assert until_eos([5, 6, EOS_ID, 7]) == [5, 6]


def test_prompts_end_at_def_lines_of_the_asked_group(corpus: Corpus, tokenizer: Tokenizer) -> None:
    prompts, references = cut_prompts(corpus.path / "held_out.jsonl", tokenizer, "stdlib")
    assert prompts.shape == (2, 64) and references.shape == (2, 96)
    assert all(tokenizer.decode(row).endswith("(values):") for row in prompts.tolist())
