"""The step that runs the target over its own answers once more and keeps what a drafter learns from.

Answers hold a few bytes a token, features 8 bytes a hidden unit and token: the step says beforehand how much that is,
and refuses when the disk cannot hold it. A shard of answers becomes a shard of features, written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from components.contract import Context, Conversations, Features, Target, UserError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from components.data.answers import Conversation
    from components.targets.model import AbstractTarget

SPARE_BYTES: Final = 256 << 20
"""Disk space left free for everything else."""


def record_features(
    target: Target,
    answers: Conversations,
    *,
    tokens_per_pass: Annotated[int, Field(ge=64)] = 2048,
    ctx: Context,
) -> Features:
    """Write the taps and the last layer's output before the final norm for every token of the answers, as bf16.

    Args:
        tokens_per_pass: Tokens of one forward pass at most, padding included (a longer conversation is a pass of its
            own); bounds memory.
    """
    import torch

    from components.data.answers import open_answers, read_shard, shard_name
    from components.targets.load import open_target, target_facts
    from components.targets.threads import threads_for

    facts = target_facts(target)
    torch.set_num_threads(threads_for(facts["num_params"], ctx.num_threads))
    shape = facts["shape"]
    names = open_answers(answers).shards
    num_tokens = int(answers.info["num_tokens"])
    todo = [name for name in names if not (ctx.out / name).is_file()]
    _check_space(ctx, num_tokens, int(shape["hidden_size"]), share_left=len(todo) / max(1, len(names)))
    model: AbstractTarget | None = None
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        assert name == shard_name(number)
        conversations = read_shard(answers.path / name)
        if name in todo:
            if model is None:
                model = open_target(target, device=ctx.device, kernel="plain")
            _write_shard(ctx.out / name, model, conversations, tokens_per_pass)
        for index, conversation in enumerate(conversations):
            row = conversation.row
            rows.append(
                {
                    "row_id": row.row_id,
                    "workload": row.workload,
                    "split": row.split,
                    "shard": name,
                    "index": index,
                    "num_tokens": len(conversation.ids),
                    "num_answer_tokens": row.num_answer_tokens,
                }
            )
        ctx.progress(number + 1, len(names), "shards of features")
    manifest = _manifest(shape, target.key, answers.key, names, rows)
    (ctx.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    summary = {
        name: manifest[name] for name in ("target_key", "tap_layers", "hidden_size", "vocab_size", "dtype", "splits")
    }
    size = sum((ctx.out / name).stat().st_size for name in names)
    return Features.made(ctx, {**summary, "num_tokens": num_tokens, "bytes": size})


def feature_bytes(num_tokens: int, hidden_size: int) -> int:
    """Bytes on disk: per token four bf16 vectors (three taps and the last layer), a token id and a mask byte."""
    return num_tokens * (4 * 2 * hidden_size + 4 + 1)


def _check_space(ctx: Context, num_tokens: int, hidden_size: int, *, share_left: float) -> None:
    size = feature_bytes(num_tokens, hidden_size)
    ctx.note(f"features: {num_tokens} tokens x 4 x {hidden_size} bf16 = {size / 2**20:.0f} MiB on disk")
    free = shutil.disk_usage(ctx.out).free
    if size * share_left + SPARE_BYTES > free:
        raise UserError(
            f"features need {size * share_left / 2**20:.0f} MiB and {SPARE_BYTES >> 20} MiB to spare, the disk at "
            f"{ctx.out} has {free / 2**20:.0f} MiB free; free some space, or answer fewer prompts"
        )


def _write_shard(
    file: Path, model: AbstractTarget, conversations: Sequence[Conversation], tokens_per_pass: int
) -> None:
    import torch
    from safetensors.torch import save_file

    taps: list[Tensor | None] = [None] * len(conversations)
    last: list[Tensor | None] = [None] * len(conversations)
    for group in _groups([len(conversation.ids) for conversation in conversations], tokens_per_pass):
        longest = max(len(conversations[index].ids) for index in group)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        for place, index in enumerate(group):
            ids[place, : len(conversations[index].ids)] = conversations[index].ids
        # right padding needs no mask: attention is causal, and what the padding rows give is cut off below
        passed = model.forward(ids, model.new_cache(len(group), longest), logits="none", features=True)
        assert passed.taps is not None and passed.last is not None
        for place, index in enumerate(group):
            length = len(conversations[index].ids)
            taps[index] = passed.taps[place, :length].to("cpu", torch.bfloat16)
            last[index] = passed.last[place, :length].to("cpu", torch.bfloat16)
    lengths = [len(conversation.ids) for conversation in conversations]
    tensors = {
        "ids": torch.cat([conversation.ids for conversation in conversations]).to(torch.int32),
        "mask": torch.cat([conversation.mask for conversation in conversations]),
        "taps": torch.cat([part for part in taps if part is not None]),
        "last": torch.cat([part for part in last if part is not None]),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }
    beside = file.with_name(f".{file.name}.tmp")
    save_file(tensors, beside)
    beside.replace(file)


def _groups(lengths: Sequence[int], tokens_per_pass: int) -> list[list[int]]:
    """Rows that go through the target together: similar lengths, at most `tokens_per_pass` tokens with padding."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if groups and (len(groups[-1]) + 1) * lengths[index] <= tokens_per_pass:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _manifest(
    shape: dict[str, Any], target_key: str, answers_key: str, names: Sequence[str], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    from components.data.features import FeatureRow

    assert not rows or set(rows[0]) == {field.name for field in dataclasses.fields(FeatureRow)}
    num_layers = int(shape["num_layers"])
    splits = {}
    for split in sorted({str(row["split"]) for row in rows}):
        of_split = [row for row in rows if row["split"] == split]
        splits[split] = {
            "rows": len(of_split),
            "tokens": sum(int(row["num_tokens"]) for row in of_split),
            "answer_tokens": sum(int(row["num_answer_tokens"]) for row in of_split),
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
        "rows": rows,
    }
