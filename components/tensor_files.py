"""Reads a safetensors file that may have been damaged, and checks that it is whole and every number in it is finite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from components.contract import UserError
from components.tensor_headers import read_header


def read_tensors(file: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file of ours.

    remedy: what to do when the file cannot be got again, for the error.

    Raises:
        UserError: the file is not whole, or a tensor in it holds NaN or infinity.
    """
    try:
        read_header(file, str(file))
    except UserError as error:
        raise UserError(f"{error}; where that cannot be, {remedy}") from error
    try:
        with safe_open(file, framework="pt") as stream:
            metadata: dict[str, str] = stream.metadata() or {}
        tensors = load_file(file)
    except SafetensorError as error:
        raise UserError(f"{file}: cannot be read ({str(error)[:120]}); {remedy}") from error
    require_finite(tensors, str(file), remedy)
    return tensors, metadata


def require_finite(tensors: Mapping[str, Tensor], location: str, remedy: str) -> None:
    """Raises UserError, with the first tensor's name, where one holds NaN or infinity."""
    for name, tensor in tensors.items():
        # 8-bit floating point has no test of its own in torch
        numbers = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        if numbers.is_floating_point() and not bool(torch.isfinite(numbers).all()):
            raise UserError(f"{location}: {name} holds NaN or infinity; {remedy}")
