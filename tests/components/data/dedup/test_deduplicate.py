"""One row of each thing stays, always the same one, whatever the order, the parts, the workers or a kill in between.

Rows that are alike are joined, and of each group the preferred, longest row stays.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from near_copies import changed, prose, some_rows
from rows_for_deduplication import Result, benchmark, bytes_of, chat, deduplicated, document, result_of, written

from components.contract import Chats, Context, UserError
from components.data.dedup.deduplicate import WINDOW
from components.data.formats.chats import Chat, read_dropped, read_manifest

ROOT = Path(__file__).parents[4]
SOAK_SEED = int(os.environ.get("DRAFTSMITH_SOAK_SEED", "0"))


def test_exact_and_near_duplicates_go_and_each_names_the_row_that_stays(tmp_path: Path) -> None:
    text = prose(1)
    rows = [
        chat("What is it?", changed(text), "good", "g:1"),
        chat("what  is it?", changed(text).upper(), "other", "o:1"),
        chat("What is it?", changed(text, 20), "other", "o:2"),
        chat("What is it?", changed(prose(2)), "other", "o:3"),
    ]
    found = deduplicated(tmp_path, rows, prefer=["good"])
    assert found.places == {("good", "g:1"), ("other", "o:3")}
    gone = {row["where"]: row for row in found.dropped}
    assert [gone[where]["reason"] for where in ("o:1", "o:2")] == ["exact_duplicate", "near_duplicate"]
    for row in gone.values():
        assert (row["kept_id"], row["kept_where"]) == (rows[0].row_id, "g:1")
    assert gone["o:1"]["similarity"] == 1.0
    grams = [{tuple(words[at : at + 5]) for at in range(len(words) - 4)} for words in _said(rows[0], rows[2])]
    assert gone["o:2"]["similarity"] == pytest.approx(len(grams[0] & grams[1]) / len(grams[0] | grams[1]))


def _said(*rows: Chat) -> list[list[str]]:
    return [row.as_text().lower().replace("?", "").split() for row in rows]


def test_kept_and_dropped_are_what_was_read(tmp_path: Path) -> None:
    rows = some_rows()
    found = deduplicated(tmp_path, rows)
    info = found.made.info
    assert info["num_read"] == len(rows) == info["num_rows"] + info["num_dropped"]
    assert info["num_dropped"] == sum(info["dropped"].values()) == len(found.dropped)
    places = sorted((row.source, row.where) for row in rows)
    assert sorted([*found.places, *((row["source"], row["where"]) for row in found.dropped)]) == places
    assert read_manifest(found.made)["num_rows"] == info["num_rows"]
    assert info["by_source"] == read_manifest(found.made)["by_source"]
    for row in read_dropped(found.made.path):  # what every step's dropped.parquet can be asked
        assert set(row) == {"reason", "source", "where", "excerpt"} and row["excerpt"]


def test_the_rows_that_stay_keep_their_order_and_content(tmp_path: Path) -> None:
    rows = some_rows()
    found = deduplicated(tmp_path, rows)
    assert found.kept == [row for row in rows if (row.source, row.where) in found.places]


def test_every_exact_duplicate_is_found_across_sources_shapes_and_parts(tmp_path: Path) -> None:
    rows = [chat(f"q {n}", changed(prose(n)), source, f"{source}:{n}") for n in range(20) for source in ("a", "b", "c")]
    found = deduplicated(tmp_path, rows, rows_per_part=7)
    assert len(found.kept) == 20
    assert found.made.info["dropped"] == {"exact_duplicate": 40}


def test_short_rows_are_duplicates_only_of_the_same_words(tmp_path: Path) -> None:
    rows = [chat("hi", "hello", where="1"), chat("HI", " hello", where="2"), chat("hi", "hello!", where="3")]
    rows += [document("3 + 4"), document("3 - 4"), document("?"), document("!")]
    found = deduplicated(tmp_path, rows)
    assert found.made.info["dropped"] == {"exact_duplicate": 1}


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="prefer: wiki: no row has this source; there are web"):
        deduplicated(tmp_path, [chat("a", "b")], prefer=["wiki"])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_what_stays_does_not_depend_on_order_or_parts(
    tmp_path_factory: pytest.TempPathFactory, shuffle: random.Random, rows_per_part: int
) -> None:
    rows = some_rows()
    expected = deduplicated(tmp_path_factory.mktemp("a"), rows)
    shuffle.shuffle(rows)
    found = deduplicated(tmp_path_factory.mktemp("b"), rows, rows_per_part=rows_per_part)
    assert found.places == expected.places
    assert {row["where"]: row["kept_id"] for row in found.dropped} == {
        row["where"]: row["kept_id"] for row in expected.dropped
    }


@pytest.mark.parametrize("similarity", [0.5, 0.8])
def test_deduplicating_twice_removes_nothing_more(tmp_path: Path, similarity: float) -> None:
    once = deduplicated(tmp_path, some_rows(), similarity=similarity)
    twice = deduplicated(tmp_path, [once.made], similarity=similarity)
    assert once.dropped and not twice.dropped
    assert twice.kept == once.kept


def kill_at(moment: str, given: Chats, out: Path, scratch: Path) -> bool:
    """Run the step in a process that is killed when it says that it is there; whether it got so far."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom components.contract import Chats, Context\n"
        "from components.data import deduplicate\n"
        "out, scratch, given = map(Path, sys.argv[1:])\n"
        "say = lambda event: print(event.get('what'), event.get('done'), flush=True) or time.sleep(0.05)\n"
        "deduplicate([Chats('k', given)], ctx=Context('k', out, scratch, send=say))\n"
    )
    for folder in (out, scratch):
        folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", program, str(out), str(scratch), str(given.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        there = any(line.startswith(moment) for line in process.stdout)
        process.kill()
    return there


