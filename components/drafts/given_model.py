"""A pretrained draft model: located, checked against the target's tokenizer, referenced by digests.

Rejection sampling compares probabilities token by token, so every id must mean the same to both models: the whole
vocabularies are compared, not their sizes. Models may pad their vocabularies differently; ids that only one of them has
are never drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from components.contract import Target, UserError
from components.drafts.settings import DraftModelSettings
from components.targets.load import open_target, open_tokenizer
from components.targets.model import AbstractTarget
from components.targets.source import find_folder, load_target_fingerprint
from components.tensor_headers import headers_in


def resolve_model(target: Target, settings: DraftModelSettings) -> DraftModelSettings:
    """Check a given model and fill its files' digests and its first token into the settings.

    Raises:
        UserError: no such model, or its tokenizer is not the target's.
    """
    model = settings.model
    folder = find_folder(model)
    draft_tokenizer, target_tokenizer = open_tokenizer(folder), open_tokenizer(target)
    reason = vocabulary_difference(draft_tokenizer.get_vocab(), target_tokenizer.get_vocab())
    if reason := reason or _tokenization_difference(draft_tokenizer, target_tokenizer):
        raise UserError(
            f"draft-model: {model} does not share the target's tokenizer ({reason}); take one of its family"
        )
    first_ids = draft_tokenizer("").input_ids
    first_token = int(first_ids[0]) if first_ids and first_ids[0] == draft_tokenizer.bos_token_id else None
    return settings.model_copy(
        update={
            "model": model if "/" in model and not Path(model).exists() else str(folder),
            "model_files": load_target_fingerprint({"model": str(folder)}),
            "first_token": settings.first_token if settings.first_token is not None else first_token,
        }
    )


def num_parameters_of(settings: DraftModelSettings) -> int:
    """Numbers in the given model's weights, from the headers of its files."""
    folder = find_folder(settings.model)
    headers = headers_in(folder, settings.model)
    return sum(math.prod(entry["shape"]) for _, header in headers for entry in header.values())


def vocabulary_difference(drafts: Mapping[str, int], targets: Mapping[str, int]) -> str:
    """Describe the first difference of two vocabularies (token -> id); "" where every target token agrees."""
    for token, token_id in sorted(targets.items(), key=lambda item: item[1]):
        if drafts.get(token) != token_id:
            return f"token {token!r} is {token_id} for the target and {drafts.get(token, 'absent')} for the draft model"
    extra_tokens = sorted(drafts.keys() - targets.keys())
    return f"token {extra_tokens[0]!r} is unknown to the target" if extra_tokens else ""


def _tokenization_difference(draft_tokenizer: Any, target_tokenizer: Any) -> str:
    """Describe a difference in tokenizing a sample: equal vocabularies may have other merges; "" where equal."""
    text = "def add(a, b):\n    return a + b  # Grüße, 你好 1234\n"
    ids = [tokenizer(text, add_special_tokens=False).input_ids for tokenizer in (draft_tokenizer, target_tokenizer)]
    return "" if ids[0] == ids[1] else f"{text.strip()!r} is cut otherwise"


def open_model(
    settings: DraftModelSettings, device: str, dtype: Literal["float32", "bfloat16"], kernel: str
) -> AbstractTarget:
    """The given model, ready to decode on `kernel` (see open_target).

    Raises UserError when its files have changed since the draft was made.
    """
    folder = find_folder(settings.model)
    digests = load_target_fingerprint({"model": str(folder)})
    if settings.model_files and digests != settings.model_files:
        changed = sorted(
            name for name in {*digests, *settings.model_files} if digests.get(name) != settings.model_files.get(name)
        )
        raise UserError(
            f"{settings.model}: {changed[0]} changed since the draft was made; run drafts.train_draft again"
        )
    return open_target(folder, device=device, dtype=dtype, kernel=kernel, tapped=False)
