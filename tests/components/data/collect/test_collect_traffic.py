"""Served traffic: what is new is decided by content, nothing leaks, and a quiet night says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contract import Context, NothingNew, Prompts, UserError
from components.data import collect_prompts, collect_traffic, mix_prompts
from components.data.collect.traffic import EVALUATION, digest_of, read_seen
from components.data.formats.prompts import SPLITS, Prompt, question_of, read_prompts
from components.data.sources.listing import collect_traffic_fingerprint, traffic_files

NewCtx = Callable[..., Context]


@pytest.fixture
def new_ctx(tmp_path: Path) -> NewCtx:
    def make(seed: int = 0) -> Context:
        place = tmp_path / f"step{len(list(tmp_path.glob('step*')))}"
        (place / "scratch").mkdir(parents=True)
        return Context(key=place.name, out=place, scratch=place / "scratch", seed=seed)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "traffic"
    place.mkdir()
    return place


def chat(text: str, system: str = "") -> dict[str, Any]:
    turns = [{"role": "system", "content": system}] if system else []
    return {"messages": [*turns, {"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}


def write(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def everything(prompts: Prompts) -> list[Prompt]:
    return [prompt for split in SPLITS for prompt in read_prompts(prompts, split)]


def collect(folder: Path, ctx: Context, seen: Prompts | None = None, **changed: Any) -> Prompts:
    return collect_traffic(seen, source=str(folder), ctx=ctx, **{"min_new": 1, "num_train": 500, **changed})


def test_every_night_takes_what_no_night_before_has_used(folder: Path, new_ctx: NewCtx) -> None:
    write(folder / "1.jsonl", [chat(f"first {n}") for n in range(40)])
    first = collect(folder, new_ctx())
    write(folder / "2.jsonl", [chat(f"second {n}") for n in range(30)] + [chat("first  7")])
    (folder / "1.jsonl").rename(folder / "renamed.jsonl")
    second = collect(folder, new_ctx(), first)
    assert second.info["new"] == 30 and second.info["seen"] == 41
    assert {digest_of(p) for p in everything(second)}.isdisjoint(read_seen(first))
    assert read_seen(first) < read_seen(second) and len(read_seen(second)) == 70
    with pytest.raises(NothingNew, match=r"no conversation that the champion has not had .*71 rows, 71 seen"):
        collect(folder, new_ctx(), second)


@pytest.mark.parametrize(("count", "limit", "nights"), [(80, 24, 3), (200, 60, 3), (30, 60, 1)])
def test_what_is_beyond_a_nights_limit_is_used_once_in_the_nights_after(
    folder: Path, new_ctx: NewCtx, count: int, limit: int, nights: int
) -> None:
    write(folder / "1.jsonl", [chat(f"word {n}") for n in range(count)])
    taken: list[int] = []
    seen: Prompts | None = None
    for night in range(nights):
        seen = collect(folder, new_ctx(), seen, num_train=limit)
        taken += [digest_of(prompt) for prompt in everything(seen)]
        assert len(list(read_prompts(seen, "train"))) <= limit and read_seen(seen) == set(taken)
        assert seen.info["waiting"] == count - len(taken) == seen.info["new"] - len(everything(seen)), night
    assert len(taken) == len(set(taken)) == count
    with pytest.raises(NothingNew):
        collect(folder, new_ctx(), seen)


def test_the_night_after_a_refusal_tries_others_of_what_waits(folder: Path, new_ctx: NewCtx) -> None:
    write(folder / "1.jsonl", [chat(f"word {n}") for n in range(200)])
    first = collect(folder, new_ctx(), num_train=24)
    write(folder / "2.jsonl", [chat(f"later {n}") for n in range(5)])
    second = collect(folder, new_ctx(), num_train=24)  # the first was refused: it counts as seen by nobody
    tried = [{digest_of(prompt) for prompt in read_prompts(night, "train")} for night in (first, second)]
    assert len(tried[0] & tried[1]) < 12, "nearly the same conversations give nearly the same drafter"


@pytest.mark.parametrize(("limit", "advised"), [(24, True), (100, False)])
def test_it_says_what_waits_and_where_a_night_takes_too_little(
    folder: Path, new_ctx: NewCtx, limit: int, advised: bool
) -> None:
    write(folder / "1.jsonl", [chat(f"word {n}") for n in range(200)])
    said, to_train = list[str](), collect(folder, new_ctx()).info["num_train"]
    ctx = replace(new_ctx(), send=lambda event: said.append(str(event.get("message", ""))))
    made = collect(folder, ctx, num_train=limit, num_test=8, num_validation=4)
    waiting, to_judge = made.info["waiting"], made.info["waiting_to_judge"]
    assert waiting - to_judge == to_train - limit > 0 and to_judge > 0
    assert f"; {waiting} wait for the next night ({to_train - limit} to train on, {to_judge} to judge on)" in said[-1]
    assert ("raise num_train" in said[-1]) == advised


def test_the_watermark_goes_through_the_mix(folder: Path, new_ctx: NewCtx) -> None:
    write(folder / "1.jsonl", [chat(f"first {n}") for n in range(60)])
    first = collect(folder, new_ctx())
    mixed = mix_prompts(first, None, ctx=new_ctx())
    assert read_seen(mixed) == read_seen(first)
    with pytest.raises(NothingNew):
        collect(folder, new_ctx(), mixed)


def test_the_prompts_of_a_first_drafter_are_a_watermark_too(folder: Path, tmp_path: Path, new_ctx: NewCtx) -> None:
    write(tmp_path / "old.jsonl", [chat(f"old {n}") for n in range(50)])
    old = collect_prompts(source=str(tmp_path / "old.jsonl"), ctx=new_ctx())
    write(folder / "1.jsonl", [chat(f"old {n}") for n in range(50)] + [chat(f"new {n}") for n in range(50)])
    found = collect(folder, new_ctx(), old)
    assert found.info["seen"] == len(everything(old)) > 40
    assert {digest_of(p) for p in everything(found)}.isdisjoint(read_seen(old))


@settings(max_examples=25, deadline=None)
@given(nights=st.lists(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 3)), max_size=40), min_size=1, max_size=4))
def test_nothing_judged_on_is_ever_trained_on(
    nights: list[list[tuple[int, int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever arrives and in whatever order: the same question, under any system prompt, stays on its side."""
    root = tmp_path_factory.mktemp("nights")
    (root / "traffic").mkdir()
    trained: set[str] = set()
    judged: set[str] = set()
    seen: Prompts | None = None
    for number, night in enumerate(nights):
        rows = [chat(f"question {asked}", f"system {system}" if system else "") for asked, system in night]
        write(root / "traffic" / f"{number}.jsonl", rows)
        ctx = Context(key=str(number), out=root / f"out{number}", scratch=root)
        ctx.out.mkdir()
        try:
            seen = collect(root / "traffic", ctx, seen, evaluation_percent=40)
        except NothingNew:
            continue
        trained |= {question_of(p) for p in read_prompts(seen, "train")}
        judged |= {question_of(p) for split in EVALUATION for p in read_prompts(seen, split)}
    assert trained.isdisjoint(judged)


