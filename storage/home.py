"""Which home this is and where it stands, in `home.json`; what a home needs once it was copied or moved.

The store, the journals and the history name everything relative to their home. MLflow's database and Prefect's do not:
an experiment, a run and a version say where their files are as an absolute address, a deployment says which home its
runs work on. So a home remembers its place, and the first command at another one leads these addresses there, in
one transaction a database. A home whose former place is gone was moved and stays who it was; from another machine
nobody can see that, so who is at a terminal is asked. Any other is a copy: it gets an identity and a registry of its
own (storage/registry/aliases.py), so that no move made in one of the two is taken for one of the other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from components.contract import UserError
from components.files import locked, write_whole
from storage import journal

MARK = "draftsmith.registry"
"""The mark of a registry: a tag of MLflow's experiment `releases`, and a fact of each move in the promotion log."""
_FORMAT = 1
"""Of all files of a home. It grows when an older version of Draftsmith could no longer work on a home of this one."""
_MLFLOW_ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
_PREFECT_VARIABLES = (("deployment", "infra_overrides"), ("flow_run", "job_variables"))
_BUSY_S = 60.0


@dataclass(frozen=True)
class Identity:
    """The content of home.json. path, host: the folder and the machine where the home was opened last."""

    home_id: str
    path: str
    host: str
    format: int = _FORMAT


