"""The parts that `draftsmith up` runs: command, environment, health address and order of each.

Every part gets only the secrets that it needs: each server its password and database, the worker (and with it every
run) the password of the servers. No secret stands on a command line, which all can read.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from components.contract import UserError
from components.files import write_whole
from flows.services.client import (
    LOOPBACK,
    OWNER_ONLY,
    PASSWORD_VARIABLE,
    QUIET,
    WORK_POOL,
    Services,
    auth_file,
    client_environment,
    read_auth_string,
)
from flows.services.databases import VARIABLES, database_url, on_database

MARK = "DRAFTSMITH_SERVICES"
"""The variable that names the home in the environment of every process below a supervisor, by which all are found."""
_SERVER_ONLY = (
    "PREFECT_SERVER_",
    "PREFECT_API_DATABASE_",
    "MLFLOW_BACKEND_STORE_URI",
    "MLFLOW_REGISTRY_STORE_URI",
    *VARIABLES,
)
_CLIENT_VARIABLES = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY", "PREFECT_PROFILE", MARK)


@dataclass(frozen=True)
class Settings:
    """The settings of `up`."""

    home: Path
    file: Path  # the pipelines file
    prefect_port: int = 4200
    mlflow_port: int = 5000
    public_url: str = ""  # where a proxy shows the pages (deploy/Caddyfile), such as https://draft.example.com

    @property
    def logs(self) -> Path:
        """The folder of the parts' logs."""
        return self.home / "logs" / "services"


@dataclass(frozen=True)
class Part:
    """One process under the supervisor."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    health_url: str = ""  # "": it is healthy while it lives
    worker_name: str = ""  # of a worker, which is healthy once Prefect hears it
    after: tuple[str, ...] = ()  # parts that must answer before it can start
    stop_s: float = 10.0  # between SIGTERM and SIGKILL


def services_of(settings: Settings, pid: int) -> Services:
    """The addresses of the servers that these settings start."""
    prefect = f"http://{LOOPBACK}:{settings.prefect_port}"
    mlflow = external_mlflow() or f"http://{LOOPBACK}:{settings.mlflow_port}"
    elsewhere = database_url("mlflow") or os.environ.get("MLFLOW_BACKEND_STORE_URI")
    return Services(
        prefect_api_url=f"{prefect}/api",
        prefect_ui_url=prefect,
        mlflow_url=mlflow,
        auth_string=read_auth_string(settings.home),
        work_pool=WORK_POOL,
        pid=pid,
        tracking_uri=mlflow if elsewhere and not os.environ.get("MLFLOW_TRACKING_URI") else "",
        mlflow_is_ours=not external_mlflow(),
        public_url=settings.public_url,
    )


def public_address(text: str) -> str:
    """A public address as all links begin with it: scheme and host, no path.

    Raises:
        UserError: it is something else.
    """
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        is_one = False
    if text and (not is_one or parts.path.strip("/") or parts.query or parts.fragment):
        raise UserError(f"--public-url {text}: must be a scheme and a host alone, such as https://draft.example.com")
    return text.rstrip("/")


def external_mlflow() -> str:
    """An MLflow server that somebody else runs, which $MLFLOW_TRACKING_URI names; "" for none."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return uri.rstrip("/") if uri.startswith(("http://", "https://")) else ""


def ensure_auth_string(home: Path) -> str:
    """The password of the servers: $PREFECT_SERVER_API_AUTH_STRING, or one that is made once and kept."""
    configured = os.environ.get("PREFECT_SERVER_API_AUTH_STRING", "")
    if configured and ":" not in configured:
        raise UserError("$PREFECT_SERVER_API_AUTH_STRING must read name:password, with a colon")
    stored = read_auth_string(home)
    auth = configured or stored or f"draftsmith:{secrets.token_urlsafe(24)}"
    if auth != stored:
        auth_file(home).parent.mkdir(parents=True, exist_ok=True)
        write_whole(auth_file(home), auth + "\n", mode=OWNER_ONLY)
    return auth


def parts_of(settings: Settings) -> list[Part]:
    """Every process that `up` keeps running, in the order in which they start."""
    services = services_of(settings, os.getpid())
    common = _common_environment(settings)
    client = common | client_environment(services)
    client.setdefault("PREFECT_CLIENT_RETRY_EXTRA_CODES", "500")  # the server's, while its connections wait for SQLite
    host = socket.gethostname().split(".")[0] or "localhost"
    worker_name = f"{WORK_POOL}-{host}-{secrets.token_hex(4)}"  # two workers of one name lock each other's database
    worker = ("-m", "prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process", "--name", worker_name)
    parts = [_prefect(settings, services)]
    if not external_mlflow():
        parts.append(_mlflow(settings, services))
    command = (sys.executable, *worker)
    parts.append(Part("worker", command, client, worker_name=worker_name, after=("prefect",), stop_s=20.0))
    parts.append(Part("watch", (sys.executable, "-m", "flows.orchestration.event_watcher"), client, after=("prefect",)))
    return parts


