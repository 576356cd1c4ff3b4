"""Which rows are held against which when A is compared with B, and why some cannot be.

Speed is compared where both ran on one machine in one dtype and batch size: directly where one measurement timed both,
else each over plain decoding of its own measurement. Pairs are made within a process first, so that what a process or a
moment does to both cancels. Acceptance length needs no common machine: it is replayed from acceptance maps at one depth
where both have them in one dtype, else counted over the rounds that were decoded at one depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from components.promotion import ArmPrompt, Margins, Measured, Way
from components.rows import OF_ONE_DEPTH, AcceptanceMap
from components.speedup.paired import Measurement, Ratio, compare_sides
from components.speedup.replay import count
from components.speedup.speed_ratio import Timed
from components.speedup.steady import steady


class Place(NamedTuple):
    """A measurement in which a way to serve was timed, in one dtype and batch size."""

    artifact_key: str
    session_id: str
    created_at: datetime
    machine_id: str
    dtype: str
    batch_size: int

    @property
    def measurement(self) -> tuple[str, str, datetime]:
        """What two ways that ran side by side have in common; an artifact that was made again is another."""
        return self.artifact_key, self.session_id, self.created_at


@dataclass
class Comparison:
    """A against B: ratios, and in `notes` what could not be compared, and why.

    timed: where the speeds of A and B are from; None where they are not comparable. depths: at which acceptance is
    compared; a tree counts at its own.
    """

    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timed: tuple[Place, Place] | None = None
    depths: tuple[int, int] | None = None

    def of(self, *quantities: str) -> list[Ratio]:
        """The ratios of some quantities, all prompts first."""
        return [ratio for ratio in self.ratios if ratio.quantity in quantities]


def compare_ways(measured: Measured, a: Way, b: Way, margins: Margins, *, same_target: bool = True) -> Comparison:
    """Hold two ways to serve against each other over everything that was measured.

    same_target: False: two measurements are only compared where they name the same target.
    """
    found = Comparison()
    compare_speeds(found, measured.arms, (a, b), margins, same_target=same_target)
    replays = _newest_replays(measured.maps, a, b)
    if replays is not None:
        compare_replays(found, replays, (a, b), margins)
    elif not (a.is_plain and b.is_plain):
        _compare_decoded(found, measured.arms, measured.maps, (a, b), margins)
    return found


@dataclass(frozen=True)
class Replay:
    """Acceptance of one drafter on one prompt. at: depth -> tokens and rounds."""

    workload: str
    at: Mapping[int, tuple[float, float]]


def compare_replays(
    found: Comparison,
    replays: tuple[Mapping[str, Replay], Mapping[str, Replay]],
    ways: tuple[Way, Way],
    margins: Margins,
    how: str = "is replayed",
) -> None:
    """Acceptance length of two drafters; prompt_id -> Replay for each. how: where it is from, for the note.

    Chains are compared at one depth: A's (B's where A decodes plainly, else the deepest), no deeper than both were
    replayed on every prompt.
    """
    shared = sorted(replays[0].keys() & replays[1].keys())
    common = [set.intersection(*(set(side[name].at) for name in shared)) - {0} if shared else set() for side in replays]
    depths = _depths(common, ways)
    if depths is None:
        found.notes.append("acceptance length not comparable: no common prompts at one depth")
        return
    same = f"depth {depths[0]} for both" if depths[0] == depths[1] else f"depths {depths[0]} and {depths[1]}"
    found.notes.append(f"acceptance length {how} at {same}")
    found.depths = depths
    a, b = (
        Measurement({(name, 0): replay[name].at[k] for name in shared})
        for replay, k in zip(replays, depths, strict=True)
    )
    workloads = {name: replays[0][name].workload for name in shared}
    found.ratios += compare_sides(a, b, workloads, "acceptance_length", margins)


def _depths(common: Sequence[set[int]], ways: tuple[Way, Way]) -> tuple[int, int] | None:
    """At which depth each side is compared, of those that it was replayed or run at on every prompt."""
    a, b = ways
    if not all(common):
        return None
    if a.tree_budget is None and b.tree_budget is None:
        both = common[0] & common[1]
        wanted = a.depth_k or b.depth_k or max(both, default=0)
        depth = max((k for k in both if k <= wanted), default=min(both, default=0))
        return (depth, depth) if depth else None
    own = [
        max(depths)
        if way.tree_budget is not None
        else max((k for k in depths if k <= way.depth_k), default=min(depths))
        for way, depths in zip(ways, common, strict=True)
    ]
    return own[0], own[1]


def _newest_replays(
    maps: Sequence[AcceptanceMap], a: Way, b: Way
) -> tuple[Mapping[str, Replay], Mapping[str, Replay]] | None:
    """The newest map of each prompt in a dtype that both have, replayed; None where there are no such maps."""
    sides = [
        [
            m
            for m in maps
            if (m.draft_key, m.tree_budget) == (way.draft_key, way.tree_budget)
            and m.num_tokens >= 2
            and len(m.accepted) >= m.num_tokens - 1
        ]
        for way in (a, b)
    ]
    if a.is_plain and b.is_plain:
        return None
    dtype = next((m.dtype for m in sides[0] if m.dtype in {other.dtype for other in sides[1]}), None)
    if dtype is None:
        return None
    newest: list[dict[str, AcceptanceMap]] = [{}, {}]
    for side, by_prompt in zip(sides, newest, strict=True):
        for m in side:
            if m.dtype == dtype:
                by_prompt.setdefault(m.prompt_id, m)
    shared = newest[0].keys() & newest[1].keys()
    mine, theirs = ({name: replay_of(side[name]) for name in sorted(shared)} for side in newest)
    return mine, theirs


def replay_of(found: AcceptanceMap) -> Replay:
    """A map replayed at the depths it holds at: a chain's at every one, that of a run at one depth at it alone."""
    of_one = found.tree_budget is not None or found.method in OF_ONE_DEPTH
    at = {}
    for depth in [found.k_max] if of_one else range(1, found.k_max + 1):
        counted = count(found.accepted, depth, found.num_tokens)
        at[depth] = (float(counted.tokens), float(counted.rounds))
    return Replay(found.workload, at)


