"""A trained drafter on disk, and back.

`draft.json`: {"format", "method", "settings" (what `build` takes), "num_steps" (trained depth), "max_depth",
"draft_vocab_size", "num_parameters", "target": {"key", "hidden_size", "vocab_size", "num_layers"}, "held_out_al", ...}.
`model.safetensors`: the drafter's own tensors, float32, under the names that engines know (see each method), and
  d2t int64 [N] (target id = i + d2t[i]) and t2d bool [V].
A method that learns nothing has the first file alone, with "trained": false. A drafter whose weights were rounded
(drafts.quantise_draft) says "storage" and "quantised_from", and its tensors are those of quantised.py; whoever reads it
here gets the weights that they stand for.
Opening checks names and shapes exactly: an engine that loads what fits and leaves the rest random is the usual way to
lose acceptance without a word.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.contract import Draft, Target, UserError
from components.drafts.draft import AbstractDraft, Drafter
from components.drafts.quantised import dequantised
from components.drafts.settings import SETTINGS, settings_class
from components.drafts.storage import Storage
from components.drafts.vocabulary import ids_of, membership_of, offsets_of
from components.outside_json import read_object
from components.targets.model import AbstractTarget
from components.tensor_files import require_finite
from components.tensor_headers import read_header

FORMAT = 1
VOCABULARY_TENSORS = ("d2t", "t2d")


def method_class(method: str) -> Any:
    """The class behind a name in METHODS; raises UserError for a name that is not there."""
    from components.drafts import METHODS

    if method not in METHODS:
        raise UserError(f"drafting method '{method}' is unknown; known are {', '.join(sorted(METHODS))}")
    module, name = METHODS[method].split(":")
    return getattr(importlib.import_module(module), name)


def save_draft(
    directory: Path,
    method: str,
    settings: Mapping[str, Any],
    target: AbstractTarget,
    draft_ids: Tensor,
    weights: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Write draft.json and model.safetensors; `facts` are added to draft.json (target_key, ...)."""
    tensors = {name: weight.detach().float().cpu().contiguous() for name, weight in weights.items()}
    num_parameters = sum(weight.numel() for weight in tensors.values())
    ids = draft_ids.cpu()
    tensors |= {"d2t": offsets_of(ids), "t2d": membership_of(ids, target.shape.vocab_size)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    shape = target.shape
    record = {
        "format": FORMAT,
        "method": method,
        "settings": dict(settings),
        "draft_vocab_size": ids.numel(),
        "num_parameters": num_parameters,
        "target": {
            "key": facts.get("target_key", ""),
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "num_layers": shape.num_layers,
        },
        **facts,
    }
    write_record(directory, record)


def write_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Write draft.json."""
    (directory / "draft.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def save_untrained(directory: Path, method: str, settings: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Write draft.json, all there is of a method that learns nothing; returns its facts. Reads no weight."""
    from components.targets.load import target_facts

    shape = target_facts(target)["shape"]
    own = method_class(method).written_down(target, settings)
    facts = {
        "method": method,
        "num_steps": own["num_steps"],
        "max_depth": own["max_depth"],
        "target_key": target.key,
        "draft_vocab_size": shape["vocab_size"],
        "num_parameters": own["num_parameters"],
        "trained": False,
    }
    sizes = {name: shape[name] for name in ("hidden_size", "vocab_size", "num_layers")}
    write_record(
        directory, {"format": FORMAT, "settings": own["settings"], "target": {"key": target.key, **sizes}, **facts}
    )
    return facts


def read_record(directory: Path) -> dict[str, Any]:
    """draft.json of a drafter, without reading any weight; raises UserError when it is not one."""

    def there(name: str) -> Path:
        if not (directory / name).is_file():
            raise UserError(f"{directory}: no {name}: not a drafter; make one with drafts.train_draft")
        return directory / name

    record = read_object(there("draft.json"))
    if record.get("format") != FORMAT:
        raise UserError(f"{directory}/draft.json: format {record.get('format')} where {FORMAT} is read; train it again")
    if record.get("trained", True):
        there("model.safetensors")
    _check_record(record, f"{directory}/draft.json")
    return record


def _check_record(record: Mapping[str, Any], where: str) -> None:
    """A UserError where a record does not say what every reader of it relies on."""
    for name, kind, what in (("method", str, "a name"), ("settings", dict, "a table")):
        if not isinstance(record.get(name), kind):
            raise UserError(f"{where}: {name} is {str(record.get(name))[:40]!r}, not {what}; train the drafter again")
    method = record["method"]
    if method not in SETTINGS:
        raise UserError(f"{where}: drafting method {method[:40]!r} is unknown; known are {', '.join(sorted(SETTINGS))}")
    try:
        settings_class(method).model_validate(record["settings"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = f"{'.'.join(map(str, first['loc']))!r:.80}: {first['msg']}"
        raise UserError(f"{where}: method {method} does not take its settings ({said}); train it again") from error
    try:
        Storage.of(record)
    except ValueError as error:
        raise UserError(f"{where}: {error}; quantise the drafter again") from error


def read_draft(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """draft.json and the weights of a drafter in float32, without a target; raises UserError when it is not one."""
    record, tensors = read_stored(directory)
    storage = Storage.of(record)
    if storage is not None:
        tensors = dequantised(tensors, storage, f"{directory}/model.safetensors")
    return record, tensors


def read_stored(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """draft.json and the tensors of a drafter as they are stored; raises UserError when it is not one."""
    record, file = read_record(directory), directory / "model.safetensors"
    if not record.get("trained", True):
        return record, {}
    read_header(file, str(file))  # before any byte of a tensor is looked at
    tensors = load_file(file)
    require_finite(tensors, str(file), "such a drafter guesses nothing: train it again")
    return record, tensors


def open_draft(
    draft: Draft, target: AbstractTarget, *, dtype: torch.dtype = torch.float32, kernel: str = "auto"
) -> Drafter:
    """The drafter of a Draft artifact, ready to decode in `dtype` on the target's device.

    kernel: of its linear layers; "auto" times them here, what an opened drafter says in its own `kernel` lays another
    out alike.

    Raises UserError when it was trained for a target of another shape, or when a tensor is missing, unexpected or of
    the wrong shape.
    """
    record, tensors = read_draft(draft.path)
    check_target(draft.path, record, target)
    if not record.get("trained", True):
        every_token = torch.arange(target.shape.vocab_size)
        untrained: Drafter = method_class(record["method"]).build(target, record["settings"], every_token)
        if isinstance(untrained, AbstractDraft):
            untrained.prepare_decoding(dtype, kernel)
        return untrained
    draft_ids = take_vocabulary(draft.path, tensors, target.shape.vocab_size)
    try:
        network: AbstractDraft = method_class(record["method"]).build(target, record["settings"], draft_ids)
    except (RuntimeError, MemoryError) as error:  # sizes that no memory holds
        said = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(f"{draft.path}/draft.json: its settings cannot be built ({said}); train it again") from error
    check_tensors(draft.path, tensors, network.state_dict())
    network.load_state_dict(tensors)
    network.eval().requires_grad_(False)
    network.prepare_decoding(dtype, kernel)
    return network


def check_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Same names, same shapes, or a UserError that lists the difference."""
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    wrong = [
        f"{name} is {_kind(found[name])}, not {_kind(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if _kind(found[name]) != _kind(expected[name])
    ]
    if missing or unexpected or wrong:
        said = [f"missing: {_first(missing)}"] if missing else []
        said += [f"unexpected: {_first(unexpected)}"] if unexpected else []
        said += [_first(wrong)] if wrong else []
        raise UserError(f"{path}/model.safetensors does not fit its draft.json: {'; '.join(said)}")


def _kind(tensor: Tensor) -> str:
    """Shape, and what it holds where that is no floating-point number."""
    of = "" if tensor.is_floating_point() else f" of {str(tensor.dtype).removeprefix('torch.')}"
    return f"{list(tensor.shape)}{of}"


def _first(names: list[str]) -> str:
    """The first few, each cut to a sane length."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(name[:120] for name in names[:4]) + more


def check_target(path: Path, record: Mapping[str, Any], target: AbstractTarget) -> None:
    """A UserError when a drafter's record names a target of another shape."""
    made_for = record.get("target")
    for name in ("hidden_size", "vocab_size", "num_layers"):
        if not isinstance(made_for, dict) or type(made_for.get(name)) is not int:
            raise UserError(f"{path}/draft.json: does not say the target's {name}; train the drafter again")
        trained, given = made_for[name], getattr(target.shape, name)
        if trained != given:
            raise UserError(f"{path}: trained for a target of {name} {trained}, but this target has {given}")


def take_vocabulary(path: Path, tensors: dict[str, Tensor], vocab_size: int) -> Tensor:
    """Take d2t and t2d out of a drafter's tensors: the target ids int64 [N] of its draft vocabulary.

    Raises UserError when one is not there or d2t does not give ascending ids below vocab_size.
    """
    for name in VOCABULARY_TENSORS:
        if name not in tensors:
            raise UserError(f"{path}/model.safetensors: no tensor '{name}'; train the drafter again")
    offsets, _ = (tensors.pop(name) for name in VOCABULARY_TENSORS)
    if offsets.dtype != torch.int64 or offsets.ndim != 1:
        raise UserError(f"{path}/model.safetensors: d2t is {_kind(offsets)}, not a row of int64; train it again")
    ids = ids_of(offsets)
    if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or bool((ids.diff() <= 0).any()):
        raise UserError(f"{path}/model.safetensors: d2t does not give ascending target ids below {vocab_size}")
    return ids
