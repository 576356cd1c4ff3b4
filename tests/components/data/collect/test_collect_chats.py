"""Collected chats are accounted for row by row, and the same bytes for any number of workers and after any kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from collected_chats import collect, context, digests, rows, write_lines

from components.data import collect_chats
from components.data.collect import chats as chat_collecting
from components.data.formats.chats import Chat, read_chats, read_dropped, read_manifest
from components.data.settings import ChatSource, Cleaning

SOAK_SEED = int(os.environ.get("DRAFTSMITH_SOAK_SEED", "0"))


def test_every_row_names_its_source_language_and_domain(tmp_path: Path) -> None:
    chinese = [
        {"prompt": f"请用几句话介绍第{n}座桥的历史和现状。", "response": f"第{n}座桥建于很久以前，现在仍然有人走。"}
        for n in range(3)
    ]
    made = collect(
        tmp_path / "out",
        str(write_lines(tmp_path / "bridges.jsonl", chinese)),
        {"path": str(write_lines(tmp_path / "en.jsonl", rows(3))), "name": "town", "domain": "towns"},
        {
            "path": str(write_lines(tmp_path / "named.jsonl", [{**row, "topic": "trains"} for row in rows(2, 50)])),
            "language": "fr",
            "domain_field": "topic",
        },
    )  # fmt: skip
    found = [(chat.source, chat.language, chat.domain) for chat in read_chats(made)]
    assert found == [("bridges", "zh", "general")] * 3 + [("town", "en", "towns")] * 3 + [("named", "fr", "trains")] * 2
    assert {name: counts["kept"] for name, counts in made.info["by_source"].items()} == read_manifest(made)["by_source"]
    assert made.info["languages"] == {"en": 3, "zh": 3, "fr": 2}


def test_what_cleaning_refuses_is_counted_and_can_be_read(tmp_path: Path) -> None:
    bad = [*rows(3), {"prompt": "How are you?", "response": "As an AI language model, I have no feelings at all."}]
    made = collect(tmp_path / "kept", str(write_lines(tmp_path / "a.jsonl", bad)))
    assert made.info["num_rows"] == 3
    (dropped,) = read_dropped(made.path)
    assert (dropped["source"], dropped["where"]) == ("a", "a.jsonl:4")
    assert dropped["excerpt"].startswith("How are you?")
    lenient = collect(tmp_path / "all", str(tmp_path / "a.jsonl"), clean=Cleaning(boilerplate=False, refusals=False))
    assert lenient.info["num_rows"] == 4


def test_redaction_reaches_turns_reasoning_and_calls(tmp_path: Path) -> None:
    pytest.importorskip("phonenumbers")
    pytest.importorskip("detect_secrets")
    turns = [
        {"role": "user", "content": "Write to ada.lovelace@example.org for me, please."},
        {
            "role": "assistant",
            "content": "I shall write to ada.lovelace@example.org at once.",
            "reasoning_content": "The address is ada.lovelace@example.org.",
            "tool_calls": [{"function": {"name": "mail", "arguments": {"to": "ada.lovelace@example.org"}}}],
        },
        {"role": "tool", "content": "sent"},
        {"role": "assistant", "content": "It has been sent."},
    ]
    made = collect(tmp_path / "out", str(write_lines(tmp_path / "a.jsonl", [{"messages": turns}])), redact=True)
    (chat,) = read_chats(made)
    assert "lovelace" not in json.dumps(chat.messages)
    assert json.dumps(chat.messages).count("[EMAIL]") == 4
    assert made.info["redacted"] == {"email": 4}
    address = "ada.lovelace@example.org"
    bad = [{"prompt": 3, "note": address}, {"prompt": 3, "note": "x" * 470 + f" {address}"}, {"note": address}]
    left = collect(tmp_path / "bad", str(write_lines(tmp_path / "b.jsonl", [*bad, {"messages": turns}])), redact=True)
    excerpts = [row["excerpt"] for row in read_dropped(left.path)]
    assert len(excerpts) == 3 and "[EMAIL]" in excerpts[0] and not any("ada.l" in shown for shown in excerpts)
    assert chat == Chat.of(
        source="a", where="a.jsonl:1", messages=chat.messages, language=chat.language, domain=chat.domain
    )


def many_files(folder: Path) -> list[ChatSource]:
    for number in range(12):
        write_lines(folder / f"{number:02d}.jsonl", [*rows(5, number * 5), {"nothing": number}])
    big = [json.dumps(row) for row in rows(300, 100)]
    big[123] = "{broken"
    (folder / "zz.jsonl").write_text("\n".join(big) + "\n")
    write_lines(folder / "other" / "x.jsonl", rows(3, 900))
    return [
        ChatSource(path=str(folder / "*.jsonl"), name="many"),
        ChatSource(path=str(folder / "other"), name="few", max_rows=2),
    ]


def test_the_result_is_the_same_for_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_collecting, "_SHARD_BYTES", 2000)
    sources = many_files(tmp_path / "in")
    alone = collect(tmp_path / "alone", *sources)
    ctx = context(tmp_path / "several")

    def backwards(function: Callable[[Any, Any], Any], shards: Sequence[Any]) -> Any:
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(function, shard, lambda share: None) for shard in reversed(shards)]
            yield from [future.result() for future in reversed(futures)]

    ctx.mapper = backwards
    several = collect_chats(sources=list(sources), ctx=ctx)
    assert len(read_manifest(alone)["parts"]) > 8
    assert several.info == alone.info
    assert digests(several.path) == digests(alone.path)


KILLED = """
import sys, time
from pathlib import Path
from components.contract import Context
from components.data import collect_chats
from components.data.collect import chats as chat_collecting
from components.data.settings import ChatSource
chat_collecting._SHARD_BYTES = 2000
folder, inputs = Path(sys.argv[1]), Path(sys.argv[2])
(folder / "scratch").mkdir(parents=True, exist_ok=True)
(folder / "out").mkdir(exist_ok=True)
sources = [
    ChatSource(path=str(inputs / "*.jsonl"), name="many"),
    ChatSource(path=str(inputs / "other"), name="few", max_rows=2),
]
said = 0
def send(event):
    global said
    print(event, flush=True)
    said += 1
    if said > int(sys.argv[3]):
        time.sleep(600)  # it may not outrun who kills it
