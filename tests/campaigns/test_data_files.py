"""People's data files, whole and damaged in every known way: no row is lost unsaid, and no file ends the process.

What every step that reads rows (data.collect_chats, collect_prompts, collect_traffic, collect_workloads) makes of each
file is judged: kept + dropped = read; read is what counted_rows.py counts, wherever the format lets one count; a row
that stands in the file unbroken is kept as it was written, or the step says where it could not read on; a table that
is cut or changed costs a named error, never fewer rows without a word. Arrow and Parquet with bytes changed anywhere
never end the process that reads them, and what one mebibyte opens to never fills the memory.

DRAFTSMITH_SOAK_DATA_FILES and DRAFTSMITH_SOAK_SEED choose another number of files and other files.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import counted_rows
import damaged_files
import pytest
from damaged_files import DataFile, data_file
from forked import SEED, forked, recorded
from read_by_steps import Read, read_by

from components.contract import UserError
from components.data.sources.addresses import parse_hub_source
from components.data.sources.files import read_rows
from components.data.sources.tables import hub_rows

FILES: Final = int(os.environ.get("DRAFTSMITH_SOAK_DATA_FILES", "200"))
MUTANTS: Final = int(os.environ.get("DRAFTSMITH_SOAK_DATA_MUTANTS", "1200"))
MEMORY: Final = 600 << 20
STEPS: Final = ("chats", "prompts", "traffic", "workloads")


@dataclass(frozen=True)
class Counted:
    """What an independent count says of a file.

    rows: how many it holds, None where its format does not say. whole: which of those written stand in it unbroken.
    strange: at most so many other rows may be kept, None: any number. may_stop: whether it may not be readable to its
    end. must_stop: whether it is not.
    """

    rows: int | None
    whole: frozenset[int]
    strange: int | None
    may_stop: bool = False
    must_stop: bool = False


def count(file: DataFile) -> Counted:
    """Count the rows of a file, and find those that its damage did not touch."""
    everything = frozenset(range(len(file.rows)))
    if file.form == "zip":
        return Counted(file.num_written, everything, 0, may_stop=file.num_hit > 0)  # it has a checksum for everything
    if file.form in damaged_files.TABLES:
        return _count_table(file)
    plain = file.plain
    if plain is None:
        opened = counted_rows.unpacked(file.raw, file.compression)
        if opened is None or not opened[1]:
            return _count_torn(file, opened)
        plain = opened[0]
    if plain.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Counted(None, frozenset(), 0, True, True)
    if file.form in damaged_files.LISTS:
        return _count_list(file, plain)
    if file.form in ("csv", "tsv"):
        columns, records = counted_rows.records_of(plain, "\t" if file.form == "tsv" else ",")
        known: dict[Any, int] = {(row.asked, row.answered): n for n, row in enumerate(file.rows)}
        usable = columns == ("prompt", "response")
        found = [known[record] for record in records if usable and record is not None and record in known]
        return Counted(len(records), frozenset(found), len(records) - len(found))
    split = counted_rows.paragraphs_of if file.form == "paragraphs" else counted_rows.lines_of
    rows = split(plain)
    pieces = {piece: n for n, piece in enumerate(file.pieces)}
    found = [pieces[row] for row in rows if row in pieces]
    return Counted(len(rows), frozenset(found), len(rows) - len(found))


def _count_torn(file: DataFile, opened: tuple[bytes, bool] | None) -> Counted:
    """Of compressed data that end too early, what stands before the end is whole, and it has to be kept or refused."""
    whole: frozenset[int] = frozenset()
    if opened is not None and file.kind == "torn compression" and file.form in (*damaged_files.LINES, "list"):
        lines = {line.rstrip(b",") for line in counted_rows.lines_of(opened[0][: opened[0].rfind(b"\n") + 1])}
        whole = frozenset(n for n, piece in enumerate(file.pieces) if piece in lines)
    strange = None if file.kind == "flipped compression" else 0 if file.form not in ("lines", "paragraphs") else 1
    return Counted(None, whole, strange, True, opened is not None or file.kind == "garbage after compression")


def _count_list(file: DataFile, plain: bytes) -> Counted:
    whole = frozenset(n for n, piece in enumerate(file.pieces) if piece in plain)
    exact = file.kind in ("whole", "wrong rows", "missing commas", "garbage lines", "latin-1") or not file.num_hit
    if file.kind == "latin-1":
        return Counted(file.num_written, whole, 0)
    damaged = file.form in ("wrapped", "minified") and not exact
    rows = file.num_written if exact else None
    return Counted(rows, whole, file.num_wrong + file.num_hit + len(file.rows) - len(whole), damaged or not exact)


def _count_table(file: DataFile) -> Counted:
    if file.kind.startswith("table "):
        return Counted(None, frozenset(), None, may_stop=True)
    assert file.plain is not None
    whole = frozenset(n for n, piece in enumerate(file.pieces) if piece in file.plain)
    if file.form not in damaged_files.PLAIN_TABLES:
        whole = frozenset(range(len(file.rows)))
    return Counted(file.num_written, whole, file.num_wrong + file.num_hit)


def steps_of(file: DataFile) -> list[str]:
    """The steps that take files of this kind."""
    if file.form == "zip":
        return ["workloads"]
    if file.form in ("lines", "paragraphs") or (file.form in ("csv", "tsv") and file.name[-4:] != ".csv"):
        return ["chats"]
    return ["chats", "workloads"] if file.form == "csv" else ["chats", "prompts", "traffic", "workloads"]


def faults_of(file: DataFile, counted: Counted, read: Read) -> list[str]:
    """What is wrong with what a step made of a file; nothing if all is well."""
    if read.ended.fault:
        return [read.ended.fault]
    where = f"{file.form}{file.compression}"
    if read.refused:
        if counted.may_stop or not counted.whole:
            return [] if "\n" not in read.refused else [f"{where}: refused in several lines: {read.refused}"]
        return [f"{where}: refused with {len(counted.whole)} rows whole: {read.refused}"]
    faults = []
    if len(read.kept) + read.num_dropped != read.num_read or read.num_listed not in (None, read.num_dropped):
        faults.append(
            f"{len(read.kept)} kept + {read.num_dropped} dropped ({read.num_listed} listed), {read.num_read} read"
        )
    if counted.rows is not None and read.num_read != counted.rows and not (counted.may_stop and read.stops):
        faults.append(f"{read.num_read} read, {counted.rows} counted ({dict(read.counts)})")
    known = {(row.asked, row.answered): n for n, row in enumerate(file.rows)}
    kept = [known.get(pair) for pair in read.kept]
    strange = [read.kept[at] for at, n in enumerate(kept) if n is None]
    if counted.strange is not None and len(strange) > counted.strange + (file.kind == "doubled slice"):
        faults.append(f"{len(strange)} rows kept that nobody wrote, such as {strange[0]}"[:400])
    if not read.stops or file.kind == "torn compression":
        asked = {question for question, _ in read.kept} if file.kind == "doubled slice" else set()  # one of two is kept
        if lost := sorted(n for n in counted.whole - set(kept) if file.rows[n].asked not in asked):
            faults.append(f"rows {lost[:8]} of {len(lost)} stand in it whole and are lost ({dict(read.counts)})")
    if not read.stops:
        if counted.must_stop:
            faults.append(f"it cannot be read to its end, and the step does not say so ({len(kept)} kept)")
        fewer = counted.rows is None and (file.form in damaged_files.TABLES or file.plain is None)
        if fewer and read.num_read < len(file.rows):
            faults.append(f"{read.num_read} rows of {len(file.rows)}, without a word about the others")
    elif not counted.may_stop:
        faults.append(f"it could be read to its end: {read.stops[0]}")
    return [f"{where}: {fault}" for fault in faults]


def campaign(folder: Path, number: int, seed: int, *, whole: bool = True, first: int = 0) -> dict[str, Any]:
    """Let the steps read the first `number` files; counts by kind and outcome, and the faults.

    whole: each file by every step that takes it, and rows of 20 MB too; else by two of them.
    """
    found: dict[str, Any] = {name: Counter() for name in ("kinds", "formats", "outcomes", "rows")}
    faults: list[str] = []
    for at in range(first, first + number):
        file = data_file(at, seed, long_rows=whole and at % 4 == 1)
        counted = count(file)
        found["kinds"][file.kind] += 1
        found["formats"][file.form + file.compression] += 1
        place = folder / f"case-{at}" / file.name
        place.parent.mkdir(parents=True)
        place.write_bytes(file.raw)
        documents = {"lines": "line", "paragraphs": "paragraph"}.get(file.form, "file")
        steps = steps_of(file)
        for step in steps if whole else {steps[0], steps[at % len(steps)]}:
            read = read_by(step, place, place.parent / step, documents)
            outcome = "refused" if read.refused else "stopped" if read.stops else "read"
            found["outcomes"][f"{step}: {outcome}"] += 1
            found["rows"].update(read=read.num_read, kept=len(read.kept), dropped=read.num_dropped)
            found["rows"]["counted independently"] += (counted.rows or 0) * (not read.refused)
            faults += [f"file {at} ({file.kind}, {step}): {fault}" for fault in faults_of(file, counted, read)]
    return {**{name: dict(counter) for name, counter in found.items()}, "faults": faults}


def fuzz(folder: Path, number: int, seed: int) -> dict[str, Any]:
    """Read `number` tables with bytes changed, each in a child of its own, row by row."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    rows = data_file(0, seed).rows
    whole = {form: damaged_files.table_bytes(rows, form, 0, seed) for form in damaged_files.TABLES}
    for at in range(number):
        dice = random.Random(f"mutant {seed} {at}")
        form = damaged_files.TABLES[at % len(damaged_files.TABLES)]
        place = folder / f"mutant{damaged_files.SUFFIX[form]}"
        raw, _ = damaged_files.mutant(whole[form], dice)
        place.write_bytes(raw)
        told = folder / "told.json"
        ended = forked(lambda place=place, told=told: _read_all(place, told), limit_s=60, memory_bytes=2 << 30)
        if ended.fault:
            faults.append(f"mutant {at} ({form}): {ended.fault}")
            continue
        read = json.loads(told.read_text())
        said = bool(read["refused"] or read["aside"])
        outcome = "refused" if read["refused"] else "rows set aside" if read["aside"] else "read"
        outcomes[f"{form.split('-')[0]}: {outcome}"] += 1
        if not said and read["kept"] < len(rows):
            faults.append(f"mutant {at} ({form}): {read['kept']} rows of {len(rows)}, without a word about the others")
    return {"mutants": number, "outcomes": dict(outcomes), "faults": faults}


