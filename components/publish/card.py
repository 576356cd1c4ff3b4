"""The model card: what the drafter is, its training data, its measurements, and where it is not worth using.

Numbers come from policy.json, its timed requests and the records of the lineage; the text is in card.md.jinja. The card
states what was not measured or recorded.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.escapes import in_code, in_markdown
from components.publish.card_limits import measured_limits, not_worth_it
from components.publish.launch import FOLDER_OF_TARGET, HUB_ID, launch_lines, shallower_than
from components.publish.lineage import Lineage
from components.publish.training_data import REASONS, training_data
from components.rows import ALL


@dataclass(frozen=True)
class Evidence:
    """The sources of a card beside release.json.

    policy: policy.json. end_to_end: the folder of the timed requests. max_positions: tokens that the target supports.
    target_licence: from the target's files, "" where they have none.
    """

    policy: dict[str, Any]
    lineage: Lineage
    end_to_end: Path
    max_positions: int
    target_licence: str = ""


class SafeText(str):
    """Text that is written to the card unchanged; all other text is escaped."""


def _safe(make: Callable[..., str]) -> Callable[..., SafeText]:
    return lambda value: SafeText(make(value))


def _yaml_scalar(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z][\w.-]*", text) else json.dumps(text)


def write_card(file: Path, record: dict[str, Any], evidence: Evidence) -> None:
    """Render README.md. record: release.json so far."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it is Markdown, and escaped as such:
        finalize=lambda value: value if isinstance(value, SafeText) else in_markdown(value),
    )
    environment.filters.update(
        x=_safe(format_ratio),
        num=_safe(format_number),
        ci=_safe(format_interval),
        pct=_safe(format_percent),
    )
    environment.filters.update(code=_safe(in_code), yaml=_safe(_yaml_scalar), verbatim=SafeText)
    text = environment.get_template("card.md.jinja").render(card_facts(record, evidence))
    file.write_text(text, encoding="utf-8")


def card_facts(record: dict[str, Any], evidence: Evidence) -> dict[str, Any]:
    """The variables of the template."""
    policy, draft_key, depth = evidence.policy, record["serve"]["draft_key"], record["serve"]["depth_k"]
    choices = [c for c in policy["choices"] if c["draft_key"] == draft_key]
    batch_size = min(c["batch_size"] for c in choices)  # the card shows one batch size and names it
    choices = [c for c in choices if c["batch_size"] == batch_size]
    evals = [e for e in policy["evals"] if (e["draft_key"], e["batch_size"]) == (draft_key, batch_size)]
    acceptance = [a for a in policy["acceptance"] if a["draft_key"] == draft_key]
    # At depth 0 nothing is drafted; the card then shows the shallowest drafting depth as the reason.
    shown_depth = depth or min((a["depth_k"] for a in acceptance if a["depth_k"]), default=0)
    arms = [a for a in policy["arms"] if a["draft_key"] == draft_key and a.get("tree_budget") is None]
    at_depth = [
        {**a, **next(_matching_interval(e, a) for e in evals if _matching_interval(e, a))}
        for a in acceptance
        if a["depth_k"] == shown_depth
    ]
    timed = {a["workload"]: a for a in arms if (a["batch_size"], a["depth_k"]) == (batch_size, shown_depth)}
    limits = measured_limits(policy, draft_key, evidence.end_to_end, evidence.max_positions)
    data = training_data(evidence.lineage, draft_key)
    hub = HUB_ID.fullmatch(record["target"]["model"].partition("@")[0])
    return {
        **record,
        "base_model": hub[0] if hub else "",
        "depth": depth,
        "shown": shown_depth,
        "pooled": next(c for c in choices if c["workload"] == ALL),
        "evals": [e for e in evals if e["workload"] == ALL],
        "at_depth": [{**a, "timed": timed.get(a["workload"])} for a in at_depth],
        "rounded": next((c for c in policy.get("weights") or [] if c["draft_key"] == draft_key), None),
        "predicted": {e["workload"]: e for e in evals if e["depth_k"] == shown_depth},
        "arms": [a for a in policy["arms"] if a["workload"] == ALL],
        "my_arms": [a for a in arms if a["workload"] == ALL],
        "gate": policy["gate"],
        "flags": [f for f in policy["flags"] if f["draft_key"] in ("", draft_key)],
        "stitched": folders_of(record).get("stitched"),
        "stands_for_folder": _folder_placeholder(record, bool(hub)),
        "shallower": shallower_than(depth, record["serve"]["method"], record["settings"]),
        "limits": limits,
        "not_worth": not_worth_it(policy, draft_key, depth, limits),
        "data": data,
        "reasons": REASONS,
        "data_licences": sorted({source.licence for source in data.sources if source.licence}),
        "target_licence": evidence.target_licence,
    }


def launch_commands(record: dict[str, Any]) -> dict[str, str]:
    """Engine -> the command that serves the release at the chosen depth, without the engines in `not_served`."""
    lines = launch_lines(
        record["serve"]["method"],
        record["serve"]["depth_k"],
        record["engines"],
        _target_in_commands(record),
        folders_of(record),
        record["settings"],
    )
    return {engine: command for engine, command in lines if engine not in record["not_served"]}


def _target_in_commands(record: dict[str, Any]) -> str:
    """The target in commands: its name, or a placeholder where the name has spaces and is no path."""
    model = str(record["target"]["model"] or FOLDER_OF_TARGET)
    return FOLDER_OF_TARGET if any(character.isspace() for character in model) else model


def _folder_placeholder(record: dict[str, Any], on_hub: bool) -> str:
    """The word in the commands that the reader replaces by the target's folder; "" where there is none."""
    word = FOLDER_OF_TARGET if on_hub else _target_in_commands(record)  # a stitched copy needs none
    commands = record["launch"].values()
    return word if any(word in shlex.split(command) for command in commands) else ""


def folders_of(record: dict[str, Any]) -> dict[str, str]:
    """Format -> folder, of the drafter that is served."""
    served = (pair for pair in record["formats"].items() if pair[1]["draft_key"] == record["serve"]["draft_key"])
    return {facts["format"]: folder for folder, facts in served}


def _matching_interval(e: dict[str, Any], a: dict[str, Any]) -> dict[str, Any]:
    """The interval of a DepthEval that belongs to an AcceptanceSummary, or {}."""
    same = (e["workload"], e["depth_k"]) == (a["workload"], a["depth_k"])
    return {k: e[k] for k in ("al", "al_lo", "al_hi")} if same else {}


def format_ratio(value: float | None) -> str:
    """1.2345 -> 1.23x; None -> "not measured"."""
    return "not measured" if value is None else f"{value:.2f}x"


def format_number(value: float | None) -> str:
    """Two decimals, or "not measured"."""
    return "not measured" if value is None else f"{value:.2f}"


def format_percent(value: float | None) -> str:
    """0.123 -> 12.3 %."""
    return "not measured" if value is None else f"{100 * value:.1f} %"


def format_interval(bounds: tuple[float | None, float | None]) -> str:
    """(lo, hi) -> [1.23, 1.45]; nothing when not measured."""
    lo, hi = bounds
    return "" if lo is None or hi is None else f"[{lo:.2f}, {hi:.2f}]"
