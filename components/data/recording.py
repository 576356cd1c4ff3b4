"""The step that runs the target over its own answers once more and keeps what a drafter learns from.

Answers hold a few bytes a token, features 8 bytes a hidden unit and token (4 as fp8): the step says beforehand how much
that is and how long it takes, and refuses when the disk cannot hold it. A shard of answers becomes a shard of features,
written whole or not at all; which rows share a pass is fixed by the shard, so whoever writes it writes the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from components.contract import Context, Conversations, Features, Target, Tell
from components.data.feature_estimate import Probe, check_space, estimated_seconds, told
from components.shards import sweep, unfinished, written_whole

if TYPE_CHECKING:
    from components.data.answers import Conversation
    from components.data.feature_storage import Storage
    from components.targets.model import AbstractTarget


def record_features(
    target: Target,
    answers: Conversations,
    *,
    tokens_per_pass: Annotated[int, Field(ge=64)] = 2048,
    storage: Literal["bf16", "fp8"] = "bf16",
    ctx: Context,
) -> Features:
    """Write the taps and the last layer's output before the final norm for every token of the answers.

    Args:
        tokens_per_pass: Tokens of one forward pass at most, padding included (a longer conversation is a pass of its
            own); bounds memory.
        storage: bf16, or fp8 (e4m3 with an exponent a token and state) for half the disk; what fp8 costs in acceptance
            is measured by benchmarks/feature_precision.py.
    """
    from components.data.answers import open_answers
    from components.targets.load import target_facts
    from components.targets.threads import threads_for

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
            ctx.note(f"features: about {told(seconds)}, by a probe of the target's speed")
    for _ in ctx.map(record_shard, shards, what="shards of features"):
        pass
    sweep(ctx.out)
    return written_manifest(ctx, target, answers, names, {"storage": storage})


@dataclass(frozen=True)
class FeatureShard:
    """Everything that one shard of features depends on, and the file it becomes. target: the artifact's directory."""

    file: Path
    answers: Path
    target: Path
    tokens_per_pass: int
    storage: Storage
    device: str
    num_threads: int


def record_shard(shard: FeatureShard, tell: Tell) -> int:
    """Write the features of one shard of answers; gives how many rows. Runs in any process that sees the paths."""
    import torch

    from components.data.answers import read_shard
    from components.targets.opened import opened_target

    torch.set_num_threads(shard.num_threads)
    conversations = read_shard(shard.answers)
    _write_shard(shard, opened_target(shard.target, shard.device), conversations, tell)
    return len(conversations)


def _write_shard(shard: FeatureShard, model: AbstractTarget, conversations: Sequence[Conversation], tell: Tell) -> None:
    import torch
    from safetensors.torch import save_file

    from components.data.feature_passes import all_passes
    from components.data.feature_storage import encoded

    ids = [conversation.ids for conversation in conversations]
    lengths = [len(row) for row in ids]
    written: dict[int, dict[str, torch.Tensor]] = {}  # each row's states as they will lie on disk
    done = 0
    for passed in all_passes(model, ids, shard.tokens_per_pass):
        for place, states in passed.items():
            parts = states._asdict().items()
            written[place] = {k: v for name, part in parts for k, v in encoded(name, part.cpu(), shard.storage).items()}
            done += lengths[place]
        tell(done / sum(lengths))
    tensors = {
        "ids": torch.cat(ids).to(torch.int32),
        "mask": torch.cat([conversation.mask for conversation in conversations]),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }
    for name in written[0]:
        tensors[name] = torch.cat([written[place][name] for place in range(len(ids))])
    with written_whole(shard.file) as beside:
        save_file(tensors, beside)


def written_manifest(
    ctx: Context, target: Target, answers: Conversations, names: Sequence[str], facts: dict[str, Any]
) -> Features:
    """Write manifest.json for the shards `names` of ctx.out, made of those of answers; gives the artifact's handle."""
    from components.targets.load import target_facts

    shape = target_facts(target)["shape"]
    rows = [row for number, name in enumerate(names) for row in _rows(answers.path / name, number)]
    manifest = _manifest(shape, target.key, answers.key, names, rows) | facts
    (ctx.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    summary = {name: value for name, value in manifest.items() if name not in ("answers_key", "shards", "rows")}
    size = sum((ctx.out / name).stat().st_size for name in names)
    return Features.made(ctx, {**summary, "num_tokens": int(answers.info["num_tokens"]), "bytes": size})


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
            "language": row.language,
            "domain": row.domain,
            "place": row.place,
        }
        for index, (row, ids, _) in enumerate(read_shard(shard))
    ]


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