def fuzz_saved(folder: Path, number: int, seed: int) -> dict[str, Any]:
    """Read what `save_to_disk` of `datasets` wrote, with bytes changed, as hf:FOLDER:SPLIT, each in a child."""
    import datasets

    rows = data_file(0, seed).rows
    texts = {"prompt": [row.asked for row in rows], "tags": [["a", "bc"][: n % 3] for n in range(len(rows))]}
    datasets.Dataset.from_dict(texts).save_to_disk(str(folder))
    (file,) = folder.glob("*.arrow")
    whole = file.read_bytes()
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    for at in range(number):
        file.write_bytes(damaged_files.mutant(whole, random.Random(f"saved {seed} {at}"))[0])
        ended = forked(lambda: _read_saved(folder), limit_s=60)
        outcomes["refused" if ended.code else "read"] += 1
        if ended.fault:
            faults.append(f"saved mutant {at}: {ended.fault}")
    return {"mutants": number, "outcomes": dict(outcomes), "faults": faults}


def _read_saved(folder: Path) -> int:
    try:
        for _ in hub_rows(parse_hub_source(f"hf:{folder}:train")):
            pass
    except UserError as error:
        print(error)  # noqa: T201
        return 1
    return 0


def _read_all(place: Path, told: Path) -> int:
    aside: list[int] = []
    found = {"kept": 0, "refused": ""}
    try:
        for _ in read_rows(place, lambda where, line, why, shown: aside.append(line)):
            found["kept"] += 1
    except UserError as error:
        found["refused"] = str(error)
        print(error)  # noqa: T201
    told.write_text(json.dumps({**found, "aside": len(aside)}))
    return 1 if found["refused"] else 0


