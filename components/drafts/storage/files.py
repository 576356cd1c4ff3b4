"""Drafters on disk: writing, reading and opening them.

`draft.json`: {"format", "method", "settings" (what `build` takes), "num_steps" (trained depth), "max_depth",
"draft_vocab_size", "num_parameters", "target": {"key", "hidden_size", "vocab_size", "num_layers"}, "held_out_al", ...};
"tap_layers" (Hugging Face hidden_states indices) where a drafter reads other layers of its target than the usual ones.
`model.safetensors`: the drafter's own tensors, float32, under the names that engines know (see each method), and
  d2t int64 [N] (target id = i + d2t[i]) and t2d bool [V].
A method without training has the first file alone, with "trained": false; with "cached_answers" also
`answers.safetensors`: ids int32 [N] of earlier answers, one after the other, and lengths int64 of each. A drafter whose
weights were rounded (drafts.quantise_draft) has "storage" and "quantised_from", and its tensors are those of
quantisation.py; the readers here dequantise them. One that has suffix decoding beside it (drafts.add_suffix) has
"with_suffix", and earlier answers as above.
Opening checks names and shapes exactly: an engine that loads what fits and leaves the rest random is the usual way to
lose acceptance silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.contract import Draft, Target, UserError
from components.drafts.interface import AbstractDraft, CopiesAnswers, Drafter, UntrainedRecord
from components.drafts.methods.suffix import Suffix
from components.drafts.methods.with_suffix import WithSuffix
from components.drafts.network.vocabulary import ids_of, membership_of, offsets_of
from components.drafts.settings import Settings, SuffixBeside, require_method, settings_class
from components.drafts.storage.quantisation import dequantise_tensors
from components.methods import METHODS, load_object
from components.outside_json import JsonObject, read_object
from components.targets.interface import AbstractTarget, tapping
from components.targets.load import target_facts
from components.targets.shape import TapLayers, check_tap_layers, tap_layers_fault
from components.tensor_files import read_header, require_finite
from components.text import message_of
from components.weight_format import Storage

FORMAT = 1
VOCABULARY_TENSORS = ("d2t", "t2d")
ANSWERS_FILE = "answers.safetensors"


class TargetSizes(TypedDict):
    """The target of a drafter in draft.json."""

    key: str
    hidden_size: int
    vocab_size: int
    num_layers: int


class DraftRecord(TypedDict):
    """draft.json.

    settings: what `build` takes. num_steps: trained depth. tap_layers: see `taps_of_draft`. trained: absent where it
    is. cached_answers: earlier answers that it copies from. storage, quantised_from: of a drafter whose weights were
    rounded. with_suffix: where suffix decoding drafts beside it.
    """

    format: int
    method: str
    settings: JsonObject
    target: TargetSizes
    num_steps: int
    max_depth: int
    draft_vocab_size: int
    num_parameters: int
    target_key: NotRequired[str]
    tap_layers: NotRequired[list[int]]
    trained: NotRequired[bool]
    cached_answers: NotRequired[int]
    storage: NotRequired[JsonObject]
    quantised_from: NotRequired[str]
    held_out_al: NotRequired[float | None]
    with_suffix: NotRequired[JsonObject]


def method_class(method: str) -> Any:
    """The class of a method in METHODS; raises UserError for an unknown name."""

    require_method(method)
    return load_object(METHODS[method].draft_class)


def build_draft(method: str, target: AbstractTarget, settings: Mapping[str, Any], draft_ids: Tensor) -> Any:
    """An untrained drafter of a method; settings: as draft.json has them, those left out by default."""
    return method_class(method).build(target, settings_class(method).model_validate(dict(settings)), draft_ids)


def save_draft(
    directory: Path,
    method: str,
    settings: Mapping[str, Any],
    target: AbstractTarget,
    draft_ids: Tensor,
    weights: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Write draft.json and model.safetensors; `facts` are added to draft.json (target_key, ...).

    target: with the taps that the drafter reads.
    """
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
        **own_taps(method, target),
        **facts,
    }
    write_record(directory, record)


def own_taps(method: str, target: AbstractTarget) -> dict[str, list[int]]:
    """The entry `tap_layers` of draft.json; {} where the method reads no taps, or the target's usual ones."""
    usual = not METHODS[method].reads_taps or target.tap_layers == target.shape.tap_layers
    return {} if usual else {"tap_layers": list(target.tap_layers)}


