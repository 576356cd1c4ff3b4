"""A home with the history of a pipeline: two nights that differ in what is known, and a third that was never planned.

Nothing in it was computed: artifacts, journals and promotions are written as runs write them. Night 2 took more
prompts, trained longer by other code with another torch, and became champion; both drafters learned from two sources.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from history_rows import choice, counted, depth_eval, request, rounds

from components.rows import CostCell, Drift, PairedComparison, QualityFlag, write_rows
from storage import journal
from storage.artifacts.store import Store
from storage.history.records import PromotionRow
from storage.history.write import record_artifact, record_promotion, record_run

NIGHTS = {1: "20261125-020000-aaaa0001", 2: "20261126-020000-bbbb0002", 3: "20261127-020000-cccc0003"}
MACHINE = {"machine_id": "f00d" * 4, "device": "cpu", "device_name": "Toy CPU", "num_cores": 2, "ram_gib": 7.7}
ANOTHER = {**MACHINE, "machine_id": "beef" * 4}  # of the same hardware: a name alone does not tell them apart


def key_of(name: str) -> str:
    """The key of an artifact of this home."""
    return hashlib.sha256(name.encode()).hexdigest()


def two_nights(home: Path) -> None:
    """Fill a home. The release of night N has the key `key_of("release N")`, its drafter `key_of("draft N")`."""
    for night in (1, 2):
        _night(home, night)
        facts = {
            "draftsmith.key": key_of(f"release {night}"),
            "draftsmith.draft_key": key_of(f"draft {night}"),
            "draftsmith.run_id": NIGHTS[night],
        }
        moves = [("champion", night - 1 or None, night)] + [("previous", None, 1)] * (night == 2)
        for alias, before, now in moves:
            at, why = datetime(2026, 11, 24 + night, 3), "the promotion gate passed"
            row = (f"{night}-{alias}", at, "builtin", alias, "promote", before, now, "night", why, json.dumps(facts))
            record_promotion(home, PromotionRow(*(row[:-1]), row[-1] if alias == "champion" else "{}"))
    entries = [_start(3), {"entry": "end", "status": "failed", "reason": "no new chats", "time": _time(3) + 1}]
    _write_run(home, 3, entries)


def _night(home: Path, night: int) -> None:
    at = _Steps(home, night)
    target = at.make("target", "Target", "targets.load_target", info={"model": "builtin", "digest": "d1"}, again=True)
    prompts = {"source": "python-stdlib", "found": 100, "num_train": 30 + 10 * night, "num_test": 5}
    asked = at.make("prompts", "Prompts", "data.collect_prompts", {"num_train": 30 + 10 * night}, info=prompts)
    by_source = {"chats.jsonl": {"licence": "MIT", "read": 50, "kept": 20}}
    chats = at.make("chats", "Prompts", "data.collect_chats", info={"by_source": by_source}, again=True)
    answers = at.make(
        "answers", "Conversations", "data.write_answers", inputs={"target": target, "prompts": [asked, chats]}
    )
    steps = 100 * night
    metrics = "".join(
        f'{{"step": {s}, "loss": {9 - s / 100}, "held_out_al": {1 + s / 400}}}\n' for s in range(1, steps + 1)
    )
    draft = at.make(
        "draft",
        "Draft",
        "drafts.train_draft",
        {"method": "eagle3", "num_steps": steps},
        {"target": target, "answers": answers},
        info={"method": "eagle3", "target_key": target},
        files={"metrics.jsonl": metrics},
    )
    plain: dict[str, Any] = {"method": "none", "draft_key": "", "depth_k": 0}
    timed = [counted("a", 5, 15, 6, draft_key=draft), request("b", decode_ns=2 * 10**9, **plain)]
    cell = CostCell(target, draft, "eagle3", "verify", 2, 1, 3, 64, 0, 9, 1e6, 0.0, "float32", "plain", 1)
    flag = QualityFlag("s", draft, "eagle3", "prediction_gap", "warning", 0.2, "predicted 1.5, measured 1.2")
    measured = at.make(
        "end_to_end",
        "Measurements",
        "bench.compare_end_to_end",
        inputs={"drafts": [draft], "target": target},
        rows=[*timed, *rounds("a", (3, 2), (3, 1), (3, 1), (3, 2), (3, 0)), cell, flag],
    )
    speed = {"speedup_meas": 1.1 + 0.1 * night, "meas_lo": 1.05, "meas_hi": 1.4}
    judged = {"draft_key": draft, "target_key": target, "selection_id": f"sel{night}"}
    paired = PairedComparison(
        "s", "sel", target, draft, key_of("draft 1"), "eagle3", "eagle3", "all", "decode_speed", 2, 2, 24, 12.0, 10.0,
        1.2, 1.1, 1.3, 0.02, "better",
    )  # fmt: skip
    drift = Drift(
        "s", target, draft, "eagle3", "all", "all", 2, 30, 30, 2.4, 2.3, 2.5, 2.3, 2.2, 2.4, -0.1, -0.2, 0.0, False
    )
    policy = at.make(
        "verdict",
        "DepthPolicy",
        "speedup.confirm_depth",
        inputs={"end_to_end": measured},
        rows=[choice(**judged, **speed, pred_error=0.2), depth_eval(**judged, **speed), paired, drift],
        info={"draft_key": draft},
    )
    at.make(
        "release",
        "Release",
        "publish.export_release",
        inputs={"target": target, "drafts": [draft, key_of("draft 1")], "policy": policy},
        info={"method": "eagle3", "depth_k": 2, "verdict": "use", **speed},
    )
    end = {"entry": "end", "status": "completed", "reason": "", "time": _time(night) + 100}
    _write_run(home, night, [_start(night), *at.entries, end])


class _Steps:
    """Makes the artifacts of one night, and the journal entries of their steps."""

    def __init__(self, home: Path, night: int) -> None:
        self.home, self.night, self.store = home, night, Store(home)
        self.entries: list[dict[str, Any]] = []

    def make(
        self,
        step: str,
        kind: str,
        uses: str,
        settings: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        *,
        info: Mapping[str, Any] | None = None,
        rows: list[Any] | None = None,
        files: Mapping[str, str] | None = None,
        again: bool = False,
    ) -> str:
        """The key of an artifact. again: it is the same every night, and reused in the second."""
        key, number = key_of(step if again else f"{step} {self.night}"), len(self.entries) + 1
        record = {
            "pipeline": "nightly",
            "step": step,
            "uses": uses,
            "run_id": NIGHTS[1 if again else self.night],
            "settings": settings or {},
            "inputs": inputs or {},
            "seconds": 10.0 * number + self.night,
            "peak_rss_mib": 100.0 * number,
            "machine": MACHINE if step != "release" else ANOTHER,
            "versions": {"torch": "2.12.0" if self.night == 1 else "2.13.0", "python": "3.11.7"},
            "parts": {"code": {"a.py: shared": "0" * 64, f"{step}.py: {step}": str(self.night) * 64}},
        }
        reused = again and self.night == 2
        if not reused:
            out, _ = self.store.open_staging(key)
            write_rows(out, rows or [])
            for name, text in (files or {"data.txt": "x" * number * 1000}).items():
                (out / name).write_text(text, encoding="utf-8")
            record_artifact(self.home, self.store.commit(key, kind, info or {}, record).path)
        named = {
            name: [["step", one] for one in (value if isinstance(value, list) else [value])]
            for name, value in (inputs or {}).items()
        }
        self.entries.append(
            {
                "entry": "step",
                "step": step,
                "uses": uses,
                "kind": kind,
                "key": key,
                "status": "reused" if reused else "completed",
                "why": "new",
                "seconds": None if reused else record["seconds"],
                "settings": settings or {},
                "inputs": named,
                "session": self.store.record_of(key).get("session", ""),
                "time": _time(self.night) + number,
            }
        )
        return key


def _time(night: int) -> float:
    return 1_795_572_000.0 + 86_400 * (night - 1)  # 2026-11-25 02:00 UTC


def _start(night: int) -> dict[str, Any]:
    facts = {"run_id": NIGHTS[night], "pipeline": "nightly", "params": {"limit": 10 * night}, "how": "direct"}
    return {"entry": "run", **facts, "git_commit": "abc", "draftsmith_version": "1", "time": _time(night)}


def _write_run(home: Path, night: int, entries: list[dict[str, Any]]) -> None:
    journal.write_anew(home / "runs" / f"{NIGHTS[night]}.jsonl", entries)
    record_run(home, entries)
