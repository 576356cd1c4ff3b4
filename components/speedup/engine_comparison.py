"""Step `speedup.compare_engines`: compares serving engines with our own loop, on the same prompts, drafter and depth.

An engine that loads a drafter wrongly still gives the right text, only later: a lost norm, hidden states of another
layer or another RoPE show only in the rounds. Where the text is the same, rounds are compared with ours by prompt:
with our timed decoding where it ran to the same length, else with the acceptance maps, replayed to that length.
A difference raises the flag `engine_mismatch`, a fault, and the newest comparison of each engine is part of the
promotion gate (storage/registry/engine_gate.sql).

Near-ties of a drafter may fall otherwise in an engine's arithmetic; such rounds are few, and acceptance length within
`tolerance` counts as close. llama.cpp's programs leave the last token of the prompt to their first round and so draft
one token out of phase: their rounds begin elsewhere in the same text, and `out_of_phase` is their tolerance.

Servers whose acceptance is imposed serve no drafter: they are held against the speedup model (imposed_acceptance.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from components.contract import Context, DepthPolicy, Measurements, UserError
from components.definitions import al, counts, speedup
from components.policy import PromptCounts, read_policy
from components.rows import (
    ALL,
    AcceptanceMap,
    DepthEval,
    EngineAcceptance,
    EngineComparison,
    QualityFlag,
    Request,
    grouped,
    read_rows,
    write_rows,
)
from components.speedup.imposed_acceptance import imposed_al, measured_al, predicted_speedup, speed_ratio, verdict
from components.speedup.measured import al_replayed
from components.speedup.prediction.flags import MAX_PREDICTION_GAP
from components.speedup.prediction.replay import replay

_OF_ANY_LENGTH: Final = ("ngram", "lookahead", "suffix")
"""Methods that draft what they find, up to the depth; implementations search elsewhere, so only texts are compared."""


class _Arm(NamedTuple):
    """One engine serving one drafter at one depth."""

    engine: str
    version: str
    concurrency: int
    method: str
    draft_key: str
    depth_k: int


class _Pair(NamedTuple):
    """One prompt with the same text on both sides. tokens: emitted by rounds."""

    engine_rounds: int
    engine_tokens: int
    our_rounds: int
    our_tokens: int
    source: str
    prompt_id: str


@dataclass(frozen=True)
class _Engine:
    """Requests of one measurement of an engine. in_phase: whether its rounds begin after the token of prefill.

    imposed: arm -> the share of rounds that accept draft 1, 2, ..., of arms that were told it.
    """

    requests: Sequence[Request]
    in_phase: bool
    imposed: Mapping[_Arm, Sequence[float]]


@dataclass(frozen=True)
class _OurRounds:
    """Our own rounds. timed: (drafter, depth, prompt) -> requests. maps, replayed: (drafter, prompt) -> map, counts.

    replayed: the counts that the policy predicted from.
    """

    timed: Mapping[tuple[str, int, str], Sequence[Request]]
    maps: Mapping[tuple[str, str], AcceptanceMap]
    replayed: Mapping[tuple[str, str], PromptCounts]

    def rounds(self, row: Request) -> tuple[int, str] | None:
        """(number of our rounds for the text of this request, their source), or None where not known."""
        for own_request in self.timed.get((row.draft_key, row.depth_k, row.prompt_id), ()):
            if own_request.tokens_kept == row.tokens_kept:
                return own_request.num_rounds, "end_to_end"
        acceptance_map = self.maps.get((row.draft_key, row.prompt_id))
        if acceptance_map is None or acceptance_map.k_max < row.depth_k or acceptance_map.num_tokens < row.tokens_kept:
            return None

        return len(replay(acceptance_map.accepted, row.depth_k, row.tokens_kept)), "maps"


def compare_engines(
    engines: list[Measurements],
    end_to_end: Measurements | None,
    acceptance: list[Measurements] | None,
    policy: DepthPolicy | None,
    *,
    tolerance: float,
    out_of_phase: float,
    ctx: Context,
) -> Measurements:
    """The step `speedup.compare_engines`; its settings are explained in components/speedup/steps.py."""
    measured = [_read_engine(source) for source in engines]
    our_rounds = _read_our_rounds(end_to_end, acceptance or [], policy)
    predictions = _predictions(policy)
    plain = [row for measurement in measured for row in measurement.requests if row.method == "none"]
    rows: list[EngineComparison] = []
    for measurement in measured:
        allowed = tolerance if measurement.in_phase else out_of_phase
        for arm in dict.fromkeys(
            _arm_of(row) for row in measurement.requests if row.method != "none" and row.depth_k > 0
        ):
            arm_requests = [row for row in measurement.requests if _arm_of(row) == arm]
            for workload in [ALL, *sorted({row.workload for row in arm_requests} - {ALL})]:
                requests = [row for row in arm_requests if workload in (ALL, row.workload)]
                plain_requests = [row for row in plain if _is_same_server(row, arm) and workload in (ALL, row.workload)]
                if arm in measurement.imposed:
                    rows.append(_imposed_row(ctx.key[:16], arm, workload, measurement, requests, plain_requests))
                    continue
                prediction = predictions.get((arm.draft_key, workload, arm.depth_k))
                same = [row for row in requests if row.identical]
                pairs = [] if arm.method in _OF_ANY_LENGTH else _pair_rounds(same, measurement.in_phase, our_rounds)
                al_pred = _al_pred(prediction, pairs, our_rounds) if prediction is not None else None
                sides = (requests, plain_requests, pairs)
                rows.append(_comparison_row(ctx.key[:16], arm, workload, sides, prediction, al_pred, tolerance=allowed))
    if not rows:
        raise UserError("engines: no request drafted anything; measure servers with a drafter, and state its depth_k")
    all_workloads = [row for row in rows if row.workload == ALL]
    of_model = {arm.method for measurement in measured for arm in measurement.imposed}
    flags = [_mismatch_flag(row) for row in all_workloads if row.verdict == "mismatch" and row.method not in of_model]
    write_rows(ctx.out, [*rows, *flags])
    verdicts = {(model_line if row.method in of_model else summary_line)(row): row.verdict for row in all_workloads}
    for line in verdicts:
        ctx.note(line)
    return Measurements.of_step(
        ctx,
        {
            "engines": sorted({f"{row.engine} {row.engine_version}".strip() for row in all_workloads}),
            "verdicts": verdicts,
            "num_mismatches": len(flags),
        },
    )


def summary_line(row: EngineComparison) -> str:
    """One line: the engine, the number of equal texts, acceptance on both sides, and the verdict."""
    who = _who(row)
    text = f"{row.num_identical} of {row.num_compared} texts the same" if row.num_compared else "no text compared"
    text += f", {row.num_ties} part at a tie" if row.num_ties else ""
    if row.al_engine is None or row.al_ours is None:
        return f"{who}: {text}; rounds not compared: {row.verdict.replace('_', ' ')}"
    rounds = f"acceptance length {row.al_engine:.3f}, ours {row.al_ours:.3f} on {row.num_paired} prompts"
    return f"{who}: {text}; {rounds}: {row.verdict.replace('_', ' ')}"


def model_line(row: EngineComparison) -> str:
    """One line for imposed acceptance: its length, told and counted, and the speedup, predicted and measured."""
    lengths = f"acceptance length {_or_dash(row.al_pred)}, counted {_or_dash(row.al_engine)}"
    speeds = f"speedup predicted {_or_dash(row.speedup_pred)}, measured {_or_dash(row.speedup_engine)}"
    return f"{_who(row)}, {row.concurrency} at once: {lengths}; {speeds}: {row.verdict.replace('_', ' ')}"


def _who(row: EngineComparison) -> str:
    return f"{row.engine} {row.engine_version}".strip() + f", {row.method} at depth {row.depth_k}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _read_engine(source: Measurements) -> _Engine:
    requests = read_rows(source.path, Request)
    rows = [row for row in requests if row.engine and counts(row) and row.temperature == 0.0]
    if not rows:
        raise UserError(
            f"engines ({source.key[:12]}): no greedy request of a serving engine; wire bench.measure_server or "
            "bench.measure_llama_cpp"
        )
    counted = read_rows(source.path, EngineAcceptance)
    arms = [
        (_Arm(row.engine, row.engine_version, row.concurrency, row.method, row.draft_key, row.depth_k), row.imposed)
        for row in counted
    ]
    imposed = {arm: rates for arm, rates in arms if rates is not None}
    return _Engine(rows, not any(row.source == "program" for row in counted), imposed)


def _read_our_rounds(
    end_to_end: Measurements | None, acceptance: Sequence[Measurements], policy: DepthPolicy | None
) -> _OurRounds:

    own_requests = [
        row
        for row in (read_rows(end_to_end.path, Request) if end_to_end is not None else ())
        if row.temperature == 0.0 and row.tree_budget is None and not row.engine and counts(row) and row.depth_k > 0
    ]
    timed = grouped(own_requests, lambda row: (row.draft_key, row.depth_k, row.prompt_id))
    maps = {
        (row.draft_key, row.prompt_id): row
        for source in acceptance
        for row in read_rows(source.path, AcceptanceMap)
        if row.tree_budget is None
    }
    prompt_counts = read_policy(policy.path).prompts if policy is not None else []
    return _OurRounds(timed, maps, {(row.draft_key, row.prompt_id): row for row in prompt_counts})


def _predictions(policy: DepthPolicy | None) -> dict[tuple[str, str, int], DepthEval]:
    """(drafter, workload, depth) -> the prediction at the smallest batch size."""
    rows = read_rows(policy.path, DepthEval) if policy is not None else []
    chains = sorted((row for row in rows if row.tree_budget is None), key=lambda row: -row.batch_size)
    return {(row.draft_key, row.workload, row.depth_k): row for row in chains}


def _arm_of(row: Request) -> _Arm:
    concurrency = row.concurrency or row.batch_size
    return _Arm(row.engine or "", row.engine_version or "", concurrency, row.method, row.draft_key, row.depth_k)


def _is_same_server(row: Request, arm: _Arm) -> bool:
    return _arm_of(row)[:3] == arm[:3]


def _comparison_row(
    session_id: str,
    arm: _Arm,
    workload: str,
    sides: tuple[Sequence[Request], Sequence[Request], Sequence[_Pair]],
    prediction: DepthEval | None,
    al_pred: float | None,
    *,
    tolerance: float,
) -> EngineComparison:
    """sides: requests of the engine's drafter, those of its plain decoding, and pairs with our rounds."""
    requests, plain, pairs = sides
    compared = [row for row in requests if row.identical is not None]
    same = [row for row in compared if row.identical]
    ties = sum(row.tie is True for row in compared if not row.identical)
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
        target_key=requests[0].target_key,
        draft_key=arm.draft_key,
        method=arm.method,
        depth_k=arm.depth_k,
        workload=workload,
        engine=arm.engine,
        engine_version=arm.version,
        concurrency=arm.concurrency,
        num_prompts=len({row.prompt_id for row in requests}),
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
        al_pred=al_pred,
        speedup_engine=speedup(requests, plain),
        speedup_ours=prediction.speedup_meas if prediction is not None else None,
        speedup_pred=prediction.speedup_pred if prediction is not None else None,
        tolerance=tolerance,
        verdict=verdict,
    )


