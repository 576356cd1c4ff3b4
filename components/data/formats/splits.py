"""Splits prompts into train, validation, test and warm_up, and selects them, by hashes, so that nothing leaks.

A source of rows is split by a hash of the question alone: the same question under another system prompt, with other
white space or in another file is on the same side, and adding rows moves none. Prompts that are equal up to white space
are kept once; where a source is already split (by file), the copy on the evaluation side is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from components.data.formats.prompts import Prompt

_EVALUATION: Final = ("test", "warm_up", "validation")
_PRUNE_ABOVE: Final = 1000
"""How many candidates beyond twice the quota are held before the last are dropped, so that memory stays bounded."""


def split_prompts(
    prompts: Iterable[Prompt],
    quotas: Mapping[str, int],
    counts: Counter[str],
    *,
    seed: int,
    evaluation_percent: int,
) -> dict[str, list[Prompt]]:
    """Split the prompts of a source of rows; each content is kept once, from its first row.

    quotas: split -> most prompts.
    evaluation_percent: of a hundred questions, how many are for test, warm_up and validation (in expectation).
    """
    num_evaluation = sum(quotas[split] for split in _EVALUATION)
    contents: set[bytes] = set()
    train: list[Prompt] = []
    evaluation: dict[str, list[Prompt]] = {}  # by question: equal questions go together
    for prompt in prompts:
        content = hashlib.sha256(content_of(prompt).encode("utf-8")).digest()
        if content in contents:
            counts["duplicates_within_split"] += 1
            continue
        contents.add(content)
        question = question_of(prompt)
        if hash_number(f"split:{question}") % 100 < evaluation_percent:
            evaluation.setdefault(question, []).append(prompt)
            if len(evaluation) > 2 * num_evaluation + _PRUNE_ABOVE:
                evaluation = dict(_in_order(evaluation, seed)[:num_evaluation])
        else:
            train.append(prompt)
            if len(train) > 2 * quotas["train"] + _PRUNE_ABOVE:
                train = sorted(train, key=lambda prompt: _order(prompt, seed))[: quotas["train"]]
    return {"train": train, **_split_evaluation_groups([group for _, group in _in_order(evaluation, seed)], quotas)}


def select_prompts(
    pools: Mapping[str, list[Prompt]], quotas: Mapping[str, int], counts: Counter[str], seed: int
) -> dict[str, list[Prompt]]:
    """Select the first prompts of every pool in hash order, each content once; evaluation splits select first."""
    split_of_content: dict[str, str] = {}
    selected: dict[str, list[Prompt]] = {}
    for split in quotas:
        selected[split] = []
        for prompt in sorted(pools[split], key=lambda prompt: _order(prompt, seed)):
            content = content_of(prompt)
            if content in split_of_content:
                side = "within_split" if split_of_content[content] == split else "across_splits"
                counts[f"duplicates_{side}"] += 1
                continue
            split_of_content[content] = split
            selected[split].append(prompt)
    return {split: selected[split][: quotas[split]] for split in quotas}


def question_of(prompt: Prompt) -> str:
    """The question with white space normalised: the text, or the user turns (without the system prompt)."""
    if prompt.messages is None:
        return _spaced(prompt.text or "")
    return _spaced("\n".join(message["content"] for message in prompt.messages if message["role"] == "user"))


def content_of(prompt: Prompt) -> str:
    """All text of a prompt with white space normalised: two prompts with equal content are the same."""
    return _spaced(prompt.text if prompt.text is not None else json.dumps(prompt.messages, ensure_ascii=False))


def hash_number(text: str) -> int:
    """A hash below 2**64 that depends on the text alone, on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def _split_evaluation_groups(groups: list[list[Prompt]], quotas: Mapping[str, int]) -> dict[str, list[Prompt]]:
    """Share groups of equal questions among test, warm_up and validation, by quota and in their order."""
    sizes = {split: quotas[split] for split in _EVALUATION}
    total = sum(sizes.values())
    if len(groups) < total:  # every split gets its share, at least one
        sizes = {split: max(1, len(groups) * size // total) if size else 0 for split, size in sizes.items()}
    splits: dict[str, list[Prompt]] = {split: [] for split in _EVALUATION}
    for split, size in sizes.items():
        for group in groups[:size]:
            splits[split].extend(dataclasses.replace(prompt, split=split) for prompt in group)
        groups = groups[size:]
    return splits


def _in_order(evaluation: Mapping[str, list[Prompt]], seed: int) -> list[tuple[str, list[Prompt]]]:
    return sorted(evaluation.items(), key=lambda entry: (hash_number(f"order:{seed}:{entry[0]}"), entry[0]))


def _order(prompt: Prompt, seed: int) -> tuple[int, str]:
    return (hash_number(f"order:{seed}:{prompt.prompt_id}"), prompt.prompt_id)


def _spaced(text: str) -> str:
    return " ".join(text.split())
