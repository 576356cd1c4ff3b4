"""Several short conversations in one row of a batch, so that next to nothing of it is padding.

Rows of a batch are lanes of one width. An epoch fills lanes with conversations, the longest first, each into the first
lane that has room (first-fit decreasing: at most 11/9 of the fewest lanes; Dosa 2007), then takes the lanes in random
order. All batches of a run have the same shape [lanes, width] but the last of a pool, which is shorter: kernels that
are compiled or captured for a shape are so once.
Packed conversations do not see each other (causal_mask.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from components.data.features import Example
from components.drafts.causal_mask import Documents
from components.drafts.draft import Batch


def lane_width(longest: int, batch_tokens: int, multiple: int) -> int:
    """Width of a lane: at least `longest`, a multiple of `multiple`, such that whole lanes fill batch_tokens."""
    least = -(-longest // multiple) * multiple
    num_lanes = max(1, batch_tokens // least)
    return max(least, batch_tokens // num_lanes // multiple * multiple)


def first_fit_decreasing(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Indices of lengths, lane by lane; no lane holds more than width."""
    lanes: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        lane = next((lane for lane, free in enumerate(room) if free >= lengths[index]), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            room.append(width)
        lanes[lane].append(index)
        room[lane] -= lengths[index]
    return lanes


def in_order(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """(lane, first column) of each length: into the current lane while it has room, else into the next.

    Of all ways to keep the order this takes the fewest lanes, so rows packed lane after lane fit again.
    """
    places, lane, used = [], 0, 0
    for length in lengths:
        if used and used + length > width:
            lane, used = lane + 1, 0
        places.append((lane, used))
        used += length
    return places


def packed(examples: Sequence[Example], max_tokens: int, width: int, device: torch.device) -> Batch:
    """Examples in lanes of `width` columns, in their order; each is cut to its first max_tokens tokens.

    mask is False at every first token: no draft may cross from one conversation into the next (causal_mask.py).
    """
    lengths = [min(len(example.ids), max_tokens) for example in examples]
    assert max(lengths) <= width
    places = in_order(lengths, width)
    shape = (places[-1][0] + 1, width)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    numbers, positions = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    first = examples[0]
    taps, last = (part.new_zeros((*shape, part.shape[-1]), device=device) for part in (first.taps, first.last))
    used = torch.zeros(shape[0], dtype=torch.int64)
    for number, (example, length, (lane, start)) in enumerate(zip(examples, lengths, places, strict=True)):
        columns = slice(start, start + length)
        ids[lane, columns], mask[lane, columns] = example.ids[:length], example.mask[:length]
        mask[lane, start] = False
        numbers[lane, columns], positions[lane, columns] = number, torch.arange(length)
        taps[lane, columns], last[lane, columns] = example.taps[:length], example.last[:length]
        used[lane] = start + length
    documents = Documents(numbers.to(device), positions.to(device))
    return Batch(ids.to(device), mask.to(device), taps.float(), last.float(), used.to(device), documents=documents)
