"""A home with a file of every kind that is kept, how one of its files is damaged, and what a user then meets."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paired_runs
import pytest
from forked import Ended, draftsmith, forked
from toy_garden import GARDEN

from components.contract import Artifact
from components.rows import write_rows
from flows import cli
from flows.services.doctor import revisions
from storage import journal
from storage.artifacts import sessions
from storage.artifacts.store import Store, stamp_of, write_stamps
from storage.history.files import compact
from storage.history.write import record_all
from storage.home import settle

for _module in (  # children are forked, and need not import all this again
    "mlflow.store.model_registry.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_store",
    "flows.execution.local_run",
    "flows.commands.run_output",
    "flows.commands.inspect",
    "storage.record",
    "storage.registry.registry",
    "storage.repair",
):
    importlib.import_module(_module)

KINDS: dict[str, str] = {  # kind of file -> its place in a home
    "record": r"store/[^/]+/artifact\.json",
    "artifact file": r"store/[^/]+/.+",
    "earlier record": r"earlier/[^/]+/[^/]+/artifact\.json",
    "earlier file": r"earlier/[^/]+/[^/]+/.+",
    "history segment": r"history/[^/]+/_segment-\w+\.parquet",
    "history keys": r"history/[^/]+/_keys-\w+\.txt",
    "history manifest": r"history/[^/]+/_manifest\.json",
    "history rows": r"history/[^/]+/[^._/][^/]*\.parquet",
    "history sums": r"history/[^/]+/_sums\.txt",
    "promotion log": r"promotions\.jsonl",
    "run journal": r"runs/[^/]+\.jsonl",
    "verified": r"verified/[^/]+\.json",
    "step history": r"steps/[^/]+/[^/]+\.json",
    "unfinished move": r"mlflow/moving\.json",
    "mlflow database": r"mlflow/mlflow\.db",
    "mlflow ready": r"mlflow/ready-[^/]+",
    "mlflow file": r"mlflow/artifacts/.+",
    "prefect database": r"prefect/prefect\.db",
    "password": r"prefect/auth",
    "services": r"services\.json",
    "supervisor": r"services\.pid",
    "lock": r"locks/[^/]+|mlflow/\w+\.lock|history/(?:[^/]+/)?\.\w+\.lock",
    "log": r"logs/.+",
    "identity": r"home\.json",
}
MADE_AGAIN = ("growth.txt", "height.txt", "train.jsonl", "index.html")
"""Files of the toys whose bytes depend on nothing but their key."""
MODEL = paired_runs.NAME
QUERIES = {
    "artifact": "SELECT artifact_key, session, kind, step, info FROM artifact ORDER BY ALL",
    "request": "SELECT request_id, draft_key, depth_k, decode_ns, num_accepted FROM request ORDER BY ALL",
    "one drafter": "SELECT prompt_id, sum(decode_ns) AS ns FROM request WHERE draft_key = 'd1' GROUP BY 1 ORDER BY ALL",
    "step": "SELECT run_id, step, status, seconds, artifact_key FROM step ORDER BY ALL",
    "run": "SELECT run_id, pipeline, status, num_executed, num_reused FROM run ORDER BY ALL",
    "promotion": "SELECT promotion_id, name, alias, action, from_version, to_version, why FROM promotion ORDER BY ALL",
}
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Base:
    """The home that every case starts with a copy of. answers: of QUERIES. made: key -> file -> bytes."""

    home: Path
    pipelines: Path
    answers: dict[str, Rows]
    made: dict[str, dict[str, bytes]]
    versions: list[tuple[str, str]]


def make_base(folder: Path) -> Base:
    """A run of toys, timed requests (measured again, merged and not), two releases of which one is the champion, a note
    of a move, and what the servers leave."""
    home, pipelines = folder / "base" / "home", folder / "pipelines.yaml"
    pipelines.write_text(GARDEN.text, encoding="utf-8")
    home.mkdir(parents=True)
    must(command("run", "garden", "--direct", home=home, pipelines=pipelines))
    shutil.copy(home / "mlflow" / "mlflow.db", folder / "base" / "older.db")
    must(forked(lambda: _fill(home), environment={"TMPDIR": str(home.parent)}))
    _leave_servers(home)
    answers = {name: rows_of(said) for name, (_, said) in ask_all(home)[1].items()}
    assert all(answers.values()), {name: len(rows) for name, rows in answers.items()}
    base = Base(home, pipelines, answers, made_files(home), versions(show_model(home).said))
    must(draftsmith("doctor", home=home))
    last = journal.promotions(home)[-1]
    (home / "mlflow" / "moving.json").write_text(journal.as_line(last), encoding="utf-8")
    return base


def _fill(home: Path) -> None:
    """Measured rows and releases, as steps would have left them."""

    def make(key: str, **record: Any) -> Artifact:
        return _make(home, key, **record)

    with pytest.MonkeyPatch.context() as patch:
        paired_runs.light_versions(patch)
        for session in ("s0", "s1"):  # measured twice: the first is an earlier session then
            make("timed-one", rows=paired_runs.timed([("d1", 4, 5.0, 24)], session=session))
        paired_runs.add(home, make, "release-one", "d1")
        record_all(home, Store(home))
        compact(home, 0, whole=True)
        make("timed-two", rows=paired_runs.timed([("d2", 4, 4.0, 20)], session="s2"))
        paired_runs.add(home, make, "release-two", "d2")
        record_all(home, Store(home))


def _make(home: Path, key: str, *, rows: Any = (), files: Mapping[str, Any] | None = None, **record: Any) -> Artifact:
    store = Store(home)
    kind, info = record.pop("kind", "Measurements"), record.pop("info", {})
    with store.lock(key):
        out, _ = store.open_staging(key)
        write_rows(out, rows)
        for name, content in (files or {}).items():
            (out / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        known = {"pipeline": "toy", "step": "measure", "run_id": "", "seconds": 1.5, "machine": {"machine_id": "m1"}}
        return store.commit(key, kind, info, {**known, **record})


def _leave_servers(home: Path) -> None:
    """What `draftsmith up` leaves when it has ended: a database at the newest revision, a password, its addresses."""
    (home / "prefect").mkdir()
    with closing(sqlite3.connect(home / "prefect" / "prefect.db")) as database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
        database.execute("CREATE TABLE flow_run (id INTEGER PRIMARY KEY, name TEXT)")
        database.executemany("INSERT INTO alembic_version VALUES (?)", [(at,) for at in revisions("prefect")[1]])
        database.executemany("INSERT INTO flow_run (name) VALUES (?)", [(f"run {n}" * 9,) for n in range(200)])
        database.commit()
    (home / "prefect" / "auth").write_text("draftsmith:secret\n", encoding="utf-8")
    (home / "prefect" / "auth").chmod(0o600)
    told = {"prefect_api_url": "http://127.0.0.1:4200/api", "prefect_ui_url": "http://127.0.0.1:4200", "pid": 4}
    told |= {"mlflow_url": "http://127.0.0.1:5000", "work_pool": "draftsmith"}
    (home / "services.json").write_text(json.dumps(told, indent=2), encoding="utf-8")
    (home / "services.pid").write_text("", encoding="utf-8")


def must(ended: Ended) -> Ended:
    """It went well."""
    assert ended.code == 0, (ended.code, ended.said[-3000:])
    return ended


def command(*arguments: str, home: Path, pipelines: Path) -> Ended:
    """A command that reads pipelines.yaml."""
    return draftsmith(*arguments, "--file", str(pipelines), home=home)


def show_model(home: Path) -> Ended:
    """What is shown of the registered model."""
    return draftsmith("show", MODEL, home=home)


def resync(home: Path) -> Ended:
    """`draftsmith resync`, by which versions are registered but no model is logged: that takes a process of its own."""

    def act() -> int:
        with pytest.MonkeyPatch.context() as patch:
            paired_runs.light_versions(patch)
            return cli.main(["resync"])

    return forked(act, environment={"DRAFTSMITH_HOME": str(home), "TMPDIR": str(home.parent)})


def ask_all(home: Path) -> tuple[Ended, dict[str, tuple[int, str]]]:
    """Every one of QUERIES, in one child: its exit code, and what it printed."""

    def act() -> int:
        for name, sql in QUERIES.items():
            code = cli.main(["query", sql, "--format", "json"])
            sys.stderr.flush()
            sys.stdout.write(f"\n--- {name} {code}\n")
            sys.stdout.flush()
        return 0

    ended = forked(act, environment={"DRAFTSMITH_HOME": str(home), "TMPDIR": str(home.parent)})
    parts = re.split(r"^--- (.+) (\d+)\n", ended.said, flags=re.MULTILINE)
    return ended, {
        name: (int(code), said) for said, name, code in zip(parts[::3], parts[1::3], parts[2::3], strict=False)
    }


def rows_of(said: str) -> Rows:
    """The rows that a query has printed as JSON."""
    rows: Rows = json.loads(said[said.index("[") :])
    return rows


def versions(said: str) -> list[tuple[str, str]]:
    """(release, aliases) of each version that `show` lists, in its order; the numbers start anew in a new registry."""
    listed = re.findall(r"^(\d+) {2,}([a-z, ]*?) {2,}.*?(\S+)\s*$", said.partition("when (UTC)")[0], re.MULTILINE)
    return [(release, aliases) for _, aliases, release in listed]


def made_files(home: Path) -> dict[str, dict[str, bytes]]:
    """The files of the toys whose bytes do not depend on when they ran."""
    return {
        key: {
            file.name: file.read_bytes() for file in sorted((home / "store" / key).iterdir()) if file.name in MADE_AGAIN
        }
        for key in Store(home).keys()  # noqa: SIM118 (a method of the store)
    }


def files_by_kind(home: Path) -> dict[str, list[Path]]:
    """Every file of a home under its kind; "" holds those of no known kind."""
    found: dict[str, list[Path]] = {}
    for file in sorted(path for path in home.rglob("*") if path.is_file()):
        found.setdefault(kind_of(file.relative_to(home).as_posix()), []).append(file)
    return found


def unknown_files(home: Path) -> tuple[list[str], list[str]]:
    """(files of no known kind, kinds of which there is no file)."""
    found = files_by_kind(home)
    names = [file.relative_to(home).as_posix() for file in found.get("", [])]
    unknown = [name for name in names if not name.startswith("records/")]  # second names of records in the store
    return unknown, sorted(set(KINDS) - set(found))


def kind_of(name: str) -> str:
    """The kind of a file by its place, "" for none."""
    return next((kind for kind, place in KINDS.items() if re.fullmatch(place, name)), "")


@dataclass(frozen=True)
class Damage:
    """What is done to which file of a copy of the base. place: its path in the home."""

    kind: str
    how: str
    place: str


HOWS = (
    "flipped",
    "flipped unseen",
    "cut",
    "emptied",
    "zeroed",
    "longer",
    "half a line",
    "removed",
    "replaced",
    "a folder",
)


def damage_of(base: Base, number: int, seed: int) -> tuple[Damage, random.Random]:
    """The damage of a case: every kind in turn, and over the rounds every damage to it."""
    kinds = list(KINDS)
    kind, turn = kinds[number % len(kinds)], number // len(kinds)
    how = HOWS[(turn + kinds.index(kind)) % len(HOWS)]
    chance = random.Random(f"{kind} {how} {turn} {seed}")
    files = files_by_kind(base.home)[kind]
    return Damage(kind, how, chance.choice(files).relative_to(base.home).as_posix()), chance


def apply(damage: Damage, base: Base, home: Path, chance: random.Random) -> None:
    """Damage the file; one in which there is nothing to change grows instead."""
    file = home / damage.place
    before, stat = file.read_bytes(), file.stat()
    if damage.how == "removed":
        file.unlink()
    elif damage.how == "a folder":
        file.unlink()
        file.mkdir()
    elif damage.how == "replaced":
        file.write_bytes(_another(damage, base, home, before, chance))
    else:
        file.write_bytes(damaged(before, damage.how, chance))
    if damage.how == "flipped unseen":
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def damaged(data: bytes, how: str, chance: random.Random) -> bytes:
    """The bytes after the damage."""
    if how == "emptied" and data:
        return b""
    if len(data) < 3 or how == "longer":
        return data + chance.randbytes(chance.randint(1, 40))
    at = chance.randrange(len(data))
    if how in ("flipped", "flipped unseen"):
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if how == "half a line":
        start = data.rstrip(b"\n").rfind(b"\n") + 1
        return data[: start + (len(data) - start) // 2]
    if how == "cut":
        return data[: min(at, len(data) - 2)]
    length = min(4096, max(1, len(data) // 4))  # zeroed: a block of a disk
    start = min(at, len(data) - length)
    return data[:start] + bytes(length) + data[start + length :]


def _another(damage: Damage, base: Base, home: Path, before: bytes, chance: random.Random) -> bytes:
    """Another file of its kind, or what it was earlier."""
    others = [
        file for file in files_by_kind(base.home)[damage.kind] if file.relative_to(base.home).as_posix() != damage.place
    ]
    same = [file for file in others if file.name == Path(damage.place).name] or others
    found = [data for file in same if (data := file.read_bytes()) != before]
    if found:
        return chance.choice(found)
    if damage.kind == "mlflow database":
        return (base.home.parent / "older.db").read_bytes()
    lines = before.splitlines(keepends=True)
    return b"".join(lines[:-1]) if len(lines) > 1 else before[: len(before) // 2]


MUST_BE_FOUND = (
    "record",
    "artifact file",
    "earlier record",
    "earlier file",
    "history segment",
    "history keys",
    "history manifest",
    "history rows",
    "promotion log",
    "run journal",
)
"""Kinds of which every damage is named by `doctor`: no byte of them may be other than it was."""
MENDS = r"doctor --repair|resync|makes it anew|set aside|remove"


@dataclass
class Case:
    """What became of one damaged home. named: commands that said something of it."""

    number: int
    damage: Damage
    faults: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def ran(self, what: str, ended: Ended) -> Ended:
        """Note how a command ended."""
        self.said[what] = ended.said
        self.seconds[what] = ended.seconds
        if ended.fault:
            self.faults.append(f"{what}: {ended.fault}")
        elif ended.code != 0 and ended.said.strip():
            self.named.append(what)
        return ended


def run_case(base: Base, folder: Path, number: int, seed: int, *, with_runs: bool = True) -> Case:
    """A copy of the base, damaged; then what a user would do. with_runs: also run the pipeline, which takes longest."""
    damage, chance = damage_of(base, number, seed)
    case, home = Case(number, damage), folder / f"case-{number}" / "home"
    shutil.copytree(base.home, home)
    settle(home)  # the copy is a home of its own before it is damaged
    for path in sorted((home / "store").iterdir()):  # as if they had been looked at here
        record = sessions.read_record(path)
        assert record is not None
        write_stamps(home, path.name, {name: stamp_of(path / name) for name in record["files"]})
    apply(damage, base, home, chance)
    is_same = is_unharmed(damage, base, home)
    in_store = re.match(r"store/([^/]+)/", damage.place)
    case.ran("show", draftsmith("show", in_store[1] if in_store else "timed-one", home=home))
    shown = case.ran("show model", show_model(home))
    if shown.code == 0 and versions(shown.said) != base.versions and not re.search(MENDS, shown.said):
        case.faults.append(f"show model says something else, without a word: {versions(shown.said)}")
    judge_answers(case, base, home, "before")
    _command(case, base, home, "plan", with_runs)
    found = case.ran("doctor", draftsmith("doctor", home=home))
    # What a kill cut short was finished by `show`: then the log says again what it said.
    if damage.kind in MUST_BE_FOUND and not is_same and found.code == 0 and not is_unharmed(damage, base, home):
        case.faults.append("doctor says that all is well")
    _command(case, base, home, "run", with_runs)
    mended = case.ran("doctor --repair", draftsmith("doctor", "--repair", home=home))
    if "draftsmith resync" in mended.said or damage.kind.startswith("mlflow"):
        case.ran("resync", resync(home))
    _command(case, base, home, "run again", with_runs)
    judge_mended(case, base, home, with_runs)
    shutil.rmtree(folder / f"case-{number}")
    return case


def is_unharmed(damage: Damage, base: Base, home: Path) -> bool:
    """The file says what it said."""
    before, now = base.home / damage.place, home / damage.place
    if not now.is_file():
        return False
    if before.read_bytes().strip() == now.read_bytes().strip():
        return True
    if before.suffix == ".json":
        try:
            return bool(json.loads(before.read_bytes()) == json.loads(now.read_bytes()))
        except ValueError:
            return False
    return False


def judge_answers(case: Case, base: Base, home: Path, when: str) -> None:
    """Every number is the one it was, or the command says what is damaged."""
    known = {row["run_id"] for row in base.answers["run"]}
    ended, answers = ask_all(home)
    case.ran(f"query {when}", ended)
    for name, expected in base.answers.items():
        code, said = answers.get(name, (1, "no answer"))
        if code != 0:
            case.named.append(f"query {name} {when}")
            if when == "after":
                case.faults.append(f"query {name} cannot be answered after the repair: {said[-300:]}")
            elif not re.search(MENDS, said):
                case.faults.append(f"query {name} does not say what to do: {said[-300:]}")
            continue
        rows = rows_of(said)
        missing, more = [row for row in expected if row not in rows], [row for row in rows if row not in expected]
        more = [row for row in more if "run_id" not in row or row["run_id"] in known]
        if when == "after" and name in ("artifact", "promotion"):  # what was made again is another session
            more = []
        doubled = len(rows) - len({json.dumps(row, sort_keys=True) for row in rows})
        if more:
            case.faults.append(f"query {name} {when}: another value: {more[:2]} (not {missing[:2]})")
        elif missing or doubled:
            case.faults.append(f"query {name} {when}: {len(missing)} rows are missing and {doubled} doubled, no word")


def judge_mended(case: Case, base: Base, home: Path, with_runs: bool) -> None:
    """The home is whole again, all that can be made again is there with the same bytes, and nothing is left to do."""
    whole = case.ran("doctor after", draftsmith("doctor", home=home))
    if whole.code != 0:
        bad = [line.strip() for line in whole.said.splitlines() if line.strip().startswith("BAD")]
        case.faults.append(f"doctor after the repair: {bad[:3]}")
    judge_answers(case, base, home, "after")
    shown = show_model(home)
    if not shown.fault and versions(shown.said) != base.versions:
        case.faults.append(
            f"the registry is not as it was: {versions(shown.said)} for {base.versions}; {shown.said[:200]}"
        )
    if with_runs:
        again = case.ran("run at last", command("run", "garden", "--direct", home=home, pipelines=base.pipelines))
        if again.code != 0 or ", 8 reused, 0 to run" not in again.said:
            case.faults.append(f"the last run does not reuse everything: {again.said[-300:]}")
        made = made_files(home)
        other = [key[:12] for key, files in base.made.items() if files and made.get(key) != files]
        if other:
            case.faults.append(f"made again with other bytes, or not at all: {other}")


def _command(case: Case, base: Base, home: Path, what: str, with_runs: bool) -> None:
    if what == "plan":
        case.ran(what, command("plan", "garden", home=home, pipelines=base.pipelines))
    elif with_runs:
        ended = case.ran(what, command("run", "garden", "--direct", home=home, pipelines=base.pipelines))
        if what == "run again" and ended.code != 0:
            case.faults.append(f"{what}: {ended.said[-300:]}")


def outcome(case: Case) -> str:
    """In a word: a fault, named by some command, or without any effect."""
    return "fault" if case.faults else "named" if case.named else "no effect"