send("begun")
collect_chats(
    sources=sources, ctx=Context(key="k", out=folder / "out", scratch=folder / "scratch", send=send)
)
"""


def killed_after(events: int, folder: Path, inputs: Path) -> bool:
    """Collect in a process that is killed after so many events (it is writing a shard then); False: it ended before."""
    command = [sys.executable, "-c", KILLED, str(folder), str(inputs), str(events)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(events):
            if not child.stdout.readline():
                return False
        child.send_signal(signal.SIGKILL)
    return True


def finished_shards(folder: Path) -> set[str]:
    return {shard.name for shard in (folder / "scratch").glob("shard-*")}


def test_killed_and_resumed_the_result_is_that_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_collecting, "_SHARD_BYTES", 2000)
    sources = many_files(tmp_path / "in")
    undisturbed = collect(tmp_path / "undisturbed", *sources)
    kept: list[set[str]] = []
    for events in (3, 6):
        assert killed_after(events, tmp_path / "killed", tmp_path / "in")
        kept.append(finished_shards(tmp_path / "killed"))
    assert kept[0] <= kept[1] and len(kept[1]) > 2  # finished shards are kept
    resumed = collect(tmp_path / "killed", *sources)
    assert resumed.info == undisturbed.info
    assert digests(resumed.path) == digests(undisturbed.path)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_twenty_times_the_result_is_that_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.record import write_record  # found from the project's root only, where `make soak` runs

    monkeypatch.setattr(chat_collecting, "_SHARD_BYTES", 2000)
    sources, chance, started = many_files(tmp_path / "in"), random.Random(SOAK_SEED), time.monotonic()
    undisturbed = collect(tmp_path / "undisturbed", *sources)
    kills: list[dict[str, int]] = []
    faults: list[str] = []
    homes = 0
    while len(kills) < 20:
        folder, killed = tmp_path / f"home-{homes}", True
        homes += 1
        while killed and len(kills) < 20:
            events = chance.randrange(1, 16)
            killed = killed_after(events, folder, tmp_path / "in")
            if killed:
                finished = len(finished_shards(folder))
                kills.append({"home": homes, "after_events": events, "finished_shards": finished})
        resumed = collect(folder, *sources)
        if resumed.info != undisturbed.info or digests(resumed.path) != digests(undisturbed.path):
            faults.append(f"home {homes} differs from the undisturbed run")
    seconds = round(time.monotonic() - started, 1)
    told = {"kills": len(kills), "seed": SOAK_SEED, "homes": homes, "files": len(digests(undisturbed.path))}
    write_record("soak-collect-kills", {**told, "seconds": seconds, "faults": faults, "each_kill": kills})
    assert faults == []


def test_a_kill_while_the_parts_are_moved_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_collecting, "_SHARD_BYTES", 2000)
    sources = many_files(tmp_path / "in")
    undisturbed = collect(tmp_path / "undisturbed", *sources)
    moved: list[Path] = []

    def dying(source: Path, to: Path) -> None:
        if to.parent.name == "out":
            moved.append(to)
        if len(moved) == 4:
            raise KeyboardInterrupt
        source.rename(to)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(chat_collecting.os, "replace", dying)
        collect(tmp_path / "killed", *sources)
    resumed = collect(tmp_path / "killed", *sources)
    assert digests(resumed.path) == digests(undisturbed.path)


def test_max_rows_looks_at_the_first_rows_only(tmp_path: Path) -> None:
    for number in range(3):
        write_lines(tmp_path / "in" / f"{number}.jsonl", rows(4, number * 4))
    notes: list[str] = []
    made = collect(tmp_path / "out", {"path": str(tmp_path / "in"), "name": "n", "max_rows": 6}, notes=notes)
    assert [chat.where for chat in read_chats(made)] == [f"0.jsonl:{n}" for n in (1, 2, 3, 4)] + [
        "1.jsonl:1",
        "1.jsonl:2",
    ]
    assert "n: stopped after 6 rows (max_rows)" in notes
    bad = tmp_path / "bad.jsonl"  # the row that reaches the limit is a bad one, which its reader counts
    good = [json.dumps(row) + "\n" for row in rows(5)]
    bad.write_text("".join([good[0], "not JSON\n" * 3, *good[1:]]))
    made = collect(tmp_path / "some", {"path": str(bad), "max_rows": 2})
    assert made.info["num_rows"] == 1
