"""Another user of this machine reads no byte below a home, and cannot stop what runs there with a lock of his own."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_garden import COMMAND_LINE, GARDEN, ROOT

NOBODY = 65534
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user"),
]


@pytest.fixture(scope="module")
def stage() -> Iterator[Path]:
    """A folder that everybody may enter, as /home is, with a pipeline that has run in it under the usual umask."""
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-attack-"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    (folder / "pipelines.yaml").write_text(GARDEN.text)
    done = run_garden(folder)
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)


def run_garden(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`draftsmith run garden` as a user whose files everybody may read unless he is told otherwise."""
    environment = os.environ | {
        "DRAFTSMITH_HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'flows'}",
    }
    command = [sys.executable, "-c", COMMAND_LINE, "run", "garden", "-f", str(folder / "pipelines.yaml"), *options]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, umask=0o022, timeout=300, check=False
    )


def as_nobody(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, check=False
    )


def test_everything_below_a_home_is_its_owners_alone(stage: Path) -> None:
    home = stage / "home"
    everything = [home, *home.rglob("*")]
    assert {"store", "history", "mlflow", "logs", "runs", "prefect"} <= {path.name for path in home.iterdir()}
    opened = [
        f"{path.relative_to(stage)} {stat.S_IMODE(path.stat().st_mode):o}"
        for path in everything
        if not path.is_symlink() and path.stat().st_mode & 0o077
    ]
    assert opened == []


def test_another_user_sees_nothing_of_it(stage: Path) -> None:
    assert as_nobody("ls", str(stage)).returncode == 0, "the folder around it is open"
    seen = as_nobody("find", str(stage / "home"))
    assert seen.returncode != 0 and seen.stdout.split() == [str(stage / "home")]
    (journal,) = (stage / "home" / "runs").iterdir()
    assert as_nobody("cat", str(journal)).returncode != 0


@pytest.mark.parametrize("how", ["held lock", "pipe", "folder of his own", "link"])
def test_what_another_user_puts_in_the_temporary_folder_stops_nobody(stage: Path, how: str) -> None:
    place = stage / "tmp" / f"draftsmith-{os.getuid()}"
    old = stage / "tmp" / "draftsmith-machine.lock"
    if place.is_dir():
        shutil.rmtree(place)
    holder = None
    if how == "held lock":
        command = ["flock", str(old), "sleep", "600"]
        holder = subprocess.Popen(command, user=NOBODY, group=NOBODY, extra_groups=[])
    elif how == "pipe":
        assert as_nobody("mkfifo", str(place)).returncode == 0
    elif how == "link":
        assert as_nobody("ln", "-s", str(stage / "tmp"), str(place)).returncode == 0
    else:
        assert as_nobody("mkdir", "-m", "777", str(place)).returncode == 0
    try:
        done = run_garden(stage, "--direct", "--force", "timed")
        assert done.returncode == 0, done.stderr
    finally:
        if holder is not None:
            holder.kill()
            holder.wait()
        old.unlink(missing_ok=True)
        if place.is_symlink() or place.is_fifo():
            place.unlink()
        elif place.is_dir():
            shutil.rmtree(place)
