"""Two machines of one: network namespaces with a wire between them, each with its own loopback, ports and host name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CAPABILITIES: Final = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN


@dataclass(frozen=True)
class Machine:
    """One of the two. Its own host name resolves nowhere, as in many containers; `known` do, by /etc/hosts."""

    name: str
    address: str

    def start(self, command: list[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
        """Start a command there."""
        there = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        return subprocess.Popen([*there, self.name, *command], env={**os.environ, **environment}, text=True, **options)

    def plug(self, how: str) -> None:
        """Pull the wire out ("down") or put it back ("up")."""
        _ip("-n", self.name, "link", "set", "wire", how)


def may_be_two() -> bool:
    """Whether this process may make network namespaces: root outside of a closed container."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    return held & CAPABILITIES == CAPABILITIES


@contextmanager
def two_machines(known: Mapping[str, int]) -> Iterator[tuple[Machine, Machine]]:
    """Two machines for the time of the block. known: names that both resolve -> 0 for the first, 1 for the second."""
    number = os.getpid()
    network = f"10.{number >> 8 & 255}.{number & 255}"
    machines = tuple(Machine(f"{name}-{number}", f"{network}.{at}") for at, name in ((1, "first"), (2, "second")))
    hosts = "127.0.0.1 localhost\n" + "".join(f"{machines[at].address} {name}\n" for name, at in known.items())
    made: list[Machine] = []
    try:
        for machine in machines:
            _ip("netns", "add", machine.name)
            made.append(machine)
            place = Path("/etc/netns") / machine.name  # what `ip netns exec` shows as /etc/hosts
            place.mkdir(parents=True)
            (place / "hosts").write_text(hosts, encoding="utf-8")
        first, second = machines
        peer = ("peer", "name", "wire", "netns", second.name)
        _ip("-n", first.name, "link", "add", "wire", "type", "veth", *peer)
        for machine in machines:
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "wire")
            _ip("-n", machine.name, "link", "set", "lo", "up")
            machine.plug("up")
        yield first, second
    finally:
        for machine in made:
            _ip("netns", "delete", machine.name)
            place = Path("/etc/netns") / machine.name
            (place / "hosts").unlink(missing_ok=True)
            place.rmdir()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
