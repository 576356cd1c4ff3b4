"""Every published number: its name, formula, unit, what it counts and leaves out, and the function that computes it.

A name means the same in policy.json, rows, views (storage/history/views.sql), tables, cards and docs/numbers.md; a
figure by another convention has another name.

    round     one draft-and-verify pass: d drafted, a accepted, e emitted; e = a + 1, the last being the target's own
              (the bonus token), unless the end of the answer cut it.
    cut       a round whose end the answer's end, or its limit, cut off: e <= a. Also called a tail round.
    overshoot what a cut round accepted past the end: kept by nobody, counted among accepted drafts.
    prefill   makes the first token of an answer, which belongs to no round and to no decoding time.

None is what nobody reached or measured, never 0. Pooled is a ratio of sums; _macro is the mean over prompts of each
prompt's own figure, its repetitions summed first. Warm-up and failed requests never count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median, quantiles
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from components.rows import Request, grouped


@dataclass(frozen=True)
class Definition:
    """One number. counts: what is in it and what is not. views: those of views.sql with a column of its name."""

    formula: str
    unit: str
    counts: str
    views: tuple[str, ...] = ()


_LENGTH, _SHARE, _SPEED, _TIMES = "tokens a round", "share", "tokens a second", "times"
_PLAIN, _EACH, _ENGINE, _DEPTH = "v_acceptance", "v_acceptance_request", "v_engine_acceptance", "v_depth"
_ALL, _AT, _MAP, _TIMED = (_PLAIN, _EACH, _ENGINE), ("v_position",), ("v_map",), ("v_speed", "v_speedup")
DEFINITIONS: Final[dict[str, Definition]] = {
    "al": Definition(
        "tokens / rounds",
        _LENGTH,
        "The headline. tokens: tokens_kept - 1 of each request. Every round, cut ones too; bonus in; prefill's token"
        " and overshoot out. None where rounds that guessed nothing were left out of the count, as engines do.",
        (_PLAIN, _EACH, _DEPTH, "v_language"),
    ),
    "al_uncut": Definition("1 + accepted / rounds", _LENGTH, "Uncut rounds alone; bonus in."),
    "al_with_overshoot": Definition("1 + accepted / rounds", _LENGTH, "Overshoot in. vLLM's.", (_PLAIN, _ENGINE)),
    "al_proxy": Definition(
        "1 + mean of min(proxy_accepted, depth)", _LENGTH, "Every place, teacher-forced: the training metric."
    ),
    "al_meas": Definition("al", _LENGTH, "Of timed requests.", (_DEPTH,)),
    "al_replayed": Definition("al", _LENGTH, "Of maps, of the very prompts that al_meas is of.", (_DEPTH,)),
    "accepted_per_round": Definition("accepted / rounds", "drafts a round", "Bonus out, overshoot in.", _ALL),
    "draft_acceptance_rate": Definition("accepted / drafted", _SHARE, "Every draft, overshoot in.", _ALL),
    "accept_uncond": Definition("accepted / drafted", _SHARE, "Uncut rounds that drafted i.", _AT),
    "accept_cond": Definition("accepted / reached", _SHARE, "Uncut rounds that drafted i, kept i - 1.", _AT),
    "accept_joint": Definition("product of accept_cond up to i", _SHARE, "As accept_cond.", _AT),
    "accept_of_rounds": Definition("accepted / rounds", _SHARE, "Overshoot in. vLLM's.", (*_AT, _ENGINE)),
    "accept_joint_everywhere": Definition(
        "places with accepted >= i / places", _SHARE, "Every place, where no round begins too.", _MAP
    ),
    "accept_joint_teacher_forced": Definition(
        "places with proxy_accepted >= i / places", _SHARE, "The same, teacher-forced: the training metric.", _MAP
    ),
    "tokens_per_s": Definition(
        "tokens / decode_ns * 1e9",
        _SPEED,
        "Tokens after the first (after an engine's first chunk), in the time since it. Prefill is out, and so are"
        " answers of one token or one chunk.",
        _TIMED,
    ),
    "tokens_per_s_e2e": Definition(
        "tokens_kept / (ttft_ns + decode_ns) * 1e9", _SPEED, "Every answer, prefill in.", _TIMED
    ),
    "throughput_tokens_per_s": Definition(
        "tokens / longest decode_ns * 1e9", _SPEED, "All decoded side by side, pooled over batches.", ("v_throughput",)
    ),
    "speedup": Definition(
        "tokens / steady time, over that of plain decoding",
        _TIMES,
        "On prompts that one process decoded both ways. Plain: its kernel with the best tokens_per_s in the session,"
        " engine, dtype, threads, batch size and temperature. Steady: the mean of the shortest tenth"
        " of repetitions, of at least three or, of few, the lower half.",
        ("v_speedup",),
    ),
    "speedup_e2e": Definition(
        "tokens_per_s_e2e / that of plain decoding", _TIMES, "The same plain kernel; both answered.", ("v_speedup",)
    ),
    "throughput_speedup": Definition(
        "throughput_tokens_per_s / that of plain decoding", _TIMES, "Its best, same batch size.", ("v_throughput",)
    ),
    "ttft_ms_p50": Definition("median of ttft_ns / 1e6", "ms", "First token, each answer.", ("v_speed",)),
    "tpot_ms_p50": Definition("median of decode_ns / tokens / 1e6", "ms", "As tokens_per_s.", ("v_speed",)),
    "tpot_ms_p99": Definition("99th percentile of decode_ns / tokens / 1e6", "ms", "As tpot_ms_p50.", ("v_speed",)),
    "cost_ratio": Definition("(T_verify + T_draft) / T_target", _TIMES, "Of a round; the rest of it out.", (_DEPTH,)),
    "speedup_pred": Definition(
        "al * T_target / (T_verify + T_draft)", _TIMES, "The rest of a round on both sides.", (_DEPTH, "v_choice")
    ),
    "speedup_meas": Definition("speedup", _TIMES, "As measured end to end.", (_DEPTH, "v_choice")),
    "pred_error": Definition(
        "speedup_pred / speedup_meas - 1", _SHARE, "Of all prompts with maps, over those timed.", (_DEPTH, "v_choice")
    ),
}
_MACRO = dict.fromkeys(("al", "accepted_per_round", "draft_acceptance_rate"), (_PLAIN,))
_MACRO |= dict.fromkeys(("accept_uncond", "accept_cond"), _AT)
for _name, _views in _MACRO.items():
    _same = DEFINITIONS[_name]
    DEFINITIONS[f"{_name}_macro"] = Definition(f"mean over prompts of {_name}", _same.unit, f"As {_name}.", _views)


class RoundCounts(NamedTuple):
    """What the rounds of some requests did, summed. whole: whether every round was counted."""

    tokens: int
    rounds: int
    drafted: int
    accepted: int
    whole: bool


def counts(request: Request) -> bool:
    """Whether a request counts at all: timed, and no error."""
    return not request.is_warmup and request.status != "error"


def has_rounds(request: Request) -> bool:
    """Whether a request counts for acceptance: it was asked to draft, and rounds were counted."""
    return counts(request) and request.method != "none" and request.depth_k > 0 and request.num_rounds > 0


def has_decoding(request: Request) -> bool:
    """Whether a request counts for decoding speed: it counts, and tokens came after the first (or first chunk)."""
    return counts(request) and request.timed_tokens > 0 and request.decode_ns > 0


def round_counts(requests: Iterable[Request]) -> RoundCounts:
    """Sums over the requests that have rounds. A request with more tokens than they can have emitted lacks some."""
    rows = [r for r in requests if has_rounds(r)]
    return RoundCounts(
        tokens=sum(r.tokens_kept - 1 for r in rows),
        rounds=sum(r.num_rounds for r in rows),
        drafted=sum(r.num_drafted for r in rows),
        accepted=sum(r.num_accepted for r in rows),
        whole=all(r.tokens_kept - 1 <= r.num_accepted + r.num_rounds for r in rows),
    )


def al(tokens: int, rounds: int) -> float | None:
    """Tokens kept a round, every round counted: the headline. tokens: kept by rounds, without prefill's."""
    return ratio(tokens, rounds)


