"""The page of a pipeline run in MLflow: what was asked, the numbers that came out, its evidence in tables.

It is worked out from the journal and the artifacts of the run, so that a run that is logged late (`resync`) looks the
same. A slash in a number's name is where MLflow begins a section of charts: `speedup/measured`, `seconds/draft.mtp`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeGuard

from components.outside_json import JsonObject, read_object
from components.policy import GateCheck, Policy, policy_in, served_choices, verdict_in_words
from components.refusals import remedy
from components.rows import ALL, DepthChoice, DepthEval, PairedComparison
from components.text import in_markdown
from storage.artifacts.store import RECORD_FILE
from storage.journal import Entry

DECIDED: Final[Mapping[str, str]] = {
    "depth_k": "depth",
    "al": "acceptance/length",
    "al_lo": "acceptance/length_low",
    "al_hi": "acceptance/length_high",
    "al_meas": "acceptance/length_while_decoding",
    "al_replayed": "acceptance/length_replayed_for_the_same",
    "speedup_pred": "speedup/predicted",
    "speedup_pred_same_prompts": "speedup/predicted_for_measured_prompts",
    "speedup_meas": "speedup/measured",
    "meas_lo": "speedup/measured_low",
    "meas_hi": "speedup/measured_high",
    "pred_error": "speedup/prediction_error",
    "vs_champion": "against_champion/speed_ratio",
    "vs_champion_lo": "against_champion/speed_ratio_low",
    "vs_champion_hi": "against_champion/speed_ratio_high",
    "num_prompts": "prompts/replayed",
    "num_prompts_timed": "prompts/timed",
    "num_checked": "output/compared",
    "num_ties": "output/ties",
    "num_flags": "reasons_to_doubt",
}
"""Fact of a depth policy -> the name of the number. low and high are the ends of the 95 % interval."""
_DRAFTER: Final[Mapping[str, str]] = {
    "depth_k": "depth",
    "speedup_pred": "speedup_predicted",
    "speedup_meas": "speedup_measured",
    "meas_lo": "speedup_measured_low",
    "meas_hi": "speedup_measured_high",
}
_BY_DEPTH: Final[Mapping[str, str]] = {
    "acceptance_length": "al",
    "cost_of_a_round": "cost_ratio",
    "predicted_speedup": "speedup_pred",
    "measured_speedup": "speedup_meas",
}
_TRAINED = ("held_out_al", "best_step", "optimiser_steps", "num_parameters")

TableColumns = dict[str, list[Any]]
"""A table as MLflow takes it: column -> values."""


@dataclass(frozen=True)
class RunPage:
    """What is shown of an ended run.

    numbers: by name. curves: name -> (depth, value). tables: file name -> columns. note: its description.
    """

    title: str
    params: dict[str, str]
    tags: dict[str, str]
    numbers: dict[str, float]
    curves: dict[str, list[tuple[int, float]]]
    tables: dict[str, TableColumns]
    note: str


def page_of(start: Entry, steps: Sequence[Entry], end: Entry, places: Mapping[str, Path]) -> RunPage:
    """The page of a run. start, steps, end: entries of its journal. places: step -> the folder of its artifact."""
    records = {name: read_object(folder / RECORD_FILE) for name, folder in places.items() if _is_whole(folder)}
    decided = next((step for step in reversed(steps) if step["kind"] == "DepthPolicy" and step["info"]), None)
    facts: JsonObject = decided["info"] if decided is not None else {}
    policy = policy_in(places[decided["step"]]) if decided is not None and decided["step"] in places else None
    numbers = _numbers_of_run(start, steps, end) | _numbers_of_artifacts(steps, records)
    numbers |= _numbers_of_decision(facts, policy)
    tables = {"steps.json": _step_table(steps, records)} | (_evidence(policy) if policy is not None else {})
    tags = {"draftsmith.reason": str(end["reason"] or "")}
    if facts:
        tags |= {"verdict": str(facts.get("verdict", "")), "drafter": str(facts.get("method") or "none")}
    return RunPage(
        title=_title(start, facts, end),
        params=_params(start, facts, records),
        tags=tags,
        numbers={name: float(value) for name, value in numbers.items() if _is_number(value)},
        curves=_curves(policy) if policy is not None else {},
        tables={name: columns for name, columns in tables.items() if columns and any(columns.values())},
        note=_note(facts, steps, end),
    )


def step_name(step: str) -> str:
    """A step's name within the name of a number: `draft[mtp]` is `draft.mtp`, since MLflow takes no brackets."""
    return step.replace("[", ".").replace("]", "").replace(", ", ".")


