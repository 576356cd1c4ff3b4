"""Make the home that tests/test_older_homes.py opens for ever after: one for each release, by the release's own code.

In a clone at the release, with its environment:  python tests/older_homes/make_home.py VERSION.tar.gz
(a clone from before this file: python PATH/TO/make_home.py VERSION.tar.gz, from the clone's root)

It holds runs of toys and of the main job at tiny size, a step that was made twice, merged history and a champion. The
copies of Draftsmith's own code beside a version in MLflow are left out: they are the release, and most of the bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

ROOT = Path.cwd()
TESTS = ("", "tests", "tests/flows")
HOST = "another-machine"


def main() -> None:
    """Run the commands, as a user would; the last prints what the home holds."""
    file = Path(sys.argv[1]).absolute()
    sys.path[:0] = [str(ROOT / name) for name in TESTS]
    from tiny_pipeline import write_pipeline
    from toy_garden import GARDEN

    folder = Path(tempfile.mkdtemp(prefix="older-home-"))
    pipelines = write_pipeline("llama", folder)
    pipelines.write_text(GARDEN.text + pipelines.read_text().partition("pipelines:\n")[2])
    home = folder / "home"
    draftsmith(home, "run", "garden", "--direct", "-f", pipelines)
    draftsmith(home, "run", "garden", "--direct", "-f", pipelines, "--force", "timed")
    draftsmith(home, "run", "tiny", "--direct", "-f", pipelines)
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as database:
        models = database.execute("SELECT name FROM registered_models").fetchall()
    for (name,) in models:
        draftsmith(home, "promote", name, "--version", "1", "--force", "--why", "for the older homes")
    draftsmith(home, "compact")
    for code in home.glob("mlflow/artifacts/**/code"):
        shutil.rmtree(code)
    for name in ("logs", "locks", "partial"):
        shutil.rmtree(home / name, ignore_errors=True)
    if (identity := home / "home.json").is_file():
        identity.write_text(json.dumps({**json.loads(identity.read_text()), "host": HOST}))
    with tarfile.open(file, "w:gz") as archive:
        archive.add(folder, ".", filter=_anonymous)
    sys.stdout.write(f"{file}: {file.stat().st_size >> 10} KiB, made in {folder}\n")


def draftsmith(home: Path, *arguments: object) -> str:
    """One command of the release."""
    paths = os.pathsep.join(str(ROOT / name) for name in TESTS)
    place = home.parent / "tmp"
    place.mkdir(exist_ok=True)
    settings = {"DRAFTSMITH_HOME": str(home), "DRAFTSMITH_PACKAGES": "components,toybox", "TMPDIR": str(place)}
    command = [sys.executable, "-m", "flows.cli", *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **settings, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[3:])}: {done.stderr}")
    return done.stdout


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if member.name.startswith("./tmp") else member


if __name__ == "__main__":
    main()
