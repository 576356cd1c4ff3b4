"""The training step: what it writes, what it keeps, and that a kill changes nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_drafts import TRAINED, new_context, write_features

from components.contract import Draft, Features, Target, UserError
from components.data.features.format import open_features
from components.drafts import train_draft
from components.drafts.storage.files import open_draft
from components.drafts.training.batches import BatchOrder, padded_length
from components.drafts.training.loop import count_accepted
from components.drafts.training.optimizer import OptimizerName
from components.targets.interface import AbstractTarget

SETTINGS: dict[str, Any] = {
    "num_steps": 9,
    "batch_tokens": 96,
    "draft_vocab_size": 128,
    "settings": {
        "dflash": {"block_size": 4, "max_anchors": 6},
        "dspark": {"block_size": 3, "max_anchors": 6, "markov_rank": 16},
        "eagle3": {"ttt_steps": 3},
        "p-eagle": {"parallel_depth": 3, "num_layers": 2},
    },
    "eval_every": 2,
    "checkpoint_minutes": 1e-9,  # after every step
}
Folder = Callable[[str], Path]
MakeTarget = Callable[[str], AbstractTarget]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory, tiny_target: MakeTarget) -> Features:
    return write_features(tiny_target("llama"), tmp_path_factory.mktemp("features") / "f")


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.mark.parametrize("method", TRAINED)
def test_a_killed_run_ends_with_the_same_bits(
    method: str, tmp_path: Path, tiny_folder: Folder, features: Features
) -> None:
    """Methods die once or twice and take the optimisers in turn: what an optimiser keeps has one form for all."""
    target, number = Target(key="", path=tiny_folder("llama")), TRAINED.index(method)
    optimizer: OptimizerName = "muon" if number % 2 else "adamw"
    deaths = [4, 9] if number % 4 < 2 else [3]

    def run(name: str, dies_at: int = 0) -> Path:
        ctx = new_context(tmp_path / name)

        def listen(event: Mapping[str, Any]) -> None:
            if event["event"] == "metrics" and event["step"] == dies_at:  # in no checkpoint yet
                raise Killed

        ctx.send = listen
        train_draft(target, features, method=method, optimizer=optimizer, **SETTINGS, ctx=ctx)  # type: ignore[arg-type]
        return ctx.out

    undisturbed = run("undisturbed")
    for step in deaths:
        with pytest.raises(Killed):
            run("killed", dies_at=step)
    resumed = run("killed")
    for file in ("model.safetensors", "draft.json", "metrics.jsonl"):
        assert (undisturbed / file).read_bytes() == (resumed / file).read_bytes(), file


def test_a_batch_in_parts_that_recomputes_its_blocks_learns_what_the_whole_learns(
    tmp_path: Path, tiny_folder: Folder, features: Features
) -> None:
    def losses(name: str, **lean: Any) -> torch.Tensor:
        ctx, target = new_context(tmp_path / name), Target(key="", path=tiny_folder("llama"))
        train_draft(target, features, **{**SETTINGS, "precision": "float32"}, **lean, ctx=ctx)
        rows = map(json.loads, (ctx.out / "metrics.jsonl").read_text().splitlines())
        return torch.tensor([[row["loss"], row["grad_norm"]] for row in rows if "loss" in row])

    whole = losses("whole")
    lean = losses("lean", micro_batch_tokens=32, recompute=True)
    torch.testing.assert_close(lean, whole, rtol=1e-3, atol=1e-4)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def without_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    del tensors[next((name for name in tensors if name.startswith("exp_avg_sq.")), next(iter(tensors)))]
    save_file(tensors, file, metadata={"progress": json.dumps({"step": 2})})


def no_numbers(file: Path) -> None:
    save_file({name: tensor * torch.nan for name, tensor in load_file(file).items()}, file)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("spoil", [cut_short, without_a_tensor, no_numbers, a_folder])
@pytest.mark.parametrize("name", ["checkpoint.safetensors", "best-*.safetensors"])
def test_a_damaged_checkpoint_is_refused_by_its_name(
    name: str, spoil: Callable[[Path], None], tmp_path: Path, tiny_folder: Folder, features: Features
) -> None:
    target, ctx = Target(key="", path=tiny_folder("llama")), new_context(tmp_path)
    settings: dict[str, Any] = {**SETTINGS, "method": "medusa", "num_steps": 2}
    train_draft(target, features, **settings, ctx=ctx)
    (file,) = ctx.scratch.glob(name)
    spoil(file)
    with pytest.raises(UserError, match="training begins again") as refused:
        train_draft(target, features, **settings, ctx=ctx)
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("number", "minutes", "saved"), [(signal.SIGKILL, 1e-9, 4), (signal.SIGTERM, 60, 5), (signal.SIGINT, 60, 5)]
)
def test_a_signal_between_two_writes_leaves_a_run_that_goes_on(
    number: signal.Signals, minutes: float, saved: int, tmp_path: Path, tiny_folder: Folder, features: Features
) -> None:
    """The same with a real signal, in a process of its own: an interrupt writes a checkpoint before it is obeyed."""
    program = f"""
import json, os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tiny_drafts import new_context
from components.contract import Features, Target
from components.drafts import train_draft
name, dies_at = sys.argv[1], int(sys.argv[2])
ctx = new_context(Path({str(tmp_path)!r}) / name)
def listen(event):
    if event["event"] == "metrics" and event["step"] == dies_at:
        os.kill(os.getpid(), {number.value})