def _prefect(settings: Settings, services: Services) -> Part:
    origins = ",".join(f"http://{host}:{settings.prefect_port}" for host in (LOOPBACK, "localhost"))
    origins += f",{settings.public_url}" if settings.public_url else ""
    environment = _common_environment(settings, keep_server=True) | {
        "PREFECT_SERVER_API_AUTH_STRING": services.auth_string,
        "PREFECT_API_AUTH_STRING": services.auth_string,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": origins,
        "PREFECT_SERVER_UI_API_URL": "/api",  # the port alone does not reach the UI
        "PREFECT_UI_URL": services.prefect_pages,  # in links of notifications, as its clients have it
        # a run ends its own pause; ended by the server as well, it would be Failed for a moment
        "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    }
    environment.setdefault("PREFECT_SERVER_DATABASE_TIMEOUT", "60")  # busy machines hold SQLite's lock for over 10 s
    # marking a queue of runs "Late", each every 5 s, kept SQLite locked for minutes when twenty were waiting
    environment.setdefault("PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS", "600")
    package = find_spec("prefect")
    assert package is not None and package.origin is not None, "prefect is installed"
    if not os.access(Path(package.origin).parent / "server", os.W_OK):  # it unpacks its UI there
        environment["PREFECT_UI_STATIC_DIRECTORY"] = str(settings.home / "prefect" / "ui")
    program = _uvicorn("flows.orchestration.server_app:create_app", settings.prefect_port, "--lifespan", "on")
    command, environment = on_database("prefect", program, environment)
    return Part("prefect", command, environment, f"{services.prefect_api_url}/ready", stop_s=12.0)


def _mlflow(settings: Settings, services: Services) -> Part:
    folder = settings.home / "mlflow"
    uri = os.environ.get("MLFLOW_BACKEND_STORE_URI") or os.environ.get("MLFLOW_TRACKING_URI")
    environment = _common_environment(settings) | {
        "MLFLOW_BACKEND_STORE_URI": uri or f"sqlite:///{(folder / 'mlflow.db').absolute()}",
        "MLFLOW_ARTIFACTS_DESTINATION": os.environ.get("MLFLOW_ARTIFACTS_DESTINATION") or str(folder / "artifacts"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes and 700 MB that nothing here uses
        "MLFLOW_SERVER_ALLOWED_HOSTS": "*",  # flows/services/server_guard.py, before it, checks the host
        PASSWORD_VARIABLE: services.auth_string,
    }
    program = _uvicorn("flows.services.mlflow_server:create_app", settings.mlflow_port)
    command, environment = on_database("mlflow", program, environment)
    return Part("mlflow", command, environment, f"http://{LOOPBACK}:{settings.mlflow_port}/health")


def _uvicorn(app: str, port: int, *options: str) -> tuple[str, ...]:
    """The command that serves the app which this function makes on a port of loopback."""
    where = ("--host", LOOPBACK, "--port", str(port), "--log-level", "warning", "--timeout-graceful-shutdown", "3")
    return (sys.executable, "-m", "uvicorn", "--factory", app, *where, *options)


def _common_environment(settings: Settings, keep_server: bool = False) -> dict[str, str]:
    """The caller's environment without the servers' variables, and with those of this home."""
    dropped = _CLIENT_VARIABLES if keep_server else _CLIENT_VARIABLES + _SERVER_ONLY
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return inherited | {
        **QUIET,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_HOME": str(settings.home / "prefect"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "DRAFTSMITH_HOME": str(settings.home),
        "DRAFTSMITH_PIPELINES": str(settings.file.absolute()),
        "DRAFTSMITH_PUBLIC_URL": settings.public_url,
        "PYTHONUNBUFFERED": "1",
        MARK: str(settings.home),
    }


def check_ports(settings: Settings) -> None:
    """Check that both ports are free.

    Raises:
        UserError: one is taken; the line names it and the option that chooses another.
    """
    ports = [("Prefect", settings.prefect_port, "--prefect-port")]
    if not external_mlflow():
        ports.append(("MLflow", settings.mlflow_port, "--mlflow-port"))
    if len(ports) == 2 and settings.prefect_port == settings.mlflow_port:
        raise UserError(f"port {settings.prefect_port} cannot serve both: choose another with --mlflow-port")
    for name, port, option in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                what = f"port {port}, wanted for {name}, cannot be used: {error.strerror}{_process_on(port)}"
                raise UserError(f"{what}; choose another with {option}") from None


def _process_on(port: int) -> str:
    """ " by process ID (NAME)" for the process that listens on a port; "" where it is not ours to see."""

    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and connection.laddr and connection.laddr.port == port:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        return ""  # another user's process: not ours to see
    return ""
