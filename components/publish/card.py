"""The model card: what this drafter is, what it learned from, what it was measured to do, where it is not worth it.

Numbers come from policy.json, the timed requests behind it and the records of the lineage; the words around them stand
in card.md.jinja. What nobody measured or recorded is said to be so.
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

ALL = "all"


@dataclass(frozen=True)
class Evidence:
    """What a card tells beside release.json.

    policy: policy.json. end_to_end: the folder of the timed requests. max_positions: the target's, tokens.
    target_licence: as the target's own files say it, "" where they do not.
    """

    policy: dict[str, Any]
    lineage: Lineage
    end_to_end: Path
    max_positions: int
    target_licence: str = ""


class Sound(str):
    """Text that may stand in the card as it is; everything else is escaped."""


def _sound(make: Callable[..., str]) -> Callable[..., Sound]:
    return lambda value: Sound(make(value))


def _yaml(text: str) -> str:
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
        finalize=lambda value: value if isinstance(value, Sound) else in_markdown(value),
    )
    environment.filters.update(x=_sound(times), num=_sound(number), ci=_sound(interval), pct=_sound(percent))
    environment.filters.update(code=_sound(in_code), yaml=_sound(_yaml), verbatim=Sound)
    text = environment.get_template("card.md.jinja").render(card_facts(record, evidence))
    file.write_text(text, encoding="utf-8")


def card_facts(record: dict[str, Any], evidence: Evidence) -> dict[str, Any]:
    """What the template is given."""
    policy, draft_key, depth = evidence.policy, record["serve"]["draft_key"], record["serve"]["depth_k"]
    mine = [c for c in policy["choices"] if c["draft_key"] == draft_key]
    batch_size = min(c["batch_size"] for c in mine)  # the card tells of one, and names it
    mine = [c for c in mine if c["batch_size"] == batch_size]
    evals = [e for e in policy["evals"] if (e["draft_key"], e["batch_size"]) == (draft_key, batch_size)]
    acceptance = [a for a in policy["acceptance"] if a["draft_key"] == draft_key]
    # At depth 0 nothing is drafted; the card then shows the shallowest drafting depth, so that the reader sees why.
    shown = depth or min((a["depth_k"] for a in acceptance if a["depth_k"]), default=0)
    arms = [a for a in policy["arms"] if a["draft_key"] == draft_key and a.get("tree_budget") is None]
    at_depth = [{**a, **next(_same(e, a) for e in evals if _same(e, a))} for a in acceptance if a["depth_k"] == shown]
    timed = {a["workload"]: a for a in arms if (a["batch_size"], a["depth_k"]) == (batch_size, shown)}
    limits = measured_limits(policy, draft_key, evidence.end_to_end, evidence.max_positions)
    data = training_data(evidence.lineage, draft_key)
    hub = HUB_ID.fullmatch(record["target"]["model"].partition("@")[0])
    return {
        **record,
        "base_model": hub[0] if hub else "",
        "depth": depth,
        "shown": shown,
        "pooled": next(c for c in mine if c["workload"] == ALL),
        "evals": [e for e in evals if e["workload"] == ALL],
        "at_depth": [{**a, "timed": timed.get(a["workload"])} for a in at_depth],
        "rounded": next((c for c in policy.get("weights") or [] if c["draft_key"] == draft_key), None),
        "predicted": {e["workload"]: e for e in evals if e["depth_k"] == shown},
        "arms": [a for a in policy["arms"] if a["workload"] == ALL],
        "my_arms": [a for a in arms if a["workload"] == ALL],
        "gate": policy["gate"],
        "flags": [f for f in policy["flags"] if f["draft_key"] in ("", draft_key)],
        "stitched": folders_of(record).get("stitched"),
        "stands_for_folder": _stands_for_folder(record, bool(hub)),
        "shallower": shallower_than(depth, record["serve"]["method"], record["settings"]),
        "limits": limits,
        "not_worth": not_worth_it(policy, draft_key, depth, limits),
        "data": data,
        "reasons": REASONS,
        "data_licences": sorted({source.licence for source in data.sources if source.licence}),
        "target_licence": evidence.target_licence,
    }


def launch_of(record: dict[str, Any]) -> dict[str, str]:
    """engine -> the command that serves the release, at the chosen depth; none for those that `not_served` names."""
    lines = launch_lines(
        record["serve"]["method"],
        record["serve"]["depth_k"],
        record["engines"],
        _in_commands(record),
        folders_of(record),
        record["settings"],
    )
    return {engine: command for engine, command in lines if engine not in record["not_served"]}


def _in_commands(record: dict[str, Any]) -> str:
    """What commands call the target: its name, or a word for it where that is for people and no command takes it."""
    model = str(record["target"]["model"] or FOLDER_OF_TARGET)
    return FOLDER_OF_TARGET if any(character.isspace() for character in model) else model


def _stands_for_folder(record: dict[str, Any], on_hub: bool) -> str:
    """The word in the commands that the reader replaces by the target's folder; "" where a hub id says it all."""
    word = FOLDER_OF_TARGET if on_hub else _in_commands(record)  # a stitched copy is served without any
    commands = record["launch"].values()
    return word if any(word in shlex.split(command) for command in commands) else ""


def folders_of(record: dict[str, Any]) -> dict[str, str]:
    """format -> folder of the drafter that is served."""
    mine = (pair for pair in record["formats"].items() if pair[1]["draft_key"] == record["serve"]["draft_key"])
    return {facts["format"]: folder for folder, facts in mine}


def _same(e: dict[str, Any], a: dict[str, Any]) -> dict[str, Any]:
    """The interval of a DepthEval that belongs to an AcceptanceSummary, or {}."""
    same = (e["workload"], e["depth_k"]) == (a["workload"], a["depth_k"])
    return {k: e[k] for k in ("al", "al_lo", "al_hi")} if same else {}


def times(value: float | None) -> str:
    """1.2345 -> 1.23x; None -> "not measured"."""
    return "not measured" if value is None else f"{value:.2f}x"


def number(value: float | None) -> str:
    """Two decimals, or "not measured"."""
    return "not measured" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """0.123 -> 12.3 %."""
    return "not measured" if value is None else f"{100 * value:.1f} %"


def interval(bounds: tuple[float | None, float | None]) -> str:
    """(lo, hi) -> [1.23, 1.45]; nothing when not measured."""
    lo, hi = bounds
    return "" if lo is None or hi is None else f"[{lo:.2f}, {hi:.2f}]"