def _is_whole(folder: Path) -> bool:
    return (folder / RECORD_FILE).is_file()


def _title(start: Entry, facts: JsonObject, end: Entry) -> str:
    """The name of the run: the pipeline, and what became of it."""
    outcome = str(end["status"])
    if facts and outcome == "completed":
        outcome = str(facts.get("verdict", "")).replace("_", " ")
        if outcome == "use":
            speed = facts.get("speedup_meas")
            outcome = f"{facts.get('method')} at depth {facts.get('depth_k')}" + (f", {speed:.2f}x" if speed else "")
    day, clock, *_ = str(start["run_id"]).split("-")
    return f"{start['pipeline']} {day[4:6]}-{day[6:8]} {clock[:2]}:{clock[2:4]} {outcome}"


def _params(start: Entry, facts: JsonObject, records: Mapping[str, JsonObject]) -> dict[str, str]:
    """What two runs may differ in beside the parameters of their pipeline."""
    about = {"pipeline": start.get("pipeline_digest", "")[:12], "draftsmith": start["draftsmith_version"]}
    about |= {"model": facts.get("model", ""), "trial": "yes" if start.get("trial") else ""}
    measured = [record["record"] for record in records.values() if record["record"].get("machine")]
    if measured:
        machine = measured[-1]["machine"]
        name = machine.get("device_name") or machine.get("cpu_model") or "machine"
        about["machine"] = f"{name} ({machine.get('machine_id')})"
        about["torch"] = measured[-1].get("versions", {}).get("torch", "")
    return {f"about/{name}": str(value) for name, value in about.items() if value}


def _numbers_of_run(start: Entry, steps: Sequence[Entry], end: Entry) -> dict[str, object]:
    """How long it took in all and by step, and how many steps were made, reused or failed."""
    numbers: dict[str, object] = {"seconds/all": end["time"] - start["time"]}
    numbers |= {f"seconds/{step_name(step['step'])}": step["seconds"] for step in steps}
    for status in ("completed", "reused", "failed"):
        numbers[f"steps/{status}"] = sum(step["status"] == status for step in steps)
    return numbers


def _numbers_of_artifacts(steps: Sequence[Entry], records: Mapping[str, JsonObject]) -> dict[str, object]:
    """Bytes of every artifact that the run made or used, peak memory of what it made, and how training ended."""
    numbers: dict[str, object] = {}
    total = 0
    for step in steps:
        name = step_name(step["step"])
        if step["step"] in records:
            size = _bytes_of(records[step["step"]])
            total += size
            numbers[f"bytes/{name}"] = size
            if step["status"] == "completed":
                numbers[f"peak_memory_mib/{name}"] = records[step["step"]]["record"].get("peak_rss_mib")
        if step["kind"] == "Draft":
            numbers |= {f"training/{name}.{fact}": step["info"].get(fact) for fact in _TRAINED}
    return numbers | {"bytes/all": total}


def _numbers_of_decision(facts: JsonObject, policy: Policy | None) -> dict[str, object]:
    """The decision about the drafter that its verdict is about, and the choice for each drafter beside it."""
    numbers: dict[str, object] = {name: facts.get(fact) for fact, name in DECIDED.items()}
    if facts.get("gate_passed") is not None:
        numbers |= {"gate/passed": int(facts["gate_passed"]), "gate/failed_checks": len(facts.get("gate_failed", ()))}
    if facts.get("identical") is not None:
        numbers["output/identical"] = int(facts["identical"])
    choices = served_choices(policy) if policy is not None else []
    for choice in choices if len(choices) > 1 else []:
        name = f"drafter.{_drafter_name(choice, choices)}"
        numbers |= {f"{name}/{label}": getattr(choice, fact) for fact, label in _DRAFTER.items()}
    return numbers


