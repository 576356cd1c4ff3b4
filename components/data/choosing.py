"""Which prompt goes into which split, and which are chosen: by hashes of what is asked, so that nothing leaks.

A source of rows is split by a hash of the question alone: the same question under another system prompt, in another
white space or file is on the same side, and adding rows moves none. Prompts that are equal up to white space are kept
once; where a source comes already split (by file), on the side of the evaluation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from components.data.prompts import Prompt

_EVALUATION: Final = ("test", "warm_up", "validation")
_PRUNE_ABOVE: Final = 1000
"""Candidates beyond twice the need that are kept before the hindmost are dropped: memory follows need, not source."""


def deal_rows(
    prompts: Iterable[Prompt],
    wanted: Mapping[str, int],
    counts: Counter[str],
    *,
    seed: int,
    evaluation_percent: int,
) -> dict[str, list[Prompt]]:
    """Split the prompts of a source of rows into the splits of `wanted`; each content comes once, the first row wins.

    evaluation_percent: of a hundred questions, how many are for test, warm_up and validation (in expectation).
    """
    num_evaluation = sum(wanted[split] for split in _EVALUATION)
    seen: set[bytes] = set()
    train: list[Prompt] = []
    evaluation: dict[str, list[Prompt]] = {}  # by question: equal questions go together
    for prompt in prompts:
        content = hashlib.sha256(content_of(prompt).encode("utf-8")).digest()
        if content in seen:
            counts["duplicates_within_split"] += 1
            continue
        seen.add(content)
        question = question_of(prompt)
        if hash_number(f"split:{question}") % 100 < evaluation_percent:
            evaluation.setdefault(question, []).append(prompt)
            if len(evaluation) > 2 * num_evaluation + _PRUNE_ABOVE:
                evaluation = dict(_in_order(evaluation, seed)[:num_evaluation])
        else:
            train.append(prompt)
            if len(train) > 2 * wanted["train"] + _PRUNE_ABOVE:
                train = sorted(train, key=lambda prompt: _order(prompt, seed))[: wanted["train"]]
    return {"train": train, **_deal_evaluation([group for _, group in _in_order(evaluation, seed)], wanted)}


def choose(
    pools: Mapping[str, list[Prompt]], wanted: Mapping[str, int], counts: Counter[str], seed: int
) -> dict[str, list[Prompt]]:
    """The first prompts of every pool in hash order, each content once; evaluation splits choose first."""
    everywhere: dict[str, str] = {}
    kept: dict[str, list[Prompt]] = {}
    for split in wanted:
        kept[split] = []
        for prompt in sorted(pools[split], key=lambda prompt: _order(prompt, seed)):
            content = content_of(prompt)
            if content in everywhere:
                side = "within_split" if everywhere[content] == split else "across_splits"
                counts[f"duplicates_{side}"] += 1
                continue
            everywhere[content] = split
            kept[split].append(prompt)
    return {split: kept[split][: wanted[split]] for split in wanted}


def question_of(prompt: Prompt) -> str:
    """What is asked, up to white space: the text, or what the user says (without the system prompt)."""
    if prompt.messages is None:
        return _spaced(prompt.text or "")
    return _spaced("\n".join(message["content"] for message in prompt.messages if message["role"] == "user"))


def content_of(prompt: Prompt) -> str:
    """What makes two prompts the same: all of their text up to white space."""
    return _spaced(prompt.text if prompt.text is not None else json.dumps(prompt.messages, ensure_ascii=False))


def hash_number(text: str) -> int:
    """A number below 2**64 that depends on the text alone, on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def _deal_evaluation(groups: list[list[Prompt]], wanted: Mapping[str, int]) -> dict[str, list[Prompt]]:
    """Share groups of equal questions among test, warm_up and validation, by need and in the order given."""
    needs = {split: wanted[split] for split in _EVALUATION}
    total = sum(needs.values())
    if len(groups) < total:  # everybody gets a share, at least one
        needs = {split: max(1, len(groups) * need // total) if need else 0 for split, need in needs.items()}
    dealt: dict[str, list[Prompt]] = {split: [] for split in _EVALUATION}
    for split, need in needs.items():
        for group in groups[:need]:
            dealt[split].extend(dataclasses.replace(prompt, split=split) for prompt in group)
        groups = groups[need:]
    return dealt


def _in_order(evaluation: Mapping[str, list[Prompt]], seed: int) -> list[tuple[str, list[Prompt]]]:
    return sorted(evaluation.items(), key=lambda entry: (hash_number(f"order:{seed}:{entry[0]}"), entry[0]))


def _order(prompt: Prompt, seed: int) -> tuple[int, str]:
    return (hash_number(f"order:{seed}:{prompt.prompt_id}"), prompt.prompt_id)


def _spaced(text: str) -> str:
    return " ".join(text.split())
