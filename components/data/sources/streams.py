"""Decompressed byte streams of files, on this disk or at a URL that fsspec opens.

Nothing is downloaded or unpacked beyond what is read. Errors of a decompressor become a UserError of one line; errors
of the network stay a ConnectionError, which may be tried again. A file that expands to far more than any data set does
(a decompression bomb) ends with an error too.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final, cast

import fsspec
import pyarrow

from components.contract import UserError
from components.data.sources.addresses import Place, is_url
from components.outside_json import JsonObject
from components.text import message_of

COMPRESSIONS: Final = (".gz", ".bz2", ".xz", ".zst")
DAMAGE: Final = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors that decompressors raise for damaged bytes; BadGzipFile and Arrow's errors are OSErrors."""
_PIECE_BYTES: Final = 1 << 16
_MAX_OUTPUT_BYTES: Final = 16 << 20
_MAX_EXPANSION: Final = 500
"""A stream that exceeds both limits, in bytes and as a multiple of the file, is refused: texts reach 100 at most."""
_XZ_MEMORY: Final = 256 << 20
"""Memory limit of xz in bytes; its best preset needs 65 MiB, a damaged header asks for up to 4 GiB."""
_S3_OPTIONS: Final = {"config_kwargs": {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 4}}}
_OPTIONS: Final[dict[str, JsonObject]] = {"s3": _S3_OPTIONS, "s3a": _S3_OPTIONS}


def file_system(url: str) -> Any:
    """The fsspec file system behind a URL; credentials come from the environment, never from the URL."""
    protocol, rest = url.split("://", 1)
    if "@" in rest.split("/", 1)[0]:
        raise UserError(
            f"source: {protocol}://...: no credentials in the URL: it is shown in logs; use the environment"
        )
    try:
        return fsspec.filesystem(protocol.lower(), **_OPTIONS.get(protocol.lower(), {}))
    except (ImportError, ValueError) as error:
        remedy = "pip install 'draftsmith[s3]'" if protocol.lower().startswith("s3") else str(error).rstrip(".")
        raise UserError(f"source: {url}: nothing here opens {protocol}:// ({remedy})") from error


@contextmanager
def open_stream(place: Place) -> Iterator[IO[bytes]]:
    """A decompressed stream of a file; raises UserError, also while it is read, for a missing or damaged file."""
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(raw_stream(place))
            yield stack.enter_context(_decompressed(raw, str(place)))
        except ConnectionError:
            raise  # a fault of the network, not of the file: another attempt may succeed
        except DAMAGE as error:
            raise UserError(
                f"source: {place}: cannot be read to its end ({message_of(error, 200)}); fetch it again"
            ) from error


@contextmanager
def raw_stream(place: Place) -> Iterator[IO[bytes]]:
    """A stream of the stored bytes, with random access."""
    if isinstance(place, Path) or not is_url(place):
        with Path(place).open("rb") as stream:
            yield stream
        return
    system = file_system(place)
    try:
        with system.open(place, "rb") as stream:
            yield io.BufferedReader(stream, buffer_size=1 << 20)  # fsspec's own readline takes no limit
    except (UserError, OSError, GeneratorExit):
        raise
    except Exception as error:  # the libraries behind fsspec have error classes of their own
        if type(error).__module__.split(".")[0] in ("botocore", "aiobotocore", "gcsfs", "aiohttp", "azure"):
            raise ConnectionError(f"{place}: {message_of(error, 200)}") from error
        raise


def suffix_of(name: str) -> str:
    """The lower-case suffix of a file without that of its compression: ".jsonl" of "rows.jsonl.gz"."""
    bare = name
    for compression in COMPRESSIONS:
        bare = bare.removesuffix(compression)
    dot = bare.rfind(".")
    return bare[dot:].lower() if dot > 0 else ""


def bounded_stream(read_some: Callable[[int], bytes], num_stored: Callable[[], int]) -> IO[bytes]:
    """A buffered stream of decompressed bytes that loses nothing before damage; OSError where it expands too far.

    read_some: returns at most so many of the next bytes, none at the end. num_stored: bytes of the file read so far, or
        its size.
    """
    return cast(IO[bytes], _DamageTolerantReader(_Bounded(read_some, num_stored), buffer_size=1 << 20))


def _decompressed(stream: IO[bytes], name: str) -> IO[bytes]:
    read_some: Callable[[int], bytes]
    if name.endswith(".gz"):
        read_some = gzip.GzipFile(fileobj=stream).read1
    elif name.endswith(".bz2"):
        read_some = _Members(stream, bz2.BZ2Decompressor).read1
    elif name.endswith(".xz"):
        read_some = _Members(stream, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY)).read1
    elif name.endswith(".zst"):
        packed = pyarrow.CompressedInputStream(stream, "zstd")
        read_some = lambda size: bytes(packed.read(min(size, 4096)))  # noqa: E731 - a larger read returns all of it or raises
    else:
        return stream
    return bounded_stream(read_some, stream.tell)


class _Members:
    """The decompressed members of a bz2 or xz file, one after the other.

    Bytes behind the last member are damage, except for zeros that fill the file up; they may be the rest of a broken
    member. Python's classes for whole files ignore them silently.
    """

    def __init__(self, stream: IO[bytes], new: Callable[[], Any]) -> None:
        self._stream, self._new = stream, new
        self._member, self._input = new(), b""

    def read1(self, size: int) -> bytes:
        """Returns at most `size` of the next bytes, none at the end."""
        while True:
            if self._member.eof:
                rest: bytes = self._member.unused_data.lstrip(b"\0")
                while not rest:
                    if not (piece := self._stream.read(_PIECE_BYTES)):
                        return b""
                    rest = piece.lstrip(b"\0")
                self._member, self._input = self._new(), rest
            elif self._member.needs_input and not self._input:
                if not (piece := self._stream.read(_PIECE_BYTES)):
                    raise EOFError("the compressed data end before their end mark")
                self._input = piece
            data, self._input = self._input, b""
            output: bytes = self._member.decompress(data, size)
            if output:
                return output


class _Bounded(io.RawIOBase):
    """A decompressed stream that raises OSError where it has expanded too far."""

    def __init__(self, read_some: Callable[[int], bytes], num_stored: Callable[[], int]) -> None:
        self._read_some, self._num_stored, self._num_read = read_some, num_stored, 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        data = self._read_some(len(into))
        into[: len(data)] = data
        self._num_read += len(data)
        if self._num_read > _MAX_OUTPUT_BYTES and self._num_read > _MAX_EXPANSION * self._num_stored():
            raise OSError(f"it opens to more than {_MAX_EXPANSION} times its size: no data set does")
        return len(data)


class _DamageTolerantReader(io.BufferedReader):
    """A buffered stream whose `read` returns the bytes before damage, and raises on the next call."""

    _failed: Exception | None = None

    def read(self, size: int | None = -1, /) -> bytes:
        if self._failed is not None:
            raise self._failed
        most = size if size is not None and size >= 0 else sys.maxsize
        pieces, num_read = list[bytes](), 0
        try:
            while num_read < most and (piece := self.read1(min(most - num_read, 1 << 20))):
                pieces.append(piece)
                num_read += len(piece)
        except DAMAGE as error:
            if not pieces:
                raise
            self._failed = error
        return b"".join(pieces)
