"""Folders as people have them, and what a run does with each: targets, drafters, checkpoints of unfinished training.

`use` of a base does to a folder what a run would, four tokens or two steps of it, and says what came out. It is called
in a forked child, so that what it opens or breaks is its own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from saved_drafts import saved_draft
from tiny_targets import FAMILIES, VOCAB_SIZE, make_tiny_target, make_tiny_tokenizer

from components.contract import Context, Draft, Features, Target
from components.data.formats.control_marks import HoldsControlMark
from components.data.formats.prompts import Prompt, encode_prompt
from components.decoding.chain import decode
from components.drafts import quantise_draft, train_draft
from components.drafts.storage.files import build_draft, open_draft
from components.targets import load_target
from components.targets.generate import continue_batch
from components.targets.interface import AbstractTarget
from components.targets.load import open_target, open_tokenizer
from components.targets.pretraining.llama import LlamaShape
from components.targets.pretraining.plan import TrainingPlan
from components.targets.pretraining.training_run import TrainingRun

NEW_TOKENS: Final = 4
ASKED: Final = Prompt("p", "test", "chat", "here", None, ({"role": "user", "content": "def read_rows(path):"},))
TEMPLATE: Final = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
PLAN: Final = TrainingPlan(
    shape=LlamaShape(
        vocab_size=300,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        max_positions=64,
    ),
    num_steps=4,
    decay_steps=1,
    warmup_steps=1,
    tokens_per_step=64,
    sequence_length=32,
    decay_sequence_length=64,
    microbatch_tokens=64,
    num_processes=1,
    dtype="float32",
)
TRAINED: Final = ("eagle3", "mtp", "medusa", "draft-model")


@dataclass(frozen=True)
class Base:
    """A folder that works. use: (a copy of it, an empty folder) -> what came out, which JSON can hold.

    exact: whatever is accepted must give what the undamaged one gives: a drafter never changes its target's tokens.
    """

    name: str
    folder: Path
    use: Callable[[Path, Path], dict[str, Any]]
    exact: bool = False


def make_bases(root: Path) -> list[Base]:
    """All bases, in a folder of their own; the target of the drafters is open already when a child is forked."""
    torch.set_num_threads(1)
    targets = root / "targets"
    bases = [Base(family, make_tiny_target(family, targets / family), use_target) for family in FAMILIES]
    make_tiny_tokenizer(targets / "llama", chat_template=TEMPLATE)
    bases.append(Base("sharded", sharded(targets / "qwen3", targets / "sharded"), use_target))
    target = open_target(targets / "llama", dtype="float32", kernel="plain")

    def drafts(folder: Path, work: Path) -> dict[str, Any]:
        return use_draft(Draft(key="d" * 64, path=folder), target)

    def given(folder: Path, work: Path) -> dict[str, Any]:
        told = {"draft-model": {"model": str(folder)}}
        artifact = Target(key="t", path=targets / "llama")
        return use_draft(train_draft(artifact, method="draft-model", settings=told, ctx=context(work)), target)

    for method in TRAINED:
        bases.append(Base(method, made_draft(root / "drafts" / method, target, method), drafts, exact=True))
    rounded = quantise_draft(
        Draft(key="d" * 64, path=root / "drafts" / "eagle3"), weights="int8", ctx=context(root / "drafts" / "int8")
    )
    bases.append(Base("int8", rounded.path, drafts, exact=True))
    small = make_tiny_target("qwen3", targets / "small", num_layers=2, seed=5)
    bases.append(Base("given", small, given, exact=True))
    features = write_features(target, root / "features")

    def training(folder: Path, work: Path) -> dict[str, Any]:
        return use_training(folder, work, Target(key="", path=targets / "llama"), features)

    ctx = context(root / "begun")
    ctx.scratch = folder_of(root / "training")
    train_draft(Target(key="", path=targets / "llama"), features, **training_settings(2), ctx=ctx)
    bases.append(Base("training", root / "training", training))
    TrainingRun(PLAN, streams(), folder_of(root / "pretraining")).train(None, until=2)
    bases.append(Base("pretraining", root / "pretraining", use_pretraining))
    return bases


def folder_of(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def context(root: Path) -> Context:
    return Context(
        key="k" * 64, out=folder_of(root / "out"), scratch=folder_of(root / "scratch"), num_threads=1, seed=3
    )


def sharded(source: Path, folder: Path) -> Path:
    """The same model in several files and an index."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source).save_pretrained(folder, max_shard_size="300KB")
    for file in source.glob("tokenizer*"):
        shutil.copy(file, folder)
    assert (folder / "model.safetensors.index.json").is_file() and len(list(folder.glob("*.safetensors"))) > 2
    return folder


