"""Columns of imported rows: their names, the unit of a time, and the values that mean "absent".

Case and spaces of a column's name do not matter, and names that engines and other tools use are accepted. A time may
have its unit at the end of its name, t_verify_us or "T_verify (us)": ms, us, s or ns; without one it is in ms.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any, NamedTuple

TEXTS = ("drafter", "method", "workload", "prompt")
LISTS = ("accepted", "accepted_per_pos")
TIMES = ("t_target", "t_verify", "t_draft", "t_host", "tpot")
COUNTS = ("draft_vocab", "tree_budget", "trained_depth", "batch_size", "kv_len", "block", "rep", "k", "k_max")
NUMBERS = (*COUNTS, "tokens", "rounds", "num_drafts", "al", "p", "speedup", *TIMES)
COLUMNS = (*TEXTS, *LISTS, *NUMBERS)

ALIASES = {
    "draft_key": "drafter",
    "prompt_id": "prompt",
    "depth_k": "k",
    "depth": "k",
    "num_speculative_tokens": "k",
    "spec_decode_num_drafts": "num_drafts",
    "acceptance_length": "al",
    "mean_acceptance_length": "al",
    "acceptance_probability": "p",
    "p_k": "p",
}
MS_PER_UNIT = {"ms": 1.0, "us": 1e-3, "s": 1e3, "ns": 1e-6}
INDEX_NAMES = ("", "unnamed:_0", "__index_level_0__", "index")
"""Names that pandas gives to its column of row numbers."""

_ABSENT = {"", "nan", "none", "null", "na", "n/a", "#n/a", "<na>", "-", "–", "—"}
_UNIT_IN_BRACKETS = re.compile(r"\s*[(\[]\s*(ms|us|s|ns)\s*[)\]]$")


class Column(NamedTuple):
    """A column by its header. unit: None where the header has none."""

    name: str
    unit: str | None


def column_of(header: object) -> Column:
    """The column that a header means; an unknown name is returned in lower case."""
    # Micro signs are two characters of Unicode; NFKC makes them one.
    text = unicodedata.normalize("NFKC", str(header)).strip().lower().replace("μ", "u")
    text = _UNIT_IN_BRACKETS.sub(r"_\1", text).removesuffix("(k)")
    text = re.sub(r"[\s\-]+", "_", text.strip())
    base, _, unit = text.rpartition("_")
    if unit in MS_PER_UNIT and base in TIMES:
        return Column(base, unit)
    return Column(ALIASES.get(text, text), None)


def is_known(header: object) -> bool:
    """Whether a header is one of the columns."""
    return column_of(header).name in COLUMNS


def is_absent(value: object) -> bool:
    """Whether a cell is empty, or holds what pandas and spreadsheets write for an absent value."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and value.strip().lower() in _ABSENT)


def as_milliseconds(value: Any, unit: str) -> Any:
    """A time in ms; what is no number is returned as it is, for the check of the row to refuse."""
    try:
        return float(value) * MS_PER_UNIT[unit]
    except (TypeError, ValueError, OverflowError):
        return value
