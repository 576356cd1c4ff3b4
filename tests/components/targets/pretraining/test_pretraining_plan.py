"""The plan of a run: its settings, its documents and its windows."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny_pretraining import PLAN
from tokenizers import Tokenizer

from components.contract import Corpus
from components.targets.pretraining.plan import TokenWindows, pack_documents, plan_from_json
from components.targets.pretraining.quality import held_out_windows
from components.targets.pretraining.tokenizer import BOS_ID, EOS_ID


def test_a_plan_survives_json() -> None:
    assert plan_from_json(json.loads(json.dumps(asdict(PLAN)))) == PLAN


def test_documents_are_framed_and_repeated_as_asked(corpus: Corpus, tokenizer: Tokenizer) -> None:
    once = pack_documents(corpus.path / "train.jsonl", tokenizer, {})
    twice = pack_documents(corpus.path / "train.jsonl", tokenizer, {"stdlib": 2})
    assert once[0] == BOS_ID and once[-1] == EOS_ID
    assert (once == EOS_ID).sum() == 24 and (twice == EOS_ID).sum() == 36
    assert (held_out_windows(corpus.path / "held_out.jsonl", tokenizer, 64)["stdlib"][:, 0] == BOS_ID).sum() >= 1


@given(length=st.integers(4, 40), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_an_epoch_shows_no_token_twice_and_nearly_all_of_them(length: int, seed: int, epoch: int) -> None:
    windows = TokenWindows(np.arange(1000, dtype=np.uint16), length, seed)
    seen = windows.batch(epoch * windows.per_epoch, windows.per_epoch)
    assert (np.diff(seen, axis=1) == 1).all()
    inputs = seen[:, :-1].ravel()
    assert len(set(inputs.tolist())) == len(inputs) and len(inputs) > 1000 - 3 * length
