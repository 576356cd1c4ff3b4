"""Estimates the cost of recording features before it starts: bytes on disk, and time by a short probe of real rows.

Bytes follow from the number of tokens alone. Seconds are extrapolated from a few of the passes that will run, padding
included: the probe runs in the recording process, its first pass only warms up, and it ends early where a pass takes
long. The cost of attention grows with the length of a row, so the probed passes are spread over the lengths. On a
cluster there is no probe: starting one takes longer than the first shards, which tell the same.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open

from components.contract import Context, UserError
from components.data.features.format import Storage, bytes_per_token
from components.data.features.passes import forward_pass, group_rows, padded_tokens
from components.data.formats.responses import read_shard
from components.targets.load import cached_target

SPARE_BYTES: Final = 256 << 20
"""Disk space left free for everything else."""
PROBE_PASSES: Final = 3
PROBE_SECONDS: Final = 20.0
"""The probe starts no further pass after this time."""


@dataclass(frozen=True)
class Probe:
    """Settings of a probe. answers: the shard of answers to run. target: the artifact's directory."""

    answers: Path
    target: Path
    tokens_per_pass: int
    device: str
    num_threads: int


def check_space(ctx: Context, num_tokens: int, hidden_size: int, storage: Storage, *, share_left: float) -> None:
    """Log the size of the features on disk; raises UserError when the disk has no room for the share left to write."""

    size = num_tokens * bytes_per_token(hidden_size, storage)
    what = "ids and masks only" if storage == "none" else f"4 x {hidden_size} {storage}"
    ctx.note(f"features: {num_tokens} tokens x {what} = {size / 2**20:.0f} MiB on disk")
    free = shutil.disk_usage(ctx.out).free
    if size * share_left + SPARE_BYTES > free:
        live = "or take data.features_on_the_fly"
        smaller = {"bf16": f", set storage: fp8, {live}", "fp8": f", {live}", "none": ""}[storage]
        raise UserError(
            f"features need {size * share_left / 2**20:.0f} MiB and {SPARE_BYTES >> 20} MiB to spare, the disk at "
            f"{ctx.out} has {free / 2**20:.0f} MiB free; free some, answer fewer prompts{smaller}"
        )


def estimated_seconds(ctx: Context, probe: Probe, shards: Sequence[Path]) -> float | None:
    """Estimated seconds of the passes over shards of answers; None on a cluster, and for too few passes to probe.

    probe: `answers` is one of the shards.
    """

    if ctx.mapper is not None:
        return None
    lengths = [lengths_of(shard) for shard in shards]
    if sum(len(group_rows(of_shard, probe.tokens_per_pass)) for of_shard in lengths) <= 2 * PROBE_PASSES:
        return None
    return seconds_per_token(probe) * sum(padded_tokens(of_shard, probe.tokens_per_pass) for of_shard in lengths)


def seconds_per_token(probe: Probe) -> float:
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
        forward_pass(model, [rows[index] for index in group])  # it reads finiteness on the CPU: nothing is pending
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
