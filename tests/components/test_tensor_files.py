"""A weight file is read when every byte belongs to a tensor and every number is finite; else it costs one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.contract import UserError
from components.tensor_files import (
    headers_in,
    read_header,
    read_tensors,
    require_finite,
    unique_names,
    written_by_rows,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.int64)}, tmp_path / "m.safetensors", {"k": "v"})
    return tmp_path / "m.safetensors"


def test_a_whole_file_is_read_with_its_metadata(file: Path) -> None:
    tensors, metadata = read_tensors(file, "make it again")
    assert metadata == {"k": "v"} and tensors["a"].sum() == 6
    assert read_header(file, "m")["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [32, 56]}
    assert [path for path, _ in headers_in(file.parent, "m")] == [file]


def test_a_file_that_was_cut_or_continued_or_is_a_pickle_is_one_line(file: Path) -> None:
    whole = file.read_bytes()
    for content, message in (
        (whole[:-1], "cut short"),
        (whole + b"x", "followed by bytes"),
        (whole[:4], "no safetensors file"),
        (b"PK\x03\x04" + whole, "a pickle"),
        (whole.replace(b'"F32"', b'"F99"'), "cannot be understood"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=message) as error:
            read_header(file, "m")
        assert "\n" not in str(error.value)


def test_numbers_are_finite_also_in_eight_bits() -> None:
    require_finite({"a": torch.ones(2).to(torch.float8_e5m2)}, "m", "make it again")
    for tensor in (torch.tensor([1.0, float("nan")]), torch.tensor([float("inf")]).to(torch.float8_e5m2)):
        with pytest.raises(UserError, match="m: a holds NaN or infinity; make it again"):
            require_finite({"a": tensor}, "m", "make it again")


def test_a_name_stands_once() -> None:
    assert unique_names([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="'a' stands twice"):
        unique_names([("a", 1), ("a", 2)])


def test_a_file_written_by_rows_in_any_order_reads_as_what_was_written(tmp_path: Path) -> None:
    """Every type that we write, an odd number of rows among them."""
    whole = {
        "states": torch.randn(5, 3).to(torch.bfloat16),
        "small": torch.randn(5, 3).to(torch.float8_e4m3fn),
        "exponents": torch.arange(5, dtype=torch.int8),
        "mask": torch.tensor([True, False, True, True, False]),
        "ids": torch.arange(5, dtype=torch.int32),
        "offsets": torch.tensor([0, 2, 5]),
        "none": torch.empty(0, 3, dtype=torch.int64),
    }
    layout = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in whole.items()}
    with written_by_rows(tmp_path / "rows.safetensors", layout) as write:
        for first, last in ((2, 5), (0, 2)):
            for name, tensor in whole.items():
                write(name, min(first, len(tensor)), tensor[first:last])
    assert read_header(tmp_path / "rows.safetensors", "rows").keys() == whole.keys()
    read = load_file(tmp_path / "rows.safetensors")
    assert all(read[name].view(torch.uint8).equal(tensor.view(torch.uint8)) for name, tensor in whole.items())
