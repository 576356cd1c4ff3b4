"""The summary of a run in a few lines, printed at its end, from the info of its artifacts; and a page's first line."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from components.contract import Artifact
from components.outside_json import read_object
from components.policy import verdict_in_words

Facts = Mapping[str, Any]
"""Info of an artifact, as its step gave it."""
VERDICTS = {
    "use": "Use it",
    "do_not_speculate": "Do not speculate",
    "undecided": "Undecided",
    "invalid": "Invalid measurement",
}


def summarise(policy: Facts, release: Facts | None = None, places: Mapping[str, str] | None = None) -> dict[str, str]:
    """Label -> value, in the order to print.

    policy: DepthPolicy.info after speedup.confirm_depth. release: Release.info. places: label -> path or address of
    the report, the registered version and the like.
    """
    lines = {"verdict": verdict_in_words(policy), "drafter": str(policy.get("method", "none"))}
    if not policy.get("depth_k") and policy.get("reasons"):
        lines["reasons"] = "; ".join(policy["reasons"])  # what was measured of other depths is in no line below
    not_served = policy.get("verdict") in ("do_not_speculate", "invalid") and policy.get("depth_k")
    lines["chosen depth"] = f"{policy.get('depth_k', 0)}{', not served' if not_served else ''}"
    lines["acceptance length"] = _with_interval(policy, "al", "al_lo", "al_hi", "") + _while_decoding(policy)
    lines["measured speedup"] = _with_interval(policy, "speedup_meas", "meas_lo", "meas_hi", "x")
    if policy.get("depth_k") == 0 and policy.get("speedup_meas") is None:
        lines["measured speedup"] = "none: depth 0 is plain decoding"
    lines["predicted speedup"] = _with_interval(policy, "speedup_pred", "", "", "x")
    lines["predicted speedup"] += _gap(policy)
    lines["token-identical"] = _identity(policy)
    if policy.get("vs_champion") is not None:
        lines["against champion"] = _with_interval(policy, "vs_champion", "vs_champion_lo", "vs_champion_hi", "x")
        lines["against champion"] += f": {str(policy['vs_champion_verdict']).replace('_', ' ')}"
    gate = policy.get("gate_passed")
    failed = "; ".join(policy.get("gate_failed", []))
    lines["promotion gate"] = "not checked" if gate is None else "passed" if gate else f"not passed: {failed}"
    if release:
        lines["exported formats"] = ", ".join(release.get("formats", []))
    return {**lines, **(places or {})}


def _with_interval(facts: Facts, value: str, lo: str, hi: str, unit: str) -> str:
    """A value with its interval: 2.31x, 95 % interval [2.10, 2.50]."""
    if facts.get(value) is None:
        return "not measured"
    text = f"{facts[value]:.2f}{unit}"
    if facts.get(lo) is not None and facts.get(hi) is not None:
        text += f", 95 % interval [{facts[lo]:.2f}, {facts[hi]:.2f}]"
    return text


def _while_decoding(facts: Facts) -> str:
    """The acceptance length of the timed requests, and the replayed one of the same prompts."""
    measured, replayed = facts.get("al_meas"), facts.get("al_replayed")
    if measured is None:
        return ""
    of = f" on {facts['num_prompts']} prompts" if facts.get("num_prompts") else ""
    timed = f" {facts['num_prompts_timed']} prompts" if facts.get("num_prompts_timed") else ""
    replay = "not replayed for those" if replayed is None else f"{replayed:.2f} replayed for the same"
    return f"{of}; {measured:.2f} while decoding{timed}, {replay}"


def _gap(facts: Facts) -> str:
    """The deviation of the prediction from the measurement, on the measured prompts where that is known."""
    measured, same = facts.get("speedup_meas"), facts.get("speedup_pred_same_prompts")
    if measured is None or facts.get("speedup_pred") is None:
        return ""
    predicted = facts["speedup_pred"] if same is None else same
    gap = predicted / measured - 1.0
    distance = f"{100 * abs(gap):.1f} % {'above' if gap >= 0 else 'below'} measured"
    differs = same is not None and f"{same:.2f}" != f"{facts['speedup_pred']:.2f}"
    return f"; {same:.2f}x for the measured prompts, {distance}" if differs else f", {distance}"


def _identity(facts: Facts) -> str:
    """Whether outputs were identical: yes (24 outputs compared, 1 part at a tie)."""
    if not facts.get("num_checked"):
        return "not compared"
    ties = facts.get("num_ties", 0)
    compared = f"{facts['num_checked']} outputs compared" + (f", {ties} part at a tie" if ties else "")
    return f"{'yes' if facts.get('identical') else 'NO'} ({compared})"


def origin_of(model: str, target_key: str, measured: Artifact) -> list[tuple[str, str]]:
    """(label, value): which model, measured on which machine, when, and by which code.

    model: the name of the target; "" where only its key is known. The rest is what the measurement
    recorded about itself; what it did not record has no entry.
    """
    facts = [("model", model or f"target {target_key[:12]}")]
    file = measured.path / "artifact.json"
    if not file.is_file():  # a step that is called outside of a run leaves no record
        return facts
    content = read_object(file)
    record = content["record"]
    if machine := record.get("machine"):
        name = machine["device_name"] or machine["cpu_model"]
        facts.append(("machine", f"{name}, {machine['num_cores']} cores, {machine['ram_gib']:g} GiB, {machine['os']}"))
    facts.append(("measured", f"{datetime.fromtimestamp(content['finished_at'], UTC):%Y-%m-%d %H:%M} UTC"))
    commit, torch = record.get("git_commit"), record.get("versions", {}).get("torch")
    code = [f"commit {commit[:12]}{' with changes' if record.get('git_changed') else ''}"] if commit else []
    if code := [*code, *([f"torch {torch}"] if torch else [])]:
        facts.append(("code", ", ".join(code)))
    return facts
