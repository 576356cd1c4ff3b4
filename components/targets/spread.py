"""Targets too large for one GPU, which transformers spreads over several of one machine. `load_target` says which way.

By layers (`device_map: auto`): one process, each layer on one of the GPUs, which work in turns; every step may open
such a target, and a shard on Ray has the GPUs that `gpus_per_shard` gives it. Within layers (`tp_size: N`, by
transformers' tp_plan): N processes with a GPU each hold a part of every matrix and work at once. They run the shards of
a wide step together: all of them make the same calls in the same order, and the first one's file counts.

Both run the model's own code. Three tensors of a target (training from stored features) need none of this.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.distributed import DistributedConfig

from components.contract import Context, ReportProgress, Target, UserError
from components.outside_json import JsonObject
from components.targets.shape import TargetShape
from components.targets.source import open_record

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PATIENCE: Final = timedelta(minutes=30)
"""How long a process waits for the others: opening a large target takes minutes, and not the same in each."""


class Spread(NamedTuple):
    """How a target is spread over GPUs: `device_map` and `tp_size` of `load_target`."""

    device_map: str = "none"
    tp_size: int = 1

    @classmethod
    def of_record(cls, record: JsonObject) -> Spread:
        """As target.json says; of a plain folder, and of older ones, not at all."""
        return cls(str(record.get("device_map", "none")), int(record.get("tp_size", 1)))

    def by_layers(self, device: str) -> bool:
        """Whether its layers are spread on this device; a CPU is one place."""
        return self.device_map == "auto" and device.startswith("cuda")

    def check(self, config: Any, shape: TargetShape, device: str, location: str) -> None:
        """Raises UserError for what cannot work on this device, or with this model."""
        if self.device_map == "auto" and self.tp_size > 1:
            raise UserError(f"{location}: device_map: auto and tp_size: {self.tp_size} are two ways; take one")
        if self.device_map == "auto":
            if not device.startswith("cuda"):
                raise UserError(f"{location}: device_map: auto spreads layers over GPUs, and this step runs on a CPU")
            if importlib.util.find_spec("accelerate") is None:
                raise UserError(f"{location}: device_map: auto needs accelerate: pip install 'draftsmith[quantised]'")
        if self.tp_size == 1:
            return
        if not (getattr(config.get_text_config(decoder=True), "base_model_tp_plan", None)):
            raise UserError(
                f"{location}: transformers has no tp_plan for {shape.architecture}, so tp_size: {self.tp_size} cannot"
                " divide its layers; take device_map: auto"
            )
        for number, what in ((shape.num_attention_heads, "query"), (shape.num_key_value_heads, "key and value")):
            if number % self.tp_size:
                raise UserError(
                    f"{location}: its {number} {what} heads cannot be divided by tp_size: {self.tp_size}; set tp_size"
                )
        _check_devices(self.tp_size, device, location)

    def check_processes(self, location: str) -> None:
        """Raises UserError in a process that is none of those that hold the target together."""
        if self.tp_size > 1 and not (dist.is_initialized() and dist.get_world_size() == self.tp_size):
            raise UserError(
                f"{location}: tp_size: {self.tp_size} divides it among processes that only data.write_answers,"
                " data.record_features and bench.measure_acceptance start; for other steps name it by a load_target"
                " step with device_map: auto"
            )

    def placement(self) -> str | DistributedConfig:
        """What transformers is told."""
        return DistributedConfig(tp_size=self.tp_size) if self.tp_size > 1 else self.device_map


def check_all_on_gpus(model: Any, location: str) -> None:
    """Raises UserError where a device_map put layers into memory or onto the disk: each pass would bring them in."""
    places = getattr(model, "hf_device_map", {})
    if len(places) > 1 and (beside := [part for part, place in places.items() if place in ("cpu", "disk")]):
        raise UserError(
            f"{location}: the GPUs here do not hold it: {len(beside)} of its {len(places)} parts, first {beside[0]},"
            " would lie beside them; take more GPUs, or dtype: bfloat16"
        )


def is_share(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a process's share of a tensor that several hold: a DTensor, whose class takes a second to load."""
    return hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a weight."""
    return tensor.to_local() if is_share(tensor) else tensor


def _check_devices(tp_size: int, device: str, location: str) -> None:
    if device.startswith("cuda") and torch.cuda.device_count() < tp_size:
        raise UserError(
            f"{location}: tp_size: {tp_size} needs a GPU for each process, and there are"
            f" {torch.cuda.device_count()}; set tp_size"
        )


def spread_shards(ctx: Context, target: Target) -> None:
    """Let `ctx.map` run each shard in `tp_size` processes together, where the target is divided among so many.

    A shard then also has `device` and `num_threads`. Raises UserError where a cluster would run the shards.
    """
    _, record = open_record(target.path)
    tp_size, location = Spread.of_record(record).tp_size, str(record["model"])
    if tp_size == 1:
        return
    if ctx.mapper is not None:
        raise UserError(
            f"{location}: tp_size: {tp_size} needs so many processes for a shard, and a cluster gives it one: take"
            " device_map: auto, with gpus_per_shard on Ray"
        )
    _check_devices(tp_size, ctx.device, location)
    ctx.mapper = partial(_map_together, tp_size, ctx.device, ctx.scratch)


class _Ended(Exception):
    """One of the processes has ended without a word."""


def _map_together(
    number: int, device: str, scratch: Path, function: Callable[[Any, ReportProgress], Any], shards: Sequence[Any]
) -> Iterator[Any]:
    """What `function` makes of each shard in `number` processes, of which the first one's result and file count."""
    if not shards:
        return
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        readers: list[Connection] = []
        for rank in range(number):
            reader, writer = context.Pipe(duplex=False)
            arguments = (rank, number, device, folder, function, list(shards), writer)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            writer.close()
            stack.callback(_end, process)
            readers.append(reader)
        for _ in shards:
            yield _received(readers)[0]


def _received(readers: Sequence[Connection]) -> list[Any]:
    """The next result of every process; raises what the first one that failed says."""
    results: dict[Connection, Any] = {}
    while waiting := [reader for reader in readers if reader not in results]:
        for reader in wait(waiting):
            assert isinstance(reader, Connection)
            try:
                refusal, results[reader] = reader.recv()
            except EOFError as error:
                raise _Ended(
                    f"process {readers.index(reader) + 1} of the {len(readers)} that hold the target has ended; the log"
                    " of the step has its error"
                ) from error
            if refusal:
                raise UserError(refusal)
    return [results[reader] for reader in readers]


def _end(process: Any) -> None:
    process.terminate()
    process.join()
    process.close()


def _work(
    rank: int,
    number: int,
    device: str,
    folder: Path,
    function: Callable[[Any, ReportProgress], Any],
    shards: Sequence[Any],
    writer: Connection,
) -> None:
    """One of the processes: sends ("", result) for every shard, or (why it is refused, None)."""
    on_gpu = device.startswith("cuda")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(number))
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would take the GPUs that are there
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    meeting = f"file://{folder / 'meeting'}"
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=number, timeout=PATIENCE)
    folder_of_rank = folder / str(rank)
    folder_of_rank.mkdir()
    for shard in shards:
        part = dataclasses.replace(
            shard,
            file=shard.file if rank == 0 else folder_of_rank / shard.file.name,
            device=f"cuda:{rank}" if on_gpu else device,
            num_threads=shard.num_threads if on_gpu else max(1, shard.num_threads // number),
        )
        try:
            writer.send(("", function(part, lambda share: None)))
        except UserError as error:
            writer.send((str(error), None))
            return
        if rank:
            part.file.unlink()
    dist.destroy_process_group()
