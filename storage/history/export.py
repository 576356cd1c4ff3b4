"""The whole history as one DuckDB file: its tables with all sessions, the views over them, and the comments on both.

A copy for notebooks, dashboards and other machines: it opens without Draftsmith, and nothing that happens to it reaches
the history. It is written beside its place and renamed, so a reader of an earlier copy never sees half of a new one.
"""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa

from components.contract import UserError
from components.files import written_whole
from storage.artifacts.sync import catch_up
from storage.history.comments import VIEWS, comment_statements
from storage.history.files import damaged_files, history_dir, open_table
from storage.history.query import NEWEST, relation_columns
from storage.history.schema import all_tables
from storage.history.segments import REPAIR_HINT, DamagedHistory, reading

_MAGIC = slice(8, 12), b"DUCK"


def export_history(home: Path, file: Path) -> dict[str, int]:
    """Write the history of `home` into a DuckDB file; returns table -> rows. An earlier copy is replaced.

    Raises:
        UserError: the file is there and is no DuckDB database, or its folder is not there.
        DamagedHistory: a file of the history is damaged.
    """
    if not file.parent.is_dir():
        raise UserError(f"history export: the folder {file.parent} is not there; make it first")
    if file.exists() and not _is_database(file):
        raise UserError(f"history export: {file} is there and is no DuckDB database; name another file")
    catch_up(home)
    with reading(history_dir(home)), written_whole(file) as beside:
        try:
            return _write(home, beside)
        except (pa.ArrowException, OSError, duckdb.Error) as error:
            damaged = next(damaged_files(home), None)
            if damaged is None:
                raise
            raise DamagedHistory(f"{damaged}: is damaged; {REPAIR_HINT}") from error


def _write(home: Path, file: Path) -> dict[str, int]:
    rows = {}
    with duckdb.connect(str(file)) as connection:
        connection.begin()  # one write to disk instead of a thousand
        for table in all_tables():
            connection.register("_source", open_table(home, table))
            connection.execute(f'CREATE TABLE "{table}" AS FROM _source')
            connection.unregister("_source")
            (count,) = connection.execute(f'SELECT count(*) FROM "{table}"').fetchall()[0]
            rows[table] = int(count)
        connection.execute(NEWEST + VIEWS.read_text(encoding="utf-8")).fetchall()
        connection.execute(comment_statements(relation_columns(connection), all_tables())).fetchall()
        connection.commit()
    return rows


def _is_database(file: Path) -> bool:
    place, expected = _MAGIC
    with file.open("rb") as stream:
        return stream.read(16)[place] == expected