def al_of(requests: Iterable[Request]) -> float | None:
    """al of those that have rounds; None where some of their rounds were not counted."""
    sums = round_counts(requests)
    return al(sums.tokens, sums.rounds) if sums.whole else None


def macro(by_prompt: Iterable[float | None]) -> float | None:
    """The mean over prompts of each one's own figure, over those that have one; None without any."""
    values = [value for value in by_prompt if value is not None]
    return fmean(values) if values else None


def al_macro(by_prompt: Sequence[float | None]) -> float | None:
    """The mean over prompts of al; None where one of them has none."""
    return None if None in by_prompt else macro(by_prompt)


def accepted_per_round(accepted: int, rounds: int) -> float | None:
    """Accepted drafts a round: no bonus token, overshoot included."""
    return ratio(accepted, rounds)


def al_with_overshoot(accepted: int, rounds: int) -> float | None:
    """1 + accepted / rounds, overshoot included."""
    return None if not rounds else 1.0 + accepted / rounds


def al_uncut(accepted: int, rounds: int) -> float | None:
    """1 + accepted / rounds. accepted, rounds: of uncut rounds alone."""
    return None if not rounds else 1.0 + accepted / rounds


def al_proxy(proxy_accepted: Iterable[int], depth: int) -> float | None:
    """1 + the mean over every place of min(proxy_accepted, depth)."""
    lengths = [min(length, depth) for length in proxy_accepted]
    return 1.0 + sum(lengths) / len(lengths) if lengths else None


