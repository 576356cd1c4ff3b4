"""The doctor finds what breaks servers: versions, databases half migrated or too new, a password that others read."""

from __future__ import annotations

import importlib.metadata
import sqlite3
from pathlib import Path

import pytest

from components.contract import UserError
from flows.services.client import auth_file
from flows.services.doctor import BREAKS_SERVER, Finding, check_versions, examine, revisions
from flows.services.processes import ensure_auth_string


def findings(home: Path, about: str) -> list[Finding]:
    return [finding for finding in examine(home) if about in finding.what]


def make_database(file: Path, revision: str, *tables: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
        database.execute("INSERT INTO alembic_version VALUES (?)", (revision,))
        for table in tables:
            database.execute(f"CREATE TABLE {table} (a)")
    database.close()


def test_a_fresh_home_is_well(tmp_path: Path) -> None:
    assert [finding for finding in examine(tmp_path / "home") if finding.verdict == "bad"] == []
    assert not (tmp_path / "home").exists(), "the doctor changes nothing"


@pytest.mark.parametrize("name", sorted(BREAKS_SERVER))
def test_a_version_that_breaks_the_server_is_refused_with_its_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    too_new = BREAKS_SERVER[name][0]
    monkeypatch.setattr(importlib.metadata, "version", lambda dist: f"{too_new}.9" if dist == name else real(dist))
    with pytest.raises(UserError, match=rf'{name} {too_new}\.9: .*pip install "{name}<{too_new}"'):
        check_versions()


def test_a_machine_without_a_c_compiler_is_told_what_it_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert [finding.verdict for finding in findings(tmp_path / "home", "C compiler")] == ["ok"]
    compiler.unlink()
    (found,) = findings(tmp_path / "home", "C compiler")
    assert found.verdict == "note" and "gcc" in found.remedy


def test_what_is_installed_here_does_not_break_it() -> None:
    check_versions()


def test_migrations_end_in_one_newest() -> None:
    for package in ("prefect", "mlflow"):  # that it is the right one is seen on real databases, in tests/system
        known, newest = revisions(package)
        assert len(newest) == 1 and len(known) > 20, package


def test_databases_of_other_versions_are_told_apart(tmp_path: Path) -> None:
    known, (newest,) = revisions("mlflow")
    older = next(iter(known - {newest}))
    for name, revision, tables, verdict in (
        ("current", newest, (), "ok"),
        ("older", older, (), "note"),
        ("newer", "0123456789ab", (), "bad"),
        ("half", older, ("_alembic_tmp_tags",), "bad"),
    ):
        make_database(tmp_path / name / "mlflow" / "mlflow.db", revision, *tables)
        assert [finding.verdict for finding in findings(tmp_path / name, "mlflow's database")] == [verdict], name


def test_a_database_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "prefect.db").write_bytes(b"x" * 4096)
    (found,) = findings(tmp_path, "prefect.db")
    assert found.verdict == "bad" and "not a database" in found.what and "--repair" in found.remedy


def test_a_password_that_others_can_read_is_told(tmp_path: Path) -> None:
    ensure_auth_string(tmp_path)
    assert findings(tmp_path, "password")[0].verdict == "ok"
    auth_file(tmp_path).chmod(0o644)
    (found,) = findings(tmp_path, "can be read by others")
    assert found.verdict == "bad" and "chmod 600" in found.remedy
