"""Warm start: continue training a drafter with its weights and vocabulary and a new optimiser.

Weights belong to the vocabulary they were trained for, so the vocabulary stays as it is, whatever the new answers are.
A drafter has no optimiser moments; the warm-up of the schedule rebuilds them. Only weights that fit exactly are loaded:
a drafter that is half loaded and half random looks like one that drifted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from components.contract import Draft, UserError
from components.drafts.draft import AbstractDraft
from components.drafts.files import check_target, pop_vocabulary, read_draft
from components.targets.model import AbstractTarget

MEANING: Final = {"norm_output": False, "first_hidden": "post_norm"}
"""Settings that change the meaning of weights but not their shapes, with their values in drafters without them."""


@dataclass(frozen=True)
class WarmStart:
    """The drafter to start from. draft_ids: int64 [N], ascending target ids. weights: under the names of its method."""

    key: str
    record: Mapping[str, Any]  # draft.json
    draft_ids: Tensor
    weights: Mapping[str, Tensor]

    @property
    def facts(self) -> dict[str, Any]:
        """The entries about it in the new drafter's draft.json."""
        return {
            "continued_from": self.key,
            "optimiser_steps_before": self.record.get("optimiser_steps", 0)
            + self.record.get("optimiser_steps_before", 0),
        }


def read_warm_start(start_from: Draft, method: str, draft_vocab_size: int, target: AbstractTarget) -> WarmStart:
    """Read the drafter to start from; draft_vocab_size 0 accepts any vocabulary size.

    Raises:
        UserError: it is of another method, for a target of another shape, or has another vocabulary size.
    """
    record, tensors = read_draft(start_from.path)
    label = f"start_from ({start_from.key[:12]})"
    if record["method"] != method:
        raise UserError(f"{label} is of method {record['method']}, not {method}; set method: {record['method']}")
    check_target(start_from.path, record, target)
    ids = pop_vocabulary(start_from.path, tensors, target.shape.vocab_size)
    if draft_vocab_size not in (0, ids.numel()):
        raise UserError(
            f"{label} has a draft vocabulary of {ids.numel()}, not {draft_vocab_size}; draft_vocab_size: 0 keeps it"
        )
    return WarmStart(start_from.key, record, ids, tensors)


def load_warm_start(start: WarmStart, draft: AbstractDraft, settings: Mapping[str, Any]) -> None:
    """Load the weights into a drafter that was built with `settings`.

    Raises:
        UserError: a tensor is missing, unexpected or of another shape; the line names the settings that differ.
    """
    expected = draft.state_dict()
    wrong = [
        f"{name} is {_shape(start.weights.get(name))} there and {_shape(expected.get(name))} here"
        for name in sorted(expected.keys() | start.weights.keys())
        if _shape(start.weights.get(name)) != _shape(expected.get(name))
    ]
    if wrong:
        old = start.record["settings"]
        differences = [
            f"{name}: {old.get(name)!r} there, {settings.get(name)!r} here"
            for name in sorted({*old, *settings} - {"init_seed"})
            if old.get(name) != settings.get(name)
        ]
        raise UserError(
            f"start_from ({start.key[:12]}) has another shape: {wrong[0]}{_others(wrong)}; "
            + (
                f"give it the settings it was made with ({', '.join(differences)})"
                if differences
                else "train without start_from"
            )
        )
    for name, default in MEANING.items():
        value, trained_with = settings.get(name, default), start.record["settings"].get(name, default)
        if value != trained_with:
            mismatch = f"was trained with {name}: {trained_with!r}, not {value!r}; give it the same"
            raise UserError(f"start_from ({start.key[:12]}) {mismatch}")
    draft.load_state_dict(dict(start.weights))


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))


def _others(wrong: list[str]) -> str:
    return f" and {len(wrong) - 1} tensors more" if len(wrong) > 1 else ""