def write_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Write draft.json."""
    (directory / "draft.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def save_untrained(
    directory: Path, method: str, settings: Settings, target: Target, answers: Sequence[Tensor] = ()
) -> dict[str, Any]:
    """Write the files of a method without training and return its facts. Reads no weight.

    answers: token ids of earlier answers, for a method that copies from them.
    """

    shape = target_facts(target)["shape"]
    record: UntrainedRecord = method_class(method).untrained_record(target, settings)
    facts = {
        "method": method,
        "num_steps": record.num_steps,
        "max_depth": record.max_depth,
        "target_key": target.key,
        "draft_vocab_size": shape["vocab_size"],
        "num_parameters": record.num_parameters,
        "trained": False,
        **({"cached_answers": len(answers)} if answers else {}),
    }
    save_answers(directory, answers)
    sizes = {name: shape[name] for name in ("hidden_size", "vocab_size", "num_layers")}
    settings_record = record.settings.model_dump(mode="json")
    write_record(
        directory, {"format": FORMAT, "settings": settings_record, "target": {"key": target.key, **sizes}, **facts}
    )
    return facts


def save_answers(directory: Path, answers: Sequence[Tensor]) -> None:
    """Write earlier answers to copy from, token ids; nothing where there are none."""
    if answers:
        lengths = torch.tensor([len(ids) for ids in answers])
        save_file({"ids": torch.cat(list(answers)).int(), "lengths": lengths}, directory / ANSWERS_FILE)


def read_record(directory: Path) -> DraftRecord:
    """Read draft.json of a drafter, and no weights; raises UserError where the folder holds no drafter."""

    def require_file(name: str) -> Path:
        if not (directory / name).is_file():
            raise UserError(f"{directory}: no {name}: not a drafter; make one with drafts.train_draft")
        return directory / name

    record = read_object(require_file("draft.json"))
    if record.get("format") != FORMAT:
        raise UserError(f"{directory}/draft.json: format {record.get('format')} where {FORMAT} is read; train it again")
    if record.get("trained", True):
        require_file("model.safetensors")
    _check_record(record, f"{directory}/draft.json")
    checked: DraftRecord = record  # type: ignore[assignment]  # checked just now
    return checked


def _check_record(record: Mapping[str, Any], location: str) -> None:
    """Raise UserError where a record lacks what every reader relies on."""
    for name, kind, expected in (("method", str, "a name"), ("settings", dict, "a table")):
        if not isinstance(record.get(name), kind):
            raise UserError(
                f"{location}: {name} is {str(record.get(name))[:40]!r}, not {expected}; train the drafter again"
            )
    method = record["method"]
    if method not in METHODS:
        raise UserError(
            f"{location}: drafting method {method[:40]!r} is unknown; known are {', '.join(sorted(METHODS))}"
        )
    try:
        settings_class(method).model_validate(record["settings"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        fault = f"{'.'.join(map(str, first['loc']))!r:.80}: {first['msg']}"
        raise UserError(f"{location}: method {method} does not take its settings ({fault}); train it again") from error
    if (taps := record.get("tap_layers")) is not None:
        numbers = isinstance(taps, list) and all(type(layer) is int for layer in taps)
        if fault := tap_layers_fault(taps) if numbers else f"{taps!r:.40} is no list of layers":
            raise UserError(f"{location}: tap_layers {fault}; train the drafter again")
    if (beside := record.get("with_suffix")) is not None:
        try:
            SuffixBeside.model_validate(beside)
        except ValidationError as error:
            raise UserError(
                f"{location}: with_suffix cannot be read ({error.errors()[0]['msg']}); add it again"
            ) from error
    try:
        Storage.from_record(record)
    except ValueError as error:
        raise UserError(f"{location}: {error}; quantise the drafter again") from error


def read_draft(directory: Path) -> tuple[DraftRecord, dict[str, Tensor]]:
    """Read draft.json and the weights in float32; raises UserError where the folder holds no drafter."""
    record, tensors = read_stored(directory)
    storage = Storage.from_record(record)
    if storage is not None:
        tensors = dequantise_tensors(tensors, storage, f"{directory}/model.safetensors")
    return record, tensors


def read_stored(directory: Path) -> tuple[DraftRecord, dict[str, Tensor]]:
    """Read draft.json and the tensors as they are stored; raises UserError where the folder holds no drafter."""
    record, file = read_record(directory), directory / "model.safetensors"
    if not record.get("trained", True):
        return record, {}
    read_header(file, str(file))  # validates the header before any tensor is read
    tensors = load_file(file)
    require_finite(tensors, str(file), "such a drafter guesses nothing: train it again")
    return record, tensors


def open_draft(
    draft: Draft, target: AbstractTarget, *, dtype: torch.dtype = torch.float32, kernel: str = "auto"
) -> Drafter:
    """The drafter of a Draft artifact, ready to decode in `dtype` on the target's device.

    kernel: of its linear layers; "auto" times them here, the `kernel` of an opened drafter reproduces its choice.

    Raises UserError when it was trained for a target of another shape, or when a tensor is missing, unexpected or of
    the wrong shape.
    """
    record, tensors = read_draft(draft.path)
    check_target(draft.path, record, target)
    target = tapping(target, check_tap_layers(taps_of_draft(record, target), target.shape.num_layers, str(draft.path)))
    if not record.get("trained", True):
        every_token = torch.arange(target.shape.vocab_size)
        untrained: Drafter = build_draft(record["method"], target, record["settings"], every_token)
        if isinstance(untrained, AbstractDraft):
            untrained.prepare_decoding(dtype, kernel)
        return _with_answers(untrained, draft.path, record, target.shape.vocab_size)
    draft_ids = pop_vocabulary(draft.path, tensors, target.shape.vocab_size)
    try:
        network: AbstractDraft = build_draft(record["method"], target, record["settings"], draft_ids)
    except (RuntimeError, MemoryError) as error:  # sizes that no memory holds
        reason = message_of(error, 160)
        raise UserError(f"{draft.path}/draft.json: its settings cannot be built ({reason}); train it again") from error
    check_tensors(draft.path, tensors, network.state_dict())
    network.load_state_dict(tensors)
    tensors.clear()  # they would be in memory once more while kernels are timed
    network.eval().requires_grad_(False)
    network.prepare_decoding(dtype, kernel)
    if (beside := record.get("with_suffix")) is None:
        return network
    told = SuffixBeside.model_validate(beside)
    both: Drafter = WithSuffix(network, Suffix(told.settings), told.depth)  # type: ignore[assignment]  # same interface
    return _with_answers(both, draft.path, record, target.shape.vocab_size)


def _with_answers(drafter: Drafter, directory: Path, record: DraftRecord, vocab_size: int) -> Drafter:
    """The drafter, given the earlier answers that are stored with it."""
    if record.get("cached_answers"):
        assert isinstance(drafter, CopiesAnswers)
        drafter.remember(_read_answers(directory, vocab_size))
    return drafter


def taps_of_draft(record: DraftRecord, target: AbstractTarget) -> TapLayers:
    """The layers that a drafter reads: its own, or the target's usual ones."""
    return tuple(record.get("tap_layers", target.shape.tap_layers))