def compare_speeds(
    found: Comparison, arms: Sequence[ArmPrompt], ways: tuple[Way, Way], margins: Margins, *, same_target: bool
) -> None:
    """Decoding speed, from one measurement of both, or over plain decoding from two; see `compare_ways`."""
    where = _where(found, arms, ways, same_target)
    if where is None:
        return
    here, there = where
    rows = [_arm(arms, place, way) for place, way in zip(where, ways, strict=True)]
    workloads = {row.prompt_id: row.workload for row in (*rows[1], *rows[0])}
    if here.measurement == there.measurement:
        sides, quantity = [Measurement(times_of(mine)) for mine in rows], "decode_speed"
    else:
        found.notes.append("speeds are of two sessions: each is taken over plain decoding of its own")
        plain = [times_of(_plain(arms, place)) for place in where]
        sides = [Measurement(times_of(mine), beside) for mine, beside in zip(rows, plain, strict=True)]
        quantity = "speedup"
    ratios = compare_sides(sides[0], sides[1], workloads, quantity, margins)
    if not ratios:
        found.notes.append("speed not comparable: other prompts (none shared)")
        return
    if any(len({process for _, process in side.own}) == 1 for side in sides):
        found.notes.append("timed in one process: what differs between processes is not in the interval of speed")
    found.timed = where
    found.ratios += ratios


def _where(
    found: Comparison, arms: Sequence[ArmPrompt], ways: tuple[Way, Way], same_target: bool
) -> tuple[Place, Place] | None:
    """Where A and B are compared: one measurement of both, else one of each, the smallest batch and newest first."""
    places = [{_place(row): row for row in arms if _is_of(row, way)} for way in ways]
    if not all(places):
        missing = [way.name for way, timed in zip(ways, places, strict=True) if not timed]
        found.notes.append(f"speed not comparable: never timed end to end: {', '.join(missing)}")
        return None
    pairs = [(one, other) for one in sorted(places[0]) for other in sorted(places[1])]
    alike = [(one, other) for one, other in pairs if one[3:] == other[3:]]  # machine, dtype, batch size
    if not alike:
        newest = [max(timed, key=lambda one: (one.created_at, -one.batch_size)) for timed in places]
        names = zip(("machine", "dtype", "batch size"), newest[0][3:], newest[1][3:], strict=True)
        differ = [f"other {name} ({x} and {y})" for name, x, y in names if x != y]
        found.notes.append(f"speed not comparable: {', '.join(differ) or 'never on one machine in one dtype'}")
        return None
    of_one_target = [
        (one, other)
        for one, other in alike
        if same_target
        or one.measurement == other.measurement
        or places[0][one].target_key == places[1][other].target_key
    ]
    if not of_one_target:
        found.notes.append("speed not comparable: other target")
        return None
    plain = {_place(row) for row in arms if row.method == "none"}
    together = [p for p in of_one_target if p[0].measurement == p[1].measurement]
    apart = [p for p in of_one_target if plain.issuperset(p)]
    if not together and not apart:
        found.notes.append("speed not comparable: two sessions, and one of them did not time plain decoding")
        return None
    # Equal up to the keys: any order that is always the same.
    return max(
        together or apart,
        key=lambda p: (-p[0].batch_size, *sorted((p[0].created_at, p[1].created_at)), p[0].dtype == "float32", p),
    )


