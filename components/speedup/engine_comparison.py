"""Step `speedup.compare_engines`: serving engines beside our own loop, on the same prompts, drafter and depth.

An engine that loads a drafter wrongly still gives the right text, only later: a dropped norm, taps off by one or
another RoPE show in the rounds alone. So rounds are held against ours prompt by prompt, where the text is the same:
against our own timed decoding where it ran to the same length, else against the acceptance maps, replayed to it.
What differs raises the flag `engine_mismatch`, a fault, and the newest comparison of each engine stands in the
promotion gate (storage/engine_gate.sql).

A drafter's near-ties may fall otherwise in an engine's arithmetic; such rounds are few, and acceptance length within
`tolerance` counts as close. llama.cpp's programs leave the last token of the prompt to their first round and so draft
one token out of phase: their rounds begin elsewhere in the same text, and `out_of_phase` is their tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from pydantic import Field

from components.contract import Context, DepthPolicy, Measurements, UserError
from components.definitions import al, counts, speedup
from components.rows import (
    AcceptanceMap,
    DepthEval,
    EngineAcceptance,
    EngineComparison,
    QualityFlag,
    Request,
    read_rows,
    write_rows,
)

if TYPE_CHECKING:
    from components.speedup.policy import PromptCounts

ALL: Final = "all"
_OF_ANY_LENGTH: Final = ("ngram", "lookahead")
"""They draft what they find, up to the depth, and implementations look in different places: only texts are compared."""


class _Arm(NamedTuple):
    """One engine serving one drafter at one depth."""

    engine: str
    version: str
    concurrency: int
    method: str
    draft_key: str
    depth_k: int


class _Pair(NamedTuple):
    """One prompt on both sides, with the same text. tokens: emitted by rounds."""

    engine_rounds: int
    engine_tokens: int
    our_rounds: int
    our_tokens: int
    source: str
    prompt_id: str


@dataclass(frozen=True)
class _Engine:
    """What one measurement holds of engines. in_phase: its rounds begin after the token that prefill makes."""

    requests: Sequence[Request]
    in_phase: bool


@dataclass(frozen=True)
class _Ours:
    """What we know of our own rounds: (drafter, depth, prompt) -> timed requests, (drafter, prompt) -> the rest.

    replayed: what the policy predicted from.
    """

    timed: Mapping[tuple[str, int, str], Sequence[Request]]
    maps: Mapping[tuple[str, str], AcceptanceMap]
    replayed: Mapping[tuple[str, str], PromptCounts]

    def rounds(self, row: Request) -> tuple[int, str] | None:
        """(rounds of ours for the text of this request, where they are from), or None where nobody knows."""
        for one in self.timed.get((row.draft_key, row.depth_k, row.prompt_id), ()):
            if one.tokens_kept == row.tokens_kept:
                return one.num_rounds, "end_to_end"
        found = self.maps.get((row.draft_key, row.prompt_id))
        if found is None or found.k_max < row.depth_k or found.num_tokens < row.tokens_kept:
            return None
        from components.speedup.replay import replay

        return len(replay(found.accepted, row.depth_k, row.tokens_kept)), "maps"


def compare_engines(
    engines: list[Measurements],
    end_to_end: Measurements | None = None,
    acceptance: list[Measurements] | None = None,
    policy: DepthPolicy | None = None,
    *,
    tolerance: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.02,
    out_of_phase: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1,
    ctx: Context,
) -> Measurements:
    """Do engines keep our tokens and our rounds? One row for each engine, drafter, depth and workload.

    Args:
        engines: what bench.measure_server and bench.measure_llama_cpp measured, with num_compared and draft_key given.
        end_to_end: our own timed decoding of the same drafters.
        acceptance: acceptance maps of the same drafters on the same prompts.
        policy: the depth policy, for what was predicted.
        tolerance: share by which an engine's acceptance length may lie off ours.
        out_of_phase: the same for llama.cpp's programs, which draft one token out of phase.
    """
    measured = [_read(source) for source in engines]
    ours = _ours(end_to_end, acceptance or [], policy)
    evals = _evals(policy)
    plain = [row for one in measured for row in one.requests if row.method == "none"]
    rows: list[EngineComparison] = []
    for one in measured:
        allowed = tolerance if one.in_phase else out_of_phase
        for arm in dict.fromkeys(_arm(row) for row in one.requests if row.method != "none" and row.depth_k > 0):
            mine = [row for row in one.requests if _arm(row) == arm]
            for workload in [ALL, *sorted({row.workload for row in mine} - {ALL})]:
                of_it = [row for row in mine if workload in (ALL, row.workload)]
                side = [row for row in plain if _served_alike(row, arm) and workload in (ALL, row.workload)]
                seen = evals.get((arm.draft_key, workload, arm.depth_k))
                rows.append(_row(ctx.key[:16], arm, workload, of_it, side, one.in_phase, ours, seen, allowed))
    if not rows:
        raise UserError("engines: no request drafted anything; measure servers with a drafter, and state its depth_k")
    pooled = [row for row in rows if row.workload == ALL]
    flags = [_flag(row) for row in pooled if row.verdict == "mismatch"]
    write_rows(ctx.out, [*rows, *flags])
    for row in pooled:
        ctx.note(in_words(row))
    return Measurements.made(
        ctx,
        {
            "engines": sorted({f"{row.engine} {row.engine_version}".strip() for row in pooled}),
            "verdicts": {in_words(row): row.verdict for row in pooled},
            "num_mismatches": len(flags),
        },
    )


def in_words(row: EngineComparison) -> str:
    """One line: who, how many texts are the same, acceptance on both sides, and the verdict."""
    who = f"{row.engine} {row.engine_version}".strip() + f", {row.method} at depth {row.depth_k}"
    text = f"{row.num_identical} of {row.num_compared} texts the same" if row.num_compared else "no text compared"
    text += f", {row.num_ties} part at a tie" if row.num_ties else ""
    if row.al_engine is None or row.al_ours is None:
        return f"{who}: {text}; rounds not compared: {row.verdict.replace('_', ' ')}"
    rounds = f"acceptance length {row.al_engine:.3f}, ours {row.al_ours:.3f} on {row.num_paired} prompts"
    return f"{who}: {text}; {rounds}: {row.verdict.replace('_', ' ')}"


def _read(source: Measurements) -> _Engine:
    every = read_rows(source.path, Request)
    rows = [row for row in every if row.engine and counts(row) and row.temperature == 0.0]
    if not rows:
        raise UserError(
            f"engines ({source.key[:12]}): no greedy request of a serving engine; wire bench.measure_server or "
            "bench.measure_llama_cpp"
        )
    counted = read_rows(source.path, EngineAcceptance)
    return _Engine(rows, in_phase=not any(one.source == "program" for one in counted))


def _ours(end_to_end: Measurements | None, acceptance: Sequence[Measurements], policy: DepthPolicy | None) -> _Ours:
    from components.speedup.policy import read_policy

    timed: dict[tuple[str, int, str], list[Request]] = {}
    for row in read_rows(end_to_end.path, Request) if end_to_end is not None else ():
        greedy = row.temperature == 0.0 and row.tree_budget is None
        if greedy and not row.engine and counts(row) and row.depth_k > 0:
            timed.setdefault((row.draft_key, row.depth_k, row.prompt_id), []).append(row)
    maps = {
        (one.draft_key, one.prompt_id): one
        for source in acceptance
        for one in read_rows(source.path, AcceptanceMap)
        if one.tree_budget is None
    }
    told = read_policy(policy.path).prompts if policy is not None else []
    return _Ours(timed, maps, {(one.draft_key, one.prompt_id): one for one in told})


def _evals(policy: DepthPolicy | None) -> dict[tuple[str, str, int], DepthEval]:
    """(drafter, workload, depth) -> what was predicted, at the smallest batch size."""
    rows = read_rows(policy.path, DepthEval) if policy is not None else []
    chains = sorted((row for row in rows if row.tree_budget is None), key=lambda row: -row.batch_size)
    return {(row.draft_key, row.workload, row.depth_k): row for row in chains}


def _arm(row: Request) -> _Arm:
    concurrency = row.concurrency or row.batch_size
    return _Arm(row.engine or "", row.engine_version or "", concurrency, row.method, row.draft_key, row.depth_k)


def _served_alike(row: Request, arm: _Arm) -> bool:
    return _arm(row)[:3] == arm[:3]


def _row(
    session_id: str,
    arm: _Arm,
    workload: str,
    mine: Sequence[Request],
    plain: Sequence[Request],
    in_phase: bool,
    ours: _Ours,
    predicted: DepthEval | None,
    tolerance: float,
) -> EngineComparison:
    compared = [row for row in mine if row.identical is not None]
    same = [row for row in compared if row.identical]
    ties = sum(row.tie is True for row in compared if not row.identical)
    pairs = [] if arm.method in _OF_ANY_LENGTH else _paired(same, in_phase, ours)
    engine_rounds, our_rounds = sum(pair.engine_rounds for pair in pairs), sum(pair.our_rounds for pair in pairs)
    engine_tokens, our_tokens = sum(pair.engine_tokens for pair in pairs), sum(pair.our_tokens for pair in pairs)
    al_engine, al_ours = al(engine_tokens, engine_rounds), al(our_tokens, our_rounds)
    different = sum(pair.engine_rounds != pair.our_rounds for pair in pairs)
    divergences = len(compared) - len(same) - ties
    verdict = "not_compared"
    if al_engine is not None and al_ours is not None:
        off = abs(al_engine / al_ours - 1.0)
        verdict = "mismatch" if off > tolerance else "close" if different else "equal"
    if divergences:
        verdict = "mismatch"
    return EngineComparison(
        session_id=session_id,
        target_key=mine[0].target_key,
        draft_key=arm.draft_key,
        method=arm.method,
        depth_k=arm.depth_k,
        workload=workload,
        engine=arm.engine,
        engine_version=arm.version,
        concurrency=arm.concurrency,
        num_prompts=len({row.prompt_id for row in mine}),
        num_compared=len(compared),
        num_identical=len(same),
        num_ties=ties,
        num_divergences=divergences,
        num_paired=len(pairs),
        num_different=different,
        engine_rounds=engine_rounds,
        engine_tokens=engine_tokens,
        our_rounds=our_rounds,
        our_tokens=our_tokens,
        our_rounds_from=" and ".join(sorted({pair.source for pair in pairs})),
        al_engine=al_engine,
        al_ours=al_ours,
        al_pred=_al_pred(predicted, pairs, ours) if predicted is not None else None,
        speedup_engine=speedup(mine, plain),
        speedup_ours=predicted.speedup_meas if predicted is not None else None,
        speedup_pred=predicted.speedup_pred if predicted is not None else None,
        tolerance=tolerance,
        verdict=verdict,
    )


def _al_pred(predicted: DepthEval, pairs: Sequence[_Pair], ours: _Ours) -> float | None:
    """What the policy's replay says of the paired prompts; of all that it replayed where none is paired."""
    from components.speedup.measured import al_replayed

    if not pairs:
        return predicted.al
    told = [ours.replayed.get((predicted.draft_key, pair.prompt_id)) for pair in pairs]
    return al_replayed(told, predicted.depth_k)


def _paired(same: Sequence[Request], in_phase: bool, ours: _Ours) -> list[_Pair]:
    """Every request with our text whose rounds we know as well."""
    pairs = []
    for row in same:
        found = ours.rounds(row)
        if found is None or row.num_rounds == 0:
            continue
        emitted = row.tokens_kept - 1  # the first token is prefill's
        # A program that begins its rounds in the prompt emits every token from one, the overshoot of the last included.
        theirs = emitted if in_phase else row.tokens_raw
        pairs.append(_Pair(row.num_rounds, theirs, found[0], emitted, found[1], row.prompt_id))
    return pairs


def _flag(row: EngineComparison) -> QualityFlag:
    off = 0.0 if row.al_engine is None or row.al_ours is None else row.al_engine / row.al_ours - 1.0
    value = float(row.num_divergences) if row.num_divergences else off
    said = in_words(row)
    return QualityFlag(row.session_id, row.draft_key, row.method, "engine_mismatch", "fault", value, said)
