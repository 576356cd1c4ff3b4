"""Steps `data.record_features` and `data.features_on_the_fly`: the target's hidden states at its answers.

Answers take a few bytes per token, features of three taps 8 bytes per hidden unit and token (4 as fp8).
`record_features` runs the target over its answers again and stores them: each shard of answers becomes one shard of
features, written atomically, and the shard alone decides which rows share a pass, so every process writes the same
bytes. `features_on_the_fly` is for features that do not fit on disk or are used once: its artifact holds tokens, masks
and the manifest, and `train_draft` computes the hidden states batch by batch (format.py).

Both estimate the cost first. Bytes follow from the number of tokens, and a disk that cannot hold them is refused.
Seconds are extrapolated from a few of the passes that will run, padding included: the probe runs in the recording
process, its first pass only warms up, and it ends early where a pass takes long. The cost of attention grows with the
length of a row, so the probed passes are spread over the lengths. On a cluster there is no probe: starting one takes
longer than the first shards, which show the same.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import safe_open

from components.contract import Context, Conversations, Features, ReportProgress, Target, UserError, unfinished
from components.data.features.format import (
    FeatureRow,
    FeaturesManifest,
    States,
    Storage,
    bytes_per_token,
    encode,
    forward_pass,
    forward_passes,
    group_rows,
    padded_tokens,
)
from components.data.formats.responses import Conversation, open_answers, read_shard, shard_name
from components.files import sweep, written_whole
from components.outside_json import JsonObject
from components.targets.interface import AbstractTarget
from components.targets.load import cached_target, target_facts, threads_for
from components.targets.shape import TapLayers, check_tap_layers, taps_of
from components.targets.spread import spread_shards
from components.tensor_files import written_by_rows

SPARE_BYTES: Final = 256 << 20
"""Disk space left free for everything else."""
PROBE_PASSES: Final = 3
_LABELS: Final = ("row_id", "workload", "split", "num_answer_tokens", "language", "domain", "place")
PROBE_SECONDS: Final = 20.0
"""The probe starts no further pass after this time."""


def record_features(
    target: Target,
    answers: Conversations,
    *,
    tap_layers: list[int] | None,
    tokens_per_pass: int,
    storage: Literal["bf16", "fp8"],
    ctx: Context,
) -> Features:
    """The step `data.record_features`; its settings are explained in components/data/steps.py."""
    facts = target_facts(target)
    taps = chosen_taps(tap_layers, facts, "data.record_features")
    names = open_answers(answers).shards
    num_threads = threads_for(facts["num_params"], ctx.num_threads)
    shards = [
        FeatureShard(
            file=ctx.out / name,
            answers=answers.path / name,
            target=target.path,
            taps=taps,
            tokens_per_pass=tokens_per_pass,
            storage=storage,
            device=ctx.device,
            num_threads=num_threads,
        )
        for name in names
    ]
    todo = unfinished(shards)
    spread_shards(ctx, target)
    num_tokens, hidden_size = int(answers.info["num_tokens"]), int(facts["shape"]["hidden_size"])
    check_space(ctx, num_tokens, hidden_size, storage, len(taps), share_left=len(todo) / max(1, len(names)))
    if todo:
        seconds = estimated_seconds(ctx, todo[0], [shard.answers for shard in todo])
        if seconds is not None:
            ctx.note(f"features: about {format_duration(seconds)}, by a probe of the target's speed")
    for _ in ctx.map(record_shard, shards, what="shards of features"):
        pass
    sweep(ctx.out)
    return write_features_manifest(ctx, target, answers, names, taps, storage)


def features_on_the_fly(
    target: Target, answers: Conversations, *, tap_layers: list[int] | None, tokens_per_pass: int, ctx: Context
) -> Features:
    """The step `data.features_on_the_fly`; its settings are explained in components/data/steps.py."""
    facts = target_facts(target)
    taps = chosen_taps(tap_layers, facts, "data.features_on_the_fly")
    names, hidden_size = open_answers(answers).shards, int(facts["shape"]["hidden_size"])
    check_space(ctx, int(answers.info["num_tokens"]), hidden_size, "none", len(taps), share_left=1.0)
    if names:
        shards = [answers.path / name for name in names]
        num_threads = threads_for(facts["num_params"], ctx.num_threads)
        shard = FeatureShard(ctx.out, shards[0], target.path, taps, tokens_per_pass, "none", ctx.device, num_threads)
        seconds = estimated_seconds(ctx, shard, shards)
        if seconds is not None:
            about = f"about {format_duration(seconds)} of every epoch of training"
            ctx.note(f"features: nothing stored; computing them takes {about}")
    copy_answers(ctx, answers, names)
    return write_features_manifest(ctx, target, answers, names, taps, "none", tokens_per_pass)


def copy_answers(ctx: Context, answers: Conversations, names: Sequence[str]) -> None:
    """Copy shards of answers into an artifact that holds tokens and masks alone."""
    for name in names:
        with written_whole(ctx.out / name) as beside:
            shutil.copyfile(answers.path / name, beside)
    sweep(ctx.out)


def chosen_taps(tap_layers: Sequence[int] | None, facts: Mapping[str, Any], location: str) -> TapLayers:
    """The setting as a tuple, None being the usual layers of the target; facts: of `target_facts`.

    Raises:
        UserError: layers that do not ascend, or that the target does not have.
    """
    num_layers = int(facts["shape"]["num_layers"])
    return taps_of(num_layers) if tap_layers is None else check_tap_layers(tap_layers, num_layers, location)


@dataclass(frozen=True)
class FeatureShard:
    """The inputs of one shard of features, and its file. target: the artifact's directory."""

    file: Path
    answers: Path
    target: Path
    taps: TapLayers
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
    done, num_taps, size = 0, len(shard.taps), model.shape.hidden_size
    with written_shard(shard.file, conversations, shard.storage, num_taps, size) as write_states:
        for states_by_row in forward_passes(model, ids, shard.tokens_per_pass, shard.taps):
            for index, states in states_by_row.items():
                write_states(index, states)
                done += lengths[index]
            report_progress(done / sum(lengths))