def draft_acceptance_rate(accepted: int, drafted: int) -> float | None:
    """Accepted drafts over all drafts, overshoot included."""
    return ratio(accepted, drafted)


class PositionCounts(NamedTuple):
    """How rounds did at one draft position i. The first three leave cut rounds out, the last three do not."""

    drafted: int  # d >= i
    reached: int  # d >= i and a >= i - 1
    accepted: int  # d >= i and a >= i
    drafted_in_all: int  # d >= i
    accepted_in_all: int  # a >= i
    rounds: int


def is_cut(accepted: int, emitted: int) -> bool:
    """Whether the end of an answer cut what a round emits."""
    return emitted < accepted + 1


def position_counts(rounds: Iterable[tuple[int, int, int]], position: int) -> PositionCounts:
    """rounds: (drafted, accepted, emitted) of each. position: i, from 1."""
    every = list(rounds)
    uncut = [(d, a) for d, a, e in every if not is_cut(a, e) and d >= position]
    return PositionCounts(
        drafted=len(uncut),
        reached=sum(a >= position - 1 for _, a in uncut),
        accepted=sum(a >= position for _, a in uncut),
        drafted_in_all=sum(d >= position for d, _, _ in every),
        accepted_in_all=sum(a >= position for _, a, _ in every),
        rounds=len(every),
    )


def accept_uncond(at_position: PositionCounts) -> float | None:
    """How often draft i is kept, of the uncut rounds that drafted it."""
    return ratio(at_position.accepted, at_position.drafted)


def accept_cond(at_position: PositionCounts) -> float | None:
    """How often draft i is kept, of the uncut rounds that drafted it and kept draft i - 1."""
    return ratio(at_position.accepted, at_position.reached)


def accept_of_rounds(at_position: PositionCounts) -> float | None:
    """Rounds that accepted draft i over all rounds, whatever they drafted; None where none drafted it."""
    return ratio(at_position.accepted_in_all, at_position.rounds) if at_position.drafted_in_all else None


def accept_joint(conditional: Sequence[float | None]) -> list[float | None]:
    """Products of accept_cond up to each position; None from the first that nobody reached."""
    return list(accumulate(conditional, lambda before, p: None if p is None or before is None else before * p))


def accept_joint_everywhere(lengths: Collection[int], position: int) -> float | None:
    """The share of places whose accepted length is at least i: of `accepted`, or teacher-forced of `proxy_accepted`."""
    return ratio(sum(length >= position for length in lengths), len(lengths))


def tokens_per_s(requests: Iterable[Request]) -> float | None:
    """Pooled decoding speed of those that have a decoding time, prefill and its token left out."""
    rows = [r for r in requests if has_decoding(r)]
    return ratio(1e9 * sum(r.timed_tokens for r in rows), sum(r.decode_ns for r in rows))


def tokens_per_s_e2e(requests: Iterable[Request]) -> float | None:
    """Pooled speed from the request to its last token, prefill included."""
    rows = [r for r in requests if counts(r)]
    return ratio(1e9 * sum(r.tokens_kept for r in rows), sum(r.ttft_ns + r.decode_ns for r in rows))


def throughput_tokens_per_s(batches: Iterable[Sequence[Request]]) -> float | None:
    """Tokens of everything decoded side by side over the time of the longest. batches: the requests of each."""
    timed = [[r for r in batch if counts(r)] for batch in batches]
    tokens = sum(r.timed_tokens for batch in timed for r in batch if has_decoding(r))
    return ratio(1e9 * tokens, sum(max((r.decode_ns for r in batch), default=0) for batch in timed))


