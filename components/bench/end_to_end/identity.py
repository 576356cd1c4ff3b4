"""Compares speculative output with plain decoding, and decides whether a difference is rounding or a fault.

A pass over k+1 rows rounds differently from a pass over one row. Where the two best tokens are closer than that noise,
either is right, and after such a tie the texts differ. So a text that differs from plain decoding's is verified by
itself, to its end: every token must be the target's own choice after those before it, up to the noise there.

Kernels add in another order for another number of rows, so logits differ in their last bits, in bfloat16 by a few
hundredths. This noise differs between positions and targets, so it is measured at each position, by passes of several
row counts. A token passes if its logit is at most TIE_FACTOR times the noise below the best one.

How often a correct token fails. On the built-in target, over 216,000 pairs of tokens less than half a logit
apart, the result of a pass of 1 to 8 rows was off from the readings by 5.1 noises in one of 370 in bfloat16
(float32: 5.5), by 7.8 (8.7) in one of 10^4, by 9.3 (10.8) in one of 10^5, by 9.7 (11.3) at most; transformers' own code
by no more. The two best tokens must also be that close: in bfloat16 one position in fifty is so for every noise of
distance, in float32 one in a million. Together 2 * 10^-8 of bfloat16 tokens: where 150 outputs of 96 tokens all differ
from plain, one measurement in 3,000 has a false alarm; in float32 none differs. A wrong token is missed if it is that
close: 0.15 logits in bfloat16, 10^-5 in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from components.targets.interface import AbstractCache, AbstractTarget

TIE_FACTOR: Final = 10.0
WIDER_NOISE: Final = 4.0
"""How much noisier than wide passes the passes of an arm's few rows may be; more than that is not rounding."""


class Identity(NamedTuple):
    """The comparison of one output with the plain output of its prompt; all but the first are None for equal outputs.

    identical:        None where nothing was compared.
    first_divergence: the first position where the two differ; a missing token differs.
    tie:              whether every token is the target's own choice, up to noise: they differ by rounding only.
    first_wrong:      the first position whose token is not; None for a tie.
    shortfall, noise: how far the token is below the best one, and the noise, in logits, at first_wrong, else at
        first_divergence. None for a token that is missing.
    num_rounded:      tokens of the output that are not the likeliest; rounded_expected: their number by rounding
        alone. Equal outputs have those of the plain one (IdentityChecker); None where none was measured.
    """

    identical: bool | None
    first_divergence: int | None = None
    tie: bool | None = None
    first_wrong: int | None = None
    shortfall: float | None = None
    noise: float | None = None
    num_rounded: int | None = None
    rounded_expected: float | None = None


NOT_COMPARED: Final = Identity(None)


class PlainText(NamedTuple):
    """The verification of one plain output.

    tie_chance: the probability that rounding alone gives another way of decoding another text.
    same: the Identity of any output equal to it; not identical where the plain output itself is wrong.
    """

    tie_chance: float
    same: Identity


def first_divergence(tokens: Sequence[int], plain: Sequence[int]) -> int | None:
    """The first output position at which two runs differ; a missing token differs."""
    for index, (token, plain_token) in enumerate(zip(tokens, plain, strict=False)):
        if token != plain_token:
            return index
    return None if len(tokens) == len(plain) else min(len(tokens), len(plain))


def compare(
    target: AbstractTarget, prompt_ids: Sequence[int], plain: Sequence[int], tokens: Sequence[int], rows: int
) -> Identity:
    """Compare one output with the plain one. rows: per sequence in its verification passes; 1 for plain decoding."""
    index = first_divergence(tokens, plain)
    if index is None:
        return Identity(True)
    wrong, reading = _find_wrong_token(target, prompt_ids, tokens, rows) if tokens else (None, None)
    if wrong is None and not _may_end_there(target, tokens, plain):
        return Identity(False, index, False, min(len(tokens), len(plain)))
    assert reading is not None, "an empty output ends too early"
    return _difference(index, wrong, reading)


