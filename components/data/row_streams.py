"""The bytes of a file wherever it lies, on this disk or at a URL that fsspec opens, decompressed as they are read.

Nothing is downloaded or unpacked beyond what is read. What a damaged file makes a compressor raise becomes a UserError
in one line, where reading stopped; what the network does stays a ConnectionError, which may be tried again. A file
that opens to far more than any data set does ends with an error too, before it has cost hours.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final, cast

from components.contract import UserError

COMPRESSIONS: Final = (".gz", ".bz2", ".xz", ".zst")
DAMAGE: Final = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What a decompressor raises for damaged bytes; BadGzipFile and Arrow's errors are OSErrors."""
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PIECE_BYTES: Final = 1 << 16
_OPENED_BYTES: Final = 16 << 20
_OPENED_TIMES: Final = 500
"""What opens to more bytes than this, and so many times what is stored, is no data set: texts reach 5, at most 100."""
_XZ_MEMORY: Final = 256 << 20
"""What xz may take to open a file; its best preset asks for 65 MiB, a damaged header for up to 4 GiB."""
_WAIT: Final = {"config_kwargs": {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 4}}}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {"s3": _WAIT, "s3a": _WAIT}

Place = Path | str
"""A file on this disk, or the URL of one elsewhere."""


def is_url(place: Place) -> bool:
    """Whether it names an object elsewhere: s3://bucket/name, gs://..., memory://..."""
    return isinstance(place, str) and _URL.match(place) is not None


def file_system(url: str) -> Any:
    """The fsspec file system behind a URL; credentials come from the environment, never from the URL."""
    import fsspec

    protocol, rest = url.split("://", 1)
    if "@" in rest.split("/", 1)[0]:
        raise UserError(
            f"source: {protocol}://...: no credentials in the URL: it is shown in logs; use the environment"
        )
    try:
        return fsspec.filesystem(protocol.lower(), **_OPTIONS.get(protocol.lower(), {}))
    except (ImportError, ValueError) as error:
        how = "pip install 'draftsmith[s3]'" if protocol.lower().startswith("s3") else str(error).rstrip(".")
        raise UserError(f"source: {url}: nothing here opens {protocol}:// ({how})") from error


@contextmanager
def opened(place: Place) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file; raises UserError, also while they are read, where they cannot be had."""
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(raw_stream(place))
            yield stack.enter_context(_decompressed(raw, str(place)))
        except ConnectionError:
            raise  # the network's fault, not the file's: another attempt may succeed
        except DAMAGE as error:
            raise UserError(
                f"source: {place}: cannot be read to its end ({one_line(error)}); fetch it again"
            ) from error


@contextmanager
def raw_stream(place: Place) -> Iterator[IO[bytes]]:
    """The bytes as they are stored, with random access."""
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
            raise ConnectionError(f"{place}: {one_line(error)}") from error
        raise


def suffix_of(name: str) -> str:
    """The kind of a file by its name, without what it is compressed with: ".jsonl" of "rows.jsonl.gz"."""
    bare = name
    for compression in COMPRESSIONS:
        bare = bare.removesuffix(compression)
    dot = bare.rfind(".")
    return bare[dot:].lower() if dot > 0 else ""


def one_line(error: BaseException) -> str:
    """What an error says, on one line, at most 200 characters."""
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__


def opened_within_reason(take: Callable[[int], bytes], stored: Callable[[], int]) -> IO[bytes]:
    """A stream of what is decompressed: OSError where it opens to far too much, and nothing before damage is lost.

    take: gives so many of the next bytes at most, none at the end. stored: how many bytes of the file that was, or all.
    """
    return cast(IO[bytes], _Opened(_Bounded(take, stored), buffer_size=1 << 20))


def _decompressed(stream: IO[bytes], name: str) -> IO[bytes]:
    take: Callable[[int], bytes]
    if name.endswith(".gz"):
        take = gzip.GzipFile(fileobj=stream).read1
    elif name.endswith(".bz2"):
        take = _Members(stream, bz2.BZ2Decompressor).read1
    elif name.endswith(".xz"):
        take = _Members(stream, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY)).read1
    elif name.endswith(".zst"):
        import pyarrow

        packed = pyarrow.CompressedInputStream(stream, "zstd")
        take = lambda size: bytes(packed.read(min(size, 4096)))  # noqa: E731 - which gives all of it or an error
    else:
        return stream
    return opened_within_reason(take, stream.tell)


class _Members:
    """What the members of a bz2 or xz file open to, one after the other.

    What stands behind the last of them, but for zeros that fill a file up, is damage, and may be all that is left of
    the next; the classes of Python for whole files pass over it without a word.
    """

    def __init__(self, stream: IO[bytes], new: Callable[[], Any]) -> None:
        self._stream, self._new = stream, new
        self._member, self._given = new(), b""

    def read1(self, size: int) -> bytes:
        """At most so many of the next bytes; none at the end."""
        while True:
            if self._member.eof:
                rest: bytes = self._member.unused_data.lstrip(b"\0")
                while not rest:
                    if not (piece := self._stream.read(_PIECE_BYTES)):
                        return b""
                    rest = piece.lstrip(b"\0")
                self._member, self._given = self._new(), rest
            elif self._member.needs_input and not self._given:
                if not (piece := self._stream.read(_PIECE_BYTES)):
                    raise EOFError("the compressed data end before their end mark")
                self._given = piece
            given, self._given = self._given, b""
            opened: bytes = self._member.decompress(given, size)
            if opened:
                return opened


class _Bounded(io.RawIOBase):
    """A decompressed stream that ends with OSError where it has become far more than what is stored."""

    def __init__(self, take: Callable[[int], bytes], stored: Callable[[], int]) -> None:
        self._take, self._stored, self._num_opened = take, stored, 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        opened = self._take(len(into))
        into[: len(opened)] = opened
        self._num_opened += len(opened)
        if self._num_opened > _OPENED_BYTES and self._num_opened > _OPENED_TIMES * self._stored():
            raise OSError(f"it opens to more than {_OPENED_TIMES} times its size: no data set does")
        return len(opened)


class _Opened(io.BufferedReader):
    """A buffered stream whose `read` gives what stands before damage first, and raises on the next call."""

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
