"""The made-up rows of the benchmark at small size: what was planted goes, and nothing else."""

from __future__ import annotations

from pathlib import Path

from benchmarks.datasets_at_scale import accounted_for, held_against
from benchmarks.synthetic_chats import SHARES, SOURCES, SyntheticChats
from components.contract import Context, Prompts
from components.data import collect_chats, deduplicate
from components.data.settings import ChatSource

NUM_ROWS, NUM_SENTENCES = 1000, 4000


def test_planted_duplicates_and_benchmark_prompts_go_and_nothing_else(tmp_path: Path) -> None:
    made = SyntheticChats(3, NUM_SENTENCES)
    files = [made.write(tmp_path, NUM_ROWS, number) for number in range(len(SOURCES))]
    for name in ("collect", "collect-scratch", "clean", "clean-scratch", "benchmark"):
        (tmp_path / name).mkdir()
    made.write_benchmark(tmp_path / "benchmark" / "prompts.jsonl")
    sources = [ChatSource(path=str(file)) for file in files]
    collected = collect_chats(sources=sources, ctx=Context("a", tmp_path / "collect", tmp_path / "collect-scratch"))
    keep_out = [Prompts("b", tmp_path / "benchmark")]
    clean = deduplicate([collected], keep_out, ctx=Context("c", tmp_path / "clean", tmp_path / "clean-scratch"))
    found = held_against(made, NUM_ROWS, collected, clean)
    assert found["planted_exact"] > 30 and found["planted_near"] > 30 and found["planted_contaminated"] > 0
    wrong = {name: value for name, value in found.items() if name.startswith(("recall", "precision")) and value != 1.0}
    assert not wrong and found["groups_without_a_row_left"] == 0
    assert accounted_for({"collect": dict(collected.info), "deduplicate": dict(clean.info)}, NUM_ROWS)


def test_made_rows_depend_on_their_number_alone() -> None:
    one, other = SyntheticChats(1, 200), SyntheticChats(1, 200)
    assert [one.line(number) for number in range(40)] == [other.line(number) for number in reversed(range(40))][::-1]
    assert one.line(0) != SyntheticChats(2, 200).line(0)
    kinds = [one.made(number).kind for number in range(4000)]
    for kind, share in SHARES:
        assert abs(kinds.count(kind) / 4000 - share) < 0.02, kind
    for made in map(one.made, range(4000)):
        assert made.of == made.number or (made.of < made.number and one.made(made.of).kind == "plain")
