"""A discrete simulation of producers of hidden states, a network, a bounded buffer or a store, trainers and failures.

Producers are engines that pass parcels of tokens and send the hidden states over links, and wait until they are sent.
Trainers are one group of processes that takes step after step, and loses what it did since its last checkpoint when one
of them dies. Parcels that are lost are asked for again. A parcel is one block, or several where a run has more than
PARCELS of them. Time is simulated, so a run is the same for the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import simpy

from benchmarks.scale.shapes import Shape

BLOCK_TOKENS: Final = 65_536
GPUS_A_NODE: Final = 8
PARCELS: Final = 5_000
TOKENS_A_GPU: Final = 8_192
"""Of a training step: 65,536 tokens on eight GPUs, and more with more of them."""


@dataclass(frozen=True)
class Cluster:
    """What the work runs on; rates in bytes a second, times in seconds. All are assumptions of the simulation.

    link: network of a node to the store and to others. gpu_link: of each GPU to those of other nodes, inside: within a
    node. store: of the shared store, all nodes together. gpu_hours_between_failures: 50,700 by Llama 3's report
    (arXiv:2407.21783: 419 unexpected interruptions of 16,384 GPUs in 54 days). restart_s: until a process has
    been placed and started; an engine then loads its weights from the store. buffer_blocks: blocks that wait for
    training.
    """

    link: float = 12.5e9
    gpu_link: float = 50e9
    inside: float = 300e9
    store: float = 10e9
    gpu_hours_between_failures: float = 50_700.0
    restart_s: float = 180.0
    checkpoint_every_s: float = 600.0
    buffer_blocks: int = 64


@dataclass(frozen=True)
class Outcome:
    """What a simulated run took.

    busy: phase -> part -> share of the phase in which it worked. failures: part -> count. repeated_tokens: trained
    twice. stored_bytes: the most that lay in the store.
    """

    hours: float
    busy: dict[str, dict[str, float]]
    failures: dict[str, int]
    repeated_tokens: float
    moved_bytes: float
    stored_bytes: float

    @property
    def bottleneck(self) -> str:
        """The busiest part of each phase."""
        return ", then ".join(max(shares, key=shares.__getitem__) for shares in self.busy.values())


class Factory:
    """One phase of work: some engines, some training GPUs, and what lies between them."""

    def __init__(self, shape: Shape, cluster: Cluster, engines: int, trainers: int, seed: int) -> None:
        self.shape, self.cluster, self.engines, self.trainers = shape, cluster, engines, trainers
        self.env = simpy.Environment()
        self.rng = random.Random(seed)
        sides = [-(-gpus // GPUS_A_NODE) for gpus in (trainers, engines * shape.gpus) if gpus]
        self.links = simpy.Resource(self.env, capacity=min(sides))  # the side with fewer nodes has fewer links
        self.one_node = bool(engines and trainers) and engines * shape.gpus + trainers <= GPUS_A_NODE
        self.busy = {"engines": 0.0, "network": 0.0, "store": 0.0, "trainers": 0.0}
        self.failures = {"engines": 0, "trainers": 0}
        self.repeated = self.moved = 0.0
        self.waiting = self.left = 0
        self.blocks = 1  # of a parcel
        self.store: simpy.Resource | None = None
        self.done = self.env.event()

    def run(self, blocks: int, *, through_store: bool) -> float:
        """Pass, send and train so many blocks; returns seconds. Without engines the buffer fills from the store,
        without trainers the parcels end in the store."""
        self.blocks = -(-blocks // PARCELS)
        self.waiting = self.left = -(-blocks // self.blocks)
        self.buffer = simpy.Store(self.env, capacity=max(2, self.cluster.buffer_blocks // self.blocks))
        self.store = simpy.Resource(self.env, capacity=1) if through_store else None
        for _ in range(self.engines):
            self.env.process(self._engine())
        for _ in range(0 if self.engines else self.links.capacity):
            self.env.process(self._reader())
        if self.trainers:
            self.env.process(self._trainer())
        self.env.run(self.done)
        return float(self.env.now)

    def shares(self, seconds: float) -> dict[str, float]:
        """Part -> the share of so many seconds in which it worked, of the parts that were there."""
        there = {"engines": self.engines, "network": 1, "store": self.store is not None, "trainers": self.trainers}
        return {part: value / seconds for part, value in self.busy.items() if there[part]}

    def _engine(self) -> Iterator[Any]:
        """One engine: takes a parcel, passes it, sends it; starts again with its parcel where it fails."""
        nodes = -(-self.shape.gpus // GPUS_A_NODE)
        loading_s = self.shape.weight_bytes / min(self.cluster.link * nodes, self.cluster.store)
        starting_s = self.cluster.restart_s + loading_s
        fails = self._failures("engines", self.shape.gpus, lambda: starting_s)
        yield self.env.timeout(starting_s)
        while True:
            if not self.waiting:
                yield self.env.timeout(30.0)  # a failed training process may give parcels back
                continue
            self.waiting -= 1
            yield from fails(self.blocks * BLOCK_TOKENS / self.shape.engine_tokens_per_s)
            yield from self._send()
            if self.trainers:
                yield self.buffer.put(1)
            else:
                self._finish(1)

    def _reader(self) -> Iterator[Any]:
        """Stored parcels on their way to a training node."""
        while True:
            if not self.waiting:
                yield self.env.timeout(30.0)
                continue
            self.waiting -= 1
            yield from self._send()
            yield self.buffer.put(1)

    def _send(self) -> Iterator[Any]:
        """A parcel's hidden states over one node's link, and through the store where they go there."""
        size = self.blocks * BLOCK_TOKENS * self.shape.feature_bytes
        self.moved += size
        sending_s = size / (self.cluster.inside if self.one_node else self.cluster.link)
        with self.links.request() as link:
            yield link
            self.busy["network"] += sending_s / self.links.capacity
            yield self.env.timeout(sending_s)
        if self.store is not None:
            with self.store.request() as place:
                yield place
                self.busy["store"] += size / self.cluster.store
                yield self.env.timeout(size / self.cluster.store)

    def _trainer(self) -> Iterator[Any]:
        """The training group: steps, checkpoints, and back to the last one where it fails."""
        checkpoint_s = (
            self.shape.draft_params * 14.0 / min(self.cluster.link, self.cluster.store)
        )  # weights, two moments
        lost: list[int] = []
        yield self.env.timeout(self.cluster.restart_s)
        fails = self._failures("trainers", self.trainers, lambda: self.cluster.restart_s, lambda: lost.append(1))
        saved_at, since = self.env.now, 0
        while self.left:
            taken = min(max(1, self.blocks_a_step // self.blocks), self.left - since)
            for _ in range(taken):
                yield self.buffer.get()
            yield from fails(taken * self.blocks / self.blocks_a_step * self.step_s())
            since += taken
            if lost:  # the steps since the checkpoint are to be made again, with features that are asked for again
                self.repeated += (since - taken) * self.blocks * BLOCK_TOKENS
                self.waiting += since - taken
                since, saved_at = taken, self.env.now
                lost.clear()
            if self.env.now - saved_at >= self.cluster.checkpoint_every_s or since == self.left:
                yield self.env.timeout(checkpoint_s)
                self._finish(since)
                saved_at, since = self.env.now, 0

    @property
    def blocks_a_step(self) -> int:
        """Blocks of one training step."""
        return max(1, self.trainers * TOKENS_A_GPU // BLOCK_TOKENS)

    def step_s(self) -> float:
        """A training step: its arithmetic, and summing bf16 gradients over all GPUs (not overlapped)."""
        arithmetic = self.blocks_a_step * BLOCK_TOKENS / (self.trainers * self.shape.trainer_tokens_per_s)
        link = self.cluster.inside if self.trainers <= GPUS_A_NODE else self.cluster.gpu_link
        return arithmetic + 2.0 * self.shape.draft_params * 2.0 / link * (self.trainers - 1) / self.trainers

    def _failures(
        self, part: str, gpus: int, restart_s: Callable[[], float], on_failure: Callable[[], object] = lambda: None
    ) -> Callable[[float], Iterator[Any]]:
        """Work of some seconds on some GPUs that may die in it, at any time of its life; it is then done again."""
        mean_s = self.cluster.gpu_hours_between_failures * 3600.0 / gpus
        next_at = self.rng.expovariate(1.0 / mean_s)
        share = 1.0 / self.engines if part == "engines" else 1.0

        def work(seconds: float) -> Iterator[Any]:
            nonlocal next_at
            while self.env.now + seconds > next_at:
                yield self.env.timeout(max(0.0, next_at - self.env.now))
                self.failures[part] += 1
                on_failure()
                yield self.env.timeout(restart_s())
                next_at = self.env.now + self.rng.expovariate(1.0 / mean_s)
            yield self.env.timeout(seconds)
            self.busy[part] += seconds * share

        return work

    def _finish(self, parcels: int) -> None:
        self.left -= parcels
        if not self.left and not self.done.triggered:
            self.done.succeed()


def best_split(shape: Shape, cluster: Cluster, gpus: int) -> tuple[int, int]:
    """(engines, training GPUs) of so many GPUs, so that neither waits much for the other."""

    def speed(engines: int) -> float:
        trainers = gpus - engines * shape.gpus
        group = Factory(shape, cluster, engines, trainers, seed=0)
        trained = group.blocks_a_step * BLOCK_TOKENS / group.step_s()
        return min(engines * shape.engine_tokens_per_s, trained)

    engines = max(range(1, (gpus - 1) // shape.gpus + 1), key=speed)
    return engines, gpus - engines * shape.gpus


def streamed(shape: Shape, cluster: Cluster, gpus: int, tokens: float, epochs: int, seed: int = 0) -> Outcome:
    """Engines beside trainers: hidden states are made anew in every epoch and lie nowhere."""
    engines, trainers = best_split(shape, cluster, gpus)
    factory = Factory(shape, cluster, engines, trainers, seed)
    seconds = factory.run(_blocks(tokens * epochs), through_store=False)
    busy = {"both": factory.shares(seconds)}
    return Outcome(seconds / 3600, busy, factory.failures, factory.repeated, factory.moved, 0.0)


def stored(shape: Shape, cluster: Cluster, gpus: int, tokens: float, epochs: int, seed: int = 0) -> Outcome:
    """All GPUs are engines first, and the hidden states are stored; then all train, and read them once an epoch."""
    first = Factory(shape, cluster, max(1, gpus // shape.gpus), 0, seed)
    making = first.run(_blocks(tokens), through_store=True)
    second = Factory(shape, cluster, 0, gpus, seed + 1)
    training = second.run(_blocks(tokens * epochs), through_store=True)
    busy = {"making": first.shares(making), "training": second.shares(training)}
    failures = {part: first.failures[part] + second.failures[part] for part in first.failures}
    moved, hours = first.moved + second.moved, (making + training) / 3600
    return Outcome(hours, busy, failures, second.repeated, moved, tokens * shape.feature_bytes)


def _blocks(tokens: float) -> int:
    return max(1, round(tokens / BLOCK_TOKENS))
