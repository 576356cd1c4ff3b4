"""The model card: what the drafter is, its training data, its measurements, and where it is not worth using.

Numbers come from policy.json, its timed requests and the records of the lineage; the text is in card.md.jinja. The card
states what was not measured or recorded.

Its limits come from measured rows only. Nothing is extrapolated to another batch size, context length, workload or
temperature: without a row it is "not measured". A depth counts as faster when the lower end of its 95 % interval is
above 1, as slower when the upper end is below 1.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jinja2

from components.engines.launch import FOLDER_OF_TARGET, HUB_ID, launch_lines, shallower_than
from components.outside_json import JsonObject
from components.policy import MeasuredArm, Policy
from components.publish.card.lineage import REASONS, Lineage, training_data
from components.release_record import ReleaseRecord
from components.rows import ALL, DepthChoice, Request, read_rows
from components.tables import format_estimate, format_interval, format_percent, format_ratio
from components.text import in_code, in_markdown


@dataclass(frozen=True)
class Evidence:
    """The sources of a card beside release.json.

    end_to_end: the folder of the timed requests. max_positions: tokens that the target supports.
    target_licence: from the target's files, "" where they have none.
    """

    policy: Policy
    lineage: Lineage
    end_to_end: Path
    max_positions: int
    target_licence: str = ""


NOT_MEASURED = "not measured"


class SafeText(str):
    """Text that is written to the card unchanged; all other text is escaped."""


def _safe(make: Callable[..., str]) -> Callable[..., SafeText]:
    return lambda value: SafeText(make(value))


def _yaml_scalar(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z][\w.-]*", text) else json.dumps(text)


def write_card(file: Path, record: ReleaseRecord, evidence: Evidence) -> None:
    """Render README.md. record: release.json so far."""
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
        x=_safe(partial(format_ratio, missing=NOT_MEASURED)),
        num=_safe(lambda value: NOT_MEASURED if value is None else f"{value:.2f}"),
        ci=_safe(lambda bounds: format_interval(*bounds).lstrip()),
        pct=_safe(partial(format_percent, missing=NOT_MEASURED)),
    )
    environment.filters.update(code=_safe(in_code), yaml=_safe(_yaml_scalar), verbatim=SafeText)
    text = environment.get_template("card.md.jinja").render(card_facts(record, evidence))
    file.write_text(text, encoding="utf-8")


def card_facts(record: ReleaseRecord, evidence: Evidence) -> JsonObject:
    """The variables of the template."""
    policy, draft_key, depth = evidence.policy, record["serve"]["draft_key"], record["serve"]["depth_k"]
    choices = [c for c in policy.choices if c.draft_key == draft_key]
    batch_size = min(c.batch_size for c in choices)  # the card shows one batch size and names it
    choices = [c for c in choices if c.batch_size == batch_size]
    evals = [e for e in policy.evals if (e.draft_key, e.batch_size) == (draft_key, batch_size)]
    acceptance = [a for a in policy.acceptance if a.draft_key == draft_key]
    # At depth 0 nothing is drafted; the card then shows the shallowest drafting depth as the reason.
    shown_depth = depth or min((a.depth_k for a in acceptance if a.depth_k), default=0)
    arms = [a for a in policy.arms if a.draft_key == draft_key and a.tree_budget is None]
    timed = {a.workload: a for a in arms if (a.batch_size, a.depth_k) == (batch_size, shown_depth)}
    limits = measured_limits(policy, draft_key, evidence.end_to_end, evidence.max_positions)
    data = training_data(evidence.lineage, draft_key)
    hub = HUB_ID.fullmatch(record["target"]["model"].partition("@")[0])
    return {
        **record,
        "base_model": hub[0] if hub else "",
        "depth": depth,
        "shown": shown_depth,
        "pooled": next(c for c in choices if c.workload == ALL),
        "evals": [e for e in evals if e.workload == ALL],
        "at_depth": [
            {**asdict(a), "al": e.al, "al_lo": e.al_lo, "al_hi": e.al_hi, "timed": timed.get(a.workload)}
            for a in acceptance
            for e in evals
            if a.depth_k == shown_depth and (e.workload, e.depth_k) == (a.workload, a.depth_k)
        ],
        "rounded": next((c for c in policy.weights if c.draft_key == draft_key), None),
        "predicted": {e.workload: e for e in evals if e.depth_k == shown_depth},
        "arms": [a for a in policy.arms if a.workload == ALL],
        "my_arms": [a for a in arms if a.workload == ALL],
        "gate": policy.gate,
        "flags": [f for f in policy.flags if f.draft_key in ("", draft_key)],
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


def launch_commands(record: ReleaseRecord) -> dict[str, str]:
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


def _target_in_commands(record: ReleaseRecord) -> str:
    """The target in commands: its name, or a placeholder where the name has spaces and is no path."""
    model = str(record["target"]["model"] or FOLDER_OF_TARGET)
    return FOLDER_OF_TARGET if any(character.isspace() for character in model) else model


def _folder_placeholder(record: ReleaseRecord, on_hub: bool) -> str:
    """The word in the commands that the reader replaces by the target's folder; "" where there is none."""
    word = FOLDER_OF_TARGET if on_hub else _target_in_commands(record)  # a stitched copy needs none
    commands = record["launch"].values()
    return word if any(word in shlex.split(command) for command in commands) else ""


def folders_of(record: ReleaseRecord) -> dict[str, str]:
    """Format -> folder, of the drafter that is served."""
    served = (pair for pair in record["formats"].items() if pair[1]["draft_key"] == record["serve"]["draft_key"])
    return {facts["format"]: folder for folder, facts in served}