PLACES: Final = ("folder", "pipe", "link to itself", "link out of the folder", "link to nothing", "empty")


def misplace(folder: Path, kind: str, suffix: str) -> Path:
    """A folder with a good file of this kind, and beside it what is none."""
    inside, outside = folder / "in", folder / "outside"
    inside.mkdir(parents=True)
    outside.mkdir()
    head = "prompt,response\n" if suffix == ".csv" else ""
    for place, mark in ((inside / f"good{suffix}", "inside"), (outside / f"bad{suffix}", "outside")):
        pairs = [(f"question {mark} {n}: what grows here?", f"answer {n}") for n in range(60)]
        lines = [f"{asked},{answered}" for asked, answered in pairs]
        if suffix != ".csv":
            lines = [json.dumps({"prompt": asked, "response": answered}) for asked, answered in pairs]
        place.write_text(head + "\n".join(lines) + "\n")
    bad = inside / f"bad{suffix}"
    if kind == "folder":
        bad.mkdir()
    elif kind == "pipe":
        os.mkfifo(bad)
    elif kind == "empty":
        bad.touch()
    else:
        bad.symlink_to({"link to itself": bad, "link to nothing": inside / "nothing"}.get(kind, outside / bad.name))
    return bad


def places(folder: Path) -> dict[str, Any]:
    """Let every step read what stands in place of a file: named, in a folder, by a pattern, beside a good file."""
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    asked = [(kind, step, suffix) for kind in PLACES for step in STEPS for suffix in (".jsonl", ".csv")]
    for at, (kind, step, suffix) in enumerate(asked):
        if suffix == ".csv" and step in ("prompts", "traffic"):
            continue
        bad = misplace(folder / f"place-{at}", kind, suffix)
        for way, source in (("named", bad), ("in a folder", bad.parent), ("by a pattern", bad.parent / f"*{suffix}")):
            read = read_by(step, source, folder / f"place-{at}" / way, limit_s=30)
            outcomes[f"{kind}, {way}: {'refused' if read.refused else 'read'}"] += 1
            said = read.ended.fault
            if any("outside" in question for question, _ in read.kept) and way != "named":
                said = "rows of a file out of the folder are kept"
            elif way == "named" and not read.refused and not kind.startswith(("link out", "folder")):
                said = said or "it is read"
            elif way != "named" and not read.refused and len(read.kept) != 60:
                said = said or f"{len(read.kept)} rows of 60 of the good file beside it are kept"
            elif way != "named" and read.refused and step == "chats":
                said = said or f"the good file beside it is refused too: {read.refused}"
            if said:
                faults.append(f"{kind}, {way}, {step} {suffix}: {said}")
    return {"outcomes": dict(outcomes), "faults": faults}


