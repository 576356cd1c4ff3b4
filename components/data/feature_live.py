"""Online features: hidden states are computed while training, at the cost of one more target pass for each batch.

The artifact holds the answers' tokens and masks (5 bytes a token) and the key of their target, which training has in
memory anyway. A batch's rows go through the target together, in passes of at most `tokens_per_pass` tokens, and are
rounded to bf16. So the features equal the stored ones up to rounding, and bit for bit where the same rows share a pass.

Nothing is cached between batches, on purpose. With a cache, a row's last bits would depend on the rows that it once
shared a pass with, and a run resumed after a kill, with an empty cache, would no longer end with the same bits; within
a batch no row occurs twice, and an epoch is longer than any cache that is smaller than a store. Nor is the next batch
computed ahead: the target's pass and the training step need the same cores, or the same GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from components.data.feature_passes import States, forward_passes
from components.data.features import Example, FeatureRow, FeatureSource
from components.targets.model import AbstractTarget


@final
class LiveFeatures(FeatureSource):
    """Features computed by the target on demand."""

    def __init__(self, path: Path, manifest: dict[str, Any], target: AbstractTarget | None = None) -> None:
        super().__init__(path, manifest)
        self.target = target

    def computed_by(self, target: AbstractTarget) -> LiveFeatures:
        """See FeatureSource."""
        return LiveFeatures(self.path, self.manifest, target)

    def load_all(self, rows: Sequence[FeatureRow], max_tokens: int | None = None) -> list[Example]:
        """See FeatureSource. Features are on the target's device."""
        assert self.target is not None, "features on the fly need `computed_by` first"
        ids = [self.shards.part(row, "ids", max_tokens).long() for row in rows]
        states: dict[int, States] = {}
        for passed in forward_passes(self.target, ids, int(self.manifest["tokens_per_pass"])):
            states |= passed
        return [
            Example(row.row_id, row.workload, ids[place], self.shards.part(row, "mask", max_tokens), *states[place])
            for place, row in enumerate(rows)
        ]
