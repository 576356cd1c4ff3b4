"""A draft model that is there already: found, compared with the target's tokenizer, referenced by digests.

Rejection sampling compares probabilities token by token, so both models must mean the same by every id: the whole
vocabularies are compared, not their sizes. Models may pad their vocabularies differently; ids that only one of them has
are never guessed.
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


def checked_model(target: Target, settings: DraftModelSettings) -> DraftModelSettings:
    """The settings with the files' digests and the first token filled in.

    Raises:
        UserError: no such model, or its tokenizer is not the target's.
    """
    model = settings.model
    folder = find_folder(model)
    own, theirs = open_tokenizer(folder), open_tokenizer(target)
    if (why := difference(own.get_vocab(), theirs.get_vocab())) or (why := _other_pieces(own, theirs)):
        raise UserError(f"draft-model: {model} does not share the target's tokenizer ({why}); take one of its family")
    first = own("").input_ids
    token = int(first[0]) if first and first[0] == own.bos_token_id else None
    return settings.model_copy(
        update={
            "model": model if "/" in model and not Path(model).exists() else str(folder),
            "model_files": load_target_fingerprint({"model": str(folder)}),
            "first_token": settings.first_token if settings.first_token is not None else token,
        }
    )


def num_parameters_of(settings: DraftModelSettings) -> int:
    """Numbers in the given model's weights, from the headers of its files."""
    folder = find_folder(settings.model)
    headers = headers_in(folder, settings.model)
    return sum(math.prod(entry["shape"]) for _, header in headers for entry in header.values())


def difference(own: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """How two vocabularies differ, in words; "" when they do not."""
    for token, number in sorted(theirs.items(), key=lambda item: item[1]):
        if own.get(token) != number:
            return f"token {token!r} is {number} for the target and {own.get(token, 'absent')} for the draft model"
    more = sorted(own.keys() - theirs.keys())
    return f"token {more[0]!r} is unknown to the target" if more else ""


def _other_pieces(own: Any, theirs: Any) -> str:
    """Do both cut a text alike? The same pieces may be merged in another order."""
    text = "def add(a, b):\n    return a + b  # Grüße, 你好 1234\n"
    same = own(text, add_special_tokens=False).input_ids == theirs(text, add_special_tokens=False).input_ids
    return "" if same else f"{text.strip()!r} is cut otherwise"


def open_model(
    settings: DraftModelSettings, device: str, dtype: Literal["float32", "bfloat16"], kernel: str
) -> AbstractTarget:
    """The given model, ready to decode on `kernel` (see open_target).

    Raises UserError when its files are not those that were written down.
    """
    folder = find_folder(settings.model)
    now = load_target_fingerprint({"model": str(folder)})
    if settings.model_files and now != settings.model_files:
        changed = sorted(
            name for name in {*now, *settings.model_files} if now.get(name) != settings.model_files.get(name)
        )
        raise UserError(
            f"{settings.model}: {changed[0]} changed since the draft was made; run drafts.train_draft again"
        )
    return open_target(folder, device=device, dtype=dtype, kernel=kernel, tapped=False)
