"""Features computed while training are the stored ones: the same losses, and the same bits after a SIGKILL."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafts import new_context

from components.contract import Context, Conversations, Features, Target, UserError
from components.data import collect_prompts, features_on_the_fly, record_features, write_answers
from components.data.features.format import LiveFeatures, open_features
from components.drafts import train_draft
from components.targets import load_target

SETTINGS: dict[str, Any] = {
    "num_steps": 8,
    "draft_vocab_size": 128,
    "settings": {"eagle3": {"ttt_steps": 3}},
    "eval_every": 4,
    "checkpoint_minutes": 1e-9,  # after every step
    "precision": "float32",
}
MAKERS: dict[str, Callable[..., Features]] = {"stored": record_features, "on the fly": features_on_the_fly}


def made(folder: Path) -> Context:
    folder.mkdir(parents=True)
    return Context(key="k", out=folder, scratch=folder, num_threads=1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[[str], Path]) -> Target:
    return load_target(model=str(tiny_folder("llama")), ctx=made(tmp_path_factory.mktemp("target") / "a"))


@pytest.fixture(scope="module")
def answers(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    root = tmp_path_factory.mktemp("answers")
    prompts = collect_prompts(num_train=12, num_validation=4, num_test=2, ctx=made(root / "prompts"))
    return write_answers(target, prompts, max_new_tokens=24, batch_size=8, ctx=made(root / "answers"))


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def both_ways(
    target: Target, answers: Conversations, folder: Path, method: str, tokens_per_pass: int, **settings: Any
) -> dict[str, Path]:
    """Train on features stored and on the fly; gives the folders."""
    for name, make in MAKERS.items():
        features = make(target, answers, tokens_per_pass=tokens_per_pass, ctx=made(folder / name / "features"))
        train_draft(target, features, method=method, **SETTINGS | settings, ctx=new_context(folder / name))  # type: ignore[arg-type]
    return {name: folder / name for name in MAKERS}


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_training_on_the_fly_has_the_losses_of_training_on_stored_features(
    method: str, target: Target, answers: Conversations, tmp_path: Path
) -> None:
    """To bf16 rounding: other rows share a pass, so a few states round to the neighbouring bf16."""
    folders = both_ways(target, answers, tmp_path, method, tokens_per_pass=512, batch_tokens=512)
    stored, live = (torch.tensor(losses(folder)) for folder in folders.values())
    torch.testing.assert_close(live, stored, rtol=5e-3, atol=0.0)
    assert len(stored) == 8


def test_the_same_rows_in_a_pass_give_the_same_bits(target: Target, answers: Conversations, tmp_path: Path) -> None:
    """A pass for each row, both ways: then not even rounding differs, and neither do the weights."""
    folders = both_ways(target, answers, tmp_path, "eagle3", tokens_per_pass=64, batch_tokens=512)
    lengths = [
        row.num_tokens for row in open_features(Features(key="", path=folders["stored"] / "features")).rows("train")
    ]
    assert min(lengths) > 32, "two rows would share a pass of 64 tokens"
    one, other = ((folder / "out" / "model.safetensors").read_bytes() for folder in folders.values())
    assert one == other


def test_what_a_live_source_gives_depends_on_what_is_asked_alone(
    target: Target, answers: Conversations, tmp_path: Path
) -> None:
    from components.targets.load import open_target

    features = features_on_the_fly(target, answers, ctx=made(tmp_path / "f"))
    assert sum(file.stat().st_size for file in features.path.glob("shard-*")) < 64 * features.info["num_tokens"]
    model = open_target(target, kernel="plain")
    source = open_features(features).computed_by(model)
    assert isinstance(source, LiveFeatures)
    rows = source.rows("train")
    first = source.load_all(rows[:4], max_tokens=20)
    source.load_all(rows[3:7])
    again = open_features(features).computed_by(model).load_all(rows[:4], max_tokens=20)
    for one, other in zip(first, again, strict=True):
        assert one.row_id == other.row_id and len(one.ids) == 20
        assert all(torch.equal(a, b) for a, b in zip(one[2:], other[2:], strict=True))


def test_a_sigkill_while_training_on_the_fly_changes_no_bit(
    target: Target, answers: Conversations, tmp_path: Path
) -> None:
    """A real SIGKILL of a process; what goes on from its checkpoint ends as a run that nothing disturbed."""
    features = features_on_the_fly(target, answers, ctx=made(tmp_path / "features"))
    settings = {**SETTINGS, "packing": "pack"}
    program = f"""
import json, os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tiny_drafts import new_context
from components.contract import Features, Target
from components.drafts import train_draft
ctx = new_context(Path({str(tmp_path / "killed")!r}))
def listen(event):
    if event["event"] == "metrics" and event["step"] == 5:  # the step is done, and not in a checkpoint
        os.kill(os.getpid(), signal.SIGKILL)
ctx.send = listen
target = Target(key="k", path=Path({str(target.path)!r}))
train_draft(target, Features(key="f", path=Path({str(features.path)!r})), ctx=ctx, **json.loads(sys.argv[1]))
"""
    command = [sys.executable, "-c", program, json.dumps(settings)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / "scratch" / "checkpoint.safetensors").is_file()
    weights = []
    for name in ("killed", "undisturbed"):
        ctx = new_context(tmp_path / name)
        train_draft(target, features, ctx=ctx, **settings)
        weights.append((ctx.out / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_features_on_the_fly_of_another_target_are_refused(
    target: Target, answers: Conversations, tmp_path: Path
) -> None:
    features = features_on_the_fly(Target("a" * 64, target.path, target.info), answers, ctx=made(tmp_path / "f"))
    with pytest.raises(UserError, match="these features are of target aaaaaaaaaaaa"):
        train_draft(Target("b" * 64, target.path, target.info), features, ctx=new_context(tmp_path))