def _imposed_row(
    session_id: str,
    arm: _Arm,
    workload: str,
    measurement: _Engine,
    requests: Sequence[Request],
    plain: Sequence[Request],
) -> EngineComparison:
    """An arm of imposed acceptance beside the speedup model, whose cost of a round is that of the same server at 0."""
    rates = measurement.imposed[arm]
    zero = {one for one, its in measurement.imposed.items() if not any(its) and _same_round(one, arm)}
    at_zero = [row for row in measurement.requests if _arm_of(row) in zero and workload in (ALL, row.workload)]
    row = _comparison_row(session_id, arm, workload, (requests, plain, ()), None, None, tolerance=MAX_PREDICTION_GAP)
    predicted, measured = predicted_speedup(rates, requests, at_zero, plain), speed_ratio(requests, plain)
    return replace(
        row,
        al_engine=measured_al(requests),
        al_pred=imposed_al(rates, requests),
        speedup_engine=measured,
        speedup_pred=predicted,
        verdict=verdict(predicted, measured),
    )


def _same_round(one: _Arm, other: _Arm) -> bool:
    """Whether two arms are of one engine, concurrency and depth."""
    return (*one[:3], one.depth_k) == (*other[:3], other.depth_k)


def _al_pred(prediction: DepthEval, pairs: Sequence[_Pair], our_rounds: _OurRounds) -> float | None:
    """AL by the policy's replay of the paired prompts; of all its prompts where none is paired."""
    if not pairs:
        return prediction.al
    counts = [our_rounds.replayed.get((prediction.draft_key, pair.prompt_id)) for pair in pairs]
    return al_replayed(counts, prediction.depth_k)


def _pair_rounds(same: Sequence[Request], in_phase: bool, our_rounds: _OurRounds) -> list[_Pair]:
    """The requests with our text for which our rounds are known. same: those with our text."""
    pairs = []
    for row in same:
        rounds = our_rounds.rounds(row)
        if rounds is None or row.num_rounds == 0:
            continue
        emitted = row.tokens_kept - 1  # the first token is prefill's
        # A program that begins its rounds in the prompt emits every token from one, the overshoot of the last included.
        engine_tokens = emitted if in_phase else row.tokens_raw
        pairs.append(_Pair(row.num_rounds, engine_tokens, rounds[0], emitted, rounds[1], row.prompt_id))
    return pairs


def _mismatch_flag(row: EngineComparison) -> QualityFlag:
    off = 0.0 if row.al_engine is None or row.al_ours is None else row.al_engine / row.al_ours - 1.0
    value = float(row.num_divergences) if row.num_divergences else off
    detail = summary_line(row)
    return QualityFlag(row.session_id, row.draft_key, row.method, "engine_mismatch", "fault", value, detail)
