"""A home as thirty nights leave it: promotions, quiet, failed and killed nights, drift, two machines.

Rows go through the functions that runs use, so every one is checked; times lie in the past, and numbers are made up.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import defaultdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from history_rows import choice, depth_eval

from components.rows import Drift
from storage.artifacts.store import Store
from storage.history.files import write_table
from storage.history.records import ArtifactRow, PromotionRow, RunRow, StepRow, now

HOSTS = {
    "m1": {"device_name": "EPYC 7B13", "num_cores": 8, "ram_gib": 31.4},
    "m2": {"device_name": "Ampere Altra", "num_cores": 16, "ram_gib": 62.8},
}
PROMOTED, FAILED, QUIET, KILLED = {0, 4, 9, 16, 24}, {5, 21}, {3, 10, 18, 25}, {13}


Rows = dict[str, list[dict[str, Any]]]
"""Table -> its rows."""


def key_of(name: str, night: int = 0) -> str:
    """A key as the store makes them."""
    return hashlib.sha256(f"{name} {night}".encode()).hexdigest()


def fill(home: Path, nights: int = 30) -> None:
    """Write the nights into the history and the store of a home; the last was a few hours ago."""
    rows: Rows = defaultdict(list)
    champion, version = -1, 0
    for night in range(nights):
        at = now().replace(hour=2, minute=0, second=0, microsecond=0) - timedelta(days=nights - 1 - night)
        run_id = f"{at:%Y%m%d-%H%M%S}-{night:08x}"
        pipeline = "nightly" if night else "quickstart"
        status, reason = "completed", ""
        if night in FAILED:
            status, reason = (
                "failed",
                "step 'answers' failed: No space left on device: 0.2 GiB are free, 1.1 GiB are needed",
            )
            _step(rows, run_id, pipeline, "answers", "Conversations", None, at, "failed", reason)
        elif night in KILLED:
            status, reason = (
                "killed",
                "ended without a word; last said </script><script>document.title = 'taken'</script>",
            )
        elif night in QUIET:
            reason = "nothing new: traffic: no conversation that the champion has not had"
        else:
            version += 1
            is_better = night in PROMOTED
            _measured(home, rows, run_id, pipeline, night, champion, at)
            _publish(rows, run_id, pipeline, night, version, is_better, at)
            reason = f"registered: builtin version {version} (candidate, challenger{', champion' if is_better else ''})"
            if is_better:
                champion = night
            else:
                reason += "; not promoted: it was not shown to be faster than version 1: 0.99x [0.97, 1.02]"
        ended = at + timedelta(minutes=12 + night % 5)
        row = RunRow(
            run_id, pipeline, "{}", "prefect", status, reason, 12 if reason else 3, 3, at, ended, "c0ffee", "0.1.0"
        )
        rows["run"].append(dataclasses.asdict(row))
    for table, made in rows.items():
        write_table(home, table, "thirty-nights", made, "thirty nights")


def _step(
    rows: Rows, run_id: str, pipeline: str, name: str, kind: str, key: str | None, at: datetime, status: str, why: str
) -> None:
    row = StepRow(run_id, pipeline, name, "toy", kind, key, False, why, status, 31.0, "{}", "{}", at)
    rows["step"].append(dataclasses.asdict(row))


def _artifact(
    rows: Rows,
    run_id: str,
    pipeline: str,
    name: str,
    kind: str,
    night: int,
    at: datetime,
    /,
    *inputs: str,
    **settings: Any,
) -> str:
    """One artifact of a night in the history, with its step; returns its key."""
    key, machine = key_of(name, night), "m2" if night % 3 == 2 else "m1"
    info = {"model": settings.get("model", ""), "digest": "ab" * 32} if kind == "Target" else {}
    row = ArtifactRow(
        artifact_key=key,
        kind=kind,
        pipeline=pipeline,
        step=name,
        run_id=run_id,
        uses="targets.load_target" if kind == "Target" else "toy",
        settings=json.dumps(settings),
        inputs=json.dumps(
            {"start_from" if (kind, i) == ("Draft", 2) else f"in{i}": one for i, one in enumerate(inputs)}
        ),
        info=json.dumps(info),
        seconds=20.0 + night,
        machine_id=machine,
        machine=json.dumps(HOSTS[machine]),
        created_at=at,
        draftsmith_version="0.1.0",
    )
    rows["artifact"].append(dataclasses.asdict(row))
    _step(rows, run_id, pipeline, name, kind, key, at, "completed", "new")
    return key


def _measured(home: Path, rows: Rows, run_id: str, pipeline: str, night: int, champion: int, at: datetime) -> None:
    """What a night makes: its lineage, and the choices of challenger and champion."""

    def made(name: str, kind: str, *inputs: str, **settings: Any) -> str:
        return _artifact(rows, run_id, pipeline, name, kind, night, at, *inputs, **settings)

    target = made("target", "Target", model="builtin")
    prompts = made("prompts", "Prompts", source="traffic/*.jsonl" if night else "python-stdlib")
    answers = made("answers", "Conversations", target, prompts)
    features = made("features", "Features", target, answers)
    earlier = [key_of("draft", champion)] if champion >= 0 else []
    draft = made("draft", "Draft", target, features, *earlier, method="mtp")
    acceptance = made("acceptance", "Measurements", target, draft, prompts)
    cost = made("step_cost", "Measurements", target, draft)
    depth = made("depth", "DepthPolicy", acceptance, cost)
    end_to_end = made("end_to_end", "Measurements", target, draft, depth)
    verdict = made("verdict", "DepthPolicy", depth, end_to_end)
    release = made("release", "Release", target, draft, verdict, acceptance, end_to_end)
    page = made("report", "Page", verdict, release)
    store = Store(home)
    out, _ = store.open_staging(page)
    (out / "index.html").write_text(f"<!doctype html><title>night {night}</title>", encoding="utf-8")
    store.commit(page, "Page", {}, {"pipeline": pipeline, "step": "report", "run_id": run_id})

    shared = {"artifact_key": verdict, "pipeline": pipeline, "step": "verdict", "run_id": run_id, "created_at": at,
              "machine_id": "m2" if night % 3 == 2 else "m1", "draftsmith_version": "0.1.0", "session": ""}  # fmt: skip
    drafters = [(draft, "mtp", night)] + ([(earlier[0], "mtp", champion)] if earlier else [])
    drafters += [(key_of("eagle3"), "eagle3", 0)] if not night else []
    choices, evals = [], []
    for drafter, method, grade in drafters:
        gain = 1.22 + 0.01 * grade + 0.03 * math.sin(night) - 0.3 * (method == "eagle3")
        verdict_is = "use" if gain > 1.03 else "do_not_speculate"
        named = {"selection_id": verdict[:16], "target_key": target, "draft_key": drafter, "method": method}
        for k in range(6):
            al = 1 + 0.75 * (1 - 0.6**k) + 0.02 * grade
            speed = gain - 0.02 * (k - 3) ** 2 if k else 1.0
            evals.append(depth_eval(
                **named, depth_k=k, al=al, al_lo=al - 0.06, al_hi=al + 0.06, cost_ratio=1 + 0.14 * k,
                t_verify_ms=5 + k / 3, t_draft_ms=k / 4, speedup_pred=speed * 1.02, pred_lo=speed - 0.05,
                pred_hi=speed + 0.08, speedup_meas=speed if k in (2, 3, 4) else None, meas_lo=speed - 0.04,
                meas_hi=speed + 0.04))  # fmt: skip
        said = [f"{method} at depth 3 measured {gain:.2f}x [{gain - 0.04:.2f}, {gain + 0.04:.2f}]"]
        choices.append(choice(
            **named, depth_k=3, speedup_pred=gain * 1.02, pred_lo=gain - 0.05, pred_hi=gain + 0.08, speedup_meas=gain,
            meas_lo=gain - 0.04, meas_hi=gain + 0.04, pred_error=0.02, verdict=verdict_is, reasons=said))  # fmt: skip
    for table, found in (("depth_choice", choices), ("depth_eval", evals)):
        rows[table] += [{**dataclasses.asdict(row), **shared} for row in found]
    if night:
        change = 0.05 * math.cos(night / 3) - 0.005 * night
        seen = Drift("s", target, earlier[0], "mtp", "all", "all", 3, 24, 24, 2.3, 2.25, 2.35, 2.3 + change,
                     2.2 + change, 2.4 + change, change, change - 0.08, change + 0.08, change + 0.08 < 0)  # fmt: skip
        drift = made("drift", "Measurements", acceptance)
        rows["drift"].append({**dataclasses.asdict(seen), **shared, "artifact_key": drift, "step": "drift"})


def _publish(rows: Rows, run_id: str, pipeline: str, night: int, version: int, is_better: bool, at: datetime) -> None:
    """The moves of the aliases of a night's version."""
    gain = 1.22 + 0.01 * night + 0.03 * math.sin(night)
    facts = {"key": key_of("release", night), "target": "builtin", "target_key": key_of("target", night),
             "method": "mtp", "depth_k": 3, "draft_key": key_of("draft", night), "verdict": "use", "speedup_meas": gain,
             "meas_lo": gain - 0.04, "meas_hi": gain + 0.04, "speedup_pred": gain * 1.02, "al": 1.59, "al_lo": 1.53,
             "al_hi": 1.65, "run_id": run_id, "machine_name": "EPYC 7B13", "pipeline": pipeline}  # fmt: skip
    numbers = json.dumps({f"draftsmith.{name}": str(value) for name, value in facts.items()})
    for alias in ("candidate", "challenger", *(["champion"] if is_better else [])):
        action = "promote" if alias == "champion" else "publish"
        why = (
            f"1.0{night % 9}x [1.01, 1.09] against the champion, on 24 prompts" if alias == "champion" else "published"
        )
        row = PromotionRow(
            promotion_id=f"{at:%Y%m%d}-{version:03}-{alias}",
            promoted_at=at + timedelta(minutes=11),
            name="builtin",
            alias=alias,
            action=action,
            from_version=version - 1 or None,
            to_version=version,
            who="nightly",
            why=why,
            numbers=numbers,
        )
        rows["promotion"].append(dataclasses.asdict(row))


if __name__ == "__main__":
    import sys

    fill(Path(sys.argv[1]))
