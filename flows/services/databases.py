"""Prefect and MLflow on PostgreSQL, for many users; without it each home has SQLite files of its own.

    DRAFTSMITH_PREFECT_DATABASE=postgresql+asyncpg://user:password@host/prefect
    DRAFTSMITH_MLFLOW_DATABASE=postgresql://user:password@host/mlflow

The URLs hold passwords: they travel in the environment of the one server that needs them, never on a command line, and
storage/redaction.py hides them in all output. A server is started through this file
(`python -m flows.services.databases NAME PROGRAM ...`), which brings the schema up to date first, holding a lock in the
database itself: however many machines start their servers at once, one of them migrates and the others wait.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from components.contract import UserError
from storage.redaction import without_secrets

MIGRATION_TIMEOUT_S = 600.0
_LOCK = 0x6472616674  # "draft": any number will do


@dataclass(frozen=True)
class Server:
    """How a server gets its database. variable: ours; server_variable: its own. upgrade: arguments to Python."""

    variable: str
    drivers: tuple[str, ...]
    server_variable: str
    upgrade: tuple[str, ...]


SERVERS = {
    "prefect": Server(
        "DRAFTSMITH_PREFECT_DATABASE",
        ("postgresql+asyncpg",),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL",
        ("-m", "prefect", "server", "database", "upgrade", "--yes"),
    ),
    "mlflow": Server(
        "DRAFTSMITH_MLFLOW_DATABASE",
        ("postgresql", "postgresql+psycopg2"),
        "MLFLOW_BACKEND_STORE_URI",
        ("-c", "import os, storage.registry.tracking as t; t.prepare_database(os.environ['MLFLOW_BACKEND_STORE_URI'])"),
    ),
}
VARIABLES = tuple(server.variable for server in SERVERS.values())
"""Variables that workers and runs do not get: they talk to the servers."""


def on_database(
    name: str, command: tuple[str, ...], environment: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and environment of server `name` on the PostgreSQL that our variable names; unchanged without one.

    Raises:
        UserError: the URL is not one of PostgreSQL.
    """
    url = database_url(name)
    environment_kept = {variable: value for variable, value in environment.items() if variable not in VARIABLES}
    if not url:
        return command, environment_kept
    through = (sys.executable, "-m", "flows.services.databases", name, *command)
    return through, environment_kept | {SERVERS[name].server_variable: url}


def database_url(name: str) -> str:
    """The connection URL of "prefect" or "mlflow", password included; "" means a SQLite file of the home.

    Raises:
        UserError: it is not one of PostgreSQL, with the driver that the server needs.
    """
    server = SERVERS[name]
    url = os.environ.get(server.variable, "").strip()
    if not url:
        return ""
    parts = urlsplit(url)
    if parts.scheme not in server.drivers or not parts.hostname or not parts.path.strip("/"):
        form = f"{server.drivers[0]}://user:password@host/database"
        raise UserError(f"{server.variable} is '{without_secrets(url)}'; it must read {form}")
    return url


def migrate(name: str) -> None:
    """Make or upgrade the schema of server `name` under a lock; its URL stands in the server's own variable.

    Raises:
        UserError: the database cannot be reached, or refuses.
    """
    url = os.environ[SERVERS[name].server_variable]
    asyncio.run(_upgrade_locked(name, url))


async def _upgrade_locked(name: str, url: str) -> None:
    try:
        import asyncpg
    except ImportError as error:
        raise UserError("PostgreSQL needs two more packages: pip install 'draftsmith[postgres]'") from error
    try:
        connection = await asyncpg.connect(_libpq_url(url), timeout=30.0)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
        raise UserError(f"{name}: {without_secrets(url)} cannot be used: {type(error).__name__}: {error}") from error
    try:
        await connection.execute("SELECT pg_advisory_lock($1)", _LOCK, timeout=MIGRATION_TIMEOUT_S)
        command = [sys.executable, *SERVERS[name].upgrade]
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=MIGRATION_TIMEOUT_S, check=True)
    finally:
        await connection.close()  # which releases the lock


def _libpq_url(url: str) -> str:
    """The URL without SQLAlchemy's driver, with the parameter names of libpq."""
    parts = urlsplit(url)
    words = [("sslmode" if name == "ssl" else name, value) for name, value in parse_qsl(parts.query)]
    return urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(words), ""))


def main(arguments: list[str]) -> None:
    """NAME PROGRAM ARGUMENT...: migrate, then become the program."""
    name, *command = arguments
    try:
        migrate(name)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{name}: its database could not be brought up to date (exit code {error.returncode})\n")
        raise SystemExit(1) from None
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
