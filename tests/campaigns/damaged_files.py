"""Data files of every format with known rows in them, and the damage that was done to them; a number makes one again.

Every row asks and answers with its own mark, so that what a step keeps can be told apart, row by row.
"""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

TEXTS: Final = ("jsonl", "ndjson", "list", "pretty", "minified", "wrapped", "csv", "tsv", "lines", "paragraphs")
TABLES: Final = ("parquet", "parquet-groups", "parquet-plain", "arrow", "arrow-plain", "feather", "stream")
LISTS: Final = ("list", "pretty", "minified", "wrapped")
LINES: Final = ("jsonl", "ndjson", "lines")
COMPRESSIONS: Final = ("", ".gz", ".bz2", ".xz", ".zst")
SUFFIX: Final = {
    "jsonl": ".jsonl", "ndjson": ".ndjson", "list": ".json", "pretty": ".json", "minified": ".json",
    "wrapped": ".json", "csv": ".csv", "tsv": ".tsv", "lines": ".txt", "paragraphs": ".md", "parquet": ".parquet",
    "parquet-groups": ".parquet", "parquet-plain": ".parquet", "arrow": ".arrow", "arrow-plain": ".arrow",
    "feather": ".feather", "stream": ".arrow", "zip": ".zip",
}  # fmt: skip
PLAIN_TABLES: Final = ("parquet-plain", "arrow-plain", "stream")
"""Tables whose texts stand in the file as they are."""
KINDS: Final = {
    "whole": (*TEXTS, *TABLES, "zip"),
    "wrong rows": (*TEXTS, *TABLES),
    "garbage lines": (*LINES, "list", "pretty", "csv", "tsv", "paragraphs"),
    "stray quotes": ("jsonl", "list", "csv", "tsv", "csv"),
    "missing commas": ("list", "pretty"),
    "latin-1": ("jsonl", "list", "csv", "lines"),
    "utf-16": ("jsonl", "list", "csv", "lines", "wrapped"),
    "bit flips": TEXTS,
    "cut": TEXTS,
    "doubled slice": TEXTS,
    "zeroed block": TEXTS,
    "NULs": TEXTS,
    "flips in texts": PLAIN_TABLES,
    "table flips": TABLES,
    "table cut": TABLES,
    "table zeroed": TABLES,
    "table doubled": TABLES,
    "torn compression": TEXTS,
    "flipped compression": TEXTS,
    "garbage after compression": TEXTS,
    "damaged zip": ("zip",),
}
"""Kind of damage -> the formats that it is done to."""
BYTE_DAMAGE: Final = ("bit flips", "cut", "doubled slice", "zeroed block", "NULs")
STREAM_DAMAGE: Final = ("torn compression", "flipped compression", "garbage after compression")
_WORDS: Final = (
    "garden", "peas", "grow", "where", "water,", "light", "and", "care;", "the", "雨", "falls", "“quoted”", "é", "ü",
    "😀", "tab\there", "it's", "a|b", "{x}", "[y]", "<z>", "back\\slash",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A question and its answer; a text has no answer."""

    asked: str
    answered: str


@dataclass(frozen=True)
class DataFile:
    """A file of the campaign.

    raw: its bytes. plain: what it opens to, None where the damage was done to what is compressed. pieces: how each
    row stands in `plain` where it is whole. num_written: rows, the wrong ones too. num_wrong: of these, wrong ones.
    num_hit: places that were damaged.
    """

    number: int
    kind: str
    form: str
    compression: str
    name: str
    raw: bytes
    plain: bytes | None
    rows: tuple[Row, ...]
    pieces: tuple[bytes, ...]
    num_written: int
    num_wrong: int = 0
    num_hit: int = 0


def data_file(number: int, seed: int, *, long_rows: bool = False) -> DataFile:
    """The file of this number. long_rows: whether wrong rows may be of 20 MB."""
    dice = random.Random(f"file {seed} {number}")
    kind = list(KINDS)[number % len(KINDS)]
    form = dice.choice(KINDS[kind])
    rows = tuple(_row(dice, f"{seed}x{number}", n, form) for n in range(dice.randint(40, 90)))
    if form in TABLES:
        return _table_file(dice, number, kind, form, rows)
    if form == "zip":
        return _zip_file(dice, number, kind, rows)
    compression = dice.choice(COMPRESSIONS if kind not in STREAM_DAMAGE else COMPRESSIONS[1:])
    pieces = [_piece(row, form) for row in rows]
    written, num_hit = list(pieces), 0
    wrong = _wrong_rows(dice, form, long_rows) if kind == "wrong rows" else []
    for piece in wrong:  # a broken element of a list takes what is not an object with it, so that one comes after it
        free = [at for at in range(len(written)) if written[at] in pieces]
        written.insert(dice.choice(free), piece)
    if kind == "garbage lines":
        for at in sorted(dice.sample(range(1, len(written)), dice.randint(1, 6)), reverse=True):
            written.insert(at, dice.choice(_GARBAGE))
            num_hit += 1
    end = "\r\n" if dice.random() < 0.3 else "\n"
    plain = _joined(written, form, end.encode(), dice, kind)
    if kind == "garbage lines" and form in LISTS and dice.random() < 0.6:
        for line in (b"garbage", b"!!", b"undefined"):
            plain = plain.replace(line + b",", line)  # no comma ends it
    if kind == "stray quotes":
        plain, num_hit = _with_quotes(plain, dice)
    elif kind == "missing commas":
        plain, num_hit = _without_commas(plain, dice)
    elif kind == "latin-1":
        plain, num_hit = _latin(plain, dice)
    elif kind == "utf-16":
        plain = plain.decode().encode("utf-16")
    elif kind in BYTE_DAMAGE:
        plain, num_hit = damaged(plain, kind, dice)
    raw = compressed(plain, compression)
    opens_to: bytes | None = plain
    if kind in STREAM_DAMAGE:
        raw, opens_to = _damaged_stream(raw, kind, dice), None
    name = f"file{number:05d}{SUFFIX[form]}{compression}"
    counts = (len(written), len(wrong), num_hit)
    return DataFile(number, kind, form, compression, name, raw, opens_to, rows, tuple(pieces), *counts)


def damaged(raw: bytes, kind: str, dice: random.Random) -> tuple[bytes, int]:
    """(bytes with this damage, places hit)."""
    at, size = dice.randrange(len(raw)), dice.randint(1, 400)
    if kind == "cut":
        return raw[: max(1, at)], 1
    if kind == "doubled slice":
        return raw[: at + size] + raw[at:], 1
    if kind == "zeroed block":
        return (raw[:at] + bytes(min(size, len(raw) - at)) + raw[at + size :])[: len(raw)], 1
    hits = dice.randint(1, 8)
    changed = bytearray(raw)
    for _ in range(hits):
        at = dice.randrange(len(changed))
        if kind == "NULs":
            changed[at:at] = bytes(dice.randint(1, 3))
        else:
            changed[at] ^= 1 << dice.randrange(8)
    return bytes(changed), hits


def compressed(plain: bytes, compression: str) -> bytes:
    """The bytes in this compression, in two members where that can be, as a tool that appends writes them."""
    halves = [plain[: len(plain) // 2], plain[len(plain) // 2 :]]
    if compression == ".gz":
        return b"".join(gzip.compress(half, mtime=0) for half in halves)
    if compression == ".bz2":
        return b"".join(bz2.compress(half) for half in halves)
    if compression == ".xz":
        return b"".join(lzma.compress(half) for half in halves)
    if compression == ".zst":
        return b"".join(pa.compress(half, codec="zstd", asbytes=True) for half in halves)
    return plain


def table_bytes(rows: tuple[Row, ...], form: str, wrong: int = 0, seed: int = 0) -> bytes:
    """A table of these rows among columns of other types; `wrong` further rows at its end say nothing usable."""
    table = _table(rows, wrong, seed)
    sink = io.BytesIO()
    if form.startswith("parquet"):
        options: dict[str, Any] = {"compression": "zstd"}
        if form == "parquet-groups":
            options = {"compression": "snappy", "row_group_size": 16, "data_page_size": 512}
        if form == "parquet-plain":
            options = {"compression": "none", "use_dictionary": False, "row_group_size": 32}
        pa.parquet.write_table(table, sink, **options)
    elif form == "feather":
        pa.feather.write_feather(table, sink, compression="lz4", chunksize=32)
    else:
        writer = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        codec = "zstd" if form == "arrow" else None
        with writer(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as out:
            out.write_table(table, max_chunksize=32)
    return sink.getvalue()


def _table(rows: tuple[Row, ...], wrong: int, seed: int) -> pa.Table:
    dice = random.Random(f"table {seed}")
    asked = [row.asked.encode() for row in rows]
    unusable = [b"\xff\xfe no text", None, b"", b"NUL \0 in it", b"half \xed\xa0\x80 a character", b"<|im_start|>"]
    asked_or_wrong = [*asked, *(dice.choice(unusable) for _ in range(wrong))]
    answered = [row.answered.encode() for row in rows] + [b"an answer to nothing"] * wrong
    num = len(answered)
    return pa.table(
        {
            "prompt": _strings(asked_or_wrong),
            "response": _strings(answered),
            "id": pa.array(range(num), pa.int64()),
            "tags": pa.array([["a", "bc"][: n % 3] for n in range(num)], pa.list_(pa.string())),
            "topic": pa.array([f"topic {n % 4}" for n in range(num)]).dictionary_encode(),
            "made": pa.array([datetime.datetime(2024, 1, 1 + n % 28) for n in range(num)], pa.timestamp("us")),
            "score": pa.array([{"a": n / 2, "b": None} for n in range(num)]),
            "nothing": pa.nulls(num),
        }
    )


def _strings(values: list[bytes | None]) -> pa.Array:
    """Texts that may hold bytes that are none."""
    kept = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(kept), kept.buffers())


def _table_file(dice: random.Random, number: int, kind: str, form: str, rows: tuple[Row, ...]) -> DataFile:
    wrong = dice.randint(1, 12) if kind == "wrong rows" else 0
    raw, num_hit = table_bytes(rows, form, wrong, number), 0
    if kind == "flips in texts":
        changed = bytearray(raw)
        for row in dice.sample(rows, dice.randint(1, 5)):
            at = raw.find(row.asked.encode())
            assert at >= 0, "the texts of such a table stand in it as they are"
            changed[at + dice.randrange(len(row.asked.encode()))] ^= 1 << dice.randrange(8)
            num_hit += 1
        raw = bytes(changed)
    elif kind.startswith("table "):
        raw, num_hit = mutant(raw, dice, kind.removeprefix("table "))
    name = f"file{number:05d}{SUFFIX[form]}"
    pieces = tuple(row.asked.encode() for row in rows)
    return DataFile(number, kind, form, "", name, raw, raw, rows, pieces, len(rows) + wrong, wrong, num_hit)


def mutant(raw: bytes, dice: random.Random, kind: str = "") -> tuple[bytes, int]:
    """(a table with bytes changed at its beginning, at its end or anywhere, places hit)."""
    kind = kind or dice.choice(("flips", "flips", "flips", "cut", "zeroed", "doubled"))
    if kind != "flips":
        return damaged(raw, {"cut": "cut", "zeroed": "zeroed block", "doubled": "doubled slice"}[kind], dice)
    zones = {"head": (0, 400), "tail": (len(raw) - 700, len(raw)), "anywhere": (0, len(raw))}
    low, high = zones[dice.choice(list(zones))]
    changed, hits = bytearray(raw), dice.randint(1, 8)
    for _ in range(hits):
        at = min(len(raw) - 1, max(0, dice.randrange(low, high)))
        changed[at] = dice.choice((changed[at] ^ (1 << dice.randrange(8)), dice.randrange(256), 0, 255))
    return bytes(changed), hits


def _zip_file(dice: random.Random, number: int, kind: str, rows: tuple[Row, ...]) -> DataFile:
    sink = io.BytesIO()
    middle = len(rows) // 2
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in (("a.csv", rows[:middle]), ("b.csv", rows[middle:])):
            plain = _joined([_piece(row, "csv") for row in part], "csv", b"\n", dice, "whole")
            archive.writestr(zipfile.ZipInfo(name), plain, zipfile.ZIP_DEFLATED)
    raw, num_hit = sink.getvalue(), 0
    if kind == "damaged zip":
        raw, num_hit = mutant(raw, dice)
    pieces = tuple(_piece(row, "csv") for row in rows)
    return DataFile(number, kind, "zip", "", f"file{number:05d}.zip", raw, None, rows, pieces, len(rows), 0, num_hit)


def _row(dice: random.Random, mark: str, n: int, form: str) -> Row:
    def said() -> str:
        words = dice.choices(_WORDS, k=dice.randint(4, 25))
        return " ".join(words if form in ("lines", "paragraphs") else [*words[:3], '"so', 'she" said\nand', *words[3:]])

    if form in ("lines", "paragraphs"):
        return Row(f"text {mark}-{n}: {said()}.", "")
    return Row(f"question {mark}-{n}: {said()}?", f"answer {mark}-{n}: {said()}.")


def _piece(row: Row, form: str) -> bytes:
    """How a row stands in a file of this format."""
    if form in ("lines", "paragraphs"):
        return row.asked.encode()
    if form in ("csv", "tsv"):
        line = io.StringIO()
        csv.writer(line, delimiter="\t" if form == "tsv" else ",", lineterminator="").writerow(
            [row.asked, row.answered]
        )
        return line.getvalue().encode()
    content = {"prompt": row.asked, "response": row.answered}
    indent = 2 if form == "pretty" else None
    return json.dumps(content, ensure_ascii=False, indent=indent).replace("\n", "\n  ").encode()


def _joined(pieces: list[bytes], form: str, end: bytes, dice: random.Random, kind: str) -> bytes:
    head, between, tail = b"", end, end if dice.random() < 0.8 else b""
    if form in LISTS:
        between = b", " if form == "minified" else b"," + end + b"  " * (form == "pretty")
        head = b'{"version": 2, "data": [' if form == "wrapped" else b"[" + (b"" if form == "minified" else end)
        tail = b"]}" if form == "wrapped" else b"]"
        head += b"  " * (form == "pretty")
    elif form in ("csv", "tsv"):
        head = (b"prompt\tresponse" if form == "tsv" else b"prompt,response") + end
    elif form == "paragraphs":
        between = end * dice.randint(2, 3)
    if form in ("jsonl", "ndjson", "lines") and dice.random() < 0.3:
        between = end + b" \t " + end  # lines of white space are no rows
    if kind != "utf-16" and dice.random() < 0.25:
        head = b"\xef\xbb\xbf" + head
    return head + between.join(pieces) + tail


_GARBAGE: Final = (
    b"garbage", b"<<<<<<< HEAD", b"!!", b"}", b"\x80\x81\x82", b"undefined", b"'a': 1", b"{", b'{"prompt": "torn',
)  # fmt: skip
_LONG: Final = b"x" * (20 << 20)


def _wrong_rows(dice: random.Random, form: str, long_rows: bool) -> list[bytes]:
    if form in ("csv", "tsv"):
        separator = b"\t" if form == "tsv" else b","
        found = [b"one cell", separator * 4, b'"not closed by a separator"x' + separator, b"nul \0" + separator + b"a"]
        found += [b"caf\xe9" + separator + b"latin", separator, b'""' + separator + b'""', b"<|im_start|>" + separator]
        long_row = _LONG + separator + b"long"
    elif form in ("lines", "paragraphs"):
        found, long_row = [b"latin caf\xe9", b"nul \0 in it", b"half \xed\xa0\x80", b"<|im_start|>user"], _LONG
    else:
        deep = b"[" * 100_000 + b"]" * 100_000
        found = [b"null", b"7", b'"text"', b"[1]", b"{}", b'{"prompt": 3}', b'{"prompt": null}', b'{"messages": []}']
        found += [b'{"messages": {"role": "user"}}', b'{"messages": [{"role": "gardener", "content": "a"}]}']
        found += [b'{"prompt": "half \\ud800", "response": "a"}', b'{"prompt": "nul \\u0000", "response": "a"}']
        found += [b'{"prompt": "<|im_start|>", "response": "a"}', b'{"prompt": "a", "prompt": "b", "response": "c"}']
        found += [b'{"prompt": %s}' % (b"[" * depth + b"]" * depth) for depth in (100, 400, 900, 980)]
        found += [b'{"response": {"a": ' * 300 + b"1" + b"}}" * 300, b'{"prompt": ""}', b'{"prompt": 1e999}']
        found += [b'{"body": "{\\"prompt\\": 1"}', b'{"messages": "[[[["}', b'{"prompt": "a", "response": ["x"]}']
        if form != "wrapped":  # which is read as a whole or not at all
            found += [deep, b'{"prompt": %s}' % deep, b'{"x": NaN}', b'{"x": %s}' % (b"1" * 5000)]
        if form == "minified":  # which cannot be read on after what is no JSON
            found = [one for one in found if len(one) < 3000 and b"NaN" not in one]
        long_row = b'{"prompt": "' + _LONG + b'"}'
    wrong = dice.sample(found, min(len(found), dice.randint(2, 9)))
    if long_rows and form not in ("wrapped", "minified", "pretty"):
        wrong.append(long_row)
    return wrong


def _with_quotes(plain: bytes, dice: random.Random) -> tuple[bytes, int]:
    hits = dice.randint(1, 5)
    for _ in range(hits):
        at = dice.randrange(20, len(plain))
        plain = plain[:at] + b'"' + plain[at:]
    return plain, hits


def _without_commas(plain: bytes, dice: random.Random) -> tuple[bytes, int]:
    places = [at for at in range(len(plain)) if plain[at : at + 2] in (b",\n", b",\r") and plain[at - 1 : at] == b"}"]
    gone = set(dice.sample(places, min(len(places), dice.randint(1, 6))))
    return bytes(byte for at, byte in enumerate(plain) if at not in gone), len(gone)


def _latin(plain: bytes, dice: random.Random) -> tuple[bytes, int]:
    """Some of the words in Latin-1, as where two files of other encodings were put together."""
    places = [at for at in range(len(plain)) if plain[at : at + 2] == "é".encode()]
    hits = dice.sample(places, min(len(places), dice.randint(1, 5)))
    for at in sorted(hits, reverse=True):
        plain = plain[:at] + b"\xe9" + plain[at + 2 :]
    return plain, len(hits)


def _damaged_stream(raw: bytes, kind: str, dice: random.Random) -> bytes:
    if kind == "garbage after compression":
        return raw + bytes(dice.randrange(1, 256) for _ in range(dice.randint(20, 300)))
    if kind == "torn compression":
        return raw[: dice.randrange(len(raw) // 10, len(raw))]
    return damaged(raw, "bit flips", dice)[0]


_BEGINNINGS: Final = {
    ".jsonl": b'{"prompt": "', ".json": b'["', ".csv": b"prompt,response\n", ".txt": b"",
}  # fmt: skip
_PACK: Final[dict[str, Callable[[bytes], bytes]]] = {
    ".gz": lambda plain: gzip.compress(plain, 9, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda plain: bytes(pa.compress(plain, codec="zstd", asbytes=True)),
}
BOMBS: Final = (
    *(f"{filler}{suffix}.gz" for suffix in _BEGINNINGS for filler in ("x", "blank", "newline")),
    *("row.jsonl.gz", "object.json.gz", "x.jsonl.bz2", "x.jsonl.xz", "x.jsonl.zst", "x.csv.xz", "zip.zip"),
)
"""What a mebibyte or two opens to two gibibytes of: one text, white space, empty lines, or rows that say nothing."""
HEAVY: Final = tuple(f"heavy{suffix}.gz" for suffix in (*_BEGINNINGS, "-object.json"))
"""One row of 300 MiB that no compressor makes much smaller."""


def bomb(name: str) -> bytes:
    """The bytes of one of BOMBS."""
    filler = {"blank": b" ", "newline": b"\n", "row": b"{}\n"}.get(name.split(".")[0], b"x")
    if name.endswith(".zip"):
        sink = io.BytesIO()
        archive = zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        with archive, archive.open("a.csv", "w", force_zip64=True) as member:
            for _ in range(1 << 10):
                member.write(filler * (1 << 20))
        return sink.getvalue()
    _, suffix, compression = name.rsplit(".", 2)
    beginning = b'{"data": ["' if name.startswith("object") else _BEGINNINGS["." + suffix]
    if filler in (b"\n", b"{}\n") and suffix == "jsonl":
        beginning = b""
    pack = _PACK["." + compression]
    return pack(beginning) + pack(filler * ((64 << 20) // len(filler))) * 32


def heavy(name: str) -> bytes:
    """The bytes of one of HEAVY."""
    dice = random.Random(name)
    block = b"".join(b"%032x" % dice.getrandbits(128) + b"x" * 480 for _ in range(2048))
    kind = "." + name.rsplit(".", 2)[1]
    beginning = b'{"data": ["' if "object" in name else _BEGINNINGS[kind]
    packed = _PACK[".gz"](block)
    return _PACK[".gz"](beginning) + packed * 300
