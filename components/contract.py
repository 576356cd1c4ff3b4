"""The contract of a step: kinds of artifacts, the context that a step receives, and the one error that users see.

A step is a plain typed function. Before the `*` it takes artifacts, after it settings; `ctx: Context` and
`machine: Machine` are injected by name. Its return annotation is the kind it makes.

    def train_draft(features: Features, *, method: Method = "eagle3", ctx: Context) -> Draft: ...

A step writes its files under `ctx.out` and returns `Draft.of_step(ctx, {...facts...})`. The directory is renamed into
the store only when the step has returned, so an artifact is complete or absent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

Result = TypeVar("Result")
ReportProgress = Callable[[float], None]
"""A function that takes the share of a shard's work that is done, from 0 to 1."""
Mapper = Callable[[Callable[[Any, ReportProgress], Any], Sequence[Any]], Iterator[Any]]
"""Calls function(shard, report_progress) for every shard, here or elsewhere; yields the results in order."""


class Shard(Protocol):
    """A piece of a wide step's work: plain small values (paths, ids, settings; no tensors) and the file it becomes."""

    @property
    def file(self) -> Path:
        """The file of the shard, which exists once the shard is finished and not before."""


AnyShard = TypeVar("AnyShard", bound=Shard)


def unfinished(shards: Sequence[AnyShard]) -> list[AnyShard]:
    """The shards whose file does not exist yet."""
    return [shard for shard in shards if not shard.file.is_file()]


class UserError(Exception):
    """The user's input is wrong. The message is one line: where, what, and how to repair it. It is never retried."""


class NothingNew(Exception):
    """A step has nothing to do; the message says why in one line. The run ends as completed, without an artifact."""


@dataclass(frozen=True)
class Artifact:
    """A finished directory in the store and the small facts about it. Steps pass this handle on; tensors stay in files.

    key:  sha256 hex digest that names the directory ("" while the step that makes it is still running).
    path: the directory.
    info: JSON facts (counts, sizes, choices); also kept in `artifact.json` beside the files.
    """

    key: str
    path: Path
    info: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_step(cls, ctx: Context, info: Mapping[str, Any] | None = None) -> Self:
        """The artifact that a step returns for the files that it wrote under `ctx.out`. info: JSON facts about it."""
        return cls(key=ctx.key, path=ctx.out, info=dict(info or {}))


class Corpus(Artifact):
    """Text documents: `train.jsonl`, `held_out.jsonl`; one {"id", "source", "text"} a line."""


class Target(Artifact):
    """A causal LM in Hugging Face format: config.json, *.safetensors, tokenizer.json."""


class Chats(Artifact):
    """Whole conversations and documents in unified rows: `part-*.parquet`, `manifest.json` (data/formats/chats.py)."""


class Prompts(Artifact):
    """`prompts.jsonl`: {"prompt_id", "split", "workload", "language", "source", "prompt" | "messages", "reference"}."""


class Conversations(Artifact):
    """Answers to learn from: `shard-*.safetensors`, token ids and masks; see data/formats/responses.py."""


class Features(Artifact):
    """Hidden states over Conversations: `shard-*.safetensors`, `manifest.json`; see data/features/format.py."""


class Draft(Artifact):
    """A trained drafter: `draft.json` (method and shape) and `model.safetensors`; see drafts/storage/files.py."""


class Measurements(Artifact):
    """Rows of facts: one `TABLE.jsonl` for each table named in components/rows.py."""


class DepthPolicy(Artifact):
    """How deep to draft, and why: `policy.json`; see components/policy.py."""


class Release(Artifact):
    """What others can load: one folder a format, the model card, and `release.json`."""


class Page(Artifact):
    """What people read: `index.html`, self-contained."""


KINDS: dict[str, type[Artifact]] = {
    kind.__name__: kind
    for kind in (
        Corpus,
        Target,
        Chats,
        Prompts,
        Conversations,
        Features,
        Draft,
        Measurements,
        DepthPolicy,
        Release,
        Page,
    )
}