def _curves(policy: Policy) -> dict[str, list[tuple[int, float]]]:
    """Acceptance, cost and speedup of each drafter over depth, at the smallest batch: one line a run in MLflow."""
    curves: dict[str, list[tuple[int, float]]] = {}
    served = served_choices(policy)
    for choice in served:
        depths = sorted(
            (row for row in policy.evals if row.workload == ALL and _is_of(choice, row)), key=lambda row: row.depth_k
        )
        name = f"by_depth.{_drafter_name(choice, served)}"
        for label, fact in _BY_DEPTH.items():
            values = [(row.depth_k, getattr(row, fact)) for row in depths]
            curves[f"{name}/{label}"] = [(depth, float(value)) for depth, value in values if _is_number(value)]
    return {name: points for name, points in curves.items() if points}


def _is_of(choice: DepthChoice, row: DepthEval) -> bool:
    return (row.draft_key, row.batch_size) == (choice.draft_key, choice.batch_size)


def _drafter_name(choice: DepthChoice, choices: Sequence[DepthChoice]) -> str:
    """The method, with the start of the key where two drafters are of one method."""
    twins = sum(other.method == choice.method for other in choices)
    return choice.method if twins == 1 else f"{choice.method}-{choice.draft_key[:8]}"


def _evidence(policy: Policy) -> dict[str, TableColumns]:
    """The rows behind a decision: choices, depths, the comparison with the champion, the gate, reasons to doubt."""
    pooled = [row for row in policy.evals if row.workload == ALL]
    return {
        "choices.json": _columns(DepthChoice, policy.choices),
        "depths.json": _columns(DepthEval, pooled),
        "against-champion.json": _columns(PairedComparison, policy.comparisons),
        "gate.json": _gate_table(policy.gate.checks if policy.gate is not None else ()),
        "reasons-to-doubt.json": {
            name: [getattr(flag, name) for flag in policy.flags]
            for name in ("severity", "code", "method", "value", "detail")
        },
    }


def _columns(row_type: type[Any], rows: Iterable[Any]) -> TableColumns:
    """Rows of one type by column, in the order of its fields; lists in one line."""
    rows = list(rows)
    return {field.name: [_cell(getattr(row, field.name)) for row in rows] for field in fields(row_type)}


def _cell(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, list) else value


def _gate_table(checks: Sequence[GateCheck]) -> TableColumns:
    """Every check: what was measured, what was asked, whether it passed, and what to do where it did not."""
    return {
        "check": [check.what() for check in checks],
        "passed": [check.passed for check in checks],
        "measured": [check.measured() for check in checks],
        "asked": [check.asked() for check in checks],
        "what to do": ["" if check.passed else remedy(check.name) for check in checks],
    }


def _step_table(steps: Sequence[Entry], records: Mapping[str, JsonObject]) -> TableColumns:
    """What the run did, step by step."""
    rows = [
        {
            **{name: step[name] for name in ("step", "uses", "kind", "status", "seconds")},
            "bytes": _bytes_of(records[step["step"]]) if step["step"] in records else None,
            "key": step["key"],
            "why": step["why"],
            "settings": json.dumps(step["settings"], default=str, sort_keys=True),
        }
        for step in steps
    ]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _note(facts: JsonObject, steps: Sequence[Entry], end: Entry) -> str:
    """The description of the run, as Markdown: verdict, what speaks for it, what refused it, where the report is."""
    lines = [f"**{in_markdown(verdict_in_words(facts))}**", ""] if facts else []
    lines += [f"- {in_markdown(reason)}" for reason in facts.get("reasons", ())]
    lines += [f"- the gate refuses: {in_markdown(failed)}" for failed in facts.get("gate_failed", ())]
    if reason := end["reason"]:
        lines += ["", f"Ended as {end['status']}: {in_markdown(str(reason))}"]
    pages = [step["step"] for step in steps if step["kind"] == "Page" and step["path"]]
    lines += ["", "Among its artifacts:"] * bool(pages)
    lines += [f"- `report/{name}/index.html`, the report, with its charts and tables beside it" for name in pages]
    return "\n".join(lines).strip()


def _bytes_of(record: JsonObject) -> int:
    return sum(int(file["size"]) for file in record["files"].values())


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
