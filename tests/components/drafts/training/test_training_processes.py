"""Training in several processes: it learns what one process learns, and the death of one of them changes nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_drafts import new_context, write_features

from components.contract import Features, Target, UserError
from components.drafts import train_draft
from components.drafts.training.processes import RENDEZVOUS
from components.targets.interface import AbstractTarget

SETTINGS: dict[str, Any] = {
    "num_steps": 6,
    "batch_tokens": 160,
    "draft_vocab_size": 128,
    "settings": {
        "dflash": {"block_size": 4, "max_anchors": 6},
        "eagle3": {"ttt_steps": 3},
        "p-eagle": {"parallel_depth": 3, "num_layers": 2},
    },
    "precision": "float32",
    "eval_every": 3,
    "checkpoint_minutes": 1e-9,  # after every step
}
Folder = Callable[[str], Path]
MakeTarget = Callable[[str], AbstractTarget]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory, tiny_target: MakeTarget) -> Features:
    return write_features(tiny_target("llama"), tmp_path_factory.mktemp("features") / "f")


def rows_of(out: Path, *names: str) -> torch.Tensor:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return torch.tensor([[row[name] for name in names] for row in rows if names[0] in row])


@pytest.mark.parametrize(
    ("method", "number", "packing", "sharding"),
    [
        ("eagle3", 4, "bucket", "none"),  # some batches have fewer rows than there are processes
        ("eagle3", 4, "bucket", "full"),
        ("dflash", 2, "bucket", "none"),
        ("medusa", 2, "none", "full"),
        ("hass", 2, "pack", "none"),
    ],
)
def test_losses_gradients_and_acceptance_are_those_of_one_process(
    method: str, number: int, packing: str, sharding: str, tmp_path: Path, tiny_folder: Folder, features: Features
) -> None:
    """Small steps: rounding that Muon's iterations in bfloat16 and AdamW's first steps magnify stays below 1e-5."""

    def train(processes: int, peak_lr: float = 1e-5) -> Path:
        ctx = new_context(tmp_path / f"{processes}-{peak_lr}")
        chosen: dict[str, Any] = {**SETTINGS, "method": method, "packing": packing, "peak_lr": peak_lr}
        if number == 4:
            chosen["batch_tokens"] = 64
        if sharding == "full":  # processes have different numbers of parts
            chosen |= {"sharding": sharding, "micro_batch_tokens": 32}
        train_draft(Target(key="", path=tiny_folder("llama")), features, **chosen, processes=processes, ctx=ctx)
        return ctx.out

    alone, together = train(1), train(number)
    measured = ("loss", "grad_norm", "teacher_forced_al")
    torch.testing.assert_close(rows_of(together, *measured), rows_of(alone, *measured), rtol=1e-5, atol=1e-5)
    assert torch.equal(rows_of(together, "held_out_al"), rows_of(alone, "held_out_al"))
    before, one, many = (load_file(out / "model.safetensors") for out in (train(1, 1e-30), alone, together))
    for name, start in before.items():
        if start.is_floating_point() and not torch.equal(start, one[name]):
            steps = torch.stack([one[name] - start, many[name] - start]).double().flatten(1)
            assert torch.nn.functional.cosine_similarity(*steps, dim=0) > 0.98, name


def test_shares_survive_a_death_and_one_process_goes_on_from_them(
    tmp_path: Path, tiny_folder: Folder, features: Features
) -> None:
    """The checkpoint is whole: a single process goes on from one of shares."""
    settings: dict[str, Any] = {**SETTINGS, "sharding": "full"}

    def train(name: str, dies_at: int) -> tuple[Path, list[str]]:
        ctx, listened = new_context(tmp_path / name), Killer(dies_at)
        ctx.send = listened
        train_draft(Target(key="", path=tiny_folder("llama")), features, **settings, processes=2, ctx=ctx)
        return ctx.out, listened.resumed

    of_other_tests = {*psutil.Process().children(recursive=True)}
    undisturbed, _ = train("undisturbed", 0)
    killed, notes = train("killed", 3)
    assert len(notes) == 1
    for file in ("model.safetensors", "draft.json", "metrics.jsonl"):
        assert (undisturbed / file).read_bytes() == (killed / file).read_bytes(), file
    assert {*psutil.Process().children(recursive=True)} <= of_other_tests
    alone, ctx = {**settings, "num_steps": 7}, new_context(tmp_path / "killed")
    train_draft(Target(key="", path=tiny_folder("llama")), features, **alone, ctx=ctx)
    assert int(rows_of(ctx.out, "loss", "step")[-1, 1]) == 7


class Killer:
    """Listens to a training run and kills one of its processes, once, at optimiser step `dies_at` or soon after it.

    resumed: the notes that say from where it went on.
    """

    def __init__(self, dies_at: int) -> None:
        self.dies_at, self.resumed = dies_at, list[str]()

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "note" and "goes on from optimiser step" in event["message"]:
            self.resumed.append(str(event["message"]))
        if event["event"] == "progress" and 0 < self.dies_at <= event["done"]:
            self.dies_at = 0
            os.kill(worker_of_rank(1), signal.SIGKILL)


class Ended(BaseException):
    """What SIGTERM does in this process."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """The block ends by a SIGTERM to this process."""

    def end(*_: object) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(Ended):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_that_goes_on_with_another_number_of_processes_has_the_losses_of_an_undisturbed_one(
    tmp_path: Path, tiny_folder: Folder, features: Features
) -> None:
    """From one process to two and back, in float32: within 1e-6 of each loss, as docs/scale.md says (3e-7 measured)."""
    settings: dict[str, Any] = {**SETTINGS, "num_steps": 12, "eval_every": 6, "checkpoint_minutes": 60}

    def train(name: str, processes: int, until: int = 0) -> Path:
        ctx = new_context(tmp_path / name)

        def listen(event: Mapping[str, Any]) -> None:
            if event["event"] == "metrics" and "loss" in event and event["step"] == until:
                os.kill(os.getpid(), signal.SIGTERM)

        ctx.send = listen
        with ended_by_sigterm() if until else nullcontext():
            train_draft(Target(key="", path=tiny_folder("llama")), features, **settings, processes=processes, ctx=ctx)
        return ctx.out

    train("changed", 1, until=4)
    train("changed", 2, until=8)
    changed, undisturbed = (rows_of(train(name, 1), "loss", "step") for name in ("changed", "undisturbed"))
    assert len(changed) == 12 and torch.equal(changed[:4], undisturbed[:4])
    torch.testing.assert_close(changed, undisturbed, rtol=1e-6, atol=0.0)


def test_interrupted_all_save_at_one_step_and_after_a_death_as_well_they_end_with_the_same_bits(
    tmp_path: Path, tiny_folder: Folder, features: Features
) -> None:
    settings: dict[str, Any] = {**SETTINGS, "num_steps": 80, "eval_every": 40, "checkpoint_minutes": 60}

    def train(name: str, send: Callable[[Mapping[str, Any]], None] | None = None, **changed: Any) -> Path:
        ctx = new_context(tmp_path / name)
        ctx.send = send
        chosen = {**settings, **changed}
        train_draft(Target(key="", path=tiny_folder("llama")), features, **chosen, processes=2, ctx=ctx)
        return ctx.out

    interrupts: list[int] = []

    def interrupt(event: Mapping[str, Any]) -> None:
        if event["event"] == "metrics" and not interrupts:
            interrupts.append(event["step"])
            os.kill(os.getpid(), signal.SIGTERM)

    of_other_tests = {*psutil.Process().children(recursive=True)}
    with ended_by_sigterm():
        train("disturbed", interrupt)
    assert {*psutil.Process().children(recursive=True)} <= of_other_tests
    with safe_open(tmp_path / "disturbed" / "scratch" / "checkpoint.safetensors", "pt") as checkpoint:
        saved = json.loads(checkpoint.metadata()["progress"])["step"]
    assert 1 <= saved < 80
    killer = Killer(saved + 2)
    disturbed = train("disturbed", killer, checkpoint_minutes=1e-9)
    assert len(killer.resumed) == 2, "after the interrupt, and after the death of one"
    assert {*psutil.Process().children(recursive=True)} <= of_other_tests
    undisturbed = train("undisturbed")
    for file in ("model.safetensors", "draft.json", "metrics.jsonl"):
        assert (undisturbed / file).read_bytes() == (disturbed / file).read_bytes(), file


def worker_of_rank(rank: int) -> int:
    """The process number of a training process."""
    return next(process.pid for process in workers_below(os.getpid()) if process.environ()["RANK"] == str(rank))


def workers_below(ancestor: int) -> list[psutil.Process]:
    """The training processes that this one and its children have started."""
    return [process for process in psutil.Process(ancestor).children(recursive=True) if "RANK" in process.environ()]


def test_two_nodes_learn_what_one_process_does_and_the_same_bits_though_a_process_of_the_other_node_dies(
    tmp_path: Path, tiny_folder: Folder, features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("", 0)) as free:
        monkeypatch.setenv(RENDEZVOUS, f"127.0.0.1:{free.getsockname()[1]}")
    notes: list[str] = []
    killed: list[int] = []

    def train(name: str, listen: Callable[[Mapping[str, Any]], None] | None = None, **of_run: Any) -> Path:
        ctx = new_context(tmp_path / name)
        ctx.send = listen
        settings: dict[str, Any] = {**SETTINGS, "num_steps": 16, "eval_every": 8, "peak_lr": 1e-5}
        train_draft(Target(key="", path=tiny_folder("llama")), features, **settings, **of_run, ctx=ctx)
        return ctx.out

    def listen(event: Mapping[str, Any]) -> None:
        if event["event"] == "note":
            notes.append(str(event["message"]))
        if event["event"] == "progress" and event["done"] == 3 and not killed:
            killed.append(workers_below(other.pid)[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    other = subprocess.Popen([sys.executable, "-m", "components.drafts.training.node"])
    try:
        disturbed = train("disturbed", listen, nodes=2)
        undisturbed = train("undisturbed", nodes=2)  # the other node waits for the next step
        assert other.poll() is None
    finally:
        other.terminate()
        other.wait()
    assert any("goes on from optimiser step" in note for note in notes)
    for file in ("model.safetensors", "draft.json", "metrics.jsonl"):
        assert (undisturbed / file).read_bytes() == (disturbed / file).read_bytes(), file
    measured = ("loss", "grad_norm", "teacher_forced_al")
    together, alone = (rows_of(out, *measured) for out in (undisturbed, train("alone")))
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_nodes_need_a_place_to_meet(
    tmp_path: Path, tiny_folder: Folder, features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("", "a-host", "a-host:0", "a-host:port"):
        monkeypatch.setenv(RENDEZVOUS, place)
        with pytest.raises(UserError, match=f"nodes: 2: set {RENDEZVOUS}=HOST:PORT on every node"):
            ctx = new_context(tmp_path / f"at-{place}")
            train_draft(Target(key="", path=tiny_folder("llama")), features, **SETTINGS, nodes=2, ctx=ctx)


def test_a_fault_of_the_input_is_one_line_as_with_one_process(
    tmp_path: Path, tiny_folder: Folder, features: Features
) -> None:
    ctx = new_context(tmp_path)
    (ctx.scratch / "checkpoint.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="training begins again") as refused:
        train_draft(Target(key="", path=tiny_folder("llama")), features, **SETTINGS, processes=2, ctx=ctx)
    assert "\n" not in str(refused.value)
    by_position = {**SETTINGS, "settings": {"eagle3": {"normaliser": "position"}}}
    with pytest.raises(UserError, match="processes is not for normaliser: position"):
        train_draft(Target(key="", path=tiny_folder("llama")), features, **by_position, processes=2, ctx=ctx)
