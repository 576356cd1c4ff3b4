"""A home that was copied or moved: its own identity, all addresses lead to it, nothing is written into the original."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, light_versions, release

from components.speedup.comparison.promotion_rule import judge
from flows import cli
from storage import journal
from storage.artifacts.store import Store
from storage.home import read_identity, settle
from storage.record import resync
from storage.registry import versions as model_versions
from storage.registry.aliases import mark_of, version_numbers
from storage.registry.model import RegisteredVersion
from storage.registry.registry import notice_moves, promote, register
from storage.registry.tracking import open_client, tracking_uri
from storage.repair import find_damage

MODEL_FILE = Path(__file__).parent / "model_file.py"


@pytest.fixture(autouse=True)
def toy_model(with_mlflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_versions, "REQUIREMENTS", ("mlflow",))
    monkeypatch.setattr(model_versions, "MODEL_CODE", MODEL_FILE)


def add(home: Path, make: Any, key: str, **changes: Any) -> RegisteredVersion:
    return register(home, release(make, key, **changes).path, judge)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Time and size of everything in a folder: what is written there shows."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [folder, *folder.rglob("*")]}


def answer(home: Path) -> str:
    """What the champion of a home says, loaded as a user does."""
    code = f"import mlflow; print(mlflow.pyfunc.load_model('models:/{NAME}@champion').predict([1]))"
    environment = {**os.environ, "MLFLOW_TRACKING_URI": tracking_uri(home)}
    loaded = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return loaded.stdout.strip() or loaded.stderr[-1000:]


def test_a_copy_is_a_home_of_its_own_and_leaves_the_original_alone(home: Path, make: Any, tmp_path: Path) -> None:
    add(home, make, "k1")
    release(make, "k2", "d2")
    copy = tmp_path / "another place, 100 % ünlike" / "home"
    shutil.copytree(home, copy)
    before, mark = tree(home), mark_of(home, open_client(home))

    line = settle(copy)
    assert line.startswith(f"{copy} is a copy of {home}: ") and line.endswith("and it is a home of its own")
    assert settle(copy) == settle(home) == "", "it says so once"
    ours, theirs = read_identity(home), read_identity(copy)
    assert ours is not None and theirs is not None and ours.home_id != theirs.home_id and theirs.path == str(copy)

    home.rename(tmp_path / "hidden")
    assert mark_of(copy, open_client(copy)) != mark and notice_moves(copy) == []
    assert answer(copy).endswith("2.5"), "its version is loaded from the copy"
    assert resync(copy, judge)["releases"] == 2
    assert version_numbers(open_client(copy), NAME) == {1, 2} and not list(find_damage(copy, Store(copy)))
    promote(copy, NAME, 2, "try it", force=True, judge=judge)
    assert not home.exists()
    (tmp_path / "hidden").rename(home)
    assert tree(home) == before
    assert mark_of(home, open_client(home)) == mark and version_numbers(open_client(home), NAME) == {1}


def test_a_moved_home_stays_who_it_was_and_one_from_before_identities_finds_its_place(
    home: Path, make: Any, tmp_path: Path
) -> None:
    add(home, make, "k1")
    identity, mark = read_identity(home), mark_of(home, open_client(home))
    moved = home.rename(tmp_path / "moved")
    assert settle(moved).startswith(f"{moved} was moved here from {home}: ")
    now = read_identity(moved)
    assert identity is not None and now is not None and (now.home_id, now.path) == (identity.home_id, str(moved))
    assert mark_of(moved, open_client(moved)) == mark and len(journal.promotions(moved)) == 3
    assert not list(find_damage(moved, Store(moved)))

    (moved / "home.json").unlink()
    again = moved.rename(tmp_path / "again")
    assert settle(again).startswith(f"{again} was moved here from {moved}: ")
    (tmp_path / "link").symlink_to(again)
    assert settle(tmp_path / "link") == "", "another name of the same place"

    shutil.rmtree(next((again / "mlflow" / "artifacts").rglob("MLmodel")).parent)
    lost = [(damage.kind, damage.name) for damage in find_damage(again, Store(again))]
    assert lost == [("version", f"{NAME} version 1")]
    resync(again, judge)  # makes its files from its release
    assert not list(find_damage(again, Store(again))) and answer(again).endswith("2.5")


@pytest.mark.parametrize(("answered", "became"), [("y", "was moved here from"), ("n", "is a copy of")])
def test_who_is_at_a_terminal_is_asked_once_what_a_home_of_another_machine_is(
    home: Path, make: Any, tmp_path: Path, answered: str, became: str
) -> None:
    add(home, make, "k1")
    before = read_identity(home)
    assert before is not None
    came = shutil.copytree(home, tmp_path / "came")
    elsewhere = {**json.loads((came / "home.json").read_text()), "host": "another-machine"}
    (came / "home.json").write_text(json.dumps(elsewhere))
    command = [sys.executable, "-m", "flows.cli", "query", "SELECT 1"]
    environment = {**os.environ, "DRAFTSMITH_HOME": str(came)}
    ours, its = pty.openpty()
    with open(ours, "r+b", buffering=0) as terminal:
        terminal.write(f"{answered}\n".encode())
        with open(its, "r+b", buffering=0) as end:
            subprocess.run(command, env=environment, stdin=end, stderr=end, check=True, timeout=600)
            said = terminal.read(4096).decode()
            assert said.count("Was it moved") == 1 and became in said.replace("\r\n", "")
            again = subprocess.run(command, env=environment, stdin=end, stderr=subprocess.PIPE, check=True, timeout=600)
    now = read_identity(came)
    assert again.stderr == b"" and now is not None
    assert (now.home_id == before.home_id) == (answered == "y") and now.host == before.host


def test_a_version_deleted_in_mlflow_does_not_come_back(home: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    light_versions(monkeypatch)
    add(home, make, "k1")
    add(home, make, "k2", draft="d2")
    client = open_client(home)
    client.delete_model_version(NAME, "2")
    resync(home, judge)
    assert version_numbers(client, NAME) == {1}
    again = register(home, Store(home).path_of("k2"), judge)
    assert not again.is_new and "version 2 was deleted in MLflow and stays so" in again.note
    remade = add(home, make, "k2", draft="d2")  # somebody wanted it: measured in a new session
    assert remade.is_new and remade.version == 3


def test_a_home_of_a_newer_version_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    later = tmp_path / "later"
    monkeypatch.setenv("DRAFTSMITH_HOME", str(later))
    (later / "runs").mkdir(parents=True)
    (later / "home.json").write_text('{"format": 2, "who": "a later one"}')
    before = (later / "home.json").read_bytes()
    for command in (["doctor"], ["plan", "quickstart"], ["query", "SELECT 1"]):
        assert cli.main(command) == 2
        assert "a newer Draftsmith has worked on this home (its format is 2" in capfd.readouterr().err
    assert [path.name for path in later.iterdir() if path.name != "runs"] == ["home.json"]
    assert (later / "home.json").read_bytes() == before
