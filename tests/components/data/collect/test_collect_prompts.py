"""Prompts of rows: every usable row is read in any format, every wrong row is named with its line, none is lost.

No question is on both sides of a split, whatever else is in the rows.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from collected_chats import write_lines
from hypothesis import strategies as st

from components.contract import Context, Prompts, UserError
from components.data import collect_prompts
from components.data.collect import prompts as prompt_splits
from components.data.formats.prompts import SPLITS, Prompt, question_of, read_prompts
from components.data.sources.files import read_rows
from components.data.sources.listing import collect_prompts_fingerprint

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def context(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(key="k", out=folder, scratch=folder)


def questions(number: int) -> list[dict[str, str]]:
    return [{"question": f"What is {index} plus {index}?", "answer": str(2 * index)} for index in range(number)]


def test_malformed_rows_are_set_aside_with_their_lines(tmp_path: Path) -> None:
    good = [json.dumps(row) for row in questions(60)]
    lines = [*good[:10], "{not json", "[1, 2]", '{"question": 3}', "", *good[10:], '{"question": "cut'.strip()]
    file = tmp_path / "rows.jsonl"
    file.write_bytes("\n".join(lines).encode() + b'\n{"question": "\xff"}\n{"a": NaN}\n')
    prompts = collect_prompts(source=str(file), num_train=50, num_test=4, num_validation=4, ctx=context(tmp_path / "o"))
    aside = [json.loads(line) for line in (prompts.path / "set_aside.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in aside] == [11, 12, 13, 65, 66, 67]
    assert prompts.info["set_aside"] == 6
    assert prompts.info["found"] == 60
    assert all(entry["source"] == str(file) and entry["why"] for entry in aside)


def test_all_formats_give_the_same_prompts(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = questions(60)
    (tmp_path / "array").mkdir()
    files = [
        write_lines(tmp_path / "rows.jsonl", rows),
        tmp_path / "array" / "rows.json",
        tmp_path / "rows.json",
        tmp_path / "rows.parquet",
        tmp_path / "rows.jsonl.gz",
        tmp_path / "rows.ndjson",
        tmp_path / "rows.json.gz",
    ]
    files[1].write_text(json.dumps(rows, indent=2))
    files[2].write_text(json.dumps({"version": 1, "data": rows}))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), files[3])
    files[4].write_bytes(gzip.compress(files[0].read_bytes()))
    files[5].write_bytes(b"\xef\xbb\xbf" + files[0].read_bytes().replace(b"\n", b"\r\n"))
    files[6].write_bytes(gzip.compress(b"\xef\xbb\xbf" + files[1].read_bytes()))
    made = []
    for number, file in enumerate(files):
        prompts = collect_prompts(source=str(file), num_train=20, ctx=context(tmp_path / str(number)))
        made.append([[prompt.prompt_id for prompt in read_prompts(prompts, split)] for split in SPLITS])
    assert all(ids == made[0] for ids in made)


def test_what_is_kept_out_is_in_no_split(tmp_path: Path) -> None:
    source, benchmark = tmp_path / "rows.jsonl", tmp_path / "benchmark.jsonl"
    write_lines(source, questions(200))
    write_lines(benchmark, [{"turns": [row["question"].replace(" ", "\n")]} for row in questions(120)[40:]])
    made = collect_prompts(source=str(source), keep_out=str(benchmark), num_test=4, ctx=context(tmp_path / "out"))
    assert made.info["kept_out"] == 80
    left = {question_of(prompt) for split in SPLITS for prompt in read_prompts(made, split)}
    assert left <= {row["question"] for row in [*questions(40), *questions(200)[120:]]}
    before = collect_prompts_fingerprint({"source": str(source), "keep_out": str(benchmark)})
    write_lines(benchmark, questions(3))
    assert collect_prompts_fingerprint({"source": str(source), "keep_out": str(benchmark)}) != before
    with pytest.raises(UserError, match=r"^keep_out: .*no such file"):
        collect_prompts(source=str(source), keep_out="absent.jsonl", ctx=context(tmp_path / "out"))


def test_a_benchmark_can_be_for_evaluation_only(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", questions(50))
    asked: dict[str, Any] = {"num_train": 0, "num_validation": 0, "num_warm_up": 2, "evaluation_percent": 100}
    made = collect_prompts(source=str(file), num_test=48, **asked, ctx=context(tmp_path / "out"))
    assert [len(read_prompts(made, split)) for split in SPLITS] == [0, 0, 48, 2]


def test_rows_beyond_the_limit_are_not_read_and_that_is_said(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", questions(300))
    events: list[Any] = []
    ctx = context(tmp_path / "out")
    ctx.send = events.append
    assert collect_prompts(source=str(file), num_test=2, max_rows=250, ctx=ctx).info["found"] == 250
    assert any("max_rows" in event.get("message", "") for event in events)


def test_a_killed_attempt_leaves_no_row_set_aside_twice(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", [*questions(60), {"bad": 1}])
    for _ in range(2):
        made = collect_prompts(source=str(file), ctx=context(tmp_path / "out"))
        assert len((made.path / "set_aside.jsonl").read_text().splitlines()) == 1


def test_labels_are_text(tmp_path: Path) -> None:
    rows: list[Any] = [{**row, "kind": "sums"} for row in questions(60)]
    rows += [{"question": "Why?", "kind": kind} for kind in (3, None, "", "half \ud800")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))  # escaped: half a character is no UTF-8
    made = collect_prompts(source=str(file), workload_field="kind", ctx=context(tmp_path / "out"))
    assert set(made.info["workloads"]) == {"sums"} and made.info["set_aside"] == 4


def test_a_parquet_row_that_is_not_text_costs_itself_only(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    column = pyarrow.array([b"one", b"\xff", None, "三".encode()], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "rows.parquet")
    aside: list[int] = []
    rows = list(read_rows(tmp_path / "rows.parquet", lambda source, line, why, row: aside.append(line)))
    assert rows == [(1, {"prompt": "one"}), (3, {"prompt": None}), (4, {"prompt": "三"})]
    assert aside == [2]


lines = st.one_of(
    st.binary(max_size=30),
    json_values.map(lambda value: json.dumps(value).encode()),
    json_values.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [b"", b"  ", b"NaN", b"Infinity", b'{"a": 1e999}', b"1" * 5000, b"[" * 3000, b"\xef\xbb\xbf{}", b'{"a": "\r"}']
    ),
).map(lambda line: line.replace(b"\n", b" "))


def test_unicode_line_separators_survive(tmp_path: Path) -> None:
    rows = [{"prompt": f"line\u2028{index}\u0085end\x0c"} for index in range(40)]
    prompts = collect_prompts(source=str(write_lines(tmp_path / "r.jsonl", rows)), ctx=context(tmp_path / "out"))
    texts = {prompt.text for split in SPLITS for prompt in read_prompts(prompts, split)}
    assert texts <= {row["prompt"] for row in rows}
    assert len(texts) > 30


def development_data() -> Path | None:
    """Public data sets for trying things out; not part of the project, so tests that use them skip without them."""
    named = os.environ.get("DRAFTSMITH_DEV_DATA")
    folder = Path(named) if named else Path(__file__).parents[5] / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.mark.skipif(development_data() is None, reason="no development data (set DRAFTSMITH_DEV_DATA)")
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("chat/alpaca_en.json", 999),
        ("chat/alpaca_zh.json", 1000),
        ("chat/sharegpt_256.jsonl", 256),
        ("chat/sharegpt_256_qwen3.jsonl", 256),
        ("prompts/HumanEval.jsonl.gz", 164),
        ("prompts/gsm8k_test.jsonl", 1319),
        ("prompts/mt_bench.jsonl", 80),
        ("prompts/spec_bench.jsonl", 480),
    ],
)
def test_public_data_sets_are_read_whole(tmp_path: Path, name: str, number: int) -> None:
    folder = development_data()
    assert folder is not None
    prompts = collect_prompts(source=str(folder / name), ctx=context(tmp_path))
    assert prompts.info["found"] == number
    assert prompts.info["set_aside"] == 0


def by_split(prompts: Prompts) -> dict[str, set[str]]:
    return {
        split: {" ".join(str(prompt.text or prompt.messages).split()) for prompt in read_prompts(prompts, split)}
        for split in SPLITS
    }


def test_no_prompt_is_in_two_splits_even_with_other_white_space(tmp_path: Path) -> None:
    rows = questions(200)
    respaced = [{"question": row["question"].replace(" ", "  ")} for row in rows]
    file = write_lines(tmp_path / "rows.jsonl", [*rows, *respaced, *rows])
    prompts = collect_prompts(source=str(file), num_train=300, num_test=10, ctx=context(tmp_path / "out"))
    splits = by_split(prompts)
    assert sum(len(part) for part in splits.values()) == len(set().union(*splits.values()))
    for split in SPLITS:
        assert len(read_prompts(prompts, split)) == len(splits[split])
    assert prompts.info["duplicates_across_splits"] + prompts.info["duplicates_within_split"] >= 200


def test_adding_rows_moves_no_training_prompt_to_the_evaluation(tmp_path: Path) -> None:
    def split(number: int) -> dict[str, set[str]]:
        file = write_lines(tmp_path / f"{number}.jsonl", questions(number))
        return by_split(collect_prompts(source=str(file), num_train=999, ctx=context(tmp_path / str(number))))

    few, many = split(100), split(200)
    assert few["train"] <= many["train"]
    assert not few["train"] & (many["test"] | many["validation"] | many["warm_up"])


def test_a_question_is_on_one_side_whatever_the_system_prompt_and_the_file(tmp_path: Path) -> None:
    def chats(system: str) -> list[dict[str, Any]]:
        turns = [[{"role": "user", "content": row["question"]}] for row in questions(150)]
        return [{"messages": [{"role": "system", "content": system}, *turn]} for turn in turns]

    folder = tmp_path / "rows"
    folder.mkdir()
    write_lines(folder / "a.jsonl", chats("Be brief."))
    write_lines(folder / "b.jsonl", chats("Be kind."))
    write_lines(folder / "c.jsonl", [{"prompt": row["question"]} for row in questions(150)])
    prompts = collect_prompts(source=str(folder), num_train=999, num_test=9, ctx=context(tmp_path / "out"))
    asked = {split: {question_of(prompt) for prompt in read_prompts(prompts, split)} for split in SPLITS}
    assert sum(map(len, asked.values())) == len(set().union(*asked.values()))
    assert prompts.info["num_train"] == 3 * len(asked["train"]) > 300


def test_memory_follows_the_need_and_the_choice_is_that_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Prompt(f"{number}", "train", "w", "s", f"ask {number}", None) for number in range(400)]
    wanted = {"test": 3, "warm_up": 1, "validation": 3, "train": 9}

    def chosen(prune_above: int) -> dict[str, list[Prompt]]:
        monkeypatch.setattr(prompt_splits, "_PRUNE_ABOVE", prune_above)
        dealt = prompt_splits.split_prompts(rows, wanted, Counter(), seed=3, evaluation_percent=20)
        return prompt_splits.select_prompts(dealt, wanted, Counter(), 3)

    assert chosen(0) == chosen(10**9)
