"""Selection of the rows that a comparison of A with B rests on, with notes on what cannot be compared.

Speed needs one machine, dtype and batch size: it is compared directly where one measurement timed both, else each side
over plain decoding in its own measurement. Rows are paired within a process, so that what a process or a moment does to
both cancels. Acceptance length needs no common machine: it is replayed from acceptance maps at one depth where both
have maps in one dtype, else counted over the rounds that were decoded at one depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from components.definitions import steady
from components.methods import decoding_loop_of
from components.promotion import ArmPrompt, Margins, MeasuredRows, ServingSetup
from components.rows import AcceptanceMap, grouped
from components.speedup.comparison.paired import Measurement, Ratio, TimedPairs, compare_sides
from components.speedup.prediction.replay import count


class TimingContext(NamedTuple):
    """The measurement, dtype and batch size in which a way to serve was timed."""

    artifact_key: str
    session_id: str
    created_at: datetime
    machine_id: str
    dtype: str
    batch_size: int

    @property
    def measurement(self) -> tuple[str, str, datetime]:
        """Identity of the measurement; equal for two ways that ran side by side. A remade artifact is another one."""
        return self.artifact_key, self.session_id, self.created_at


@dataclass
class Comparison:
    """Ratios of A over B; `notes` say what could not be compared, and why.

    timed_in: the measurements that the speeds of A and B come from; None where these are not comparable.
    depths: the depths of A and B at which acceptance is compared; a tree counts at its own depth.
    """

    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timed_in: tuple[TimingContext, TimingContext] | None = None
    depths: tuple[int, int] | None = None

    def of(self, *quantities: str) -> list[Ratio]:
        """The ratios of these quantities, that over all prompts first."""
        return [ratio for ratio in self.ratios if ratio.quantity in quantities]


def compare_ways(
    measured: MeasuredRows, a: ServingSetup, b: ServingSetup, margins: Margins, *, same_target: bool = True
) -> Comparison:
    """Compare two ways to serve over everything that was measured.

    same_target: True where all measurements are of one target; False compares only those that name the same target.
    """
    comparison = Comparison()
    compare_speeds(comparison, measured.arms, (a, b), margins, same_target=same_target)
    replays = _newest_replays(measured.maps, a, b)
    if replays is not None:
        compare_replays(comparison, replays, (a, b), margins)
    elif not (a.is_plain and b.is_plain):
        _compare_decoded(comparison, measured.arms, measured.maps, (a, b), margins)
    return comparison


@dataclass(frozen=True)
class Replay:
    """Acceptance of one drafter on one prompt. by_depth: depth -> (tokens, rounds)."""

    workload: str
    by_depth: Mapping[int, tuple[float, float]]


def compare_replays(
    comparison: Comparison,
    replays: tuple[Mapping[str, Replay], Mapping[str, Replay]],
    ways: tuple[ServingSetup, ServingSetup],
    margins: Margins,
    how: str = "is replayed",
) -> None:
    """Enter the acceptance-length ratios of two drafters.

    replays: prompt_id -> Replay, for A and for B. how: the origin of the numbers, for the note. Chains are compared at
    one depth: A's (B's where A decodes plainly, else the deepest), limited to depths replayed on every prompt.
    """
    shared = sorted(replays[0].keys() & replays[1].keys())
    common = [set.intersection(*(set(side[n].by_depth) for n in shared)) - {0} if shared else set() for side in replays]
    depths = _choose_depths(common, ways)
    if depths is None:
        comparison.notes.append("acceptance length not comparable: no common prompts at one depth")
        return
    same = f"depth {depths[0]} for both" if depths[0] == depths[1] else f"depths {depths[0]} and {depths[1]}"
    comparison.notes.append(f"acceptance length {how} at {same}")
    comparison.depths = depths
    a, b = (
        Measurement({(name, 0): replay[name].by_depth[k] for name in shared})
        for replay, k in zip(replays, depths, strict=True)
    )
    workloads = {name: replays[0][name].workload for name in shared}
    comparison.ratios += compare_sides(a, b, workloads, "acceptance_length", margins)


def _choose_depths(common: Sequence[set[int]], ways: tuple[ServingSetup, ServingSetup]) -> tuple[int, int] | None:
    """The depth at which each side is compared. common: for each side, the depths it has on every prompt."""
    a, b = ways
    if not all(common):
        return None
    if a.tree_budget is None and b.tree_budget is None:
        both = common[0] & common[1]
        deepest = a.depth_k or b.depth_k or max(both, default=0)
        depth = max((k for k in both if k <= deepest), default=min(both, default=0))
        return (depth, depth) if depth else None
    by_side = [
        max(depths)
        if way.tree_budget is not None
        else max((k for k in depths if k <= way.depth_k), default=min(depths))
        for way, depths in zip(ways, common, strict=True)
    ]
    return by_side[0], by_side[1]


def _newest_replays(
    maps: Sequence[AcceptanceMap], a: ServingSetup, b: ServingSetup
) -> tuple[Mapping[str, Replay], Mapping[str, Replay]] | None:
    """The newest map of each prompt in a dtype that both have, replayed; None where there are no such maps."""
    if a.is_plain and b.is_plain:
        return None
    usable = [m for m in maps if m.num_tokens >= 2 and len(m.accepted) >= m.num_tokens - 1]
    sides = [[m for m in usable if _is_drafter(m, way)] for way in (a, b)]
    dtype = next((m.dtype for m in sides[0] if m.dtype in {other.dtype for other in sides[1]}), None)
    if dtype is None:
        return None
    newest: list[dict[str, AcceptanceMap]] = [{}, {}]
    for side, by_prompt in zip(sides, newest, strict=True):
        for m in side:
            if m.dtype == dtype:
                by_prompt.setdefault(m.prompt_id, m)
    shared = newest[0].keys() & newest[1].keys()
    replays_a, replays_b = ({name: replay_of(side[name]) for name in sorted(shared)} for side in newest)
    return replays_a, replays_b


def replay_of(acceptance_map: AcceptanceMap) -> Replay:
    """Replay a map at every depth that it is valid for: all depths of a chain, the one depth of a tree or live run."""
    of_one = acceptance_map.tree_budget is not None or bool(decoding_loop_of(acceptance_map.method))
    by_depth = {}
    for depth in [acceptance_map.k_max] if of_one else range(1, acceptance_map.k_max + 1):
        counted = count(acceptance_map.accepted, depth, acceptance_map.num_tokens)
        by_depth[depth] = (float(counted.tokens), float(counted.rounds))
    return Replay(acceptance_map.workload, by_depth)


def compare_speeds(
    comparison: Comparison,
    arms: Sequence[ArmPrompt],
    ways: tuple[ServingSetup, ServingSetup],
    margins: Margins,
    *,
    same_target: bool,
) -> None:
    """Enter the ratios of decoding speed: from one measurement of both, else over plain decoding from two."""
    contexts = _timing_contexts(comparison, arms, ways, same_target)
    if contexts is None:
        return
    context_a, context_b = contexts
    rows = [_rows_of_arm(arms, context, way) for context, way in zip(contexts, ways, strict=True)]
    workloads = {row.prompt_id: row.workload for row in (*rows[1], *rows[0])}
    if context_a.measurement == context_b.measurement:
        sides, quantity = [Measurement(times_of(side_rows)) for side_rows in rows], "decode_speed"
    else:
        comparison.notes.append("speeds are of two sessions: each is taken over plain decoding of its own")
        plain = [times_of(_rows_of_plain(arms, context)) for context in contexts]
        sides = [Measurement(times_of(side_rows), beside) for side_rows, beside in zip(rows, plain, strict=True)]
        quantity = "speedup"
    ratios = compare_sides(sides[0], sides[1], workloads, quantity, margins)
    if not ratios:
        comparison.notes.append("speed not comparable: other prompts (none shared)")
        return
    if any(len({process for _, process in side.sums}) == 1 for side in sides):
        comparison.notes.append("timed in one process: what differs between processes is not in the interval of speed")
    comparison.timed_in = contexts
    comparison.ratios += ratios


def _timing_contexts(
    comparison: Comparison, arms: Sequence[ArmPrompt], ways: tuple[ServingSetup, ServingSetup], same_target: bool
) -> tuple[TimingContext, TimingContext] | None:
    """The measurements to take speeds from: one of both, else one of each; the smallest batch, then the newest."""
    contexts = [{_context_of(row): row for row in arms if _is_arm(row, way)} for way in ways]
    if not all(contexts):
        missing = [way.name for way, timed in zip(ways, contexts, strict=True) if not timed]
        comparison.notes.append(f"speed not comparable: never timed end to end: {', '.join(missing)}")
        return None
    # Alike: in machine, dtype and batch size.
    alike = [(a, b) for a in sorted(contexts[0]) for b in sorted(contexts[1]) if a[3:] == b[3:]]
    if not alike:
        newest = [max(timed, key=lambda c: (c.created_at, -c.batch_size)) for timed in contexts]
        names = zip(("machine", "dtype", "batch size"), newest[0][3:], newest[1][3:], strict=True)
        differ = [f"other {name} ({x} and {y})" for name, x, y in names if x != y]
        comparison.notes.append(f"speed not comparable: {', '.join(differ) or 'never on one machine in one dtype'}")
        return None
    of_one_target = [
        (a, b)
        for a, b in alike
        if same_target or a.measurement == b.measurement or contexts[0][a].target_key == contexts[1][b].target_key
    ]
    if not of_one_target:
        comparison.notes.append("speed not comparable: other target")
        return None
    plain = {_context_of(row) for row in arms if row.method == "none"}
    together = [p for p in of_one_target if p[0].measurement == p[1].measurement]
    apart = [p for p in of_one_target if plain.issuperset(p)]
    if not together and not apart:
        comparison.notes.append("speed not comparable: two sessions, and one of them did not time plain decoding")
        return None
    # The pair itself comes last, so that ties fall alike every time.
    return max(
        together or apart,
        key=lambda p: (-p[0].batch_size, *sorted((p[0].created_at, p[1].created_at)), p[0].dtype == "float32", p),
    )


def times_of(rows: Iterable[ArmPrompt]) -> TimedPairs:
    """(prompt, process) -> (tokens, seconds): the mean tokens of a repetition, at the steady time of a token."""
    times = {}
    for pair, pair_rows in grouped(rows, lambda row: (row.prompt_id, row.process)).items():
        tokens = sum(row.tokens for row in pair_rows) / sum(row.requests for row in pair_rows)
        times[pair] = (tokens, tokens * steady([ns for row in pair_rows for ns in row.ns_per_token]) / 1e9)
    return times


def _compare_decoded(
    comparison: Comparison,
    arms: Sequence[ArmPrompt],
    maps: Sequence[AcceptanceMap],
    ways: tuple[ServingSetup, ServingSetup],
    margins: Margins,
) -> None:
    """Enter ratios of acceptance length over decoded rounds: from the measurements of speed, else the newest ones."""
    sides = []
    for number, way in enumerate(ways):
        contexts = {_context_of(row) for row in arms if row.rounds and _is_arm(row, way)}
        newest = max(contexts, key=lambda context: (context.created_at, -context.batch_size, context), default=None)
        sides.append(
            _decoded_replays(arms, way, comparison.timed_in[number] if comparison.timed_in is not None else newest)
        )
    if all(sides):
        how = f"is that of decoding, of {ways[0].name} and {ways[1].name},"
        compare_replays(comparison, (sides[0], sides[1]), ways, margins, how)
        return
    dtypes = [{m.dtype for m in maps if _is_drafter(m, way)} for way in ways]
    reason = "other dtype" if all(dtypes) and dtypes[0].isdisjoint(dtypes[1]) else "no acceptance map of both"
    comparison.notes.append(f"acceptance length not comparable: {reason}")


def _decoded_replays(arms: Sequence[ArmPrompt], way: ServingSetup, context: TimingContext | None) -> dict[str, Replay]:
    """Prompt -> tokens and rounds at every depth that a drafter ran at in one measurement."""
    decoded = [row for row in arms if _context_of(row) == context and row.rounds and _is_drafter(row, way)]
    by_prompt: dict[str, dict[int, tuple[float, float]]] = {}
    workloads: dict[str, str] = {}
    for (name, depth), depth_rows in grouped(decoded, lambda row: (row.prompt_id, row.depth_k)).items():
        num = sum(row.requests for row in depth_rows)  # a prompt counts once, however often it was decoded
        means = sum(r.tokens for r in depth_rows) / num, sum(r.rounds for r in depth_rows) / num
        by_prompt.setdefault(name, {})[depth] = means
        workloads[name] = depth_rows[0].workload
    return {name: Replay(workloads[name], by_depth) for name, by_depth in by_prompt.items()}


def _context_of(row: ArmPrompt) -> TimingContext:
    return TimingContext(row.artifact_key, row.session_id, row.created_at, row.machine_id, row.dtype, row.batch_size)


def _is_arm(row: ArmPrompt, way: ServingSetup) -> bool:
    if way.measured_in and row.artifact_key not in way.measured_in:
        return False
    if way.is_plain:
        return row.method == "none"
    return _is_drafter(row, way) and (way.tree_budget is not None or row.depth_k == way.depth_k)


def _is_drafter(row: ArmPrompt | AcceptanceMap, way: ServingSetup) -> bool:
    return (row.draft_key, row.tree_budget) == (way.draft_key, way.tree_budget)


def _rows_of_arm(arms: Sequence[ArmPrompt], context: TimingContext, way: ServingSetup) -> list[ArmPrompt]:
    return (
        _rows_of_plain(arms, context)
        if way.is_plain
        else [row for row in arms if _context_of(row) == context and _is_arm(row, way)]
    )


def _rows_of_plain(arms: Sequence[ArmPrompt], context: TimingContext) -> list[ArmPrompt]:
    """The rows of plain decoding in a measurement, on the kernel with most tokens a second."""
    plain = (row for row in arms if row.method == "none" and _context_of(row) == context)
    by_kernel = grouped(plain, lambda row: row.kernel)
    kernels = sorted(by_kernel)
    return by_kernel[max(kernels, key=lambda kernel: _tokens_per_ns(by_kernel[kernel]))] if kernels else []


def _tokens_per_ns(rows: Sequence[ArmPrompt]) -> float:
    return sum(row.tokens for row in rows) / sum(row.decode_ns for row in rows)


def identity_of(measured: MeasuredRows, way: ServingSetup, context: TimingContext) -> tuple[int, int]:
    """(outputs compared with plain decoding, those that differ outside ties) in one measurement, at any batch size."""
    rows = [
        row
        for row in measured.arms
        if _is_arm(row, way) and _context_of(row).measurement == context.measurement and row.dtype == context.dtype
    ]
    return sum(row.compared for row in rows), sum(row.divergences for row in rows)
