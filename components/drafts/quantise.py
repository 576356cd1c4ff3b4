"""The step that stores a drafter in fewer bits: a drafter of its own, measured by the same acceptance maps.

A drafter reads all its weights for each draft token, so half the bytes allow up to twice the speed where memory
bandwidth is the limit; what rounding costs in acceptance must be measured. The quantised drafter is therefore a Draft
like any other: measured, compared, released and served under its own key, beside the one that it was made from.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from safetensors.torch import save_file

from components.contract import Context, Draft, UserError
from components.drafts.storage.files import read_draft, write_record
from components.drafts.storage.quantisation import is_linear, layer_of, num_bytes, packed_layers, quantise_tensors
from components.weight_format import DEFAULT_GROUP, Storage, Weights

OF_TRAINED_WEIGHTS = ("held_out_al", "held_out_al_by_workload")
"""Entries of draft.json measured with the trained weights, which do not hold for the rounded ones."""

DEFAULT_KEEP = ("fc", "lm_head")
INFO_FIELDS = (
    *("method", "num_steps", "max_depth", "target_key", "draft_vocab_size", "num_parameters", "weight_bytes"),
    *("continued_from", "best_step"),  # needed by the gate for a challenger
)


def quantise_draft(
    draft: Draft,
    *,
    weights: Weights,
    group_size: Annotated[int, Field(ge=0, le=4096)] | None,
    keep: list[str],
    ctx: Context,
) -> Draft:
    """The step `drafts.quantise_draft`; its settings are explained in components/drafts/steps.py."""

    record, tensors = read_draft(draft.path)
    label = f"drafts.quantise_draft: {record['method']} ({draft.key[:12]})"
    if not record.get("trained", True):
        raise UserError(f"{label} has no weights of its own to quantise: leave the step out")
    if record.get("storage"):
        raise UserError(f"{label} is stored in {record['storage']['weights']} already; wire the one it was made from")
    size = DEFAULT_GROUP[weights] if group_size is None else group_size
    linear = {layer_of(name) for name, tensor in tensors.items() if is_linear(name, tensor)}
    if unknown := sorted(set(keep) - linear - set(DEFAULT_KEEP)):
        raise UserError(f"{label} has no layer {unknown[0]} to keep; it has {', '.join(sorted(linear))}")
    storage = Storage(weights, size, tuple(sorted(linear & set(keep))) if weights != "bf16" else ())
    encoded = quantise_tensors(tensors, storage, label)
    if weights != "bf16" and not packed_layers(encoded):
        raise UserError(f"{label}: keep names every linear layer that it has; leave one of {keep} out")
    save_file(encoded, ctx.out / "model.safetensors", metadata={"format": "pt"})
    before, after = num_bytes(tensors.values()), num_bytes(encoded.values())
    facts = {
        **{name: value for name, value in record.items() if name not in OF_TRAINED_WEIGHTS},
        "storage": {"weights": weights, "group_size": size, "keep": list(storage.keep)},
        "quantised_from": draft.key,
        "weight_bytes": after,
    }
    write_record(ctx.out, facts)
    ctx.note(f"{record['method']} in {storage.description}: {after / 1e6:.2f} MB, {after / before:.0%} of float32")
    info = {name: facts[name] for name in INFO_FIELDS if name in facts}
    return Draft.of_step(ctx, {**info, "weights": storage.description, "quantised_from": draft.key})