@dataclass(frozen=True)
class Limits:
    """What was measured of a drafter; None for no timed requests.

    batch_sizes, contexts: choices over all workloads, by batch size and by context length. largest_timed: largest batch
    size of the timed requests. Lengths are in tokens.
    """

    batch_sizes: Sequence[DepthChoice]
    largest_timed: int | None
    contexts: Sequence[DepthChoice]
    longest_context: int | None
    prompt_tokens: tuple[int, int] | None
    answer_tokens: int | None
    temperatures: list[float]
    dtypes: list[str]
    threads: list[int]
    max_positions: int


def measured_limits(policy: Policy, draft_key: str, end_to_end: Path, max_positions: int) -> Limits:
    """The batch sizes, context lengths, texts and temperatures that were measured of a drafter; None for no rows.

    end_to_end: the folder of the timed comparison. max_positions: tokens that the target's config allows.
    """
    requests = [row for row in read_rows(end_to_end, Request) if row.draft_key == draft_key and not row.is_warmup]
    # Failed requests do not count, nor does depth 0, at which the drafter drafts nothing.
    timed = [row for row in requests if row.depth_k > 0 and row.status != "error" and row.timed_tokens > 0]
    longest = [row.prompt_tokens + row.tokens_kept for row in timed]
    pooled = [c for c in policy.choices if (c.draft_key, c.workload) == (draft_key, ALL)]
    contexts = [c for c in policy.contexts if (c.draft_key, c.workload) == (draft_key, ALL)]
    return Limits(
        batch_sizes=sorted(pooled, key=lambda c: c.batch_size),
        largest_timed=max((row.batch_size for row in timed), default=None),
        contexts=sorted(contexts, key=lambda c: (c.batch_size, c.kv_len)),
        longest_context=max(longest, default=None),
        prompt_tokens=(min(r.prompt_tokens for r in timed), max(r.prompt_tokens for r in timed)) if timed else None,
        answer_tokens=max((row.tokens_kept for row in timed), default=None),
        temperatures=sorted({row.temperature for row in timed}),
        dtypes=sorted({row.dtype for row in timed}),
        threads=sorted({row.num_threads for row in timed}),
        max_positions=max_positions,
    )


def not_worth_it(policy: Policy, draft_key: str, depth: int, limits: Limits) -> list[str]:
    """Sentences: where drafting is slower or not shown to be faster, with numbers; then what was not measured."""
    return [
        *_cases_without_drafting(policy, draft_key, limits),
        *_arms_not_faster(policy, draft_key, depth),
        *_unmeasured(limits),
    ]


def _cases_without_drafting(policy: Policy, draft_key: str, limits: Limits) -> Iterator[str]:
    """Workloads, batch sizes and context lengths at which the policy does not draft."""
    choices = [c for c in policy.choices if c.draft_key == draft_key]
    smallest = min(c.batch_size for c in choices)
    for c in choices:
        if c.workload != ALL and c.batch_size == smallest and _drafts_nothing(c):
            yield f"workload {c.workload}: do not speculate{_reasons(c)}"
    for c in limits.batch_sizes:
        if _drafts_nothing(c):
            yield f"batch size {c.batch_size}: do not speculate{_reasons(c)}"
    for c in limits.contexts:
        if _drafts_nothing(c):
            yield f"contexts of {c.kv_len} tokens, batch size {c.batch_size}: do not speculate{_reasons(c)}"


def _drafts_nothing(choice: DepthChoice) -> bool:
    return choice.depth_k == 0 or choice.verdict in ("do_not_speculate", "invalid")


def _reasons(choice: DepthChoice) -> str:
    """The reasons of a choice in brackets; "" where it has none."""
    reasons = "; ".join(choice.reasons)
    return f" ({reasons})" if reasons else ""


def _arms_not_faster(policy: Policy, draft_key: str, depth: int) -> Iterator[str]:
    """Timed arms slower than plain decoding or not shown to be faster, and prompt lookup where it was as fast."""
    pooled = [a for a in policy.arms if a.workload == ALL and a.tree_budget is None]
    arms = [a for a in pooled if a.draft_key == draft_key]
    for a in arms:
        at, measured = f"depth {a.depth_k}, batch size {a.batch_size}", _speedup(a)
        if a.depth_k == 0:
            if a.speedup is not None and a.speedup < 1.0:
                yield (
                    f"requests that draft nothing while it is loaded, batch size {a.batch_size}: {measured} of the"
                    " speed of the best plain decoding"
                )
        elif a.hi is not None and a.hi < 1.0:
            yield f"{at}: slower than plain decoding, measured {measured}"
        elif a.lo is not None and a.lo <= 1.0:
            yield f"{at}: not shown to be faster than plain decoding, measured {measured}"
    at_depth = {a.batch_size: a for a in arms if a.depth_k == depth and depth}
    for a in pooled:
        arm = at_depth.get(a.batch_size)
        if arm is not None and a.method == "ngram" and a.speedup >= arm.speedup:
            yield (
                f"batch size {a.batch_size}: prompt lookup, which needs no drafter, was as fast, {_speedup(a)}"
                f" beside {_speedup(arm)}"
            )


def _speedup(arm: MeasuredArm) -> str:
    return format_estimate(arm.speedup, arm.lo, arm.hi)


def _unmeasured(limits: Limits) -> Iterator[str]:
    """What was not measured, by the rows."""
    if limits.largest_timed is None:
        yield "speed: not measured end to end at all"
        return
    yield f"batch sizes above {limits.largest_timed}: not measured"
    longest, most = limits.longest_context, limits.max_positions
    yield f"contexts above {longest} tokens (the target takes {most}): not measured"
    if limits.temperatures == [0.0]:
        yield "sampling (temperature above 0): not measured"
    yield "other machines, other engines, other kinds of prompts: not measured, and the best depth moves"
