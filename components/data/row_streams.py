"""The bytes of a file wherever it lies, on this disk or at a URL that fsspec opens, decompressed as they are read.

Nothing is downloaded or unpacked beyond what is read. What a damaged file makes a compressor raise becomes a UserError
in one line, where reading stopped; what the network does stays a ConnectionError, which may be tried again.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final, cast

from components.contract import UserError

COMPRESSIONS: Final = (".gz", ".bz2", ".xz", ".zst")
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
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
            yield cast(IO[bytes], stack.enter_context(_decompressed(raw, str(place))))
        except ConnectionError:
            raise  # the network's fault, not the file's: another attempt may succeed
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # BadGzipFile and Arrow's are OSErrors
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


def _decompressed(stream: IO[bytes], name: str) -> Any:
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=stream)
    if name.endswith(".bz2"):
        return bz2.BZ2File(stream)
    if name.endswith(".xz"):
        return lzma.LZMAFile(stream)
    if name.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(stream, "zstd"), buffer_size=1 << 20)
    return stream
