"""The step that runs the target over its own answers once more and keeps what a drafter learns from.

Answers hold a few bytes a token, features 8 bytes a hidden unit and token: the step says beforehand how much that is,
and refuses when the disk cannot hold it. A shard of answers becomes a shard of features, written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from components.contract import Context, Conversations, Features, Target, Tell, UserError
from components.shards import sweep, written_whole

if TYPE_CHECKING:
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
    from components.data.answers import open_answers
    from components.targets.load import target_facts
    from components.targets.threads import threads_for

    facts = target_facts(target)
    shape = facts["shape"]
    names = open_answers(answers).shards
    num_tokens = int(answers.info["num_tokens"])
    todo = [
        FeatureShard(
            file=ctx.out / name,
            answers=answers.path / name,
            target=target.path,
            tokens_per_pass=tokens_per_pass,
            device=ctx.device,
            num_threads=threads_for(facts["num_params"], ctx.num_threads),
        )
        for name in names
        if not (ctx.out / name).is_file()
    ]
    _check_space(ctx, num_tokens, int(shape["hidden_size"]), share_left=len(todo) / max(1, len(names)))
    for _ in ctx.map(record_shard, todo, what="shards of features", finished=len(names) - len(todo)):
        pass
    sweep(ctx.out)
    rows = [row for number, name in enumerate(names) for row in _rows(answers.path / name, number)]
    manifest = _manifest(shape, target.key, answers.key, names, rows)
    (ctx.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    summary = {
        name: manifest[name] for name in ("target_key", "tap_layers", "hidden_size", "vocab_size", "dtype", "splits")
    }
    size = sum((ctx.out / name).stat().st_size for name in names)
    return Features.made(ctx, {**summary, "num_tokens": num_tokens, "bytes": size})


@dataclass(frozen=True)
class FeatureShard:
    """Everything that one shard of features depends on, and the file it becomes. target: the artifact's directory."""

    file: Path
    answers: Path
    target: Path
    tokens_per_pass: int
    device: str
    num_threads: int


def record_shard(shard: FeatureShard, tell: Tell) -> int:
    """Write the features of one shard of answers; gives how many rows. Runs in any process that sees the paths."""
    import torch

    from components.data.answers import read_shard
    from components.targets.opened import opened_target

    torch.set_num_threads(shard.num_threads)
    conversations = read_shard(shard.answers)
    _write_shard(shard.file, opened_target(shard.target, shard.device), conversations, shard.tokens_per_pass, tell)
    return len(conversations)


def _rows(shard: Path, number: int) -> list[dict[str, Any]]:
    """What the manifest says of each row of a shard of answers."""
    from components.data.answers import read_shard, shard_name

    assert shard.name == shard_name(number)
    return [
        {
            "row_id": row.row_id,
            "workload": row.workload,
            "split": row.split,
            "shard": shard.name,
            "index": index,
            "num_tokens": len(ids),
            "num_answer_tokens": row.num_answer_tokens,
        }
        for index, (row, ids, _) in enumerate(read_shard(shard))
    ]


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
    file: Path, model: AbstractTarget, conversations: Sequence[Conversation], tokens_per_pass: int, tell: Tell
) -> None:
    import torch
    from safetensors.torch import save_file

    taps: list[Tensor | None] = [None] * len(conversations)
    last: list[Tensor | None] = [None] * len(conversations)
    groups = _groups([len(conversation.ids) for conversation in conversations], tokens_per_pass)
    for number, group in enumerate(groups, start=1):
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
        tell(number / len(groups))
    lengths = [len(conversation.ids) for conversation in conversations]
    tensors = {
        "ids": torch.cat([conversation.ids for conversation in conversations]).to(torch.int32),
        "mask": torch.cat([conversation.mask for conversation in conversations]),
        "taps": torch.cat([part for part in taps if part is not None]),
        "last": torch.cat([part for part in last if part is not None]),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }
    with written_whole(file) as beside:
        save_file(tensors, beside)


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