def test_a_killed_step_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    given = written(tmp_path / "given", some_rows(), 5)
    expected = deduplicated(tmp_path, [given])
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    for moment in ("parts read 3", "bands compared 2", "rows written"):
        assert kill_at(moment, given, out, scratch)
    events: list[dict[str, Any]] = []
    made = deduplicated_in(Context("k", out, scratch, send=lambda event: events.append(dict(event))), given)
    assert bytes_of(made.made.path) == bytes_of(expected.made.path)
    assert not [event for event in events if event.get("what") == "parts read"]  # all were left by those killed


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_twenty_kills_at_random_moments_change_no_byte(tmp_path: Path) -> None:
    from benchmarks.record import write_record  # found from the project's root only, where `make soak` runs

    rng, started = random.Random(SOAK_SEED), time.monotonic()
    given = written(tmp_path / "given", some_rows(), 3)
    expected = bytes_of(deduplicated(tmp_path, [given]).made.path)
    kinds = ("parts read", "bands compared", "rows written")
    kills: list[dict[str, Any]] = []
    faults: list[str] = []
    homes = 0
    while len(kills) < 20:
        out, scratch = tmp_path / f"out{homes}", tmp_path / f"scratch{homes}"
        homes += 1
        for _ in range(rng.randint(1, 3)):
            moment = f"{rng.choice(kinds)} {rng.choice(('', rng.randint(1, 9)))}".rstrip()
            if kill_at(moment, given, out, scratch):  # else it ended without coming there: no kill
                kills.append({"home": homes, "at": moment})
        made = deduplicated_in(Context("k", out, scratch), given)
        if bytes_of(made.made.path) != expected:
            faults.append(f"home {homes} differs from the undisturbed run")
    told = {"kills": len(kills), "seed": SOAK_SEED, "homes": homes, "files": len(expected)}
    seconds = round(time.monotonic() - started, 1)
    write_record("soak-deduplicate-kills", {**told, "seconds": seconds, "faults": faults, "each_kill": kills})
    assert faults == []


def deduplicated_in(ctx: Context, given: Chats) -> Result:
    from components.data import deduplicate

    return result_of(deduplicate([given], ctx=ctx))


