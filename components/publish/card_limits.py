"""The limits of a release, from measured rows only: what was measured, and where drafting is not worth it.

Nothing is extrapolated to another batch size, context length, workload or temperature: without a row it is "not
measured". A depth counts as faster when the lower end of its 95 % interval is above 1, as slower when the upper end is
below 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.rows import ALL, Request, read_rows

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Limits:
    """What was measured of a drafter; None for no timed requests.

    batch_sizes, contexts: choices over all workloads, by batch size and by context length. largest_timed: largest batch
    size of the timed requests. Lengths are in tokens.
    """

    batch_sizes: Rows
    largest_timed: int | None
    contexts: Rows
    longest_context: int | None
    prompt_tokens: tuple[int, int] | None
    answer_tokens: int | None
    temperatures: list[float]
    dtypes: list[str]
    threads: list[int]
    max_positions: int


def measured_limits(policy: Mapping[str, Any], draft_key: str, end_to_end: Path, max_positions: int) -> Limits:
    """The batch sizes, context lengths, texts and temperatures that were measured of a drafter; None for no rows.

    end_to_end: the folder of the timed comparison. max_positions: tokens that the target's config allows.
    """
    requests = [row for row in read_rows(end_to_end, Request) if row.draft_key == draft_key and not row.is_warmup]
    # Failed requests do not count, nor does depth 0, at which the drafter drafts nothing.
    timed = [row for row in requests if row.depth_k > 0 and row.status != "error" and row.timed_tokens > 0]
    longest = [row.prompt_tokens + row.tokens_kept for row in timed]
    pooled = [c for c in policy["choices"] if (c["draft_key"], c["workload"]) == (draft_key, ALL)]
    contexts = [c for c in policy.get("contexts", []) if (c["draft_key"], c["workload"]) == (draft_key, ALL)]
    return Limits(
        batch_sizes=sorted(pooled, key=lambda c: c["batch_size"]),
        largest_timed=max((row.batch_size for row in timed), default=None),
        contexts=sorted(contexts, key=lambda c: (c["batch_size"], c["kv_len"])),
        longest_context=max(longest, default=None),
        prompt_tokens=(min(r.prompt_tokens for r in timed), max(r.prompt_tokens for r in timed)) if timed else None,
        answer_tokens=max((row.tokens_kept for row in timed), default=None),
        temperatures=sorted({row.temperature for row in timed}),
        dtypes=sorted({row.dtype for row in timed}),
        threads=sorted({row.num_threads for row in timed}),
        max_positions=max_positions,
    )


def not_worth_it(policy: Mapping[str, Any], draft_key: str, depth: int, limits: Limits) -> list[str]:
    """Sentences: where drafting is slower or not shown to be faster, with numbers; then what was not measured."""
    return [
        *_cases_without_drafting(policy, draft_key, limits),
        *_arms_not_faster(policy, draft_key, depth),
        *_unmeasured(limits),
    ]


def _cases_without_drafting(policy: Mapping[str, Any], draft_key: str, limits: Limits) -> Iterator[str]:
    """Workloads, batch sizes and context lengths at which the policy does not draft."""
    choices = [c for c in policy["choices"] if c["draft_key"] == draft_key]
    smallest = min(c["batch_size"] for c in choices)
    for c in choices:
        if c["workload"] != ALL and c["batch_size"] == smallest and _drafts_nothing(c):
            yield f"workload {c['workload']}: do not speculate{_reasons(c)}"
    for c in limits.batch_sizes:
        if _drafts_nothing(c):
            yield f"batch size {c['batch_size']}: do not speculate{_reasons(c)}"
    for c in limits.contexts:
        if _drafts_nothing(c):
            yield f"contexts of {c['kv_len']} tokens, batch size {c['batch_size']}: do not speculate{_reasons(c)}"


def _drafts_nothing(choice: Mapping[str, Any]) -> bool:
    return choice["depth_k"] == 0 or choice["verdict"] in ("do_not_speculate", "invalid")


def _reasons(choice: Mapping[str, Any]) -> str:
    """The reasons of a choice in brackets; "" where it has none."""
    reasons = "; ".join(choice.get("reasons") or [])
    return f" ({reasons})" if reasons else ""


def _arms_not_faster(policy: Mapping[str, Any], draft_key: str, depth: int) -> Iterator[str]:
    """Timed arms slower than plain decoding or not shown to be faster, and prompt lookup where it was as fast."""
    pooled = [a for a in policy["arms"] if a["workload"] == ALL and a.get("tree_budget") is None]
    arms = [a for a in pooled if a["draft_key"] == draft_key]
    for a in arms:
        at = f"depth {a['depth_k']}, batch size {a['batch_size']}"
        if a["depth_k"] == 0:
            if a["speedup"] is not None and a["speedup"] < 1.0:
                yield (
                    f"requests that draft nothing while it is loaded, batch size {a['batch_size']}: {_ratio(a)} of the"
                    " speed of the best plain decoding"
                )
        elif a["hi"] is not None and a["hi"] < 1.0:
            yield f"{at}: slower than plain decoding, measured {_ratio(a)}"
        elif a["lo"] is not None and a["lo"] <= 1.0:
            yield f"{at}: not shown to be faster than plain decoding, measured {_ratio(a)}"
    at_depth = {a["batch_size"]: a for a in arms if a["depth_k"] == depth and depth}
    for a in pooled:
        arm = at_depth.get(a["batch_size"])
        if arm is not None and a["method"] == "ngram" and a["speedup"] >= arm["speedup"]:
            yield (
                f"batch size {a['batch_size']}: prompt lookup, which needs no drafter, was as fast, {_ratio(a)} beside"
                f" {_ratio(arm)}"
            )


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


def _ratio(arm: Mapping[str, Any]) -> str:
    bounds = "" if arm["lo"] is None or arm["hi"] is None else f" [{arm['lo']:.2f}, {arm['hi']:.2f}]"
    return f"{arm['speedup']:.2f}x{bounds}"
