"""Imported rows, measured elsewhere: their columns, and the check of each row.

A row holds acceptance, cost, or both. Times are milliseconds unless the column's name has another unit (t_verify_us);
every column is optional unless a line below needs it.

  which      drafter, method, draft_vocab, tree_budget, trained_depth, workload, batch_size (1), kv_len, prompt, block,
             rep
  acceptance accepted [k_max]         for every output position: how many drafts a round that starts there would keep
             k tokens rounds          kept tokens (bonus included) and rounds at depth k
             k num_drafts accepted_per_pos   vLLM's counters: rounds that kept the draft at position 1, 2, ...
             k p                      probability that the draft at position k is kept, given that all before it were
             k al [tokens | rounds]   acceptance length at depth k, bonus included
  cost       k t_verify t_draft [t_host] and t_target once   one verification pass, k drafts, one plain step
             k tpot, and a row k = 0 with plain decoding's tpot   time per output token, end to end
             k speedup                end to end, against plain decoding

Rows with `prompt` give intervals; a figure for all prompts gives none. Rows with `block` (repeated timings) let the
interval include the error of timing. Cost rows without a workload hold for every workload. A fact that is given twice
is refused unless `rep` numbers the repetitions. Several lengths `al` (of prompts, workloads or repetitions) without
tokens or rounds count as if each had the same number of tokens: a macro mean, which raises a flag.

Reads files of imported rows: JSON, JSON lines, Parquet, and text tables with any usual delimiter.

A text table may be delimited by commas, semicolons, tabs or bars (a Markdown table too), with spaces after delimiters,
in UTF-8 or UTF-16, with or without a byte order mark. The delimiter is the one that makes most known columns of the
head. Unless commas delimit cells, a number may have a decimal comma, as European spreadsheets write it; beside decimal
points or comma delimiters such a number is refused, since 1,234 could be either.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from components.contract import UserError
from components.rows import ALL
from components.speedup.imported.columns import (
    COLUMNS,
    INDEX_NAMES,
    LISTS,
    MS_PER_UNIT,
    NUMBERS,
    TEXTS,
    TIMES,
    as_milliseconds,
    column_of,
    is_absent,
    is_known,
)
from components.text import nearest, one_line

LONGEST_MS = 1e9  # eleven days; no step takes that


def _as_list(value: Any) -> Any:
    """A list, or its text in a table: [1, 2] or 1 2."""
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text) if text.startswith("[") else re.split(r"[\s,;]+", text)
        except RecursionError as error:
            raise ValueError("no list of numbers") from error
    if isinstance(value, list) and any(isinstance(item, bool) for item in value):
        raise ValueError("true and false are no numbers")
    return value


Counts = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_as_list)]
Duration = Annotated[float, Field(gt=0.0, le=LONGEST_MS)]
DurationOrZero = Annotated[float, Field(ge=0.0, le=LONGEST_MS)]
Whole = Annotated[int, Field(ge=1)]


class ImportedRow(BaseModel):
    """One row; columns as in the head of this file, times in ms."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, coerce_numbers_to_str=True)

    drafter: str | None = None
    method: str | None = None
    draft_vocab: Whole | None = None
    tree_budget: Whole | None = None
    trained_depth: Whole | None = None
    workload: str | None = None
    batch_size: Whole = 1
    kv_len: Whole | None = None
    prompt: str | None = None
    block: int | None = None
    rep: int | None = None
    k: Annotated[int, Field(ge=0, le=256)] | None = None
    accepted: Counts | None = None
    k_max: Whole | None = None
    tokens: Whole | None = None
    rounds: Whole | None = None
    num_drafts: Whole | None = None
    accepted_per_pos: Counts | None = None
    p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    al: Annotated[float, Field(ge=1.0)] | None = None
    t_target: Duration | None = None
    t_verify: Duration | None = None
    t_draft: DurationOrZero | None = None
    t_host: DurationOrZero | None = None
    tpot: Duration | None = None
    speedup: Annotated[float, Field(gt=0.0)] | None = None

    @property
    def has_acceptance(self) -> bool:
        """Whether the row holds acceptance at a drafting depth."""
        kinds = (self.accepted, self.tokens, self.rounds, self.num_drafts, self.p, self.al)
        return any(value is not None for value in kinds) and self.k != 0

    @property
    def is_counted(self) -> bool:
        """Whether the acceptance comes with tokens or rounds."""
        return any(value is not None for value in (self.accepted, self.tokens, self.rounds, self.num_drafts))