def check_plain(target: AbstractTarget, prompt_ids: Sequence[int], plain: Sequence[int]) -> PlainText:
    """Verify a plain output like any other; outputs equal to it need no verification of their own."""
    wrong, reading = _find_wrong_token(target, prompt_ids, plain, 1)
    tie_chance = -math.expm1(float(torch.log1p(-reading.chances().clamp(max=1.0 - 1e-12)).sum()))
    num_rounded, expected = _count_rounded(reading)
    same = Identity(True, num_rounded=num_rounded, rounded_expected=expected)
    same = same if wrong is None else _difference(wrong, wrong, reading)
    return PlainText(max(0.0, tie_chance), same)


class IdentityChecker:
    """Compares outputs with plain decoding of one target; each text is verified once."""

    def __init__(self, target: AbstractTarget) -> None:
        self.target = target
        self._plain: dict[tuple[tuple[int, ...], ...], PlainText] = {}
        self._compared: dict[tuple[tuple[int, ...], ...], Identity] = {}

    def check_plain(self, prompt_ids: Sequence[int], plain: Sequence[int]) -> PlainText:
        """As the function `check_plain`, once for each text."""
        key = (tuple(prompt_ids), tuple(plain))
        if key not in self._plain:
            self._plain[key] = check_plain(self.target, prompt_ids, plain)
        return self._plain[key]

    def compare(self, prompt_ids: Sequence[int], plain: Sequence[int], tokens: Sequence[int], rows: int) -> Identity:
        """As the function `compare`, but an output equal to a wrong plain output is wrong too."""
        if first_divergence(tokens, plain) is None:
            return self.check_plain(prompt_ids, plain).same
        key = (tuple(prompt_ids), tuple(plain), tuple(tokens), (rows,))
        if key not in self._compared:
            self._compared[key] = compare(self.target, prompt_ids, plain, tokens, rows)
        return self._compared[key]


def _find_wrong_token(
    target: AbstractTarget, prompt_ids: Sequence[int], tokens: Sequence[int], rows: int
) -> tuple[int | None, Reading]:
    """The first position whose token is not the target's own choice (None: all are), and the reading of all tokens.

    Wide passes are cheap and decide nearly all. A token that fails is read again with passes of the row count that it
    came from and of one row, whose kernels may be noisier, up to WIDER_NOISE.
    """
    reading = read_text(target, prompt_ids, tokens)
    short = -reading.lead / (TIE_FACTOR * reading.noise)
    if bool((short > 1.0).any()) and float(short.max()) <= WIDER_NOISE:
        again = read_text(target, prompt_ids, tokens, sorted({*ROW_COUNTS, rows, 1}, reverse=True))
        reading = again._replace(noise=torch.minimum(again.noise, WIDER_NOISE * reading.noise))
        short = -reading.lead / (TIE_FACTOR * reading.noise)
    wrong = (short > 1.0).nonzero()
    return (int(wrong[0]) if len(wrong) else None), reading


def _difference(index: int, wrong: int | None, reading: Reading) -> Identity:
    at = index if wrong is None else wrong
    shortfall = max(0.0, -float(reading.lead[at]))
    return Identity(False, index, wrong is None, wrong, shortfall, float(reading.noise[at]), *_count_rounded(reading))


def _count_rounded(reading: Reading) -> tuple[int, float]:
    """The number of tokens that are not the likeliest, and the number expected from rounding alone."""
    chances = reading.chances()
    return int((reading.lead < 0).sum()), float(torch.minimum(chances, 1.0 - chances).sum())


def _may_end_there(target: AbstractTarget, tokens: Sequence[int], plain: Sequence[int]) -> bool:
    """Whether lengths may differ: the shorter text ends with end-of-text, and the texts have diverged before."""
    if len(tokens) == len(plain):
        return True
    longer, shorter = (tokens, plain) if len(tokens) > len(plain) else (plain, tokens)
    goes_on = first_divergence(shorter, longer[: len(shorter)]) is None
    return bool(shorter) and shorter[-1] in target.shape.eos_token_ids and not goes_on


