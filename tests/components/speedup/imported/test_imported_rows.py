"""Tables as people have them: whatever the delimiter, encoding, spelling and unit, the same rows; else one line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from components.contract import UserError
from components.speedup.imported.columns import ALIASES, LISTS, MS_PER_UNIT, NUMBERS, TIMES, is_absent
from components.speedup.imported.policy import policy_from
from components.speedup.imported.rows import ImportedRow, read_imported_rows
from components.speedup.prediction.predict import Rule

RULE = Rule(tolerance=0.01, confidence=0.95, num_draws=200, include_host=True)
ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
Rows = list[dict[str, Any]]

words = st.text("abcdeZ é語,;|\"'.-0", min_size=1, max_size=8).map(lambda text: " ".join(text.split()))
names = words.filter(lambda text: not is_absent(text) and text != "all" and not text.endswith(".0"))
ms = st.floats(0.001, 9999.0).map(lambda value: float(f"{value:.6g}"))


@st.composite
def tables(draw: st.DrawFn) -> Rows:
    """Rows with the same columns, some of them not told; every number is within what one row may say."""
    texts = draw(st.lists(st.sampled_from(["workload", "drafter", "prompt"]), unique=True))
    has_maps = draw(st.booleans())
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        k = draw(st.integers(1, 9))
        row: dict[str, Any] = {"k": k, "t_verify": draw(ms), "t_draft": draw(ms)}
        row["t_target"] = draw(st.none() | ms)
        row["al"] = None if has_maps else draw(st.none() | st.floats(1.0, k + 1.0))
        row["batch_size"] = draw(st.none() | st.integers(1, 64))
        row |= {name: draw(st.none() | names) for name in texts}
        if has_maps:
            row["prompt"] = draw(names)
            row["accepted"] = draw(st.lists(st.integers(0, k), min_size=1, max_size=6))
        rows.append(row)
    return rows


@st.composite
def spellings(draw: st.DrawFn, name: str) -> tuple[str, float]:
    """A header that means a column, and what its numbers are divided by."""
    unit = draw(st.sampled_from([None, *MS_PER_UNIT])) if name in TIMES else None
    known_as = draw(st.sampled_from([name, *(also for also, meant in ALIASES.items() if meant == name)]))
    written = known_as if unit is None else draw(st.sampled_from(["{}_{}", "{} ({})", "{}[{}]"])).format(known_as, unit)
    written = draw(st.sampled_from([str.lower, str.upper, str.title]))(written)
    return draw(st.sampled_from(["{}", " {}", "{} "])).format(written.replace("_", draw(st.sampled_from("_ ")))), (
        MS_PER_UNIT[unit or "ms"]
    )


@st.composite
def written(draw: st.DrawFn) -> tuple[Rows, str, bytes]:
    """Rows, and a file that tells them: its ending and its bytes."""
    rows = draw(tables())
    columns = draw(st.permutations(sorted(rows[0])))
    headers = {name: draw(spellings(name)) for name in columns}
    kind = draw(st.sampled_from(["json", "jsonl", "csv", "csv", "csv"]))
    encoding = draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))

    def scaled(name: str, value: Any) -> Any:
        return value / headers[name][1] if name in TIMES and value is not None else value

    if kind != "csv":
        absent: Any = draw(st.sampled_from([None, float("nan"), ""]))
        told = [
            {headers[n][0]: absent if row.get(n) is None else scaled(n, row[n]) for n in columns if n in row}
            for row in rows
        ]
        text = json.dumps(told) if kind == "json" else "\n".join(map(json.dumps, told))
        return rows, f".{kind}", text.encode(encoding)
    delimiter = draw(st.sampled_from(",;\t|"))
    has_decimal_comma = delimiter != "," and draw(st.booleans())
    empty = draw(st.sampled_from(["", "NaN", "nan", "None", "null", "NULL", "<NA>", "n/a", "-", "–", "—"]))
    gap = draw(st.sampled_from(["", " "]))

    def cell(name: str, value: Any) -> str:
        if value is None:
            return empty
        if name in LISTS:
            return json.dumps(value) if draw(st.booleans()) else " ".join(map(str, value))
        text = repr(scaled(name, value)) if name in NUMBERS else str(value)
        return text.replace(".", ",") if name in NUMBERS and has_decimal_comma else text

    lines = [[headers[n][0] for n in columns], *([cell(n, row.get(n)) for n in columns] for row in rows)]
    buffer = io.StringIO(newline="")
    ends = draw(st.sampled_from(["\n", "\r\n"]))
    writer = csv.writer(buffer, delimiter=delimiter, lineterminator=ends)
    for line in lines:
        writer.writerow(line)
    text = buffer.getvalue()
    if gap and '"' not in text:
        text = text.replace(delimiter, delimiter + gap)
    return rows, draw(st.sampled_from([".csv", ".tsv", ".txt"])), text.encode(encoding)


@ONE_FOLDER
@given(written())
def test_the_same_rows_come_out_of_every_form(tmp_path: Path, case: tuple[Rows, str, bytes]) -> None:
    rows, ending, content = case
    file = tmp_path / f"rows{ending}"
    file.write_bytes(content)
    found = [placed.row for placed in read_imported_rows([file])]
    told = [ImportedRow(**{name: value for name, value in row.items() if value is not None}) for row in rows]
    assert len(found) == len(told)
    for one, other in zip(found, told, strict=True):
        assert one.model_dump(exclude={*TIMES}) == other.model_dump(exclude={*TIMES})
        ours, theirs = (row.model_dump(include={*TIMES}, exclude_none=True) for row in (one, other))
        assert ours == pytest.approx(theirs, rel=1e-12)


GOOD = [
    "k,p,t_target,t_verify,t_draft\n1,0.8,76,90,8\n2,0.74,76,104,14\n3,0.67,76,117,22\n",
    "| k | al | T_verify (us) | t_draft_s |\n|---|---:|---|---|\n| 0 | - | - | - |\n| 1 | 1.8 | 90000 | 0.008 |\n",
    'prompt;k_max;accepted\na;3;"3,0,1"\nb;3;0 1 2\n',
    'k;speedup;al;workload\n1;"1,3";1,7;code\n2;1,5;2,2;"a;b"\n',
    '[{"k": 1, "al": 1.5, "tpot": 3}, {"k": 0, "tpot": 4.0}, {"prompt": "a", "accepted": [1, 0], "k_max": 1}]',
    '{"k": 2, "num_drafts": 90, "accepted_per_pos": [70, 40]}\n{"k": 2, "t_verify": 5, "t_draft": 1, "t_target": 4}\n',
]


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[str, bytes]:
    """A right file with a few of its bytes changed, doubled, moved or lost."""
    number = draw(st.integers(0, len(GOOD) - 1))
    text = GOOD[number]
    content = bytearray(text.encode(draw(st.sampled_from(["utf-8", "utf-16"]))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content) - 1))
        change = draw(st.sampled_from(["set", "cut", "copy", "drop"]))
        if change == "set":
            content[at] = draw(st.sampled_from(b'\x00\xff\n\r",;|\t[]{}-.0129eaNk') | st.integers(0, 255))
        elif change == "cut" and at:
            del content[at:]
        elif change == "copy":
            content[at:at] = content[at : at + draw(st.integers(1, 30))]
        elif len(content) > 40:
            del content[at : at + draw(st.integers(1, 30))]
    return (".csv" if number < 4 else ".json" if number == 4 else ".jsonl"), bytes(content)


@ONE_FOLDER
@given(spoilt())
@example((".json", b"[" * 100_000))
@example((".json", b'[{"k": 1, "accepted": "' + b"[" * 100_000 + b'", "prompt": "a"}]'))
@example((".json", b'[{"\\ud800\\n": 1}]'))
@example((".json", b'[{"k": 1, "al": 1.5, "drafter": "a\\u001b[31m\\nb", "tpot": 1}]'))
@example((".csv", b'k,al\n1,"1.8\n2,2.4\n'))
@example((".csv", b"\xff\xfe"))
@example((".csv", b"k\n" + b"1" * 5000))
@example((".jsonl", b'{"k": 1' + b"0" * 5000 + b"}"))
@example((".jsonl", b'{"k": 1, "al": 1e999, "t_verify": 1e308, "t_draft": 1e308, "t_target": 1e308}'))
def test_a_spoilt_file_is_an_answer_or_one_line(tmp_path: Path, case: tuple[str, bytes]) -> None:
    ending, content = case
    file = tmp_path / f"rows{ending}"
    file.write_bytes(content)
    try:
        policy = policy_from(read_imported_rows([file]), RULE, {}, 0)
    except UserError as error:
        said = str(error)
        assert said and said.isprintable() and len(said) < 1000
        return
    json.dumps(policy.reasons, allow_nan=False)
    assert policy.choices


def rows_of(tmp_path: Path, name: str, content: str | bytes) -> list[ImportedRow]:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return [placed.row for placed in read_imported_rows([file])]


@pytest.mark.parametrize(
    "content",
    [
        "\ufeffsep=;\r\nk;al\r\n1;1,5\r\n;\r\n\r\n",
        ",k,al\n0,1,1.5\n",  # as pandas writes a frame
        "Unnamed: 0;K ;AL\n7;1,0;1,5\n",
        "k,al,\n1,1.5,\n",
        "k\tal\tworkload\n1\t1.5\n",
        "| k | AL(k) |\n|:-:|---|\n| 1 | 1.5 |\n",
        "al, k\n 1.5 , 1 \n",
        "k,al\n1,1.5\n".encode("utf-16-le"),
        "k,al\n1,1.5\n".encode("utf-16-be"),
    ],
)
def test_what_spreadsheets_and_pandas_write_around_a_table(tmp_path: Path, content: str | bytes) -> None:
    assert rows_of(tmp_path, "rows.csv", content) == [ImportedRow(k=1, al=1.5)]


def test_a_frame_in_parquet_is_its_rows(tmp_path: Path) -> None:
    """NaN for absent, whole numbers as floats, and the index, as pandas writes them."""
    columns = {"K": [0.0, 1.0], "al": [float("nan"), 1.5], "t_target_s": [0.076, float("nan")]}
    columns |= {"t_verify_us": [None, 90_000.0], "t_draft": [None, 8.0], "__index_level_0__": [3, 4]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    found = [placed.row for placed in read_imported_rows([tmp_path / "rows.parquet"])]
    assert found == [ImportedRow(k=0, t_target=76.0), ImportedRow(k=1, al=1.5, t_verify=90.0, t_draft=8.0)]
    whole = (tmp_path / "rows.parquet").read_bytes()
    for end in range(0, len(whole), 7):
        (tmp_path / "cut.parquet").write_bytes(whole[:end])
        with pytest.raises(UserError, match="cannot be read"):
            read_imported_rows([tmp_path / "cut.parquet"])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.csv", 'k,al\n1,"1,80"\n', "r.csv:2: 1,80 could be a decimal or a thousand; write numbers with a decimal"),
        ("r.csv", "k;al;tpot\n1;1,8;9.5\n", "r.csv:2: 1,8 could be a decimal or a thousand beside 9.5"),
        ("r.csv", "k;tokens;rounds\n1;1,234;900\n", "r.csv:2: tokens: "),
        ("r.csv", "k,K\n1,1\n", "r.csv:2: k is told twice"),
        ("r.csv", "sep=;\nk;al\n\n1;9\n", "r.csv:4: al is 9"),
        ("r.csv", "k,k\n1,1\n", "two columns are called k"),
        ("r.csv", "k,,al\n1,9,1.5\n", "column 2 has no name"),
        ("r.csv", "k,t_verify,t_verify_us,t_draft\n1,2,2000,1\n", "t_verify is told twice"),
        ("r.csv", "k,tpot\n1,76 ms\n", "a unit belongs into the column's name (tpot_ms, tpot_us"),
        ("r.csv", "k,p\n1,80\n", "p is a probability, 0.8 for 80 %"),
        ("r.csv", "k,p\n1,80%\n", "p is a probability, 0.8 for 80 %"),
        ("r.csv", "k,accepted,prompt\n3,[3,1],a\n", "put a cell that holds the delimiter ',' into quotes"),
        ("r.csv", b"k,workload\n1,\xfcber\n", "is no UTF-8 text (at byte 13); save it as UTF-8"),
        ("r.json", '[{"k": 1, "k": 2}]', "one row tells k twice"),
        ("r.json", '[{"k": true, "al": 1.5}]', "row 1: k: expected a value, got true"),
        ("r.json", '[{"prompt": "a", "accepted": [1, NaN]}]', "row 1: accepted: "),
        ("r.json", '[{"prompt": "a", "accepted": [1, true]}]', "true and false are no numbers"),
        ("r.json", '[{"prompt": "a", "accepted": [1, -1]}]', "row 1: accepted: "),
        ("r.json", '[{"prompt": "a", "k": 3, "accepted": [4]}]', "accepted holds 4, more than k = 3"),
        ("r.json", '[{"prompt": "a", "accepted": []}]', "give at least one position"),
        ("r.json", '[{"k": 1, "t_target": -3}]', "row 1: t_target: "),
        ("r.jsonl", '{"k": 1, "al": 1.5}\n{"k"\n', "r.jsonl:2: not JSON"),
    ],
)
def test_what_cannot_be_read_says_where_and_how_to_mend_it(
    name: str, content: str | bytes, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        rows_of(tmp_path, name, content)
    assert said in str(caught.value)