def times_of(rows: Iterable[ArmPrompt]) -> Timed:
    """(prompt, process) -> tokens and seconds of one repetition: the mean of tokens, at the steady time of a token."""
    by_pair: dict[tuple[str, int], list[ArmPrompt]] = {}
    for row in rows:
        by_pair.setdefault((row.prompt_id, row.process), []).append(row)
    found = {}
    for pair, mine in by_pair.items():
        tokens = sum(row.tokens for row in mine) / sum(row.requests for row in mine)
        found[pair] = (tokens, tokens * steady([ns for row in mine for ns in row.ns_per_token]) / 1e9)
    return found


def _compare_decoded(
    found: Comparison, arms: Sequence[ArmPrompt], maps: Sequence[AcceptanceMap], ways: tuple[Way, Way], margins: Margins
) -> None:
    """Acceptance length over decoded rounds: where speeds are from, else in the newest measurement of each."""
    sides = []
    for number, way in enumerate(ways):
        places = {_place(row) for row in arms if row.rounds and _is_of(row, way)}
        newest = max(places, key=lambda one: (one.created_at, -one.batch_size, one), default=None)
        sides.append(_decoded(arms, way, found.timed[number] if found.timed is not None else newest))
    if all(sides):
        how = f"is that of decoding, of {ways[0].name} and {ways[1].name},"
        compare_replays(found, (sides[0], sides[1]), ways, margins, how)
        return
    mapped = [any(m.draft_key == way.draft_key for m in maps) for way in ways]
    why = "other dtype" if all(mapped) else "no acceptance map of both"
    found.notes.append(f"acceptance length not comparable: {why}")


def _decoded(arms: Sequence[ArmPrompt], way: Way, place: Place | None) -> dict[str, Replay]:
    """Tokens and rounds of each prompt at every depth that a drafter was run at in one measurement."""
    rows: dict[tuple[str, int], list[ArmPrompt]] = {}
    for row in arms:
        if _place(row) == place and row.rounds and (row.draft_key, row.tree_budget) == (way.draft_key, way.tree_budget):
            rows.setdefault((row.prompt_id, row.depth_k), []).append(row)
    found: dict[str, dict[int, tuple[float, float]]] = {}
    workloads: dict[str, str] = {}
    for (name, depth), mine in rows.items():
        num = sum(row.requests for row in mine)  # a prompt counts once, however often it was decoded
        found.setdefault(name, {})[depth] = (sum(r.tokens for r in mine) / num, sum(r.rounds for r in mine) / num)
        workloads[name] = mine[0].workload
    return {name: Replay(workloads[name], at) for name, at in found.items()}


def _place(row: ArmPrompt) -> Place:
    return Place(row.artifact_key, row.session_id, row.created_at, row.machine_id, row.dtype, row.batch_size)


def _is_of(row: ArmPrompt, way: Way) -> bool:
    if way.measured_in and row.artifact_key not in way.measured_in:
        return False
    if way.is_plain:
        return row.method == "none"
    mine = (row.draft_key, row.tree_budget) == (way.draft_key, way.tree_budget)
    return mine and (way.tree_budget is not None or row.depth_k == way.depth_k)


def _arm(arms: Sequence[ArmPrompt], timed: Place, way: Way) -> list[ArmPrompt]:
    return _plain(arms, timed) if way.is_plain else [row for row in arms if _place(row) == timed and _is_of(row, way)]


def _plain(arms: Sequence[ArmPrompt], timed: Place) -> list[ArmPrompt]:
    """Plain decoding of a measurement on the kernel that decoded most tokens a second."""
    by_kernel: dict[str, list[ArmPrompt]] = {}
    for row in arms:
        if row.method == "none" and _place(row) == timed:
            by_kernel.setdefault(row.kernel, []).append(row)
    kernels = sorted(by_kernel)
    return by_kernel[max(kernels, key=lambda kernel: _tokens_per_ns(by_kernel[kernel]))] if kernels else []


def _tokens_per_ns(rows: Sequence[ArmPrompt]) -> float:
    return sum(row.tokens for row in rows) / sum(row.decode_ns for row in rows)


def identity_of(measured: Measured, way: Way, place: Place) -> tuple[int, int]:
    """(outputs held against plain decoding, outputs that differ outside ties) in one measurement, at any batch size."""
    rows = [
        row
        for row in measured.arms
        if _is_of(row, way) and _place(row).measurement == place.measurement and row.dtype == place.dtype
    ]
    return sum(row.compared for row in rows), sum(row.divergences for row in rows)