def made_draft(folder: Path, target: AbstractTarget, method: str) -> Path:
    """A drafter of random weights over every second token."""
    draft: Any = build_draft(method, target, {}, torch.arange(0, target.shape.vocab_size, 2))
    return saved_draft(folder, draft, {}, target, target_key="t").path


def write_features(target: AbstractTarget, folder: Path) -> Features:
    """A Features artifact of random tokens: ten rows of 16, the last two for validation."""
    ids = torch.randint(3, VOCAB_SIZE, (10, 16), generator=torch.Generator().manual_seed(11))
    out = target.forward(ids, target.new_cache(10, 16), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    row = {"workload": "code", "shard": "shard-00000.safetensors", "num_tokens": 16, "num_answer_tokens": 12}
    rows = [
        {**row, "row_id": f"row-{index}", "split": "train" if index < 8 else "validation", "index": index}
        for index in range(10)
    ]
    tensors = {
        "ids": ids.flatten().int(),
        "mask": (torch.arange(16) >= 4).repeat(10),
        "taps": out.taps.flatten(0, 1).bfloat16(),
        "last": out.last.flatten(0, 1).bfloat16(),
        "offsets": torch.arange(11) * 16,
    }
    save_file(tensors, folder_of(folder) / "shard-00000.safetensors")
    known = {"target_key": "", "tap_layers": list(target.tap_layers), "vocab_size": VOCAB_SIZE}
    manifest = {**known, "rows": rows, "shards": ["shard-00000.safetensors"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Features(key="f", path=folder)


def training_settings(num_steps: int) -> dict[str, Any]:
    told = {"eagle3": {"ttt_steps": 2}}
    each = {"eval_every": 2, "checkpoint_minutes": 1e-9, "batch_tokens": 64, "draft_vocab_size": 64}
    return {"method": "eagle3", "settings": told, "num_steps": num_steps, **each}


def streams() -> tuple[np.ndarray, np.ndarray]:
    stream = np.random.default_rng(0).integers(0, PLAN.shape.vocab_size, 3000).astype(np.uint16)
    return stream, stream[::-1].copy()


# -- what a run does with a folder -------------------------------------------------------------------------------------


def use_target(folder: Path, work: Path) -> dict[str, Any]:
    """The step, the weights, a chat as tokens, and four tokens of an answer."""
    target = load_target(model=str(folder), ctx=context(work))
    try:
        ids = encode_prompt(open_tokenizer(target), ASKED)
    except HoldsControlMark:  # whoever answers sets such a prompt aside; here plain tokens take its place
        ids = [40, 41, 42]
    opened = open_target(target, kernel="plain")
    answer = continue_batch(opened, [ids[-40:]], max_new_tokens=NEW_TOKENS, stop_at_eos=False)[0].ids
    decoded = decode(opened, None, ids[-40:], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    row = torch.tensor([ids[-40:]])
    out = opened.forward(row, opened.new_cache(1, row.shape[1]), features=True)
    finite = all(bool(torch.isfinite(part).all()) for part in out if part is not None)
    in_vocabulary = max(answer) < opened.shape.vocab_size and answer == decoded.tokens
    return {"tokens": answer, "finite": finite and in_vocabulary}


def use_draft(draft: Draft, target: AbstractTarget) -> dict[str, Any]:
    """Four tokens of the target with this drafter's guesses, and its guesses everywhere."""
    proposer = open_draft(draft, target, kernel="plain")
    prompt = list(range(20, 40))
    depth = min(3, proposer.max_depth)
    decoded = decode(target, proposer, prompt, max_new_tokens=NEW_TOKENS, depth=depth, ignore_eos=True)
    ids = torch.tensor(prompt)
    out = target.forward(ids[None], target.new_cache(1, len(prompt)), features=True)
    assert out.taps is not None and out.last is not None
    guesses = proposer.propose_at_every_position(ids, out.taps[0], out.last[0], depth).tokens
    return {"tokens": decoded.tokens, "finite": int(guesses.max()) < target.shape.vocab_size}


def use_training(folder: Path, work: Path, target: Target, features: Features) -> dict[str, Any]:
    """Two steps more, and the drafter that they end with."""
    ctx = context(work)
    ctx.scratch = folder
    made = train_draft(target, features, **training_settings(4), ctx=ctx)
    return weights_said(load_file(made.path / "model.safetensors"))


def use_pretraining(folder: Path, work: Path) -> dict[str, Any]:
    """Two steps more."""
    run = TrainingRun(PLAN, streams(), folder)
    begun = run.steps_done
    run.train(None)
    return {**weights_said({name: weight.detach() for name, weight in run.weights.items()}), "begun": begun}


def weights_said(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].numpy().tobytes())
    finite = all(bool(torch.isfinite(weight.float()).all()) for weight in weights.values())
    return {"tokens": [digest.hexdigest()], "finite": finite}
