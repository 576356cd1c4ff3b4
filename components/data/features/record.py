"""Step `data.record_features`: the target runs over its answers again and records the features for drafters.

Answers take a few bytes per token, features 8 bytes per hidden unit and token (4 as fp8). The step states the size and
the time beforehand, and refuses when the disk cannot hold the features. Each shard of answers becomes one shard of
features, written atomically. The shard alone decides which rows share a pass, so every process writes the same bytes.

Step `data.features_on_the_fly`: replaces `record_features` where features do not fit on disk, or are used once.

Its artifact holds tokens, masks and the manifest; `train_draft` computes the hidden states batch by batch
(format.py). The step logs an estimate of the cost, one pass of the target over every token in each epoch.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from components.contract import Context, Conversations, Features, ReportProgress, Target
from components.data.features.estimate import Probe, check_space, estimated_seconds, format_duration
from components.data.features.format import FeatureRow, Storage, encode
from components.data.features.passes import forward_passes
from components.data.formats.responses import Conversation, open_answers, read_shard, shard_name
from components.files import sweep, unfinished, written_whole
from components.targets.interface import AbstractTarget
from components.targets.load import cached_target, target_facts, threads_for


def record_features(
    target: Target, answers: Conversations, *, tokens_per_pass: int, storage: Literal["bf16", "fp8"], ctx: Context
) -> Features:
    """The step `data.record_features`; its settings are explained in components/data/steps.py."""

    facts = target_facts(target)
    names = open_answers(answers).shards
    num_threads = threads_for(facts["num_params"], ctx.num_threads)
    shards = [
        FeatureShard(
            file=ctx.out / name,
            answers=answers.path / name,
            target=target.path,
            tokens_per_pass=tokens_per_pass,
            storage=storage,
            device=ctx.device,
            num_threads=num_threads,
        )
        for name in names
    ]
    todo = unfinished(shards)
    num_tokens, hidden_size = int(answers.info["num_tokens"]), int(facts["shape"]["hidden_size"])
    check_space(ctx, num_tokens, hidden_size, storage, share_left=len(todo) / max(1, len(names)))
    if todo:
        probe = Probe(todo[0].answers, target.path, tokens_per_pass, ctx.device, num_threads)
        seconds = estimated_seconds(ctx, probe, [shard.answers for shard in todo])
        if seconds is not None:
            ctx.note(f"features: about {format_duration(seconds)}, by a probe of the target's speed")
    for _ in ctx.map(record_shard, shards, what="shards of features"):
        pass
    sweep(ctx.out)
    return write_features_manifest(ctx, target, answers, names, {"storage": storage})


@dataclass(frozen=True)
class FeatureShard:
    """The inputs of one shard of features, and its file. target: the artifact's directory."""

    file: Path
    answers: Path
    target: Path
    tokens_per_pass: int
    storage: Storage
    device: str
    num_threads: int


def record_shard(shard: FeatureShard, report_progress: ReportProgress) -> int:
    """Write the features of one shard of answers; returns its number of rows. Runs in any process with the paths."""

    torch.set_num_threads(shard.num_threads)
    conversations = read_shard(shard.answers)
    _write_shard(shard, cached_target(shard.target, shard.device), conversations, report_progress)
    return len(conversations)


def _write_shard(
    shard: FeatureShard, model: AbstractTarget, conversations: Sequence[Conversation], report_progress: ReportProgress
) -> None:

    ids = [conversation.ids for conversation in conversations]
    lengths = [len(row) for row in ids]
    encoded_rows: dict[int, dict[str, torch.Tensor]] = {}  # tensors of each row as stored on disk
    done = 0
    for states_by_row in forward_passes(model, ids, shard.tokens_per_pass):
        for index, states in states_by_row.items():
            parts = states._asdict().items()
            encoded_rows[index] = {
                k: v for name, part in parts for k, v in encode(name, part.cpu(), shard.storage).items()
            }
            done += lengths[index]
        report_progress(done / sum(lengths))
    tensors = {
        "ids": torch.cat(ids).to(torch.int32),
        "mask": torch.cat([conversation.mask for conversation in conversations]),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }
    for name in encoded_rows[0]:
        tensors[name] = torch.cat([encoded_rows[index][name] for index in range(len(ids))])
    with written_whole(shard.file) as partial:
        save_file(tensors, partial)


def write_features_manifest(
    ctx: Context, target: Target, answers: Conversations, names: Sequence[str], facts: dict[str, Any]
) -> Features:
    """Write manifest.json for the shards `names` of ctx.out, which mirror those of answers; returns the artifact."""

    shape = target_facts(target)["shape"]
    rows = [row for number, name in enumerate(names) for row in _manifest_rows(answers.path / name, number)]
    manifest = _manifest_of(shape, target.key, answers.key, names, rows) | facts
    (ctx.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    summary = {name: value for name, value in manifest.items() if name not in ("answers_key", "shards", "rows")}
    size = sum((ctx.out / name).stat().st_size for name in names)
    return Features.of_step(ctx, {**summary, "num_tokens": int(answers.info["num_tokens"]), "bytes": size})


def _manifest_rows(shard: Path, number: int) -> list[FeatureRow]:
    """The manifest's rows of one shard of answers."""

    assert shard.name == shard_name(number)
    return [
        FeatureRow(
            row_id=row.row_id,
            workload=row.workload,
            split=row.split,
            shard=shard.name,
            index=index,
            num_tokens=len(ids),
            num_answer_tokens=row.num_answer_tokens,
            language=row.language,
            domain=row.domain,
            place=row.place,
        )
        for index, (row, ids, _) in enumerate(read_shard(shard))
    ]


def _manifest_of(
    shape: dict[str, Any], target_key: str, answers_key: str, names: Sequence[str], rows: list[FeatureRow]
) -> dict[str, Any]:
    num_layers = int(shape["num_layers"])
    splits = {}
    for split in sorted({row.split for row in rows}):
        of_split = [row for row in rows if row.split == split]
        splits[split] = {
            "rows": len(of_split),
            "tokens": sum(row.num_tokens for row in of_split),
            "answer_tokens": sum(row.num_answer_tokens for row in of_split),
        }
    return {
        "target_key": target_key,
        "answers_key": answers_key,
        "tap_layers": [2, num_layers // 2, num_layers - 3],
        "hidden_size": int(shape["hidden_size"]),
        "vocab_size": int(shape["vocab_size"]),
        "dtype": "bfloat16",
        "splits": splits,
        "shards": list(names),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def features_on_the_fly(target: Target, answers: Conversations, *, tokens_per_pass: int, ctx: Context) -> Features:
    """The step `data.features_on_the_fly`; its settings are explained in components/data/steps.py."""

    facts = target_facts(target)
    names = open_answers(answers).shards
    check_space(ctx, int(answers.info["num_tokens"]), int(facts["shape"]["hidden_size"]), "none", share_left=1.0)
    if names:
        shards = [answers.path / name for name in names]
        num_threads = threads_for(facts["num_params"], ctx.num_threads)
        probe = Probe(shards[0], target.path, tokens_per_pass, ctx.device, num_threads)
        seconds = estimated_seconds(ctx, probe, shards)
        if seconds is not None:
            duration = format_duration(seconds)
            ctx.note(f"features: nothing stored; computing them takes about {duration} of every epoch of training")
    for name in names:
        with written_whole(ctx.out / name) as beside:
            shutil.copyfile(answers.path / name, beside)
    sweep(ctx.out)
    return write_features_manifest(ctx, target, answers, names, {"storage": "none", "tokens_per_pass": tokens_per_pass})
