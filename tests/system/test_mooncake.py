"""Hidden states come by a real Mooncake store: the recorded features, nothing left in it, faults in one line."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from served_home import free_port

from components.contract import Conversations, Features, Target, UserError
from components.data import collect_prompts, features_from_server, record_features, write_answers
from components.drafts import train_draft
from components.engines import mooncake
from components.engines.server_address import MooncakeAddress
from components.targets import load_target
from tests.components.data.answering_server import answering
from tests.components.data.killed_step import context, files_of, run_killed
from tests.components.data.states_server import StatesServer
from tests.tiny_targets import make_tiny_target

pytestmark = pytest.mark.system

FLIGHT = 3
SEGMENT_BYTES = 1 << 26
TRAINING: dict[str, Any] = {
    "method": "eagle3",
    "num_steps": 4,
    "batch_tokens": 512,
    "draft_vocab_size": 128,
    "settings": {"eagle3": {"ttt_steps": 2}},
    "eval_every": 4,
    "precision": "float32",
}


class Producer:
    """What vLLM's Mooncake connector does, in a process of its own as there: a client does not outlive a fork of it."""

    def __init__(self, master: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.lock, (self.pipe, theirs) = threading.Lock(), spawn.Pipe()
        self.process = spawn.Process(target=produce, args=(theirs, master), daemon=True)
        self.process.start()
        self.pipe.recv()  # it has joined the store: what it then takes is no part of an answer's time

    def ask(self, *order: Any) -> Any:
        with self.lock:
            self.pipe.send(order)
            return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()


def produce(pipe: Connection, master: str) -> None:
    """Put, and look for, what is asked, until None is asked."""
    from hs_connectors.mooncake_store import (
        VERSION,
        MooncakeHiddenStatesStore,
        MooncakeStoreConfig,
        packed_layout,
    )

    config = MooncakeStoreConfig("127.0.0.1", "P2PHANDSHAKE", master, SEGMENT_BYTES, SEGMENT_BYTES)
    store = MooncakeHiddenStatesStore(config).setup()
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        what, name, *arrays = order
        if what == "is there":
            pipe.send(any(store._store.is_exist(key) for key in (name, f"{name}:error")))
            continue
        tensors = {
            part: torch.from_numpy(array) for part, array in zip(("hidden_states", "token_ids"), arrays, strict=True)
        }
        tensors["hidden_states"] = tensors["hidden_states"].view(torch.bfloat16)
        spec, size = packed_layout({part: (tuple(each.shape), each.dtype) for part, each in tensors.items()})
        manifest = {"handle": name, "version": VERSION, "tensors": spec, "metadata": {"total_aligned_bytes": size}}
        if what == "fail":
            store.put_error(manifest, "a state is not finite")
        else:
            store.put_sample(manifest, tensors)
        pipe.send(manifest)
    store._store.close()


class MooncakeServer(StatesServer):
    """Hands out the recorded states by a Mooncake store."""

    def __init__(self, target: Target, recorded: Features, folder: Path, master: str) -> None:
        super().__init__(target, recorded, folder)
        self.producer = Producer(master)
        self.failing: set[int] = set()  # requests, counted from 1, whose object does not come

    def named(self, prompt: tuple[int, ...]) -> dict[str, Any]:
        number = len(self.bodies)
        what = "fail" if number in self.failing else "put"
        states = self.states[prompt].contiguous().view(torch.int16).numpy()
        manifest = self.producer.ask(what, f"cmpl-{number}", states, np.array(prompt))
        return {"kv_transfer_params": manifest}

    def is_empty(self) -> bool:
        """Whether no object of any request so far is left, nor word of a fault."""
        return not any(self.producer.ask("is there", f"cmpl-{number}") for number in range(len(self.bodies) + 1))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    root = tmp_path_factory.mktemp("target")
    return load_target(model=str(make_tiny_target("llama", root / "model")), ctx=context(root / "artifact"))


@pytest.fixture(scope="module")
def answers(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    root = tmp_path_factory.mktemp("answers")
    prompts = collect_prompts(num_train=12, num_validation=4, num_test=2, ctx=context(root / "prompts"))
    return write_answers(target, prompts, max_new_tokens=24, batch_size=8, shard_size=6, ctx=context(root / "answers"))


@pytest.fixture(scope="module")
def recorded(target: Target, answers: Conversations, tmp_path_factory: pytest.TempPathFactory) -> Features:
    return record_features(target, answers, ctx=context(tmp_path_factory.mktemp("recorded") / "out"))


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """The address of a Mooncake master."""
    program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
    assert program is not None, "make test-system installs it"
    port, metrics = free_port(), free_port()
    with subprocess.Popen(
        [program, f"--rpc_port={port}", f"--metrics_port={metrics}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
        process.terminate()


@pytest.fixture
def server(target: Target, recorded: Features, master: str, tmp_path: Path) -> Iterator[MooncakeServer]:
    with answering(MooncakeServer(target, recorded, tmp_path / "own", master)) as serving:
        assert isinstance(serving, MooncakeServer)
        yield serving
        serving.producer.close()


def settings_of(server: MooncakeServer, master: str, **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"base_url": server.url, "folder": str(server.folder), "concurrency": FLIGHT}
    settings |= {"retries": 1, "backoff_s": 0.001, "timeout_s": 600.0}
    return {**settings, "mooncake": MooncakeAddress(master=master, local_hostname="127.0.0.1"), **more}


def write_half_and_die(tensors: dict[str, torch.Tensor], file: Path) -> None:
    file.write_bytes(save(tensors)[:1000])
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_comes_by_mooncake_is_what_is_recorded_here_also_after_a_fault_and_a_kill(
    server: MooncakeServer,
    master: str,
    target: Target,
    answers: Conversations,
    recorded: Features,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.failing = {2}
    settings, out = settings_of(server, master), tmp_path / "out"
    assert run_killed(lambda ctx: features_from_server(target, answers, **settings, ctx=ctx), out, after=7)
    server.settle()
    asked = server.answered.total()
    assert 7 <= asked <= 8 + 2 * FLIGHT
    with monkeypatch.context() as patch:
        patch.setattr(mooncake, "write_tensors", write_half_and_die)
        assert run_killed(lambda ctx: features_from_server(target, answers, **settings, ctx=ctx), out, after=100)
    server.settle()
    assert [file for file in server.folder.iterdir() if not file.name.endswith(".safetensors")], "a file not kept yet"
    made = features_from_server(target, answers, **settings, ctx=context(out))
    assert files_of(made.path) == files_of(recorded.path) and made.info == recorded.info
    assert server.answered.total() <= 16 + 1 + 4 * FLIGHT, "what had come is not asked for again"
    assert list(server.folder.iterdir()) == []


def test_training_on_what_mooncake_brings_is_training_on_stored_features_and_leaves_nothing_in_the_store(
    server: MooncakeServer, master: str, target: Target, answers: Conversations, recorded: Features, tmp_path: Path
) -> None:
    settings = settings_of(server, master, storage="none")
    features = features_from_server(target, answers, **settings, ctx=context(tmp_path / "features"))
    train_draft(target, features, **TRAINING, ctx=context(tmp_path / "out"))
    train_draft(target, recorded, **TRAINING, ctx=context(tmp_path / "stored"))
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "stored"))
    assert one == other
    assert set(server.answered.values()) == {1} and server.is_empty()


def test_a_store_that_fails_is_one_line(
    server: MooncakeServer, master: str, target: Target, answers: Conversations, tmp_path: Path
) -> None:
    def refused(**more: Any) -> str:
        with pytest.raises(UserError) as said:
            features_from_server(target, answers, **settings_of(server, master, **more), ctx=context(tmp_path / "out"))
        assert "\n" not in str(said.value)
        return str(said.value)

    server.failing = set(range(1, 100))
    assert "mooncake: Mooncake producer error for key=cmpl-" in (said := refused()) and "finite; 0 conv" in said
    server.failing = set()
    assert refused(mooncake=None).startswith(f"base_url: {server.url}: hands states out by Mooncake: set `mooncake`")
    server.named = super(MooncakeServer, server).named  # type: ignore[method-assign]
    server.beside = server.named
    assert "the server hands out files" in refused()
    nobody = MooncakeAddress(master=f"127.0.0.1:{free_port()}", local_hostname="127.0.0.1")
    assert refused(mooncake=nobody).startswith(f"mooncake: no store at {nobody.master}")