def _read_answers(directory: Path, vocab_size: int) -> list[list[int]]:
    """The earlier answers of a method without training; raises UserError where they are not tokens of the target."""
    file = directory / ANSWERS_FILE
    read_header(file, str(file))
    tensors = load_file(file)
    if not {"ids", "lengths"} <= tensors.keys():
        raise UserError(f"{file}: no tensors 'ids' and 'lengths'; make the drafter again")
    ids, lengths = tensors["ids"].long(), tensors["lengths"].long()
    whole = ids.ndim == lengths.ndim == 1 and bool((lengths > 0).all()) and int(lengths.sum()) == ids.numel()
    if not whole or not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise UserError(f"{file}: not answers in the target's {vocab_size} tokens; make the drafter again")
    return [answer.tolist() for answer in ids.split(lengths.tolist())]


def check_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise a UserError that lists the differences unless names and shapes are those expected."""
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    mismatched = [
        f"{name} is {_describe(tensors[name])}, not {_describe(expected[name])}"
        for name in sorted(expected.keys() & tensors.keys())
        if _describe(tensors[name]) != _describe(expected[name])
    ]
    if missing or unexpected or mismatched:
        faults = [f"missing: {_first_names(missing)}"] if missing else []
        faults += [f"unexpected: {_first_names(unexpected)}"] if unexpected else []
        faults += [_first_names(mismatched)] if mismatched else []
        raise UserError(f"{path}/model.safetensors does not fit its draft.json: {'; '.join(faults)}")


def _describe(tensor: Tensor) -> str:
    """The shape, and the dtype where that is not floating-point."""
    dtype = "" if tensor.is_floating_point() else f" of {str(tensor.dtype).removeprefix('torch.')}"
    return f"{list(tensor.shape)}{dtype}"


def _first_names(names: list[str]) -> str:
    """At most four names, each cut to 120 characters."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(name[:120] for name in names[:4]) + more


def check_target(path: Path, record: Mapping[str, Any], target: AbstractTarget) -> None:
    """Raise UserError when a drafter was trained for a target of another shape."""
    target_record = record.get("target")
    for name in ("hidden_size", "vocab_size", "num_layers"):
        if not isinstance(target_record, dict) or type(target_record.get(name)) is not int:
            raise UserError(f"{path}/draft.json: does not say the target's {name}; train the drafter again")
        trained, actual = target_record[name], getattr(target.shape, name)
        if trained != actual:
            raise UserError(f"{path}: trained for a target of {name} {trained}, but this target has {actual}")


def pop_vocabulary(path: Path, tensors: dict[str, Tensor], vocab_size: int) -> Tensor:
    """Remove d2t and t2d from a drafter's tensors; returns the target ids int64 [N] of its draft vocabulary.

    Raises UserError when one is missing or d2t does not give ascending ids below vocab_size.
    """
    for name in VOCABULARY_TENSORS:
        if name not in tensors:
            raise UserError(f"{path}/model.safetensors: no tensor '{name}'; train the drafter again")
    offsets, _ = (tensors.pop(name) for name in VOCABULARY_TENSORS)
    if offsets.dtype != torch.int64 or offsets.ndim != 1:
        raise UserError(f"{path}/model.safetensors: d2t is {_describe(offsets)}, not a row of int64; train it again")
    ids = ids_of(offsets)
    if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or bool((ids.diff() <= 0).any()):
        raise UserError(f"{path}/model.safetensors: d2t does not give ascending target ids below {vocab_size}")
    return ids