ROW_COUNTS: Final = (128, 29, 13)
"""Rows of a pass in each reading; an answer of up to 129 tokens is one pass of the first. Wide passes are cheap; the
others are odd, since kernels work in blocks of 8 or 16 rows and coinciding blocks compute the same bits."""

CANDIDATES: Final = 16
"""Number of likeliest tokens at a position over which noise is measured."""


class Reading(NamedTuple):
    """The target's logits for each of a text's T tokens, given those before, in nats before the softmax."""

    lead: Tensor  # [T] float64: the token's logit minus that of the best other one, mean of the readings
    noise: Tensor  # [T] float64: standard deviation of one logit between readings, common shifts removed
    num_readings: int

    def chances(self) -> Tensor:
        """[T] float64: the probability that another pass prefers the other of the two best tokens, for normal noise.

        Both that pass and the mean of the readings are noisy.
        """
        spread = self.noise * math.sqrt(2.0 * (1.0 + 1.0 / self.num_readings))
        return torch.special.ndtr(-self.lead / spread)


def read_text(
    target: AbstractTarget,
    prompt_ids: Sequence[int],
    tokens: Sequence[int],
    row_counts: Sequence[int] = ROW_COUNTS,
) -> Reading:
    """Read `tokens` (at least one) after the prompt once with every row count, the prompt itself in one pass.

    Noise at a position is never less than that of the text as a whole (few readings may agree by chance), nor than the
    rounding of the logit itself in the target's dtype.
    """
    assert len(tokens) > 0 and len(row_counts) > 1, "noise is a difference of readings"
    device = target.device
    token_column = torch.tensor(list(tokens), device=device)[:, None]
    with torch.inference_mode():
        cache = target.new_cache(1, len(prompt_ids) + len(tokens))
        first = target.forward(torch.tensor([list(prompt_ids)], device=device), cache, logits="last").logits
        assert first is not None
        candidates: Tensor | None = None
        readings = []
        for rows in row_counts:
            parts = [first[0], *_logits_of_passes(target, cache, len(prompt_ids), token_column, rows)]
            if candidates is None:
                candidates = torch.cat([part.topk(min(CANDIDATES, part.shape[-1])).indices for part in parts])
            looked_at = torch.cat((token_column, candidates), dim=1).split([len(part) for part in parts])
            readings.append(torch.cat([part.gather(1, at) for part, at in zip(parts, looked_at, strict=True)]))
    assert candidates is not None
    logits = torch.stack(readings).double().cpu()
    mean, others = logits.mean(dim=0), (candidates != token_column).cpu()
    best_other = mean[:, 1:].masked_fill(~others, -torch.inf).max(dim=1).values
    return Reading(mean[:, 0] - best_other, _noise(logits[:, :, 1:], target.dtype), len(readings))


def _logits_of_passes(
    target: AbstractTarget, cache: AbstractCache, start: int, token_column: Tensor, rows: int
) -> list[Tensor]:
    """Logits [<= rows, V] of each pass over all tokens but the last, from a cache of which `start` columns are kept."""
    cache.truncate(torch.tensor([start]))
    parts = []
    for part in token_column[:-1, 0].split(rows) if len(token_column) > 1 else ():
        logits = target.forward(part[None], cache).logits
        assert logits is not None
        parts.append(logits[0])
    return parts


def _noise(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Reading.noise [T] from the candidates' logits [readings, T, C]."""
    deviation = logits - logits.mean(dim=0)
    deviation = deviation - deviation.mean(dim=2, keepdim=True)  # a shift of all logits changes no choice
    num_readings, _, num_candidates = logits.shape
    variance = deviation.pow(2).sum(dim=(0, 2)) / ((num_readings - 1) * max(1, num_candidates - 1))
    # a number of this dtype near x is a multiple of the spacing: 2^exponent * eps
    spacing = torch.finfo(dtype).eps * torch.exp2(torch.frexp(logits.abs().amax(dim=(0, 2))).exponent - 1.0)
    return torch.stack((variance, variance.mean().expand_as(variance), spacing.pow(2) / 12)).amax(dim=0).sqrt()