@dataclass(frozen=True)
class Machine:
    """The machine a measuring step runs on; part of that step's key.

    A step with a parameter `machine: Machine` is a measuring step: it runs alone, and its key has the `machine_id`.
    """

    machine_id: str
    cpu_model: str
    num_cores: int
    ram_gib: float
    device: str
    device_name: str
    os: str
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Context:
    """What a step receives besides artifacts and settings; it takes nothing else from its surroundings.

    key:         the artifact's key.
    out:         the directory to write the artifact into. Survives a crash: a step that finds its own finished shards
                 there goes on from them.
    scratch:     a directory for checkpoints; survives a crash, deleted when the step has succeeded.
    device:      "cpu", "cuda" or "cuda:0".
    seed:        the only source of randomness.
    num_threads: threads that torch may use in this process.
    send:        where events go (progress, metrics, notes); None prints nothing.
    mapper:      who works on the shards of `map`; None is this process, one shard after the other.
    rehearsed:   whether what it measures is thrown away: it times nothing that would only make that better.
    """

    key: str
    out: Path
    scratch: Path
    device: str = "cpu"
    seed: int = 0
    num_threads: int = 2
    send: Callable[[Mapping[str, Any]], None] | None = None
    mapper: Mapper | None = None
    rehearsed: bool = False

    def __post_init__(self) -> None:
        """Delete what a killed attempt has set aside: this attempt reads its input anew and would count it twice."""
        (self.out / "set_aside.jsonl").unlink(missing_ok=True)

    def map(
        self,
        function: Callable[[AnyShard, ReportProgress], Result],
        shards: Sequence[AnyShard],
        *,
        what: str = "shards",
    ) -> Iterator[Result]:
        """Yield the results of function(shard, report_progress) for the unfinished shards, in their order.

        They run in this process, or where `runs_on` says. The bytes are the same wherever a shard runs, provided that
        the function stands at the top of a module, depends on its shard alone, and writes the shard's file whole or
        not at all (components/files.py). A step that calls this is a wide step.

        what: the unit of progress. Shards that an earlier attempt has finished count as done.
        """
        todo, total = unfinished(shards), len(shards)
        assert len({shard.file for shard in shards}) == total, "two shards become one file: one of them would be lost"
        finished = total - len(todo)
        if self.mapper is not None:
            for number, result in enumerate(self.mapper(function, todo), start=finished + 1):
                self.progress(number, total, what)
                yield result
            return
        for number, shard in enumerate(todo, start=finished):

            def report_share(share: float, number: int = number) -> None:
                self.progress(number + share, total, what)

            result = function(shard, report_share)
            self.progress(number + 1, total, what)
            yield result

    def progress(self, done: float, total: float, what: str = "") -> None:
        """Report that `done` of `total` units (`what`) are finished; the display estimates the remaining time."""
        self._emit({"event": "progress", "done": done, "total": total, "what": what})

    def record(self, step: int, **metrics: float) -> None:
        """Log training metrics at an optimiser step; they go to MLflow and to `metrics.jsonl` in the artifact."""
        row = {"step": step, **metrics}
        with (self.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._emit({"event": "metrics", **row})

    def note(self, message: str) -> None:
        """Show one line to whoever follows the run."""
        self._emit({"event": "note", "message": message})

    def set_aside(self, source: str, line: int, reason: str, row: str = "") -> None:
        """Write a bad input row to `set_aside.jsonl` for people to find, and report it: it is counted and shown."""
        with (self.out / "set_aside.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"source": source, "line": line, "why": reason, "row": row}) + "\n")
        self._emit({"event": "set_aside", "source": source, "line": line, "why": reason})

    def _emit(self, event: Mapping[str, Any]) -> None:
        if self.send is not None:
            self.send({"time": time.time(), **event})