class SourcedRow(NamedTuple):
    """A row with its location for errors. units: the columns whose names include their unit."""

    location: str
    row: ImportedRow
    units: frozenset[str] = frozenset()


def read_imported_rows(files: list[Path]) -> list[SourcedRow]:
    """Every row of the files.

    Raises:
        UserError: a file is missing or unreadable, there are no rows, or a row is wrong (the first one, in one line).
    """
    rows = [_checked_row(raw) for file in files for raw in raw_rows(file)]
    if not rows:
        raise UserError(f"{', '.join(map(str, files))}: no rows")
    return rows


def _checked_row(raw: RawRow) -> SourcedRow:
    """Check that columns are known and values are possible together."""
    location, cells = raw
    if not isinstance(cells, dict):
        raise UserError(f"{location}: a row is an object of columns, got {str(cells)[:40]!r}")
    values: dict[str, Any] = {}
    units = set()
    for header, value in cells.items():
        name, unit = column_of(header)
        if is_absent(value) or name == "__index_level_0__":  # pandas' own
            continue
        if name in values:
            raise UserError(f"{location}: {name} is told twice, the second time as {one_line(header)[:40]}")
        if isinstance(value, bool):
            raise UserError(f"{location}: {name}: expected a value, got {str(value).lower()}")
        if unit is not None:
            units.add(name)
        values[name] = _convert_value(name, unit, value)
    if values.get("workload") == ALL:
        del values["workload"]  # a row for all workloads names none
    try:
        row = ImportedRow.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{location}: {_first_error(error)}") from error
    fault = _contradiction(row)
    if fault:
        raise UserError(f"{location}: {fault}")
    return SourcedRow(location, row, frozenset(units))


def _convert_value(name: str, unit: str | None, value: Any) -> Any:
    """A time in ms, a name as one line (a prompt that pandas turned into 7.0 is 7), anything else as it is."""
    if unit is not None:
        return as_milliseconds(value, unit)
    if name not in TEXTS:
        return value
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float):
        return value
    text = one_line(value)
    return text.removesuffix(".0") if name == "prompt" and re.fullmatch(r"\d+\.0", text) else text


def _unknown_column(name: str) -> str:
    near = nearest(name, COLUMNS)
    hint = f"did you mean {near}?" if near else f"columns are {', '.join(COLUMNS)}"
    return f"unknown column {one_line(name)[:60]}; {hint}"


def _first_error(error: ValidationError) -> str:
    """The first error of a row as text."""
    details = error.errors(include_url=False)[0]
    name = str(details["loc"][0]) if details["loc"] else "row"
    if details["type"] == "extra_forbidden":
        return _unknown_column(name)
    message = f"{name}: {one_line(details['msg'])}, got {one_line(repr(details['input']))[:60]}"
    if name == "p":
        message += "; p is a probability, 0.8 for 80 %"
    if name in TIMES and isinstance(details["input"], str):
        message += f"; a unit belongs into the column's name ({', '.join(f'{name}_{unit}' for unit in MS_PER_UNIT)})"
    if name in LISTS:
        message += "; a list is written [3, 0, 1] or 3 0 1"
    return message


def _contradiction(row: ImportedRow) -> str:
    """The contradiction within a row as text, or ""."""
    has_counts = row.al is None and (row.tokens is not None or row.rounds is not None)
    has_vllm = row.num_drafts is not None or row.accepted_per_pos is not None
    kinds = [row.accepted is not None, has_counts, has_vllm, row.p is not None, row.al is not None]
    costs = [row.t_target, row.t_verify, row.t_draft, row.t_host, row.tpot, row.speedup]
    if sum(kinds) > 1 or (row.al is not None and row.tokens is not None and row.rounds is not None):
        return "acceptance told twice; give one of accepted, tokens + rounds, num_drafts + accepted_per_pos, p, al"
    if not any(kinds) and all(value is None for value in costs):
        return "says nothing about acceptance (accepted, tokens, num_drafts, p, al) or cost (t_verify, tpot, speedup)"
    if row.k is None and (any(kinds[1:]) or any(value is not None for value in costs[1:])):
        return "k is missing: at which depth?"
    if (row.t_verify is None) != (row.t_draft is None):
        return "t_verify and t_draft belong together"
    if row.k == 0 and (row.accepted is not None or row.p is not None):
        return "k is 0, plain decoding, which drafts nothing that could be kept"
    if row.accepted is not None and (len(row.accepted) == 0 or row.prompt is None):
        return "accepted is a list over the positions of one prompt: name the prompt, give at least one position"
    deepest = row.k if row.k_max is None else row.k_max
    if row.accepted is not None and deepest is not None and max(row.accepted) > deepest:
        name = "k" if row.k_max is None else "k_max"
        return f"accepted holds {max(row.accepted)}, more than {name} = {deepest}"
    return _impossible_counts(row)


