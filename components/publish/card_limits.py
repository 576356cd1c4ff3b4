"""What a release was measured at, and where it is not worth it: from measured rows alone, in facts and short sentences.

Nothing is carried over from one batch size, context length, workload or temperature to another: what no row says is
"not measured". A depth counts as faster when the lower end of its 95 % interval is above 1, as slower when the upper
end is below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.rows import Request, read_rows

ALL = "all"
Rows = Sequence[Mapping[str, Any]]


def measured_limits(policy: Mapping[str, Any], draft_key: str, end_to_end: Path, max_positions: int) -> dict[str, Any]:
    """What was measured of a drafter: batch sizes, context lengths, texts, temperatures; None where nothing was.

    end_to_end: the folder of the timed comparison. max_positions: what the target's config allows, tokens.
    """
    mine = [row for row in read_rows(end_to_end, Request) if row.draft_key == draft_key and not row.is_warmup]
    # What failed tells nothing, and at depth 0 a drafter was loaded and drafted nothing.
    timed = [row for row in mine if row.depth_k > 0 and row.status != "error" and row.timed_tokens > 0]
    longest = [row.prompt_tokens + row.tokens_kept for row in timed]
    pooled = [c for c in policy["choices"] if (c["draft_key"], c["workload"]) == (draft_key, ALL)]
    measured = [c for c in pooled if c["speedup_meas"] is not None]
    contexts = [c for c in policy.get("contexts", []) if (c["draft_key"], c["workload"]) == (draft_key, ALL)]
    return {
        "batch_sizes": sorted(pooled, key=lambda c: c["batch_size"]),
        "largest_timed": max((row.batch_size for row in timed), default=None),
        "largest_measured": max((c["batch_size"] for c in measured), default=None),
        "contexts": sorted(contexts, key=lambda c: (c["batch_size"], c["kv_len"])),
        "longest_context": max(longest, default=None),
        "prompt_tokens": (min(r.prompt_tokens for r in timed), max(r.prompt_tokens for r in timed)) if timed else None,
        "answer_tokens": max((row.tokens_kept for row in timed), default=None),
        "temperatures": sorted({row.temperature for row in timed}),
        "dtypes": sorted({row.dtype for row in timed}),
        "threads": sorted({row.num_threads for row in timed}),
        "max_positions": max_positions,
    }


def not_worth_it(policy: Mapping[str, Any], draft_key: str, depth: int, limits: Mapping[str, Any]) -> list[str]:
    """Where drafting is slower, or was not shown to be faster, each with its numbers; then what nobody measured."""
    said = [*_choices(policy, draft_key, limits), *_arms(policy, draft_key, depth)]
    return [*said, *_unmeasured(limits)]


def _choices(policy: Mapping[str, Any], draft_key: str, limits: Mapping[str, Any]) -> Iterator[str]:
    """Workloads, batch sizes and context lengths at which the policy does not draft."""
    mine = [c for c in policy["choices"] if c["draft_key"] == draft_key]
    smallest = min(c["batch_size"] for c in mine)
    for c in mine:
        if c["workload"] != ALL and c["batch_size"] == smallest and _refused(c):
            yield f"workload {c['workload']}: do not speculate{_why(c)}"
    for c in limits["batch_sizes"]:
        if _refused(c):
            yield f"batch size {c['batch_size']}: do not speculate{_why(c)}"
    for c in limits["contexts"]:
        if _refused(c):
            yield f"contexts of {c['kv_len']} tokens, batch size {c['batch_size']}: do not speculate{_why(c)}"


def _refused(choice: Mapping[str, Any]) -> bool:
    return choice["depth_k"] == 0 or choice["verdict"] in ("do_not_speculate", "invalid")


def _why(choice: Mapping[str, Any]) -> str:
    """The reason of a choice in its own words, after a comma's worth of punctuation."""
    reasons = "; ".join(choice.get("reasons") or [])
    return f" ({reasons})" if reasons else ""


def _arms(policy: Mapping[str, Any], draft_key: str, depth: int) -> Iterator[str]:
    """Timed arms that were slower than plain decoding, or not shown to be faster; and what was faster than this one."""
    pooled = [a for a in policy["arms"] if a["workload"] == ALL and a.get("tree_budget") is None]
    mine = [a for a in pooled if a["draft_key"] == draft_key]
    for a in mine:
        at = f"depth {a['depth_k']}, batch size {a['batch_size']}"
        if a["depth_k"] == 0:
            if a["speedup"] is not None and a["speedup"] < 1.0:
                yield (
                    f"requests that draft nothing while it is loaded, batch size {a['batch_size']}: {_times(a)} of the"
                    " speed of the best plain decoding"
                )
        elif a["hi"] is not None and a["hi"] < 1.0:
            yield f"{at}: slower than plain decoding, measured {_times(a)}"
        elif a["lo"] is not None and a["lo"] <= 1.0:
            yield f"{at}: not shown to be faster than plain decoding, measured {_times(a)}"
    chosen = {a["batch_size"]: a for a in mine if a["depth_k"] == depth and depth}
    for a in pooled:
        own = chosen.get(a["batch_size"])
        if own is not None and a["method"] == "ngram" and a["speedup"] >= own["speedup"]:
            yield (
                f"batch size {a['batch_size']}: prompt lookup, which needs no drafter, was as fast, {_times(a)} beside"
                f" {_times(own)}"
            )


def _unmeasured(limits: Mapping[str, Any]) -> Iterator[str]:
    """What the rows do not say, so that nobody takes it for granted."""
    if limits["largest_timed"] is None:
        yield "speed: not measured end to end at all"
        return
    yield f"batch sizes above {limits['largest_timed']}: not measured"
    longest, most = limits["longest_context"], limits["max_positions"]
    yield f"contexts above {longest} tokens (the target takes {most}): not measured"
    if limits["temperatures"] == [0.0]:
        yield "sampling (temperature above 0): not measured"
    yield "other machines, other engines, other kinds of prompts: not measured, and the best depth moves"


def _times(arm: Mapping[str, Any]) -> str:
    bounds = "" if arm["lo"] is None or arm["hi"] is None else f" [{arm['lo']:.2f}, {arm['hi']:.2f}]"
    return f"{arm['speedup']:.2f}x{bounds}"
