"""A checkpoint's files are read without trust, and a pickle under another name is found."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from components.contract import UserError
from components.publish.formats.checkpoint_files import checked_header


@pytest.mark.parametrize("length", [0x80, 0x0480, 0x4B50])
def test_a_header_as_long_as_a_pickles_first_bytes_is_no_pickle(length: int, tmp_path: Path) -> None:
    """Its length stands first: 128, 1152, 19280 bytes look like the beginning of a pickle or of a zip."""
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    header = data[8 : 8 + int.from_bytes(data[:8], "little")].ljust(length)
    (tmp_path / "a.safetensors").write_bytes(length.to_bytes(8, "little") + header + data[-4:])
    assert set(checked_header(tmp_path / "a.safetensors", "here")) == {"a"}
    (tmp_path / "b.safetensors").write_bytes(pickle.dumps({"a": [0.0] * 40}, protocol=4))
    with pytest.raises(UserError, match="here: a pickle under a safetensors name"):
        checked_header(tmp_path / "b.safetensors", "here")