def test_the_champions_evaluation_questions_are_kept_out_and_its_trained_ones_are_not_judged_on(
    folder: Path, tmp_path: Path, new_ctx: NewCtx
) -> None:
    write(tmp_path / "old.jsonl", [chat(f"q {n}") for n in range(100)])
    old = collect_prompts(source=str(tmp_path / "old.jsonl"), num_test=30, num_train=400, ctx=new_ctx())
    again = [chat(f"q {n}", "another system prompt") for n in range(100)]
    write(folder / "1.jsonl", again + [chat(f"fresh {n}") for n in range(50)])
    found = collect(folder, new_ctx(), old, evaluation_percent=60)
    judged_then = {question_of(p) for split in EVALUATION for p in read_prompts(old, split)}
    trained_then = {question_of(p) for p in read_prompts(old, "train")}
    assert {question_of(p) for p in everything(found)}.isdisjoint(judged_then)
    assert {question_of(p) for s in EVALUATION for p in read_prompts(found, s)}.isdisjoint(trained_then)
    assert found.info["kept_out"] > 0 and found.info["trained_on"] > 0


def test_an_own_benchmark_is_kept_out(folder: Path, tmp_path: Path, new_ctx: NewCtx) -> None:
    bench = write(tmp_path / "bench.jsonl", [chat(f"q {n}") for n in range(5)])
    write(folder / "1.jsonl", [chat(f"q {n}") for n in range(60)])
    found = collect(folder, new_ctx(), keep_out=str(bench))
    assert found.info["kept_out"] == 5
    assert str(bench) in collect_traffic_fingerprint({"source": str(folder), "keep_out": str(bench)})


def test_bad_rows_are_set_aside_and_counted(folder: Path, new_ctx: NewCtx) -> None:
    rows = [chat(f"q {n}") for n in range(40)]
    file = write(folder / "1.jsonl", [*rows, {"messages": []}, {"nothing": 1}, "text", chat("q 1"), chat("x" * 5000)])
    with file.open("a") as out:
        out.write('{"messages": [{"role": "us')  # the server was writing this line when we came
    ctx = new_ctx()
    found = collect(folder, ctx)
    assert (found.info["set_aside"], found.info["duplicates"], found.info["too_long"]) == (4, 1, 1)
    assert found.info["new"] == 40
    assert len((ctx.out / "set_aside.jsonl").read_text().splitlines()) == 4


