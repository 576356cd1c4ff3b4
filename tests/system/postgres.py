"""A real PostgreSQL (Debian's package) on loopback: its own temporary data directory, a free port, a password.

PostgreSQL refuses to run as root, so root starts it as the user `postgres` that Debian's package has made.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

PASSWORD = "s3cret of the database/@!"
QUOTED = quote(PASSWORD, safe="")
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Postgres:
    """Where it answers. Every name is a database of its own."""

    port: int
    folder: Path
    password: str = PASSWORD

    def url(self, database: str, driver: str = "") -> str:
        """A connection URL of SQLAlchemy, password included."""
        return f"postgresql{driver}://draftsmith:{quote(self.password, safe='')}@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> None:
        """Make an empty database."""
        self.ask("postgres", f'CREATE DATABASE "{database}"')

    def ask(self, database: str, sql: str) -> list[Any]:
        """The rows of one statement, first column."""

        async def run() -> list[Any]:
            import asyncpg

            connection = await asyncpg.connect(self.url(database))
            try:
                return [row[0] for row in await connection.fetch(sql)]
            finally:
                await connection.close()

        return asyncio.run(run())

    def log(self) -> str:
        """All that the server has said."""
        return (self.folder / "log").read_text(encoding="utf-8")


def program(name: str) -> str:
    """A program of PostgreSQL, the newest that is installed; Debian keeps them out of the path."""
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    found = str(installed[-1]) if installed else shutil.which(name)
    assert found, "no PostgreSQL here: `make test-system` installs it"
    return found


@contextmanager
def postgres(password: str = PASSWORD) -> Iterator[Postgres]:
    """Start it on an empty data directory; stop it and leave nothing at the end."""
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-postgres-"))  # short: the user of the server must reach it
    as_user: dict[str, Any] = {}
    if os.geteuid() == 0:
        account = pwd.getpwnam("postgres")
        os.chown(folder, account.pw_uid, account.pw_gid)
        as_user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    environment = {**os.environ, "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    try:
        (folder / "password").write_text(password, encoding="utf-8")
        (folder / "password").chmod(0o644)  # in a folder that is closed to others
        options = ("--username=draftsmith", "--auth=scram-sha-256", f"--pwfile={folder / 'password'}", "--no-sync")
        subprocess.run(
            [program("initdb"), *options, "-D", str(folder / "data")],
            env=environment,
            cwd=folder,
            capture_output=True,
            check=True,
            **as_user,
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        settings = ("-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}", "-c", "fsync=off")
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [program("postgres"), "-D", str(folder / "data"), "-p", str(port), *settings],
                env=environment,
                cwd=folder,
                stdout=log,
                stderr=log,
                **as_user,
            )
        try:
            found = Postgres(port, folder, password)
            _wait(found, server)
            yield found
        finally:
            server.send_signal(signal.SIGINT)  # "fast": ends its connections, then itself
            server.wait(timeout=_PATIENCE_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(server: Postgres, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            assert server.ask("postgres", "SELECT 1") == [1]
            return
        except Exception as error:  # refused, starting up: asyncpg has a class for each
            assert process.poll() is None, server.log()
            if time.monotonic() > deadline:
                raise AssertionError(server.log()) from error
            time.sleep(0.1)
