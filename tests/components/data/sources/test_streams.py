"""Compressed files: what stands before damage is read, the damage is said, and nothing opens to far too much."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from components.contract import UserError
from components.data.sources.streams import open_stream

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda plain: bytes(pyarrow.compress(plain, codec="zstd", asbytes=True)),
}
LINES = [b"row %d\n" % n for n in range(5000)]


@pytest.mark.parametrize("compression", PACK)
def test_members_are_read_one_after_the_other(compression: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows{compression}"
    file.write_bytes(b"".join(PACK[compression](b"".join(LINES[at : at + 1000])) for at in range(0, 5000, 1000)))
    with open_stream(file) as stream:
        assert list(stream) == LINES
    with open_stream(file) as stream:
        assert stream.read() == b"".join(LINES)


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz"])
def test_zeros_that_fill_a_file_up_are_no_damage(compression: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows{compression}"
    file.write_bytes(PACK[compression](b"".join(LINES)) + bytes(512))
    with open_stream(file) as stream:
        assert list(stream) == LINES


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize("way", ["line by line", "at once"])
def test_what_stands_before_damage_is_read_and_the_damage_is_said(way: str, compression: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows{compression}"
    second = bytearray(PACK[compression](b"".join(LINES[2500:])))
    second[:4] = b"gone"
    file.write_bytes(PACK[compression](b"".join(LINES[:2500])) + second)
    read: list[bytes] = []
    with pytest.raises(UserError, match="cannot be read to its end"), open_stream(file) as stream:
        if way == "line by line":
            read.extend(stream)
        else:
            while piece := stream.read(1 << 20):
                read.append(piece)
    said, before = b"".join(read), b"".join(LINES[:2500])
    assert before.startswith(said) and len(before) - len(said) <= (4096 if compression == ".zst" else 0)


@pytest.mark.parametrize("compression", PACK)
def test_what_opens_to_far_more_than_any_data_is_not_read_on(compression: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows{compression}"
    file.write_bytes(PACK[compression](b" " * (16 << 20)) * 64)
    num_read = 0
    with pytest.raises(UserError, match="opens to more than 500 times its size"), open_stream(file) as stream:
        while piece := stream.read(1 << 20):
            num_read += len(piece)
    assert num_read < 64 << 20
