"""Rounds by their kind: how many tokens were drafted in them.

Prompt lookup and suffix decoding draft from none to `depth` tokens, by what they find, and a round without draft tokens
takes a plain step. The median round of such a drafter is one of its most frequent kind, and the quietest slices are
those with the fewest draft tokens: both are shorter than a round is on average, which is what speed hangs on. So every
kind is timed for itself, and the mean over the kinds, each as frequent as it was, is the time of a round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from components.bench.clock import BlockStat, slices_stat
from components.bench.measurement.slices import WholeSlice

Samples = Mapping[int, Sequence[Sequence[float]]]
"""Tokens drafted in a round -> times of such rounds, slice by slice."""


def by_kind(slices: Sequence[WholeSlice], times: Iterable[Sequence[int]]) -> dict[int, list[list[int]]]:
    """The rounds of each kind, slice by slice; times: of the rounds of each of these slices, of any phase."""
    kinds_of_rounds: dict[int, list[list[int]]] = {}
    for whole_slice, of_slice in zip(slices, times, strict=True):
        kinds: dict[int, list[int]] = {}
        for drafted, time in zip(whole_slice.drafted, of_slice, strict=True):
            kinds.setdefault(drafted, []).append(time)
        for drafted, some in kinds.items():
            kinds_of_rounds.setdefault(drafted, []).append(some)
    return kinds_of_rounds


def mixed_stat(block: Samples, all_blocks: Samples, counts: Counter[int]) -> BlockStat:
    """The mean over kinds of a block's steady time of each, in the unit of the samples; its deviation likewise.

    counts: kind -> how many rounds of all blocks were of it, so that blocks with few draft tokens are no quieter than
    others. A kind that this block has not is timed by all blocks.
    """
    stats = {kind: slices_stat(block.get(kind) or all_blocks[kind]) for kind in counts}
    return BlockStat(
        sum(stats[kind].median * count for kind, count in counts.items()) / counts.total(),
        sum(stats[kind].mad * count for kind, count in counts.items()) / counts.total(),
        sum(len(samples) for of_kind in block.values() for samples in of_kind),
    )
