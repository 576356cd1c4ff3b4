"""Facts of a target, read from its configuration and the headers of its weight files without loading a weight."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from components.contract import UserError
from components.outside_json import read_object
from components.targets.interface import kv_bytes_per_token, shape_of
from components.tensor_headers import headers_in

MAX_CONFIG_BYTES = 16 << 20


def facts_of(folder: Path, *, location: str, trust_remote_code: bool, dtype: str, device: str) -> dict[str, Any]:
    """architecture, num_params, dtype, stored_dtype, kv_bytes_per_token and shape of a model folder.

    Raises UserError, naming `location`, for a model that Draftsmith cannot work with.
    """
    config = read_config(folder, location=location, trust_remote_code=trust_remote_code)
    shape = shape_of(config, location)
    stored: dict[str, int] = {}
    num_params = 0
    for _, header in headers_in(folder, location):
        for entry in header.values():
            size = 1
            for extent in entry["shape"]:
                size *= extent
            num_params += size
            stored[entry["dtype"]] = stored.get(entry["dtype"], 0) + size
    if not num_params:
        raise UserError(f"{location}: its weight files hold no numbers; download it again")
    stored_dtype = max(stored, key=lambda name: stored[name])
    compute_dtype = resolve_dtype(dtype, stored_dtype, device)
    return {
        "architecture": shape.architecture,
        "num_params": num_params,
        "dtype": compute_dtype,
        "stored_dtype": stored_dtype,
        "kv_bytes_per_token": kv_bytes_per_token(config, 4 if compute_dtype == "float32" else 2),
        "shape": dataclasses.asdict(shape),
    }


def read_config(folder: Path, *, location: str, trust_remote_code: bool) -> Any:
    """The transformers configuration in `folder`; raises UserError in one line."""

    read_object(folder / "config.json", MAX_CONFIG_BYTES)  # checked before transformers reads it
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # foreign values break each configuration class in its own way
        raise UserError(f"{location}: config.json cannot be used ({one_line(error)})") from error
    remote = trust_remote_code and bool(getattr(config, "auto_map", None))
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not remote:
        raise UserError(f"{location}: model type '{config.model_type}' is not a causal LM that transformers knows")
    return config


def one_line(error: BaseException) -> str:
    """The message of a library's exception without line breaks, at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def resolve_dtype(dtype: str, stored_dtype: str, device: str) -> str:
    """Resolve "auto": float32 on a CPU (greedy output then is the same token for token), else as stored."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device.startswith("cuda") and stored_dtype in ("BF16", "F16") else "float32"