def test_several_artifacts_and_none_at_all(tmp_path: Path) -> None:
    first = written(tmp_path / "first", [chat("q", changed(prose(1)), "a")])
    second = written(tmp_path / "second", [chat("q", changed(prose(1)), "b"), chat("q", changed(prose(2)), "b")])
    empty = written(tmp_path / "empty", [])
    found = deduplicated(tmp_path, [first, empty, second])
    assert found.made.info["num_rows"] == 2
    assert list(found.made.info["duplicates_between"].values()) == [1]
    nothing = deduplicated(tmp_path, [empty], [benchmark(tmp_path / "bench", "anything at all")])
    assert nothing.kept == [] and nothing.made.info["num_read"] == 0


def test_a_clean_row_stays_where_its_near_duplicate_is_contaminated(tmp_path: Path) -> None:
    question = changed(prose(50, 30))
    long = changed(prose(51, 300))
    keep_out = [benchmark(tmp_path / "bench", question)]
    rows = [document(f"{long} {question}", "a"), document(long, "b")]
    found = deduplicated(tmp_path, rows, keep_out)
    assert [row.source for row in found.kept] == ["b"]
    assert found.made.info["dropped"] == {"contaminated": 1}


@pytest.mark.parametrize(
    ("settings", "stays"),
    [({}, "long:1"), ({"prefer": ["short"]}, "short:1"), ({"prefer": ["none", "short", "long"]}, "none:1")],
)
def test_the_preferred_source_stays_then_the_longer(tmp_path: Path, settings: dict[str, Any], stays: str) -> None:
    text = prose(5)
    rows = [
        chat("q", changed(text, 40), "none", "none:1"),
        chat("q", changed(text), "short", "short:1"),
        chat("q", changed(text) + " and a little more", "long", "long:1"),
    ]
    assert [row.where for row in deduplicated(tmp_path, rows, **settings).kept] == [stays]


def test_rows_that_others_connect_leave_one(tmp_path: Path) -> None:
    chain = [changed(prose(99), *range(5, 5 + 10 * step, 10)) for step in range(6)]  # neighbours are alike, no others
    found = deduplicated(tmp_path, [document(text) for text in chain], similarity=0.7)
    assert len(found.kept) == 1
    assert min(row["similarity"] for row in found.dropped) < 0.7 <= max(row["similarity"] for row in found.dropped)


def test_a_crowd_of_alike_rows_is_told_apart_as_far_as_it_differs(tmp_path: Path) -> None:
    """More rows in a band than are compared pair by pair: a template that is filled in differently."""
    frame = prose(3, 40)
    rows = []
    for group in range(3 * WINDOW):
        words = [*frame, *prose(1000 + group, 12)]
        rows += [document(changed(words)), document(changed(words, 20))]
    found = deduplicated(tmp_path, rows, similarity=0.75)
    again = deduplicated(tmp_path, [found.made], similarity=0.75)
    assert found.made.info["passes"] > 1
    assert found.dropped and not again.dropped


def test_pairs_found_are_the_pairs_that_are_there(tmp_path: Path) -> None:
    """Against all pairs compared by sets of words, one text after the other."""
    rows = some_rows()
    found = deduplicated(tmp_path, rows, num_permutations=256)
    gone = {row["where"] for row in found.dropped if row["reason"] == "near_duplicate"}
    kept = [row for row in rows if row.where not in {one["where"] for one in found.dropped}]
    for row in (row for row in rows if row.where in gone):
        assert max(_jaccard(row, other) for other in rows if other is not row) >= 0.8
    for one in kept:
        for other in kept:
            assert one is other or _jaccard(one, other) < 0.8


def _jaccard(one: Chat, other: Chat) -> float:
    units = [[*text.lower().replace("!", "").replace("?", "").split()] for text in (one.as_text(), other.as_text())]
    units = [list(words[0]) if len(words) == 1 else words for words in units]  # Chinese: by character
    grams = [{tuple(words[at : at + 5]) for at in range(len(words) - 4)} for words in units]
    return len(grams[0] & grams[1]) / max(len(grams[0] | grams[1]), 1)


def test_similarity_is_monotone(tmp_path: Path) -> None:
    counts = [deduplicated(tmp_path, some_rows(), similarity=s).made.info["num_rows"] for s in (0.3, 0.6, 0.8, 1.0)]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert np.diff(counts).min() >= 0
