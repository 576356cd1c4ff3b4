"""`draftsmith compare A B`: two ways to serve on the same prompts, as ratios with 95 % intervals, and a verdict.

Speed is compared where both ran on one machine in one dtype: directly when one session measured both, else each over
plain decoding of its own session (in one session that cancels out). Only our own loop is asked; what serving engines
did stands in `draftsmith query engines_beside_ours`. Acceptance length needs no common machine; it is replayed from
acceptance maps where both have them, else counted over the rounds that were decoded. What cannot be compared is said,
with the reason. The arithmetic is that of components/speedup (bootstrap over prompts, both sides together;
non-inferiority with a margin).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flows.compare_sides import Side
from storage.results import open_history

MIN_PROMPTS = 8
NUM_DRAWS = 4000
ALL = "all"
EXIT_CODES = {"better": 0, "not_worse": 0, "worse": 1}
UNDECIDED = 3  # also where nothing could be compared


@dataclass(frozen=True)
class Ratio:
    """A over B in one quantity on one workload: above 1, A is better. verdict: see PairedComparison in rows.py."""

    quantity: str  # decode_speed | speedup | acceptance_length
    workload: str
    a: float
    b: float
    ratio: float
    lo: float
    hi: float
    num_prompts: int
    verdict: str


@dataclass
class Comparison:
    """What could be compared, and in `notes` what could not, and why."""

    a: Side
    b: Side
    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def verdict(self) -> str:
        """That of speed over all workloads, else of acceptance length; "not comparable" without either."""
        for quantity in ("decode_speed", "speedup", "acceptance_length"):
            for row in self.ratios:
                if (row.quantity, row.workload) == (quantity, ALL):
                    return row.verdict
        return "not comparable"

    def exit_code(self) -> int:
        """0: A is not worse; 1: A is worse; 3: undecided or not comparable."""
        return EXIT_CODES.get(self.verdict(), UNDECIDED)

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows of the answer."""
        columns = list(Ratio.__dataclass_fields__)
        return columns, [[asdict(ratio)[name] for name in columns] for ratio in self.ratios]


Facts = dict[str, Any]
PerPrompt = dict[str, tuple[str, float, float]]  # prompt -> workload, above, below: the value is a ratio of sums


def compare(home: Path, a: Side, b: Side, margin: float) -> Comparison:
    """A against B over everything the history knows of them. margin: share by which A may lie below."""
    found = Comparison(a, b)
    if a.target_key and b.target_key and a.target_key != b.target_key:
        found.notes.append(f"not comparable: other target ({a.target_key[:12]} and {b.target_key[:12]})")
        return found
    if (a.draft_key, a.depth_k, a.tree_budget) == (b.draft_key, b.depth_k, b.tree_budget):
        found.notes.append(
            "both are the same drafter at the same depth: what differs is when and where it was measured"
        )
    with open_history(home) as ask:
        arms = _records(ask(_ARMS, {"drafts": [a.draft_key, b.draft_key]}))
        maps = _records(ask(_MAPS, {"drafts": [a.draft_key, b.draft_key]}))
    _compare_speed(found, arms, margin)
    _compare_acceptance(found, maps, arms, margin)
    return found


_ARMS = """
SELECT artifact_key, machine_id, created_at, dtype, batch_size, method, draft_key, depth_k, kernel, prompt_id, workload,
       tree_budget, tokens, decode_ns, rounds
FROM v_arm_prompt
WHERE temperature = 0 AND engine IS NULL
  AND artifact_key IN (SELECT DISTINCT artifact_key FROM request WHERE list_contains($drafts, draft_key))
  AND (method = 'none' OR list_contains($drafts, draft_key))
ORDER BY created_at DESC"""
_MAPS = """
SELECT artifact_key, draft_key, dtype, tree_budget, prompt_id, workload, num_tokens, k_max, accepted, created_at
FROM acceptance_map WHERE list_contains($drafts, draft_key) AND num_tokens >= 2 ORDER BY created_at DESC"""