def best_plain(requests: Iterable[Request]) -> list[Request]:
    """Plain requests of the kernel with the highest tokens_per_s; [] without any.

    requests: of one session, engine, dtype, batch size, temperature and number of threads.
    """
    by_kernel = grouped((r for r in requests if r.method == "none" and counts(r)), lambda r: r.kernel)
    return max((by_kernel[name] for name in sorted(by_kernel)), key=lambda rows: tokens_per_s(rows) or 0.0, default=[])


def timed_pairs(requests: Iterable[Request]) -> dict[tuple[str, int], tuple[float, float]]:
    """(prompt, process) -> the mean tokens of its repetitions, and their seconds at the steady time of a token."""
    requests_of = grouped(filter(has_decoding, requests), lambda r: (r.prompt_id, r.process))
    means = {pair: fmean(r.timed_tokens for r in rows) for pair, rows in requests_of.items()}
    times = {pair: steady([r.decode_ns / 1e9 / r.timed_tokens for r in rows]) for pair, rows in requests_of.items()}
    return {pair: (tokens, tokens * times[pair]) for pair, tokens in means.items()}


def speedup(drafted: Iterable[Request], plain: Iterable[Request]) -> float | None:
    """How many times as fast decoding is. plain: of best_plain. None where no process decoded a prompt both ways."""
    drafted_pairs, plain_pairs = timed_pairs(drafted), timed_pairs(plain)
    pairs = sorted(drafted_pairs.keys() & plain_pairs.keys())
    times = Counter(prompt for prompt, _ in pairs)
    sums = [
        [sum(side[p][part] / times[p[0]] for p in pairs) for part in (0, 1)] for side in (drafted_pairs, plain_pairs)
    ]
    return sums[0][0] / sums[0][1] * sums[1][1] / sums[1][0] if pairs else None


def speedup_e2e(drafted: Iterable[Request], plain: Iterable[Request]) -> float | None:
    """The speedup from the request to its last token, prefill included, on the prompts that both answered."""
    drafted_rows, plain_rows = [r for r in drafted if counts(r)], [r for r in plain if counts(r)]
    shared = {r.prompt_id for r in drafted_rows} & {r.prompt_id for r in plain_rows}
    fast, slow = (tokens_per_s_e2e(r for r in side if r.prompt_id in shared) for side in (drafted_rows, plain_rows))
    return ratio(fast or 0.0, slow or 0.0)


def ttft_ms_p50(requests: Iterable[Request]) -> float | None:
    """The median time to the first token."""
    return median(times) / 1e6 if (times := [r.ttft_ns for r in requests if counts(r)]) else None


def tpot_ms(requests: Iterable[Request]) -> list[float]:
    """Time per output token after the first, of each answer that has a decoding time."""
    return [r.decode_ns / r.timed_tokens / 1e6 for r in requests if has_decoding(r)]


def tpot_ms_p50(requests: Iterable[Request]) -> float | None:
    """The median of tpot_ms."""
    return median(times) if (times := tpot_ms(requests)) else None


def tpot_ms_p99(requests: Iterable[Request]) -> float | None:
    """The 99th percentile of tpot_ms, linear between neighbours."""
    times = tpot_ms(requests)
    return quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else next(iter(times), None)


def ratio(above: float, below: float) -> float | None:
    """above / below; None where below is 0: nobody measured it."""
    return above / below if below else None


PARTS: Final = 10  # the shortest tenth of the timings counts
MIN_TIMINGS: Final = 3  # but never more than half of them


def steady(times: ArrayLike) -> float:
    """The mean of the shortest tenth of `times`, in their unit; of at least three or, of few, of the lower half.

    Other work on a machine makes a time longer, never shorter: the longest timings show how busy the machine was, the
    shortest how long the work takes. On a machine without any other task, slices of plain decoding still scattered by a
    third, since neighbours share its memory. With a load that came and went on one core, the cost of a round over a
    plain step differed between processes by 4.4 % by the mean of the lower half of 55 slices, by 3.4 % by that of the
    lowest quarter and by 1.8 % by that of the lowest tenth. The minimum is as steady there, but keeps falling as
    timings are added.

    NaN are left out (NaN where all are). The middle one of an odd number belongs to the lower half.
    """
    values = np.asarray(times, dtype=np.float64).ravel()
    values = np.sort(values[~np.isnan(values)])
    count = max(-(-len(values) // PARTS), min(MIN_TIMINGS, -(-len(values) // 2)))
    return float(values[:count].mean()) if count else math.nan
