"""Rows that somebody measured elsewhere: JSON, JSON lines, CSV or Parquet, checked one by one.

A row tells something about acceptance, about cost, or about both. Times are milliseconds; every column is optional
unless a line below needs it.

  which      drafter, method, draft_vocab, tree_budget, trained_depth, workload, batch_size (1), kv_len, prompt, block
  acceptance accepted [k_max]         from every output position: how many drafts a round begun there would keep
             k tokens rounds          kept tokens (bonus included) and rounds at depth k
             k num_drafts accepted_per_pos   vLLM's counters: rounds that kept the draft at position 1, 2, ...
             k al                     acceptance length at depth k, bonus included
  cost       k t_verify t_draft [t_host] and t_target once   one verification pass, k drafts, one plain step
             k tpot, and a row k = 0 with plain decoding's tpot   time per output token, end to end
             k speedup                end to end, against plain decoding

Rows with `prompt` give intervals; a figure for all prompts gives none. Rows with `block` (repeated timings) let the
interval carry what the timing is worth. Cost rows without a workload hold for every workload.
"""

from __future__ import annotations

import csv
import difflib
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from components.contract import UserError


def _as_list(value: Any) -> Any:
    """A list, or as CSV holds one: [1, 2] or 1 2."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    return json.loads(text) if text.startswith("[") else text.split()


def _also(*names: str) -> Any:
    return Field(validation_alias=AliasChoices(*names))


Counts = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_as_list)]
Positive = Annotated[float, Field(gt=0.0)]
Whole = Annotated[int, Field(ge=1)]


class OutsideRow(BaseModel):
    """One row; columns as in the head of this file."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, coerce_numbers_to_str=True)

    drafter: Annotated[str | None, _also("drafter", "draft_key")] = None
    method: str | None = None
    draft_vocab: Whole | None = None
    tree_budget: Whole | None = None
    trained_depth: Whole | None = None
    workload: str | None = None
    batch_size: Whole = 1
    kv_len: Whole | None = None
    prompt: Annotated[str | None, _also("prompt", "prompt_id")] = None
    block: int | None = None
    k: Annotated[Annotated[int, Field(ge=0, le=256)] | None, _also("k", "depth_k", "num_speculative_tokens")] = None
    accepted: Counts | None = None
    k_max: Whole | None = None
    tokens: Whole | None = None
    rounds: Whole | None = None
    num_drafts: Annotated[Whole | None, _also("num_drafts", "spec_decode_num_drafts")] = None
    accepted_per_pos: Counts | None = None
    al: Annotated[
        Annotated[float, Field(ge=1.0)] | None, _also("al", "acceptance_length", "mean_acceptance_length")
    ] = None
    t_target: Positive | None = None
    t_verify: Positive | None = None
    t_draft: Annotated[float, Field(ge=0.0)] | None = None
    t_host: Annotated[float, Field(ge=0.0)] | None = None
    tpot: Positive | None = None
    speedup: Positive | None = None


class Placed(NamedTuple):
    """A row and where it stands, as errors say it."""

    where: str
    row: OutsideRow


def read_outside(files: list[Path]) -> list[Placed]:
    """Every row of the files.

    Raises:
        UserError: a file that is missing or unreadable, no rows at all, or the first row that is wrong, in one line.
    """
    placed = []
    for file in files:
        for where, raw in _raw_rows(file):
            placed.append(Placed(where, _checked(where, raw)))
    if not placed:
        raise UserError(f"{', '.join(map(str, files))}: no rows")
    return placed


def _raw_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """(where, row) of one file by its ending; anything that cannot be read is a UserError."""
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    kind = file.suffix.lower()
    try:
        if kind == ".parquet":
            import pyarrow.parquet as pq

            yield from ((f"{file} row {i}", row) for i, row in enumerate(pq.read_table(file).to_pylist(), 1))
            return
        text = file.read_text(encoding="utf-8-sig")
        if kind == ".csv":
            reader = csv.DictReader(io.StringIO(text, newline=""), restkey="?")
            yield from ((f"{file}:{reader.line_num}", row) for row in reader)
        elif kind == ".jsonl":
            for number, line in enumerate(text.splitlines(), 1):
                if line.strip():
                    yield f"{file}:{number}", json.loads(line)
        elif kind == ".json":
            found = json.loads(text)
            rows = found.get("rows") if isinstance(found, dict) else found
            if not isinstance(rows, list):
                raise UserError(f'{file}: expected a list of rows, or {{"rows": [...]}}')
            yield from ((f"{file} row {i}", row) for i, row in enumerate(rows, 1))
        else:
            raise UserError(f"{file}: rows come as .json, .jsonl, .csv or .parquet")
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: not JSON ({error})") from error
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{file}: cannot be read ({' '.join(str(error).split())[:200]})") from error


def _checked(where: str, raw: Any) -> OutsideRow:
    """The row, or a UserError in one line."""
    if not isinstance(raw, dict):
        raise UserError(f"{where}: a row is an object of columns, not {type(raw).__name__}")
    told = {str(name): value for name, value in raw.items() if value is not None and value != ""}
    try:
        row = OutsideRow.model_validate(told)
    except ValidationError as error:
        raise UserError(f"{where}: {_first(error)}") from error
    fault = _contradiction(row)
    if fault:
        raise UserError(f"{where}: {fault}")
    return row


def _first(error: ValidationError) -> str:
    """The first thing wrong with a row."""
    found = error.errors(include_url=False)[0]
    name = str(found["loc"][0]) if found["loc"] else "row"
    if found["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, OutsideRow.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"columns are {', '.join(OutsideRow.model_fields)}"
        return f"unknown column {name}; {hint}"
    return f"{name}: {found['msg']}, got {str(found['input'])[:60]!r}"


def _contradiction(row: OutsideRow) -> str:
    """What cannot be true of a row, or ""."""
    has_counts = row.tokens is not None or row.rounds is not None
    has_vllm = row.num_drafts is not None or row.accepted_per_pos is not None
    kinds = [row.accepted is not None, has_counts, has_vllm, row.al is not None]
    costs = [row.t_target, row.t_verify, row.t_draft, row.tpot, row.speedup]
    if sum(kinds) > 1:
        return "acceptance told twice; give one of accepted, tokens + rounds, num_drafts + accepted_per_pos, al"
    if not any(kinds) and all(value is None for value in costs):
        return "says nothing about acceptance (accepted, tokens, num_drafts, al) or cost (t_verify, tpot, speedup)"
    if row.k is None and (any(kinds[1:]) or any(value is not None for value in costs[1:])):
        return "k is missing: at which depth?"
    if (row.t_verify is None) != (row.t_draft is None):
        return "t_verify and t_draft belong together"
    if row.accepted is not None and (len(row.accepted) == 0 or row.prompt is None):
        return "accepted is a list over the positions of one prompt: name the prompt, give at least one position"
    if row.accepted is not None and row.k_max is not None and max(row.accepted) > row.k_max:
        return f"accepted holds {max(row.accepted)}, more than k_max = {row.k_max}"
    return _impossible(row)


def _impossible(row: OutsideRow) -> str:
    """Counts that no decoding gives, or ""."""
    depth = row.k or 0
    if (row.tokens is None) != (row.rounds is None):
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