def _compare_speed(found: Comparison, arms: Sequence[Facts], margin: float) -> None:
    sessions_a, sessions_b = _sessions(arms, found.a), _sessions(arms, found.b)
    if not sessions_a or not sessions_b:
        missing = [side.name() for side, has in ((found.a, sessions_a), (found.b, sessions_b)) if not has]
        found.notes.append(f"speed not comparable: never timed end to end: {', '.join(missing)}")
        return
    pairs = [(one, other) for one in sessions_a for other in sessions_b]
    alike = [(one, other) for one, other in pairs if one[1:] == other[1:]]  # machine, dtype, batch size
    if not alike:
        one, other = sessions_a[0], sessions_b[0]
        names = ("machine", "dtype", "batch size")
        differ = [f"other {name} ({x} and {y})" for name, x, y in zip(names, one[1:], other[1:], strict=True) if x != y]
        found.notes.append(f"speed not comparable: {', '.join(differ)}")
        return
    here, there = next((pair for pair in alike if pair[0][0] == pair[1][0]), alike[0])
    mine, theirs = _arm(arms, here, found.a), _arm(arms, there, found.b)
    if here[0] == there[0]:
        _add(found, "decode_speed", [mine], [theirs], margin)
        return
    plain_a, plain_b = _plain(arms, here), _plain(arms, there)
    if not plain_a or not plain_b:
        found.notes.append("speed not comparable: two sessions, and one of them did not time plain decoding")
        return
    found.notes.append("speeds are of two sessions: each is taken over plain decoding of its own")
    _add(found, "speedup", [mine, plain_a], [theirs, plain_b], margin)


def _compare_acceptance(found: Comparison, maps: Sequence[Facts], arms: Sequence[Facts], margin: float) -> None:
    """Replayed from the maps of both, where both have them in one dtype, else counted over the rounds decoded."""
    a, b = found.a, found.b
    mine, theirs = (
        [
            m
            for m in maps
            if (m["draft_key"], m["tree_budget"]) == (side.draft_key, side.tree_budget)
            and len(m["accepted"]) >= m["num_tokens"] - 1
        ]
        for side in (a, b)
    )
    drafts = any(side.depth_k or side.tree_budget for side in (a, b))
    dtype = next((m["dtype"] for m in mine if m["dtype"] in {n["dtype"] for n in theirs}), None)
    if drafts and dtype is not None:
        newest: list[dict[str, Facts]] = [{}, {}]  # the newest map of a prompt counts
        for some, maps_of in zip((mine, theirs), newest, strict=True):
            for m in some:
                if m["dtype"] == dtype:
                    maps_of.setdefault(m["prompt_id"], m)
        depths = _replay_depths(found, newest)
        sides = [_replayed(maps_of, depth) for maps_of, depth in zip(newest, depths, strict=True)]
        _add(found, "acceptance_length", [sides[0]], [sides[1]], margin)
        return
    decoded = [_rounds(arms, side) for side in (a, b)]
    if all(decoded):
        found.notes.append(f"acceptance length is that of decoding, of {a.name()} and {b.name()}")
        _add(found, "acceptance_length", decoded[:1], decoded[1:], margin)
        return
    why = "other dtype" if mine and theirs else "no acceptance map of both"
    found.notes.append(f"acceptance length not comparable: {why}")


def _replay_depths(found: Comparison, newest: Sequence[Mapping[str, Facts]]) -> list[int]:
    """A's depth for both chains, or as deep as the maps of both go; a tree's map holds at its own depth alone."""
    a, b = found.a, found.b
    deepest = [min(m["k_max"] for m in maps_of.values()) for maps_of in newest]
    if a.tree_budget is None and b.tree_budget is None:
        depth = min(a.depth_k or b.depth_k, *deepest)
        found.notes.append(f"acceptance length is replayed at depth {depth} for both")
        return [depth, depth]
    depths = [
        full if side.tree_budget is not None else min(side.depth_k, full)
        for side, full in zip((a, b), deepest, strict=True)
    ]
    found.notes.append(f"acceptance length is replayed at depths {depths[0]} and {depths[1]}")
    return depths


def _replayed(maps_of: Mapping[str, Facts], depth: int) -> PerPrompt:
    from components.speedup.replay import count

    counted = {prompt: count(m["accepted"], depth, m["num_tokens"]) for prompt, m in maps_of.items()}
    return {p: (maps_of[p]["workload"], float(c.tokens), float(c.rounds)) for p, c in counted.items()}


def _add(found: Comparison, quantity: str, ours: list[PerPrompt], theirs: list[PerPrompt], margin: float) -> None:
    """One row for all prompts that every side has, and one for each workload with enough of them."""
    shared = sorted(set.intersection(*(set(side) for side in (*ours, *theirs))))
    if len(shared) < MIN_PROMPTS:
        what = quantity.replace("_", " ")
        found.notes.append(
            f"{what} not comparable: other prompts ({len(shared)} shared, at least {MIN_PROMPTS} needed)"
        )
        return
    workloads = sorted({ours[0][prompt][0] for prompt in shared} - {ALL})
    for workload in [ALL, *(workloads if len(workloads) > 1 else [])]:
        prompts = [prompt for prompt in shared if workload in (ALL, ours[0][prompt][0])]
        if len(prompts) >= MIN_PROMPTS:
            found.ratios.append(_ratio(quantity, workload, prompts, ours, theirs, margin))