@contextmanager
def written_shard(
    file: Path, conversations: Sequence[Conversation], storage: Storage, num_taps: int, hidden_size: int
) -> Iterator[Callable[[int, States], None]]:
    """Write a shard of features of which only the states at hand are in memory: of 64 k tokens of an 8B they are 2 GB.

    Gives a function that writes the states of one conversation, by its place; they may come in any order.
    """
    offsets = torch.tensor([0, *(len(conversation.ids) for conversation in conversations)]).cumsum(0)
    whole = {
        "ids": torch.cat([conversation.ids for conversation in conversations]).to(torch.int32),
        "mask": torch.cat([conversation.mask for conversation in conversations]),
        "offsets": offsets,
    }
    nothing = States(torch.empty(0, num_taps * hidden_size), torch.empty(0, hidden_size))
    by_rows = {
        name: (rows.dtype, [len(whole["ids"]), *rows.shape[1:]])
        for name, rows in _encoded(nothing, storage, num_taps).items()
    }
    at_once = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in whole.items()}
    with written_whole(file) as partial, written_by_rows(partial, at_once | by_rows) as write:
        for name, tensor in whole.items():
            write(name, 0, tensor)

        def write_states(index: int, states: States) -> None:
            for name, rows in _encoded(states, storage, num_taps).items():
                write(name, int(offsets[index]), rows)

        yield write_states


def _encoded(states: States, storage: Storage, num_taps: int) -> dict[str, torch.Tensor]:
    """The tensors of one row as stored on disk."""
    taps = encode("taps", states.taps.cpu(), storage, num_taps)
    return taps | encode("last", states.last.cpu(), storage, 1)