def test_a_torn_file_stops_no_night_and_is_told_where_it_was_named(folder: Path, new_ctx: NewCtx) -> None:
    write(folder / "good.jsonl", [chat(f"q {n}") for n in range(20)])
    torn = folder / "torn.parquet"
    torn.write_bytes(b"PAR1 and nothing more")
    found = collect(folder, ctx := new_ctx())
    assert (found.info["new"], found.info["set_aside"]) == (20, 1)
    assert "torn.parquet" in (ctx.out / "set_aside.jsonl").read_text()
    with pytest.raises(UserError, match=r"torn\.parquet: not readable as Parquet"):
        collect(torn, new_ctx())


def test_logged_requests_and_tables_are_read(folder: Path, new_ctx: NewCtx) -> None:
    """OpenAI's batch files, gateways that log the request, and a table that keeps messages as JSON text."""
    body = [{"custom_id": str(n), "body": {"model": "m", **chat(f"batch {n}")}, "app": "search"} for n in range(20)]
    log = [{"request": json.dumps(chat(f"log {n}")), "app": "chat"} for n in range(20)]
    write(folder / "a.jsonl", body + log)
    turns = [chat(f"table {n}")["messages"] for n in range(20)]
    table = {"messages": [json.dumps(turn) for turn in turns], "app": ["chat"] * 20}
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "b.parquet")
    pyarrow.parquet.write_table(
        pyarrow.table({"messages": [chat(f"struct {n}")["messages"] for n in range(20)], "app": ["chat"] * 20}),
        folder / "c.parquet",
    )
    write(folder / "d.jsonl", [{"messages": "[not json", "app": "chat"}])
    found = collect(folder, new_ctx(), workload_field="app", num_test=50)
    assert found.info["new"] == 80 and found.info["set_aside"] == 1
    assert {p.workload for p in everything(found)} == {"search", "chat"}


@pytest.mark.parametrize(("count", "why"), [(0, "0 rows"), (5, "fewer than min_new 8"), (2, "fewer than min_new 8")])
def test_a_quiet_night_ends_with_nothing_new(folder: Path, new_ctx: NewCtx, count: int, why: str) -> None:
    write(folder / "1.jsonl", [chat(f"q {n}") for n in range(count)])
    with pytest.raises(NothingNew, match=why):
        collect(folder, new_ctx(), min_new=8)


def test_an_empty_folder_is_quiet_and_a_missing_one_is_a_mistake(folder: Path, new_ctx: NewCtx) -> None:
    (folder / "empty.jsonl").touch()
    (folder / ".hidden.jsonl").write_text("{}")
    (folder / "notes.log").write_text("x")
    assert traffic_files(str(folder)) == ([], 1)
    assert traffic_files(str(folder / "2026-*" / "*.jsonl")) == ([], 0)
    with pytest.raises(NothingNew):
        collect(folder, new_ctx())
    assert collect_traffic_fingerprint({"source": str(folder)}) == {}
    for wrong in (folder / "none", folder / "none" / "*.jsonl", folder / "none.jsonl", Path("\0")):
        with pytest.raises(UserError, match="source: "):
            collect_traffic_fingerprint({"source": str(wrong)})


def test_the_fingerprint_follows_content(folder: Path) -> None:
    file = write(folder / "1.jsonl", [chat("one")])
    first = collect_traffic_fingerprint({"source": str(folder)})
    assert first == collect_traffic_fingerprint({"source": str(folder)})
    write(file, [chat("two")])
    assert first != collect_traffic_fingerprint({"source": str(folder)})


def test_the_same_files_give_the_same_artifact(folder: Path, new_ctx: NewCtx) -> None:
    write(folder / "1.jsonl", [chat(f"q {n}") for n in range(300)])
    first, second = collect(folder, new_ctx(), num_train=40), collect(folder, new_ctx(), num_train=40)
    for name in ("prompts.jsonl", "seen.txt"):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


def test_no_more_than_max_new_are_looked_at_and_the_rest_waits(folder: Path, new_ctx: NewCtx) -> None:
    write(folder / "1.jsonl", [chat(f"q {n}") for n in range(100)])
    first = collect(folder, new_ctx(), max_new=60)
    second = collect(folder, new_ctx(), first, max_new=60)
    assert (first.info["new"], second.info["new"]) == (60, 40 + first.info["waiting"])


def test_a_broken_watermark_is_told(folder: Path, new_ctx: NewCtx) -> None:
    write(folder / "1.jsonl", [chat(f"q {n}") for n in range(60)])
    first = collect(folder, new_ctx())
    (first.path / "seen.txt").write_text("not a digest\n")
    with pytest.raises(UserError, match=r"seen\.txt: not a list of digests"):
        collect(folder, new_ctx(), first)
