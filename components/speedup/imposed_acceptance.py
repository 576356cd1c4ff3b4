"""Holds the speedup model against servers whose acceptance is imposed: no drafter's quality is in it.

A server that was told how often to accept draft 1, 2, ... (vLLM: rejection_sample_method synthetic) drafts and verifies
as ever and throws a dice instead of comparing. At a rate of 0 each round keeps one token, the target's own, so that its
time per token is that of a round, T_verify(k) + T_draft(k) and the engine's own work together; that of the plain server
is T_target. At any other rate the model then says

    S(k) = AL(k) * T_target / (T_verify(k) + T_draft(k)) = AL(k) * S at rate 0

with an AL(k) that nobody has to measure. Where the server is faster or slower than that, a round costs the engine
otherwise when more of it is kept, and predictions from step costs are off by as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from components.definitions import al, has_decoding, has_rounds, steady
from components.rows import Request, grouped
from components.speedup.prediction.flags import MAX_PREDICTION_GAP


def expected_rounds(rates: Sequence[float], num_tokens: int) -> float:
    """The mean number of rounds that emit `num_tokens` tokens, the last of them cut at the end of the answer.

    rates: share of rounds that accept draft 1, 2, ...; none exceeds the one before.
    """
    exactly = [before - after for before, after in zip((1.0, *rates), (*rates, 0.0), strict=True)]
    rounds = [0.0]
    for left in range(1, num_tokens + 1):
        rounds.append(1.0 + sum(share * rounds[max(0, left - kept - 1)] for kept, share in enumerate(exactly)))
    return rounds[num_tokens]


def imposed_al(rates: Sequence[float], requests: Iterable[Request]) -> float | None:
    """The acceptance length that the rates give answers of these lengths: tokens / expected rounds; None without any.

    It is below 1 + sum(rates), since the end of an answer cuts its last round.
    """
    lengths = [row.timed_tokens for row in requests if has_decoding(row)]
    return sum(lengths) / sum(expected_rounds(rates, length) for length in lengths) if lengths else None


def measured_al(requests: Iterable[Request]) -> float | None:
    """The acceptance length of the same answers, by the rounds that the server reports for each; None without any."""
    rows = [row for row in requests if has_rounds(row)]
    return al(sum(row.timed_tokens for row in rows), sum(row.num_rounds for row in rows))


def speed(requests: Iterable[Request]) -> dict[str, float]:
    """prompt -> tokens a second, with each round at its steady time over the repetitions of the prompt.

    The quickest repetition of dice is the luckiest, so repetitions are compared by round and pooled by token. Plain
    decoding has one token a round. Answers whose rounds the server does not report are left out.
    """
    speeds = {}
    for prompt, rows in grouped(filter(has_decoding, requests), lambda row: row.prompt_id).items():
        rounds = [row.timed_tokens if row.method == "none" else row.num_rounds for row in rows]
        if all(rounds):
            seconds = steady([row.decode_ns / 1e9 / count for row, count in zip(rows, rounds, strict=True)]) * sum(
                rounds
            )
            speeds[prompt] = sum(row.timed_tokens for row in rows) / seconds
    return speeds


def speed_ratio(drafted: Iterable[Request], plain: Iterable[Request]) -> float | None:
    """How many times as fast, on the prompts that both answered: the ratio of the harmonic means of their speeds."""
    fast, slow = speed(drafted), speed(plain)
    both = fast.keys() & slow.keys()
    return sum(1.0 / slow[prompt] for prompt in both) / sum(1.0 / fast[prompt] for prompt in both) if both else None


def predicted_speedup(
    rates: Sequence[float], requests: Sequence[Request], at_zero: Sequence[Request], plain: Sequence[Request]
) -> float | None:
    """The speedup model's speed over plain decoding; None where the server was not measured at rate 0, or plain.

    requests: at these rates. at_zero: at the same depth with every draft refused. plain: of the same engine.
    """
    length, round_speed = imposed_al(rates, requests), speed_ratio(at_zero, plain)
    return None if length is None or round_speed is None or not any(rates) else length * round_speed


def verdict(predicted: float | None, measured: float | None) -> str:
    """close, mismatch (off by more than MAX_PREDICTION_GAP) or not_compared."""
    if predicted is None or measured is None:
        return "not_compared"
    return "close" if abs(predicted / measured - 1.0) <= MAX_PREDICTION_GAP else "mismatch"
