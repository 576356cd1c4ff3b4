"""deploy/compose.yaml: pinned images, loopback ports, health checks, no secret in the file, no name that nobody reads.

Docker itself is not needed, except for the last test, which asks it to read the file where it is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from read_variables import read_by_nobody

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
GPUS = yaml.safe_load((FOLDER / "compose.gpu.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
EXAMPLE = (FOLDER / ".env.example").read_text(encoding="utf-8")
SECRETS = re.findall(r"^(\w+)=", EXAMPLE, re.MULTILINE)
CHOICES = re.findall(r"^#(\w+)=", EXAMPLE, re.MULTILINE)


def one_shot(service: dict[str, Any]) -> bool:
    return service.get("restart") == "no"


def variables() -> dict[str, str]:
    return {name: str(value) for service in SERVICES.values() for name, value in service["environment"].items()}


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_pinned_watched_and_local(name: str) -> None:
    service = SERVICES[name]
    image, _, tag = service["image"].partition(":")
    assert image and re.search(r"\d", tag) and tag != "latest", service["image"]
    assert one_shot(service) or service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert one_shot(service) or ("mem_limit" in service and service["logging"]["options"]["max-size"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), service["ports"]
    for other, how in service.get("depends_on", {}).items():
        wanted = "service_completed_successfully" if one_shot(SERVICES[other]) else "service_healthy"
        assert how["condition"] == wanted, f"{name} after {other}"
    for volume in service.get("volumes", []):
        source = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", volume).split(":")[0]
        assert source in COMPOSE["volumes"] or (FOLDER / source).is_file(), volume


def test_our_images_are_built_from_pinned_versions() -> None:
    lines = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    stages = re.split(r"^FROM ", lines, flags=re.MULTILINE)[1:]
    assert re.match(r"python:3\.\d+\.\d+-slim-\w+ AS source\n", stages[0])
    assert [stage.split("\n")[0] for stage in stages[1:]] == ["source AS gpu", "source AS cpu"]  # the last by default
    for stage in stages[1:]:
        assert "-c constraints.txt" in stage and stage.rstrip().endswith("\nUSER draftsmith")
    assert "/whl/cpu" in stages[2] and "/whl/cpu" not in stages[1], "CUDA torch comes with the image for GPUs alone"
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", lines, re.MULTILINE) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    assert {"flows", "components", "storage", "pipelines.yaml", "constraints.txt"} <= copied
    let_through = re.findall(
        r"^!(\S+)$", (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert copied == {*let_through}, "what is copied is let through, and nothing else"


def test_secrets_come_from_the_environment_file_and_are_required() -> None:
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    used = re.findall(r"\$\{(\w+)([^}]*)\}", text)
    assert {name for name, _ in used} == {*SECRETS, *CHOICES} and not set(SECRETS) & set(CHOICES)
    assert all(rest.startswith(":?" if name in SECRETS else ":-") for name, rest in used), (
        "an empty password must stop compose, and nothing else may"
    )
    assert all(re.search(rf"^{name}=$", EXAMPLE, re.MULTILINE) for name in SECRETS), "the example holds no value"
    for name, value in variables().items():
        if re.search(r"PASSWORD|SECRET|AUTH_STRING|CONNECTION_URL|STORE_URI", name):
            assert "${" in value, f"{name} is written out"
    ignored = subprocess.run(["git", "check-ignore", "-q", "deploy/.env"], cwd=ROOT, check=False).returncode
    assert ignored in (0, 128), "deploy/.env must be ignored by git"


def test_every_variable_is_read_by_somebody() -> None:
    assert read_by_nobody(variables()) == []


@pytest.mark.parametrize("name", ["watch", "reconcile"])
def test_who_listens_to_nobody_is_well_while_its_command_runs_and_not_without_it(name: str) -> None:
    (shell,) = SERVICES[name]["healthcheck"]["test"][1:]
    pattern = re.search(r"'(.+)'", shell)
    assert pattern is not None
    assert re.search(pattern[1], "\0".join(SERVICES[name]["command"])), "the command line of the container"
    assert not re.search(pattern[1], shell), "the check itself"


def test_gpus_are_reserved_for_the_worker_alone() -> None:
    (worker,) = GPUS["services"].values()
    assert worker["build"]["target"] == "gpu" and worker["image"] != SERVICES["worker"]["image"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_our_modules_and_commands_are_there() -> None:
    words = [word for service in SERVICES.values() for word in service.get("command", [])]
    modules = [word.split(":")[0] for word in words if word.startswith("flows.")]
    assert "flows.services.databases" in modules and "flows.orchestration.server_app" in modules
    assert all((ROOT / (module.replace(".", "/") + ".py")).is_file() for module in modules)


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0,
    reason="no docker compose here",
)
def test_docker_compose_reads_it(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("".join(f"{name}=x\n" for name in SECRETS), encoding="utf-8")
    command = ["docker", "compose", "--env-file", str(tmp_path / "env"), "-f", str(FOLDER / "compose.yaml"), "config"]
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
