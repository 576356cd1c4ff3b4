"""The services of deploy/compose.yaml as processes of this machine: their very commands, variables and health checks.

What a container would have by itself is given here: the image's variables, a folder for each volume, ports. Host names,
ports, the Python and the paths of mounts are those of here; nothing else is changed, and nothing else is inherited.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from prefect_server import end
from served_home import free_port

from flows.services.child import bound

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]
_VARIABLE = re.compile(r"\$(\$)|\$\{(\w+):([-?])([^}]*)\}")
_OF_THE_IMAGE = {
    name: value
    for line in re.findall(r"^ENV (.+)$", (FOLDER / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    for name, _, value in (word.partition("=") for word in shlex.split(line))
}


def filled_in(content: Any, given: Mapping[str, str]) -> Any:
    """A part of the compose file with the values of deploy/.env, as Compose fills them in."""
    if isinstance(content, dict):
        return {name: filled_in(value, given) for name, value in content.items()}
    if isinstance(content, list):
        return [filled_in(value, given) for value in content]
    if not isinstance(content, str):
        return content

    def value(found: re.Match[str]) -> str:
        dollar, name, how, rest = found.groups()
        assert dollar or how == "-" or given.get(name), f"{name}: {rest}"
        return dollar or given.get(name) or rest

    return _VARIABLE.sub(value, content)


class ComposeServices:
    """Services of the compose file below one folder.

    given: deploy/.env. places: where "postgres:5432" and "s3:9000" are here. programs: folders of the images' programs.
    """

    def __init__(self, folder: Path, given: Mapping[str, str], places: Mapping[str, str], programs: list[Path]) -> None:
        self.folder, self.running = folder, dict[str, subprocess.Popen[bytes]]()
        self.services: dict[str, dict[str, Any]] = filled_in(SERVICES, given)
        self.ports = {name: free_port() for name in ("prefect", "mlflow", "worker")}
        self._here = {"0.0.0.0": "127.0.0.1", "/usr/local/bin/python": sys.executable, **places}
        for name, port in (("prefect", 4200), ("mlflow", 5000), ("worker", 8080)):
            hosts = (name, "127.0.0.1", "localhost")
            self._here |= {f"{host}:{port}": f"127.0.0.1:{self.ports[name]}" for host in hosts}
            self._here[f"--port={port}"] = f"--port={self.ports[name]}"
        database, _, port = places["postgres:5432"].partition(":")
        self._here["--host=postgres"] = f"--host={database}"
        path = os.pathsep.join([*map(str, [Path(sys.executable).parent, *programs]), os.environ["PATH"]])
        self._added = {"PATH": path, "HOME": os.environ["HOME"], "PYTHONPATH": str(ROOT), "HOSTNAME": "of-this-test"}
        self._added |= {"PGHOST": database, "PGPORT": port, "PREFECT_WORKER_WEBSERVER_PORT": str(self.ports["worker"])}

    def mounts(self, name: str) -> dict[str, str]:
        """Where a service's mounts are here: volumes are folders, pipelines.yaml is the one in the folder."""
        found = {
            place: str(self.folder / f"{name}-{Path(place).name}")
            for place in ("/var/lib/draftsmith", "/var/tmp/machine")
        }
        found["/opt/draftsmith/pipelines.yaml"] = str(self.folder / "pipelines.yaml")
        for mount in self.services[name].get("volumes", []):
            source, target = mount.split(":")[:2]
            found[target] = str(self.folder / Path(source).name)
        return found

    def as_here(self, name: str, text: str) -> str:
        """A text of a service with the places of here."""
        places = {**self._here, **self.mounts(name)}
        longest_first = sorted(places, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, longest_first)), lambda found: places[found[0]], text)

    def environment(self, name: str) -> dict[str, str]:
        """All variables of a service's process."""
        own = {**_OF_THE_IMAGE, **self.services[name]["environment"]}
        return {variable: self.as_here(name, value) for variable, value in own.items()} | self._added

    def command(self, name: str) -> list[str]:
        """A service's command."""
        return [self.as_here(name, word) for word in self.services[name]["command"]]

    def run(self, name: str, *command: str) -> None:
        """Run a service that ends, or another command in its place; it must end well."""
        self._make_mounts(name)
        ran = subprocess.run(
            [*command] or self.command(name),
            env=self.environment(name),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def start(self, *names: str) -> None:
        """Start services in this order, each when those that it depends on are well; return when all are."""
        for name in names:
            for other in set(self.services[name]["depends_on"]) & set(self.running):
                self.until_healthy(other)
            self._make_mounts(name)
            with self.log(name).open("ab") as log:
                self.running[name] = subprocess.Popen(
                    bound(self.command(name)),
                    env=self.environment(name),
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        for name in names:
            self.until_healthy(name)

    def until_healthy(self, name: str) -> None:
        """Return when the health check of a service is passed."""
        kind, *words = self.services[name]["healthcheck"]["test"]
        command = [self.as_here(name, word) for word in ([*words] if kind == "CMD" else ["sh", "-c", *words])]
        deadline = time.monotonic() + 900
        while subprocess.run(command, env=self.environment(name), capture_output=True, check=False).returncode != 0:
            ended = name in self.running and self.running[name].poll() is not None
            assert not ended and time.monotonic() < deadline, f"{name} is not well\n{self.said(name)}"
            time.sleep(0.5)

    def stop(self, *names: str) -> None:
        """Stop services and all that they have started."""
        for name in names:
            end(self.running.pop(name))

    def log(self, name: str) -> Path:
        """What a service says."""
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        """The end of what a service has said."""
        return self.log(name).read_text(encoding="utf-8", errors="replace")[-5000:] if self.log(name).exists() else ""

    def _make_mounts(self, name: str) -> None:
        for place in self.mounts(name).values():
            if not Path(place).is_file():
                Path(place).mkdir(exist_ok=True)


@contextmanager
def compose_services(
    folder: Path, given: Mapping[str, str], places: Mapping[str, str], programs: list[Path]
) -> Iterator[ComposeServices]:
    """The services for the time of the block; none of their processes is left after it."""
    services = ComposeServices(folder, given, places, programs)
    try:
        yield services
    finally:
        services.stop(*reversed(services.running))
