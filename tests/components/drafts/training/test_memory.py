"""What training says of its memory before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_drafts import TRAINED, new_draft

from components.contract import UserError
from components.data.features.format import FeatureRow
from components.drafts.training import memory
from components.drafts.training.batches import BatchOrder
from components.drafts.training.loop import Schedule
from components.drafts.training.memory import check_memory, peak_memory
from components.targets.interface import AbstractTarget

SCHEDULE = Schedule(9, 1e-3, 0.1, 0.0, 1.0, 3, 3, "float32", "muon", 10.0)
DEVICE = torch.device("cpu")
ROWS = tuple(FeatureRow(str(i), "w", "train", "s", i, 200 + i, 150) for i in range(8))
ORDER = BatchOrder(ROWS, batch_tokens=1024, max_tokens=400, seed=5)


@pytest.mark.parametrize("method", TRAINED)
def test_every_method_has_an_estimate_that_lean_settings_lower(
    method: str, tiny_target: Callable[[str], AbstractTarget]
) -> None:
    draft = new_draft(tiny_target("llama"), method)
    whole = peak_memory(draft, ORDER, SCHEDULE, DEVICE)
    assert whole.features == 4 * 224 * 4 * 4 * draft.target.shape.hidden_size
    in_parts = peak_memory(draft, ORDER, replace(SCHEDULE, micro_batch_tokens=256), DEVICE)
    assert in_parts.features == whole.features // 4
    assert 1.2 < whole.activations / in_parts.activations < 4.5  # masks and weights do not shrink with the batch
    assert peak_memory(draft, ORDER, replace(SCHEDULE, recompute=True), DEVICE).activations <= 1.05 * whole.activations


def test_what_cannot_fit_is_refused_with_the_setting_that_would(
    tiny_target: Callable[[str], AbstractTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = new_draft(tiny_target("llama"), "eagle3")
    needed = {
        lean: peak_memory(draft, ORDER, replace(SCHEDULE, recompute=lean), DEVICE).needed for lean in (True, False)
    }
    assert needed[True] < 0.7 * needed[False]
    for free, said in ((needed[True] + 1000, "recompute: true"), (0, "a smaller batch_tokens")):
        monkeypatch.setattr(memory, "_free", lambda device, free=free: free)
        with pytest.raises(UserError, match=said):
            check_memory(draft, ORDER, SCHEDULE, DEVICE)
    monkeypatch.setattr(memory, "_free", lambda device: needed[False] + 1000)
    assert "peak memory" in check_memory(draft, ORDER, SCHEDULE, DEVICE)