def _ratio(
    quantity: str, workload: str, prompts: list[str], ours: list[PerPrompt], theirs: list[PerPrompt], margin: float
) -> Ratio:
    """The bootstrap over prompts, every side in the same draws."""
    import numpy as np

    from components.speedup.bootstrap import draw_weights, pooled_ratio
    from components.speedup.paired import verdict_of

    weights = draw_weights(len(prompts), NUM_DRAWS, np.random.default_rng([0, 7]))

    def pooled(side: PerPrompt) -> Any:
        columns = (np.array([side[p][i] for p in prompts]) for i in (1, 2))
        return pooled_ratio(weights, *columns)

    values = []
    for sides in (ours, theirs):
        value = pooled(sides[0])
        values.append(value.over(pooled(sides[1])) if len(sides) > 1 else value)
    ratio = values[0].over(values[1])
    lo, hi = ratio.interval()
    verdict = verdict_of(lo, hi, margin, len(prompts))
    return Ratio(quantity, workload, values[0].value, values[1].value, ratio.value, lo, hi, len(prompts), verdict)


Session = tuple[str, str, str, int]  # artifact, machine, dtype, batch size


def _is_of(row: Mapping[str, Any], side: Side) -> bool:
    if side.measured_in and row["artifact_key"] not in side.measured_in:
        return False
    if side.tree_budget is not None:
        return bool((row["draft_key"], row["tree_budget"]) == (side.draft_key, side.tree_budget))
    plain = side.depth_k == 0 and row["method"] == "none"
    mine = (row["draft_key"], row["depth_k"], row["tree_budget"]) == (side.draft_key, side.depth_k, None)
    return bool(plain or mine)


def _session(row: Mapping[str, Any]) -> Session:
    return row["artifact_key"], row["machine_id"] or "unknown", row["dtype"], row["batch_size"]


def _sessions(arms: Sequence[Facts], side: Side) -> list[Session]:
    """Where a side was timed, newest first, small batches before large ones."""
    found = dict.fromkeys(_session(row) for row in arms if _is_of(row, side))
    return sorted(found, key=lambda session: session[3])


def _arm(arms: Sequence[Facts], session: Session, side: Side) -> PerPrompt:
    if side.depth_k == 0 and side.tree_budget is None:
        return _plain(arms, session)
    return _summed([row for row in arms if _session(row) == session and _is_of(row, side)])


def _plain(arms: Sequence[Facts], session: Session) -> PerPrompt:
    """The fastest plain kernel of a session."""
    rows = [row for row in arms if _session(row) == session and row["method"] == "none"]
    kernels = {row["kernel"] for row in rows}
    by_kernel = [_summed([row for row in rows if row["kernel"] == kernel]) for kernel in sorted(kernels)]
    return max(by_kernel, key=_speed, default={})


def _speed(side: PerPrompt) -> float:
    return sum(tokens for _, tokens, _ in side.values()) / sum(seconds for *_, seconds in side.values())


def _summed(rows: Sequence[Facts]) -> PerPrompt:
    """Tokens and seconds of each prompt."""
    found: PerPrompt = {}
    for row in rows:
        _, tokens, seconds = found.get(row["prompt_id"], ("", 0.0, 0.0))
        found[row["prompt_id"]] = (row["workload"], tokens + row["tokens"], seconds + row["decode_ns"] / 1e9)
    return found


def _rounds(arms: Sequence[Facts], side: Side) -> PerPrompt:
    """Tokens and rounds of each prompt, in the newest session that has any."""
    for session in _sessions(arms, side):
        rows = [row for row in arms if _session(row) == session and _is_of(row, side) and row["rounds"]]
        if rows and (side.depth_k or side.tree_budget):
            return {row["prompt_id"]: (row["workload"], float(row["tokens"]), float(row["rounds"])) for row in rows}
    return {}


def _records(answer: tuple[list[str], list[tuple[Any, ...]]]) -> list[Facts]:
    columns, rows = answer
    return [dict(zip(columns, row, strict=True)) for row in rows]