ctx.send = listen
target = Target(key="", path=Path({str(tiny_folder("llama"))!r}))
features = Features(key="f", path=Path({str(features.path)!r}))
train_draft(target, features, method="eagle3", ctx=ctx, **json.loads(sys.argv[3]))
"""

    settings = {**SETTINGS, "checkpoint_minutes": minutes}
    arguments = [sys.executable, "-c", program, "killed", "5", json.dumps(settings)]
    assert subprocess.run(arguments, check=False, stderr=subprocess.DEVNULL).returncode == -number
    with safe_open(tmp_path / "killed" / "scratch" / "checkpoint.safetensors", "pt") as checkpoint:
        assert json.loads(checkpoint.metadata()["progress"])["step"] == saved
    target = Target(key="", path=tiny_folder("llama"))
    weights = []
    for name in ("killed", "undisturbed"):
        ctx = new_context(tmp_path / name)
        train_draft(target, features, method="eagle3", **settings, ctx=ctx)
        weights.append((ctx.out / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("method", TRAINED)
def test_other_architectures_train_and_open(
    method: str, tmp_path: Path, tiny_folder: Folder, tiny_target: MakeTarget
) -> None:
    """Methods and families in turn: a loss of every method falls on another one in test_interface.py."""
    family = ("qwen3", "deepseek_v3")[TRAINED.index(method) % 2]
    target = tiny_target(family)
    data = write_features(target, tmp_path / "features", num_train=8, num_validation=2)
    ctx = new_context(tmp_path / "run")
    made = train_draft(
        Target(key="", path=tiny_folder(family)),
        data,
        method=method,
        **{**SETTINGS, "num_steps": 2},
        ctx=ctx,  # type: ignore[arg-type]
    )
    assert isinstance(made, Draft)
    assert open_draft(made, target).method == method


def test_the_kept_weights_are_those_of_the_best_held_out_acceptance(
    tmp_path: Path, tiny_folder: Folder, features: Features
) -> None:
    ctx = new_context(tmp_path)
    made = train_draft(
        Target(key="", path=tiny_folder("llama")), features, **{**SETTINGS, "num_steps": 24, "peak_lr": 6e-3}, ctx=ctx
    )
    rows = [json.loads(line) for line in (ctx.out / "metrics.jsonl").read_text().splitlines()]
    judged = {row["step"]: row["held_out_al"] for row in rows if "held_out_al" in row}
    assert set(judged) == set(range(2, 25, 2))
    assert made.info["held_out_al"] == max(judged.values()) == judged[made.info["best_step"]]
    assert {"held_out_al/chat", "held_out_al/code"} <= set().union(*rows)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 25))
    record = json.loads((ctx.out / "draft.json").read_text())
    assert {"method", "num_steps", "target_key", "draft_vocab_size", "held_out_al"} <= set(made.info)
    assert record["draft_vocab_size"] == 128 and record["num_steps"] == 3
    assert load_file(ctx.out / "model.safetensors")["d2t"].dtype == torch.int64


def test_features_of_another_target_are_refused(tmp_path: Path, tiny_folder: Folder, features: Features) -> None:
    copy = tmp_path / "features"
    copy.mkdir()
    for file in features.path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "target_key": "a" * 64}))
    target = Target(key="b" * 64, path=tiny_folder("llama"))
    with pytest.raises(UserError, match="these features are of target aaaaaaaaaaaa"):
        train_draft(target, Features(key="f", path=copy), ctx=new_context(tmp_path))


def test_every_epoch_holds_every_row_once_and_any_step_can_be_reached_directly(features: Features) -> None:
    rows = tuple(open_features(features).rows("train"))
    order = BatchOrder(rows, batch_tokens=100, max_tokens=2048, seed=5)
    epochs = [order.epoch(number) for number in range(3)]
    for batches in epochs:
        assert sorted(row.row_id for batch in batches for row in batch) == sorted(row.row_id for row in rows)
        assert all(len(b) * padded_length(max(order.length(row) for row in b)) <= 100 for b in batches)
    assert epochs[0] != epochs[1]
    flat = [batch for batches in epochs for batch in batches]
    for step in range(len(flat)):
        assert next(order.from_step(step)) == flat[step]


def test_held_out_counting_is_prefix_joint() -> None:
    """x_2.. is the answer. Root 1 guesses x_3 x_4 right; root 2 only its second guess, which does not count."""
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    mask = torch.tensor([False, False, True, True, True, True])
    guesses = torch.tensor([[0, 0], [4, 5], [0, 6], [6, 0], [0, 0]])
    assert count_accepted(guesses, ids, mask) == ([2, 1], [3, 2])


@pytest.mark.parametrize(("num_train", "num_validation"), [(7, 2), (8, 1)])
def test_too_little_to_learn_from_is_refused_before_training(
    num_train: int, num_validation: int, tmp_path: Path, tiny_folder: Folder, tiny_target: MakeTarget
) -> None:
    data = write_features(tiny_target("llama"), tmp_path / "features", num_train, num_validation)
    ctx = new_context(tmp_path / "run")
    needed = r"7 answers of split train .* needs 8; .*limit_tokens or limit_rows of data.mix_chats"
    needed = needed if num_train < 8 else r"1 answers of split validation .* needs 2; .*num_validation"
    with pytest.raises(UserError, match=needed):
        train_draft(Target(key="", path=tiny_folder("llama")), data, method="eagle3", **SETTINGS, ctx=ctx)  # type: ignore[arg-type]
    assert not list(ctx.scratch.iterdir())