def read_identity(home: Path) -> Identity | None:
    """Who the home at this place is; None where it has not said so yet, or another version has written it."""
    try:
        return Identity(**json.loads((home / "home.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _require_known_format(home: Path) -> None:
    try:
        content = json.loads((home / "home.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # `doctor` names what is wrong with it
        return
    number = content.get("format") if isinstance(content, dict) else None
    if isinstance(number, int) and number > _FORMAT:
        raise UserError(
            f"{home}: a newer Draftsmith has worked on this home (its format is {number}, the newest known here is "
            f"{_FORMAT}): go on with that one, or restore a backup from before into another folder"
        )


def settle(home: Path, ask: Callable[[str], bool] | None = None) -> str:
    """Remember a home's place; where it was copied or moved since, lead all addresses in it here.

    ask: puts a question to somebody, whether a home of another machine was moved; None: nobody can answer, and it is
    taken for a copy. Returns one line for people, "" when nothing has happened. A folder that is no home yet is left as
    it is.

    Raises:
        UserError: a newer version has written into it, in a form that this one may not understand.
    """
    _require_known_format(home)
    identity, here = read_identity(home), str(home.absolute())
    if identity is not None and _is_here(identity, home):
        return ""
    if not any((home / name).exists() for name in ("store", "mlflow", "runs", "history")):
        return ""
    if not os.access(home, os.W_OK):
        came = f"{here} was copied or moved from {identity.path}" if identity is not None else ""
        return came and f"{came} and cannot be written to: MLflow's addresses still lead there"
    try:
        return _settle(home, ask)
    except OSError as error:
        return f"{home / 'home.json'}: cannot be written ({error.strerror})"
    except UserError as error:  # a folder stands in its place: `doctor` must be able to say so too
        return str(error)


def _settle(home: Path, ask: Callable[[str], bool] | None) -> str:
    here = str(home.absolute())
    (home / "locks").mkdir(exist_ok=True)
    with locked(home / "locks" / "home.lock"):
        identity = read_identity(home)
        if identity is not None and _is_here(identity, home):  # somebody else has done it meanwhile
            return ""
        former = identity.path if identity is not None else _former_place(home)
        if identity is None:
            is_copy = bool(former) and (Path(former) / "mlflow").exists()
        elif ask is not None and identity.host != socket.gethostname():
            came = f"{here} was at {identity.path} of {identity.host} before"
            is_copy = not ask(f"{came}. Was it moved, so that nobody goes on with it there?")
        else:
            is_copy = not _is_moved(identity)
        try:
            num_addresses = _lead_here(home, former, is_copy=is_copy) if former else 0
        except sqlite3.DatabaseError as error:
            return f"{here} was copied or moved from {former}, and its databases still lead there: {error}"
        home_id = identity.home_id if identity is not None and not is_copy else uuid.uuid4().hex
        identity = Identity(home_id, here, socket.gethostname())
        write_whole(home / "home.json", json.dumps(dataclasses.asdict(identity), indent=1) + "\n", durable=True)
    if not former:
        return ""
    what = "is a copy of" if is_copy else "was moved here from"
    own = ", and it is a home of its own" if is_copy else ""
    return f"{here} {what} {former}: {num_addresses} addresses in MLflow and Prefect lead here now{own}"


def _is_here(identity: Identity, home: Path) -> bool:
    """Whether this is the place that the home knows, under this name or another."""
    if identity.path == str(home.absolute()):
        return True
    try:
        return os.path.samefile(identity.path, home)
    except OSError:
        return False


def _is_moved(identity: Identity) -> bool:
    """Whether the former place is certainly gone: on this machine, and there is no home of this identity any more."""
    if identity.host != socket.gethostname():
        return False
    try:
        former = json.loads((Path(identity.path) / "home.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return not isinstance(former, dict) or former.get("home_id") != identity.home_id


def _former_place(home: Path) -> str:
    """The place of a home from before homes remembered it, where its experiments all lead to one that is not here."""
    file = home / "mlflow" / "mlflow.db"
    try:
        with _transaction(file) as (database, tables):
            columns = "SELECT name, artifact_location FROM experiments"
            rows = database.execute(columns).fetchall() if "experiments" in tables else []
    except sqlite3.DatabaseError:  # `doctor` names what is wrong with it
        return ""
    endings = [("/mlflow/artifacts/" + re.sub(r"[^\w.-]", "_", name), str(location)) for name, location in rows]
    places = {location.removesuffix(ending) for ending, location in endings if location.endswith(ending)}
    if len(places) != 1 or places == {home.absolute().as_uri()}:
        return ""
    return url2pathname(urlsplit(places.pop()).path)


def _lead_here(home: Path, former: str, *, is_copy: bool) -> int:
    """Lead the addresses in both databases of a home here; returns how many there were. It can be repeated."""
    count = 0
    with _transaction(home / "mlflow" / "mlflow.db") as (database, tables):
        for table, column in _MLFLOW_ADDRESSES:
            for before, now in _forms(Path(former), home) if table in tables else ():
                count += database.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                    (now, len(before) + 1, len(before), before),
                ).rowcount
        if is_copy and "experiment_tags" in tables:
            _take_own_mark(home, database)
    with _transaction(home / "prefect" / "prefect.db") as (database, _):
        for table, column in _PREFECT_VARIABLES:
            place, now = "'$.env.DRAFTSMITH_HOME'", str(home.resolve())
            columns = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
            if column in columns:
                count += database.execute(
                    f"UPDATE {table} SET {column} = json_set({column}, {place}, ?)"
                    f" WHERE json_extract({column}, {place}) <> ?",
                    (now, now),
                ).rowcount
    return count


def _forms(former: Path, home: Path) -> list[tuple[str, str]]:
    """(before, now): how an address below MLflow's folder for artifacts begins, as a URI and as a path."""
    folders = [place.absolute() / "mlflow" / "artifacts" for place in (former, home)]
    return [(f"{folders[0].as_uri()}/", f"{folders[1].as_uri()}/"), (f"{folders[0]}/", f"{folders[1]}/")]


def _take_own_mark(home: Path, database: sqlite3.Connection) -> None:
    """Give a copied registry a mark of its own, and the moves in the log of its home with it.

    The new mark follows from the one before, so that a kill between the log and the database can be made up for.
    """
    for (mark,) in database.execute("SELECT value FROM experiment_tags WHERE key = ?", (MARK,)).fetchall():
        own = uuid.uuid5(uuid.NAMESPACE_URL, f"{mark} at {home.absolute()}").hex
        journal.change_mark(home, MARK, mark, own)
        database.execute("UPDATE experiment_tags SET value = ? WHERE key = ? AND value = ?", (own, MARK, mark))


@contextmanager
def _transaction(file: Path) -> Iterator[tuple[sqlite3.Connection, set[str]]]:
    """A connection to a database of SQLite and the names of its tables; what is written is kept if the block ends well.

    Where there is no file the connection is one to an empty database in memory.
    """
    with closing(sqlite3.connect(file if file.is_file() else ":memory:", timeout=_BUSY_S)) as database, database:
        database.execute("BEGIN IMMEDIATE")
        yield database, {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
