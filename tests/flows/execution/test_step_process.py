"""Killed at any moment, then the same command: it completes, and what was finished is not repeated."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pipeline_builder import only
from toy_garden import COMMAND_LINE, ENGINE_ALONE, GARDEN, gone

from flows.execution.step_process import forget_secrets, secret_names
from storage.artifacts.store import Store

SLOW = GARDEN.with_param("pause", default=0.02).with_param("steps", default=12)


def contents(store: Store) -> dict[str, dict[str, bytes]]:
    """Every file of every artifact but artifact.json and what tells the time."""
    return {
        key: {
            file.name: file.read_bytes()
            for file in store.path_of(key).iterdir()
            if file.name not in ("artifact.json", "span.txt")
        }
        for key in sorted(store.keys())
    }


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_killed_run_completes_when_the_command_is_given_again(
    seed: int,
    tmp_path: Path,
    pipelines: Callable[[str], Path],
    start: Callable[..., subprocess.Popen[str]],
    store: Store,
) -> None:
    rng = random.Random(seed)
    file = pipelines(SLOW.text)
    finished_at: dict[str, int] = {}
    for kill in range(3):
        process = start(ENGINE_ALONE, "garden", file)
        started = time.monotonic()
        deadline = rng.uniform(0.5, 2.0)
        wanted = len(store.keys()) + rng.randint(0, 2)  # so many artifacts more, or the time, whichever comes first
        while time.monotonic() - started < deadline and (kill == 0 or len(store.keys()) < wanted):
            time.sleep(0.01)
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert all(gone(child.pid) for child in below)
        for key in sorted(store.keys()):
            stamp = (store.path_of(key) / "artifact.json").stat().st_mtime_ns
            assert finished_at.setdefault(key, stamp) == stamp, "a finished step was repeated"
            assert store.verify_local(key).artifact is not None
    process = start(ENGINE_ALONE, "garden", file)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert len(store.keys()) == 8
    for key, stamp in finished_at.items():
        assert (store.path_of(key) / "artifact.json").stat().st_mtime_ns == stamp
    for content in contents(store).values():
        if "growth.txt" in content:
            assert [line.split()[0] for line in content["growth.txt"].decode().splitlines()] == [
                str(n) for n in range(12)
            ]
    assert not list((store.home / "partial").glob("*"))


@pytest.mark.parametrize("whom", ["the engine", "the fork server", "the guard", "the worker"])
def test_no_process_survives(
    whom: str,
    pipelines: Callable[[str], Path],
    start: Callable[..., subprocess.Popen[str]],
    store: Store,
) -> None:
    process = start(ENGINE_ALONE, "p", pipelines(only("toys.hang").text))
    pids = wait_for_pids(store)
    worker = psutil.Process(pids[0])
    guard = worker.parent()
    assert guard is not None
    server = guard.parent()
    assert server is not None
    victim = {
        "the engine": process.pid,
        "the fork server": server.pid,
        "the guard": guard.pid,
        "the worker": worker.pid,
    }[whom]
    os.kill(victim, signal.SIGKILL)
    if whom in ("the fork server", "the guard"):  # the step may go on under the engine's eyes, or fail: end it
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
    assert gone(worker.pid)
    assert gone(guard.pid)
    process.communicate(timeout=600)
    if whom != "the guard":  # nobody is left who knows of a process that hid in a session of its own
        assert all(gone(pid) for pid in pids)
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def test_what_a_library_leaves_in_a_step_is_not_told_at_the_end_of_the_run(
    pipelines: Callable[[str], Path], start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start(COMMAND_LINE, "run", "p", "--direct", "-f", pipelines(only("toys.leak", mib=1).text))
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert "resource_tracker" not in said


def test_an_interrupt_ends_in_order(
    pipelines: Callable[[str], Path],
    start: Callable[..., subprocess.Popen[str]],
    store: Store,
) -> None:
    process = start(COMMAND_LINE, "run", "p", "--direct", "-f", pipelines(only("toys.hang").text))
    pids = wait_for_pids(store)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 130, said
    assert "interrupted; steps that are done stay done: the same command goes on from there" in said.splitlines()
    assert "Traceback" not in said
    assert all(gone(pid, within=1) for pid in pids)


def wait_for_pids(store: Store) -> list[int]:
    """The worker's pid and that of the process it has started, once `toys.hang` has written them down."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for file in (store.home / "partial").glob("*.scratch/pids"):
            return [int(pid) for pid in file.read_text().split()]
        time.sleep(0.02)
    raise AssertionError("the step did not start in a minute")


SECRETS = {
    "HF_TOKEN": "hf_0123456789",
    "AWS_SECRET_ACCESS_KEY": "aws",
    "OPENAI_API_KEY": "sk-0123456789",
    "WANDB_API_KEY": "wandb",
    "PREFECT_API_AUTH_STRING": "draftsmith:password",
    "MLFLOW_TRACKING_PASSWORD": "password",
    "DRAFTSMITH_STORE_SECRET": "of the team",
    "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql://ada:hidden@db/prefect",
    "DATABASE_URL": "postgresql://ada:hidden@db/other",
}
PLAIN = {"PATH": "/bin", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DRAFTSMITH_HOME": "/home/ada/x"}
OURS = {name for name in SECRETS if name.startswith(("PREFECT_", "MLFLOW_", "DRAFTSMITH_"))}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in (SECRETS | PLAIN).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("environment")
def test_secrets_are_known_by_their_names_or_by_the_addresses_that_hold_them() -> None:
    assert secret_names(os.environ) == SECRETS.keys()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("address", ["drafts.train_draft", "bench.measure_acceptance", "speedup.choose_depth"])
def test_a_step_that_fetches_nothing_has_no_secret(address: str) -> None:
    forget_secrets(address, {"model": "x"})
    assert {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} == PLAIN


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    "address", ["targets.load_target", "data.collect_chats", "publish.upload_release", "mine.step"]
)
def test_a_step_that_may_fetch_has_the_keys_of_hubs_and_none_of_our_servers(address: str) -> None:
    forget_secrets(address, {})
    assert secret_names(os.environ) == SECRETS.keys() - OURS


@pytest.mark.usefixtures("environment")
def test_a_step_has_what_its_own_settings_name() -> None:
    forget_secrets("bench.measure_engine", {"api_key_variable": "OPENAI_API_KEY", "other_variable": ""})
    assert secret_names(os.environ) == {"OPENAI_API_KEY"}


def test_the_fork_server_loads_what_a_model_needs_and_can_be_forked() -> None:
    """It asks for no GPU and starts no thread: neither outlives a fork. A step then loads our own code alone."""
    program = """
import importlib, sys, threading, torch
from flows.execution.step_process import PRELOAD
asked = []
for name in ("is_available", "device_count", "_lazy_init"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))
for name in PRELOAD:
    importlib.import_module(name)
loaded, threads = {*sys.modules}, threading.active_count()
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
import components.drafts.storage.files
new = {name.split(".")[0] for name in {*sys.modules} - loaded}
print(asked, threads, sorted(new & {"torch", "sympy", "accelerate", "tokenizers", "numpy"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[] 1 []\n"