def write_features_manifest(
    ctx: Context,
    target: Target,
    answers: Conversations,
    names: Sequence[str],
    taps: TapLayers,
    storage: Storage,
    tokens_per_pass: int | None = None,
    server: JsonObject | None = None,
) -> Features:
    """Write manifest.json for the shards `names` of ctx.out, which mirror those of answers; returns the artifact."""
    shape = target_facts(target)["shape"]
    rows = [row for number, name in enumerate(names) for row in _manifest_rows(answers.path / name, number)]
    manifest: FeaturesManifest = {
        "target_key": target.key,
        "answers_key": answers.key,
        "tap_layers": list(taps),
        "hidden_size": int(shape["hidden_size"]),
        "vocab_size": int(shape["vocab_size"]),
        "dtype": "bfloat16",
        "splits": _split_sizes(rows),
        "shards": list(names),
        "rows": [dataclasses.asdict(row) for row in rows],
        "storage": storage,
    }
    if tokens_per_pass is not None:
        manifest["tokens_per_pass"] = tokens_per_pass
    if server is not None:
        manifest["server"] = server
    (ctx.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    summary = {
        name: value for name, value in manifest.items() if name not in ("answers_key", "shards", "rows", "server")
    }
    size = sum((ctx.out / name).stat().st_size for name in names)
    return Features.of_step(ctx, {**summary, "num_tokens": int(answers.info["num_tokens"]), "bytes": size})


def _manifest_rows(shard: Path, number: int) -> list[FeatureRow]:
    """The manifest's rows of one shard of answers."""
    assert shard.name == shard_name(number)
    rows = []
    for index, (row, ids, _) in enumerate(read_shard(shard)):
        labels = {name: getattr(row, name) for name in _LABELS}
        rows.append(FeatureRow(shard=shard.name, index=index, num_tokens=len(ids), **labels))
    return rows


def _split_sizes(rows: Sequence[FeatureRow]) -> dict[str, dict[str, int]]:
    """Rows and tokens of each split."""
    sizes = {}
    for split in sorted({row.split for row in rows}):
        of_split = [row for row in rows if row.split == split]
        sizes[split] = {
            "rows": len(of_split),
            "tokens": sum(row.num_tokens for row in of_split),
            "answer_tokens": sum(row.num_answer_tokens for row in of_split),
        }
    return sizes


def check_space(
    ctx: Context, num_tokens: int, hidden_size: int, storage: Storage, num_taps: int, *, share_left: float
) -> None:
    """Log the size of the features on disk; raises UserError when the disk has no room for the share left to write."""
    size = num_tokens * bytes_per_token(hidden_size, storage, num_taps)
    what = "ids and masks only" if storage == "none" else f"{num_taps + 1} x {hidden_size} {storage}"
    ctx.note(f"features: {num_tokens} tokens x {what} = {size / 2**20:.0f} MiB on disk")
    free = shutil.disk_usage(ctx.out).free
    if size * share_left + SPARE_BYTES > free:
        live = "or take data.features_on_the_fly"
        smaller = {"bf16": f", set storage: fp8, {live}", "fp8": f", {live}", "none": ""}[storage]
        raise UserError(
            f"features need {size * share_left / 2**20:.0f} MiB and {SPARE_BYTES >> 20} MiB to spare, the disk at "
            f"{ctx.out} has {free / 2**20:.0f} MiB free; free some, answer fewer prompts{smaller}"
        )


def estimated_seconds(ctx: Context, probe: FeatureShard, shards: Sequence[Path]) -> float | None:
    """Estimated seconds of the passes over shards of answers, of which `probe` is the one to measure.

    None on a cluster, and for too few passes to probe.
    """
    if ctx.mapper is not None:
        return None
    lengths = [lengths_of(shard) for shard in shards]
    if sum(len(group_rows(of_shard, probe.tokens_per_pass)) for of_shard in lengths) <= 2 * PROBE_PASSES:
        return None
    return seconds_per_token(probe) * sum(padded_tokens(of_shard, probe.tokens_per_pass) for of_shard in lengths)


def seconds_per_token(probe: FeatureShard) -> float:
    """Seconds per token, padding included, measured on passes over a few groups of rows of a shard."""
    torch.set_num_threads(probe.num_threads)
    rows = [conversation.ids for conversation in read_shard(probe.answers)]
    model = cached_target(probe.target, probe.device)
    groups = group_rows([len(row) for row in rows], probe.tokens_per_pass)
    probed = [groups[round(place)] for place in _spread(len(groups), min(PROBE_PASSES, len(groups)))]
    seconds, tokens, began = 0.0, 0, time.perf_counter()
    for number, group in enumerate([probed[0], *probed]):
        if number and time.perf_counter() - began > PROBE_SECONDS:
            break
        if number == 1:
            seconds, tokens = 0.0, 0  # the first pass has warmed up
        start = time.perf_counter()
        forward_pass(
            model, [rows[index] for index in group], probe.taps
        )  # it reads finiteness on the CPU: nothing is pending
        seconds += time.perf_counter() - start
        tokens += len(group) * max(len(rows[index]) for index in group)
    return seconds / tokens


def lengths_of(shard: Path) -> list[int]:
    """Tokens of each conversation of a shard of answers, without reading them."""
    with safe_open(shard, framework="pt") as file:
        lengths: list[int] = file.get_tensor("offsets").diff().tolist()
    return lengths


def format_duration(seconds: float) -> str:
    """A time in seconds as text, such as "89 s", "10 min" or "2.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _spread(count: int, number: int) -> Iterator[float]:
    """`number` evenly spaced positions from 0 to count - 1; the middle for one."""
    for i in range(number):
        yield (count - 1) * (i / (number - 1) if number > 1 else 0.5)
