"""Safetensors files: those from anywhere are checked, and those larger than memory are written piece by piece.

The format (huggingface.co/docs/safetensors): eight bytes with the length of a JSON object, that object, which gives
each tensor its type, shape and bytes, and the bytes. Before any library opens a file, its header is checked: every byte
belongs to a tensor. Every number must be finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from components.contract import UserError

MAX_HEADER = 100_000_000  # bytes, safetensors' own limit
MAX_NAME = 500  # characters of a tensor's name
ITEM_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64} | {
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
DTYPE_NAMES = {torch.bool: "BOOL", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64"} | {
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""Of the types that we write piece by piece."""
ALIGNMENT = 8  # bytes at which the tensors begin


class TensorEntry(TypedDict):
    """What a header says of one tensor. data_offsets: its first byte after the header, and the byte after its last."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def read_header(file: Path, at: str) -> dict[str, TensorEntry]:
    """The tensor table of a safetensors file: name -> {dtype, shape, data_offsets}.

    at: the file's name in errors.

    Raises:
        UserError: it is no regular file, or its header does not account for every byte.
    """
    if not file.is_file():
        raise UserError(f"{at}: no regular file; a pipe or a device would never end")
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
            if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
                raise UserError(f"{at}: a pickle under a safetensors name, which runs code when opened; do not open it")
            raise UserError(f"{at}: no safetensors file, or cut short; copy or download it again")
        try:
            header = json.loads(stream.read(length), object_pairs_hook=unique_names)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{at}: its header is damaged ({str(error)[:100]}); copy or download it again") from error
    if not isinstance(header, dict):
        raise UserError(f"{at}: its header is no table of tensors; copy or download it again")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{at}: its header's __metadata__ is no table of texts; copy or download it again")
    spans = sorted(_byte_span(name, entry, at) for name, entry in header.items())
    end = 0
    for first, last, name in spans:
        if first != end:
            raise UserError(f"{at}: {name} begins at byte {first}, where {end} is next: the header lies")
        end = last
    if 8 + length + end != size:
        short = "cut short" if 8 + length + end > size else "followed by bytes that no tensor owns"
        raise UserError(f"{at}: {short} ({size} bytes, its header asks for {8 + length + end}); copy it again")
    return header


def headers_in(folder: Path, location: str) -> Iterator[tuple[Path, dict[str, TensorEntry]]]:
    """Each weight file of a model's folder (which may be a link: hub caches are made of them) and its tensor table.

    location: the folder's name in errors. Raises UserError as `read_header` does.
    """
    for file in sorted(folder.glob("*.safetensors")):
        yield file, read_header(file, f"{location}/{file.name}")


def _byte_span(name: str, entry: Any, at: str) -> tuple[int, int, str]:
    """(first byte, byte after the last, name) of one entry of a header."""
    if len(name) > MAX_NAME or not name.isprintable():
        raise UserError(f"{at}: no tensor is called {name[:40]!r}; copy or download it again")
    try:
        dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(extent) is int and extent >= 0 for extent in (*shape, first, last))
        bits = math.prod(shape) * ITEM_BITS[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{at}: the header's entry for {name} cannot be understood ({error!r:.80})") from error
    if not whole or (last - first) * 8 != bits:
        raise UserError(f"{at}: {name} is said to be {dtype} {shape} in {last - first} bytes: the header lies")
    return first, last, name


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for `json.loads` that makes an object of its pairs and raises ValueError where a name stands twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' stands twice")
    return fields


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


@contextmanager
def written_by_rows(
    file: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]
) -> Iterator[Callable[[str, int, Tensor], None]]:
    """Write a new safetensors file of which only the rows at hand are in memory.

    tensors: the type and the shape of each. Gives a function (name, first, rows) that writes rows of a tensor from row
    `first` on, in any order; rows that nobody writes are zeros.
    """
    header: dict[str, TensorEntry] = {}
    end = 0
    # The largest types first, as safetensors has them: so each tensor begins at a multiple of its type's bytes.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % ALIGNMENT)
    start = len(text).to_bytes(8, "little") + text
    with file.open("wb") as stream:
        stream.write(start)
        stream.truncate(len(start) + end)

        def write(name: str, first: int, rows: Tensor) -> None:
            dtype, shape = tensors[name]
            assert rows.dtype == dtype and list(rows.shape[1:]) == list(shape[1:]) and first + len(rows) <= shape[0], (
                name
            )
            content = rows.contiguous().flatten().view(torch.uint8).numpy()
            stream.seek(len(start) + header[name]["data_offsets"][0] + first * math.prod(shape[1:]) * dtype.itemsize)
            stream.write(content.data)

        yield write