def _impossible_counts(row: ImportedRow) -> str:
    """The fault of counts that no decoding gives, or ""."""
    depth = row.k or 0
    if row.al is None and (row.tokens is None) != (row.rounds is None):
        return "tokens and rounds belong together"
    if row.tokens is not None and row.rounds is not None and not row.rounds <= row.tokens <= row.rounds * (depth + 1):
        return f"{row.rounds} rounds of depth {depth} keep {row.rounds} to {row.rounds * (depth + 1)} tokens"
    if (row.num_drafts is None) != (row.accepted_per_pos is None):
        return "num_drafts and accepted_per_pos belong together"
    if row.num_drafts is not None and row.accepted_per_pos is not None:
        if len(row.accepted_per_pos) != depth:
            return f"accepted_per_pos has {len(row.accepted_per_pos)} positions, k is {depth}"
        falling = [row.num_drafts, *row.accepted_per_pos]
        for position, (before, after) in enumerate(itertools.pairwise(falling), 1):
            if after > before:
                return f"position {position} was kept {after} times, the one before it {before}: a round keeps a prefix"
    if row.al is not None and row.al > depth + 1:
        return f"al is {row.al:g}, at depth {depth} a round keeps at most {depth + 1} tokens"
    return ""


DELIMITERS = "\t;|,"
TABLES = (".csv", ".tsv", ".tab", ".txt", ".md")
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CODECS = (
    "utf-8-sig",
    "utf-32",
    "utf-32",
    "utf-16",
    "utf-16",
)  # in the order of the marks; UTF-32's begins as UTF-16's does
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
_DECIMAL_POINT = re.compile(r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?")
_RULE = re.compile(r":?-+:?")  # a cell of the line under a Markdown table's head


class RawRow(NamedTuple):
    """A row before its check. cells: value by header; of a JSON file it may be anything."""

    location: str
    cells: Any


def raw_rows(file: Path) -> Iterator[RawRow]:
    """The rows of one file, read according to its suffix.

    Raises:
        UserError: the file is missing, or is not what its suffix says.
    """
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    kind = file.suffix.lower()
    try:
        if kind == ".parquet":
            yield from _read_parquet(file)
        elif kind in TABLES:
            yield from _read_table(file, _read_text(file))
        elif kind == ".jsonl":
            for number, line in enumerate(_read_text(file).split("\n"), 1):
                if line.strip():
                    yield RawRow(f"{file}:{number}", _parse_json(f"{file}:{number}", line))
        elif kind == ".json":
            content = _parse_json(str(file), _read_text(file))
            rows = content.get("rows") if isinstance(content, dict) else content
            if not isinstance(rows, list):
                raise UserError(f'{file}: expected a list of rows, or {{"rows": [...]}}')
            yield from (RawRow(f"{file} row {i}", row) for i, row in enumerate(rows, 1))
        else:
            raise UserError(f"{file}: rows come as .json, .jsonl, .csv, {', '.join(TABLES[1:])} or .parquet")
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{file}: cannot be read ({one_line(error)[:200]})") from error


def _read_parquet(file: Path) -> Iterator[RawRow]:
    from pyarrow import ArrowException, parquet  # rows are text as a rule, and `choose-depth` answers at once

    try:
        rows = parquet.read_table(file).to_pylist()
    except ArrowException as error:
        raise UserError(f"{file}: cannot be read ({one_line(error)[:200]})") from error
    yield from (RawRow(f"{file} row {i}", row) for i, row in enumerate(rows, 1))


def _read_text(file: Path) -> str:
    """The text of a file, decoded by its byte order mark; else UTF-8, or UTF-16 where every second byte is zero."""
    content = file.read_bytes()
    encoding = next((name for mark, name in zip(_MARKS, _CODECS, strict=True) if content.startswith(mark)), "utf-8")
    head = content[:400]
    if encoding == "utf-8" and head.count(0) * 3 > len(head):
        encoding = "utf-16-be" if head[0] == 0 else "utf-16-le"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper().removesuffix("-SIG")
        raise UserError(f"{file}: is no {name} text (at byte {error.start}); save it as UTF-8") from error


def _parse_json(location: str, text: str) -> Any:
    """Parse JSON; a repeated key in an object is refused."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{location}: one row tells {one_line(twice)[:60]} twice")
        return row

    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise UserError(f"{location}: not JSON ({error})") from error
    except RecursionError as error:
        raise UserError(f"{location}: not rows (lists within lists without end)") from error


def _read_table(file: Path, text: str) -> Iterator[RawRow]:
    """Rows of a text table, each with its line number; empty ones are skipped."""
    table = _split_table(text)
    head, rows = table.head, table.rows
    for number, cells in rows:
        if len(cells) > len(head):
            raise UserError(
                f"{file}:{number}: {len(cells)} cells under a head of {len(head)} columns; put a cell that holds the "
                f"delimiter {table.delimiter!r} into quotes, and delimit by semicolons beside decimal commas"
            )
        cells.extend([""] * (len(head) - len(cells)))
    keep = _columns_to_keep(file, head, rows)
    numbers = [i for i in keep if column_of(head[i]).name in NUMBERS]
    _convert_decimal_commas(file, table.delimiter, [(number, cells, i) for number, cells in rows for i in numbers])
    for number, cells in rows:
        if not all(is_absent(cells[i]) for i in keep):
            yield RawRow(f"{file}:{number}", {head[i]: cells[i] for i in keep})


class _Table(NamedTuple):
    """The cells of a text table, without empty lines. rows: (line number, cells)."""

    delimiter: str
    head: list[str]
    rows: list[tuple[int, list[str]]]


def _split_table(text: str) -> _Table:
    """Split a table into cells; bars around lines and empty cells at their ends are left out."""
    stated = re.match(r"sep=(.)\r?\n", text)  # as Excel writes it
    if stated:
        text = text[stated.end() :]
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = stated[1] if stated else _find_delimiter(first)
    is_barred = delimiter == "|" and first.lstrip().startswith("|")
    table = _Table(delimiter, [], [])
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    for line in lines:
        cells = [cell.strip() for cell in line]
        if is_barred and cells[:1] == [""]:
            del cells[0]
        if not any(cells) or (delimiter == "|" and all(_RULE.fullmatch(cell) for cell in cells if cell)):
            continue
        while not cells[-1] and len(cells) > len(table.head):
            cells.pop()
        if table.head:
            table.rows.append((lines.line_num + bool(stated), cells))
        else:
            table.head.extend(cells)
    return table


def _find_delimiter(head: str) -> str:
    """The delimiter that makes most known columns of a head; then the one that makes most columns."""

    def score(delimiter: str) -> tuple[int, int]:
        names = next(csv.reader([head], delimiter=delimiter, skipinitialspace=True), [])
        return sum(is_known(name) for name in names), len(names)

    return max(DELIMITERS, key=score)


def _columns_to_keep(file: Path, head: list[str], rows: list[tuple[int, list[str]]]) -> list[int]:
    """Indices of the columns to keep: all but the row numbers that pandas writes first."""
    keep = []
    for place, name in enumerate(head):
        cells = [cells[place] for _, cells in rows]
        if name.lower().replace(" ", "_") in INDEX_NAMES:
            if place == 0 and all(map(str.isdecimal, cells)) and len({*cells}) == len(cells):
                continue
            if not name:
                raise UserError(f"{file}: column {place + 1} has no name in the head")
        keep.append(place)
    names = [head[place] for place in keep]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{file}: two columns are called {one_line(twice)[:60]}")
    return keep


def _convert_decimal_commas(file: Path, delimiter: str, cells: list[tuple[int, list[str], int]]) -> None:
    """Turn decimal commas into points. cells: (line number, cells of the line, index) of every number."""
    commas = [(number, row, place) for number, row, place in cells if _DECIMAL_COMMA.fullmatch(row[place])]
    if not commas:
        return
    number, row, place = commas[0]
    problem = f"{file}:{number}: {row[place]} could be a decimal or a thousand"
    if delimiter == ",":
        raise UserError(f"{problem}; write numbers with a decimal point and without thousands separators")
    point = next((row[place] for _, row, place in cells if _DECIMAL_POINT.fullmatch(row[place])), None)
    if point is not None:
        raise UserError(f"{problem} beside {point}; write all numbers with the same decimal sign, without thousands")
    for _, row, place in commas:
        row[place] = row[place].replace(",", ".")