def bombs(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Let a step read each: it ends in time, and its memory stays below 600 MiB."""
    peaks: dict[str, int] = {}
    seconds: dict[str, float] = {}
    faults: list[str] = []
    for name in names:
        place = folder / f"bomb-{name}" / name
        place.parent.mkdir(parents=True)
        place.write_bytes(damaged_files.heavy(name) if name in damaged_files.HEAVY else damaged_files.bomb(name))
        steps = ("workloads",) if name.endswith(".zip") else ("chats",)
        steps += ("prompts",) if ".json" in name and name.endswith(".gz") else ()
        for step in steps:
            # Rows that say nothing are listed one by one, and there may be millions.
            read = read_by(step, place, place.parent / step, limit_s=900)
            peaks[f"{name}, {step}"], seconds[f"{name}, {step}"] = read.peak_bytes >> 20, round(read.ended.seconds, 1)
            if read.ended.fault:
                faults.append(f"{name}, {step}: {read.ended.fault}")
            elif read.peak_bytes > MEMORY:
                faults.append(f"{name}, {step}: {read.peak_bytes >> 20} MiB of memory")
            elif len(read.kept):
                faults.append(f"{name}, {step}: {len(read.kept)} rows kept of a file that holds none")
        place.unlink()
    return {"peak_mib": peaks, "seconds": seconds, "faults": faults}


def test_no_row_is_lost_unsaid_and_no_file_ends_a_step(tmp_path: Path) -> None:
    found = campaign(tmp_path, len(damaged_files.KINDS), seed=1, whole=False)
    assert found["faults"] == []
    assert set(found["kinds"]) == set(damaged_files.KINDS)
    assert found["rows"]["kept"] > 1000 and found["rows"]["dropped"] > 10
    for step in ("chats", "workloads"):
        assert found["outcomes"][f"{step}: read"] > 0
    assert found["outcomes"]["chats: refused"] > 0


def test_no_table_with_changed_bytes_ends_its_reader(tmp_path: Path) -> None:
    found = fuzz(tmp_path, 35, seed=1)
    assert found["faults"] == []
    outcomes = Counter({name.split(": ")[1]: number for name, number in found["outcomes"].items()})
    assert outcomes["refused"] > 0 and outcomes["read"] > 0


def test_what_a_mebibyte_opens_to_does_not_fill_the_memory(tmp_path: Path) -> None:
    assert bombs(tmp_path, ("x.jsonl.gz",))["faults"] == []


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_two_hundred_files_and_a_thousand_changed_tables(tmp_path: Path) -> None:
    def all_parts() -> dict[str, Any]:
        parts = {
            "files": campaign(tmp_path / "files", FILES, SEED),
            "tables": fuzz(tmp_path / "tables", MUTANTS, SEED),
            "saved": fuzz_saved(tmp_path / "saved", MUTANTS // 8, SEED),
            "places": places(tmp_path / "places"),
            "bombs": bombs(tmp_path / "bombs", (*damaged_files.BOMBS, *damaged_files.HEAVY)),
        }
        faults = [fault for part in parts.values() for fault in part.pop("faults")]
        return {"num_files": FILES, **parts, "faults": faults}

    assert recorded("data-files", all_parts)["faults"] == []
