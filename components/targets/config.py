"""Step `targets.load_target`: checks a target's files and reads its facts without loading a weight.

The facts come from its configuration and the headers of its weight files. A target may have many gigabytes, so the step
copies nothing: it writes `target.json` with the folder and the size and sha256 of every file (source.py reads it).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from components.contract import Context, Target, UserError
from components.outside_json import JsonObject, read_object
from components.targets.quantised import check_dtype, check_loader, numbers_per_stored, own_dtype, quantisation_of
from components.targets.remembered import sha256_of
from components.targets.shape import TargetShape, as_ids, kv_bytes_per_token, layer_kinds, shape_of
from components.targets.source import BUILTIN, find_folder, list_files
from components.targets.spread import Spread
from components.tensor_files import headers_in
from components.text import message_of

MAX_CONFIG_BYTES = 16 << 20


def load_target(
    *,
    model: str,
    trust_remote_code: bool,
    dtype: Literal["auto", "float32", "bfloat16"],
    device_map: Literal["none", "auto"],
    tp_size: int,
    ctx: Context,
) -> Target:
    """The step `targets.load_target`; its settings are explained in components/targets/steps.py."""
    folder, spread = find_folder(model, trust_remote_code), Spread(device_map, tp_size)
    files = list_files(folder, model, trust_remote_code)
    ctx.note(f"{model}: {sum(file.stat().st_size for file in files) / 2**20:.1f} MiB in {len(files)} files")
    facts = facts_of(folder, location=model, trust_remote_code=trust_remote_code, dtype=dtype, device=ctx.device)
    config = read_config(folder, location=model, trust_remote_code=trust_remote_code)
    spread.check(config, shape_of(config, model), ctx.device, model)
    if facts["layers"] != ["full"]:
        ctx.note(f"{model}: its layers see: {', '.join(facts['layers'])}")
    if (dtype, facts["dtype"], facts["stored_dtype"]) == ("auto", "float32", "BF16"):
        ctx.note(
            f"{model}: stored in bfloat16, computed in float32 on this CPU, so that greedy text is the same token for "
            "token; `dtype: bfloat16` takes half the memory"
        )
    if facts["text_part"]:
        ctx.note(f"{model}: a model of images and text; its text part alone is the target")
    if remark := facts["generation_remark"]:
        ctx.note(f"{model}: {remark}")
    sums = {
        file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": sha256_of(file)} for file in files
    }
    record = {
        "model": model,
        "folder": BUILTIN if model == BUILTIN else str(folder),
        "trust_remote_code": trust_remote_code,
        "dtype": facts["dtype"],
        **spread._asdict(),
        "files": sums,
    }
    (ctx.out / "target.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    digest = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()  # tells models of one name apart
    return Target.of_step(ctx, {"model": model, "digest": digest, **facts})


def facts_of(folder: Path, *, location: str, trust_remote_code: bool, dtype: str, device: str) -> JsonObject:
    """What a model folder is: the facts that `load_target` puts into a Target's info, its `model` apart.

    Raises UserError, naming `location`, for a model that Draftsmith cannot work with.
    """
    config = read_config(folder, location=location, trust_remote_code=trust_remote_code)
    shape = shape_of(config, location)
    silent = suppressed_tokens(folder, shape, location)
    stored: dict[str, int] = {}
    num_params = 0
    check_loader(config, location)
    check_dtype(config, dtype, location)
    quantisation = quantisation_of(config)
    for _, header in headers_in(folder, location):
        for name, entry in header.items():
            size = math.prod(entry["shape"]) * numbers_per_stored(name, entry["dtype"], quantisation)
            num_params += size
            stored[entry["dtype"]] = stored.get(entry["dtype"], 0) + size
    if not num_params:
        raise UserError(f"{location}: its weight files hold no numbers; download it again")
    stored_dtype = max(stored, key=lambda name: stored[name])
    compute_dtype = own_dtype(config) or resolve_dtype(dtype, stored_dtype, device)
    return {
        "architecture": shape.architecture,
        "layers": layer_kinds(config),
        "text_part": has_text_part(config),
        "num_params": num_params,
        "dtype": compute_dtype,
        "stored_dtype": stored_dtype,
        "kv_bytes_per_token": kv_bytes_per_token(config, 4 if compute_dtype == "float32" else 2),
        "suppressed_tokens": list(silent),
        "generation_remark": generation_remark(folder, len(silent)),
        "shape": dataclasses.asdict(shape),
    }


def read_config(folder: Path, *, location: str, trust_remote_code: bool) -> Any:
    """The transformers configuration in `folder`; raises UserError in one line."""
    read_object(folder / "config.json", MAX_CONFIG_BYTES)  # checked before transformers reads it
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # foreign values break each configuration class in its own way
        raise UserError(f"{location}: config.json cannot be used ({message_of(error)})") from error
    remote = trust_remote_code and bool(getattr(config, "auto_map", None))
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not remote and not has_text_part(config):
        raise UserError(f"{location}: model type '{config.model_type}' is not a causal LM that transformers knows")
    _join_end_tokens(config, folder, location)
    return config


GENERATION_FILE = "generation_config.json"


def _join_end_tokens(config: Any, folder: Path, location: str) -> None:
    """Make the end tokens of the language model all that either file names: engines end at those as well.

    Chat models often name the end of a turn in generation_config.json alone.
    """
    text = config.get_text_config(decoder=True)
    ends: list[int] = []
    file, generation = _generation(folder)
    for source, value in (
        ("config.json", getattr(text, "eos_token_id", None)),
        ("config.json", getattr(config, "eos_token_id", None)),
        (file, generation.get("eos_token_id")),
    ):
        try:
            ids = as_ids(value)
            ends += [one for one in map(operator.index, ids) if one not in ends]
        except TypeError as error:
            raise UserError(f"{location}: {source} says eos_token_id {value!r:.60}, which is no token id") from error
        if wrong := [one for one in ids if not 0 <= one < text.vocab_size]:
            raise UserError(f"{location}: {source} says eos_token_id {wrong[0]}; the vocabulary has {text.vocab_size}")
    text.eos_token_id = ends or None


def _generation(folder: Path) -> tuple[str, JsonObject]:
    """The file that says how text is generated and what it says: config.json where there is no other, as engines do."""
    name = GENERATION_FILE if (folder / GENERATION_FILE).is_file() else "config.json"
    return name, read_object(folder / name, MAX_CONFIG_BYTES)


def suppressed_tokens(folder: Path, shape: TargetShape, location: str) -> tuple[int, ...]:
    """The tokens that the target never says, ascending: `suppress_tokens`, and bad words of one token.

    As in transformers, a bad word that is an end token does not count, nor does a token beyond the vocabulary.

    Raises:
        UserError: a value is no list of token ids, or no token is left to say.
    """
    file, generation = _generation(folder)
    try:
        silent = {operator.index(one) for one in generation.get("suppress_tokens") or ()}
        for word in generation.get("bad_words_ids") or ():
            ids = [operator.index(one) for one in word]
            silent |= set(ids) - set(shape.eos_token_ids) if len(ids) == 1 else set()
    except TypeError as error:
        raise UserError(f"{location}: {file}: suppress_tokens or bad_words_ids are no lists of token ids") from error
    silent &= set(range(shape.vocab_size))
    if len(silent) == shape.vocab_size:
        raise UserError(f"{location}: {file} suppresses every token; no answer can be written")
    return tuple(sorted(silent))


_UNHEEDED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams"), (None, 1)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "penalty_alpha"), (None, 0)),
    **dict.fromkeys(("min_length", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("begin_suppress_tokens", "sequence_bias", "stop_strings", "force_words_ids"), (None, [], {}, "")),
    **dict.fromkeys(("constraints", "dola_layers", "watermarking_config"), (None, [], {}, "")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), (None,)),
}
"""Settings of generation_config.json that change greedy text and are not heeded here -> their harmless values."""


def generation_remark(folder: Path, num_suppressed: int) -> str:
    """What generation_config.json asks beyond end tokens, and how far it is done here and in engines, or ""."""
    file, generation = _generation(folder)
    requested = {name: generation[name] for name, harmless in _UNHEEDED.items() if generation.get(name) not in harmless}
    if longer := [word for word in generation.get("bad_words_ids") or () if len(word) > 1]:
        requested["bad_words_ids"] = longer
    parts = []
    if num_suppressed:
        parts.append(
            f"{file} suppresses {num_suppressed} tokens, which are never said here; engines may say them unless their"
            " requests bias against them"
        )
    if requested:
        listed = ", ".join(f"{name} {value!r:.60}" for name, value in requested.items())
        parts.append(
            f"{file} asks for {listed}, which is not done here: an engine that does it says other text and accepts"
            " other drafts"
        )
    return "; ".join(parts)


def has_text_part(config: Any) -> bool:
    """Whether this is a model of images and text that transformers opens as a whole."""
    kind = config.model_type
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def resolve_dtype(dtype: str, stored_dtype: str, device: str) -> str:
    """Resolve "auto": float32 on a CPU (greedy output then is the same token for token), else as stored."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device.startswith("cuda") and stored_dtype != "F32" else "float32"
