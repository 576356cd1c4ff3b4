"""The steps that read people's files, as a run calls them, and what became of the rows: kept, dropped, refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forked import Ended, forked

from components.contract import Context, NothingNew, UserError
from components.data import collect_chats, collect_prompts, collect_traffic, collect_workloads
from components.data.cleaning.language import language_of
from components.data.formats.chats import read_chats, read_dropped
from components.data.settings import ChatSource, Cleaning, WorkloadSource
from components.data.sources.listing import (
    collect_chats_fingerprint,
    collect_prompts_fingerprint,
    collect_traffic_fingerprint,
    collect_workloads_fingerprint,
)

language_of("What is loaded once, before a child is made, need not be loaded in every one of them.")
MANY: Final = 10**9
LENIENT: Final = Cleaning(
    role_order=False, min_question_characters=0, min_answer_characters=0, min_text_characters=0, mojibake=False,
    control_characters=False, replacement_characters=False, max_repeated_share=1.0, max_html_share=1.0, url_only=False,
    refusals=False, boilerplate=False, repeated_turns=False, max_characters=MANY,
)  # fmt: skip
"""What no step needs to keep a row: a row that was written whole is kept."""
_STOPS: Final = ("cannot be read either", "text after the end of the list", "breaks off")


@dataclass(frozen=True)
class Read:
    """What a step made of a file. ended: how its process ended. refused: why all of it was, "" where it was not.

    kept: (question, answer) of each row. num_read: rows read, as the step counts them. num_dropped: those that it did
    not keep, by all reasons, as the step counts them. num_listed: those that it shows to a person one by one.
    stops: where it says that it could not read on. peak_bytes: memory that it took at most.
    """

    step: str
    ended: Ended
    refused: str = ""
    kept: tuple[tuple[str, str], ...] = ()
    num_read: int = 0
    num_dropped: int = 0
    num_listed: int | None = None
    stops: tuple[str, ...] = ()
    peak_bytes: int = 0
    counts: Mapping[str, Any] = field(default_factory=dict)


def _resident_bytes(what: str) -> int:
    """Memory of this process: "VmRSS" now, "VmHWM" at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


def read_by(step: str, source: Path, folder: Path, documents: str = "file", limit_s: float = 120.0) -> Read:
    """Let a step read a file in a child of its own. documents: what one is in a file of text."""
    (folder / "out").mkdir(parents=True)
    (folder / "scratch").mkdir()
    told = folder / "told.json"

    def act() -> int:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _resident_bytes("VmRSS")  # of the process that was forked: what it had loaded is not the step's
        try:
            found = _STEPS[step](source, Context(key="k", out=folder / "out", scratch=folder / "scratch"), documents)
        except (UserError, NothingNew) as refused:
            print(refused)  # noqa: T201
            found = {"refused": str(refused)}
        told.write_text(json.dumps({**found, "peak_bytes": _resident_bytes("VmHWM") - before}))
        return 1 if "refused" in found else 0

    ended = forked(act, limit_s=limit_s, memory_bytes=4 << 30)
    if not told.exists():
        return Read(step, ended)
    found = json.loads(told.read_text())
    found["kept"] = tuple((asked, answered) for asked, answered in found.get("kept", []))
    return Read(step, ended, **{name: tuple(value) if name == "stops" else value for name, value in found.items()})


def _chats(source: Path, ctx: Context, documents: str) -> dict[str, Any]:
    given = ChatSource.model_validate({"path": str(source), "name": "n", "documents": documents})
    collect_chats_fingerprint({"sources": [given.model_dump()]})
    made = collect_chats(sources=[given], clean=LENIENT, ctx=ctx)
    dropped = list(read_dropped(made.path))
    rows = list(read_chats(made))
    assert made.info["num_rows"] == len(rows)
    assert sum(made.info["dropped"].values()) == made.info["num_dropped"]
    stops = [row["excerpt"] for row in dropped if ":" not in row["where"] or any(s in row["excerpt"] for s in _STOPS)]
    return {
        "kept": [_said(row.messages, row.text) for row in rows],
        "num_read": made.info["num_read"],
        "num_dropped": made.info["num_dropped"],
        "num_listed": len(dropped),
        "stops": stops,
        "counts": dict(made.info["dropped"]),
    }


def _prompts(source: Path, ctx: Context, documents: str) -> dict[str, Any]:
    collect_prompts_fingerprint({"source": str(source)})
    none = {"num_validation": 0, "num_test": 0, "num_warm_up": 0, "evaluation_percent": 0}
    made = collect_prompts(source=str(source), num_train=MANY, max_prompt_characters=MANY, **none, ctx=ctx)
    left = ("too_short", "too_long", "kept_out", "duplicates_within_split", "duplicates_across_splits", "set_aside")
    return _of_prompts(ctx, made.info, left, made.info["found"] + made.info["set_aside"])


def _traffic(source: Path, ctx: Context, documents: str) -> dict[str, Any]:
    collect_traffic_fingerprint({"source": str(source)})
    sizes = {"num_train": MANY, "num_test": MANY, "num_validation": 0, "num_warm_up": 0, "min_new": 1}
    made = collect_traffic(source=str(source), **sizes, max_prompt_characters=MANY, ctx=ctx)
    left = ("seen", "duplicates", "kept_out", "trained_on", "too_short", "too_long", "set_aside")
    num_read = sum(made.info[name] for name in ("new", "seen", "duplicates", "kept_out", "too_short", "too_long"))
    return _of_prompts(ctx, made.info, left, num_read + made.info["set_aside"])


def _workloads(source: Path, ctx: Context, documents: str) -> dict[str, Any]:
    given = WorkloadSource(path=str(source), workload="w", language="en")
    collect_workloads_fingerprint({"sources": [given.model_dump()]})
    made = collect_workloads(
        sources=[given], num_prompts=MANY, num_warm_up=0, max_prompt_characters=MANY, max_rows=MANY, ctx=ctx
    )
    left = ("too_long", "duplicates", "set_aside")
    return _of_prompts(ctx, made.info, left, made.info["num_test"] + sum(made.info[name] for name in left))


def _of_prompts(ctx: Context, info: Mapping[str, Any], left: tuple[str, ...], num_read: int) -> dict[str, Any]:
    prompts = [json.loads(line) for line in (ctx.out / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    listed = ctx.out / "set_aside.jsonl"
    aside = [json.loads(line) for line in listed.read_text().splitlines()] if listed.exists() else []
    assert len(aside) == info["set_aside"], "what is set aside is shown, row by row"
    kept = [(one.get("messages"), one.get("prompt") or "", one.get("reference", "")) for one in prompts]
    return {
        "kept": [_said(*one) for one in kept],
        "num_read": num_read,
        "num_dropped": sum(info[name] for name in left),
        "stops": [one["why"] for one in aside if any(stop in one["why"] for stop in _STOPS)],
        "counts": {name: info[name] for name in left if info[name]},
    }


def _said(messages: Any, text: str, reference: str = "") -> tuple[str, str]:
    if not messages:
        return text, reference
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    return messages[0]["content"], answers[0] if answers else reference


_STEPS: Final = {"chats": _chats, "prompts": _prompts, "traffic": _traffic, "workloads": _workloads}
