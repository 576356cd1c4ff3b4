"""No format takes weights of the target along without a release saying so of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_formats import FORMS, drafter_state

from components.publish.formats.interface import Source
from components.publish.formats.registry import layout_of
from components.publish.release.target_copies import formats_with_target_weights, holds_target


@pytest.mark.parametrize(("format", "method", "settings"), FORMS)
def test_what_has_a_row_of_the_targets_embedding_or_head_is_said_to(
    format: str, method: str, settings: dict[str, Any], networks: Callable[..., Any], source: Source
) -> None:
    """None of these networks has a weight as it began, so a row of the target's was copied by the layout."""
    tensors = layout_of(format).lay_out(drafter_state(networks(method, settings), settings), source).tensors
    rows = torch.cat((source.embedding(), source.head())).float()
    width = rows.shape[1]
    copied = [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.ndim == 2 and tensor.shape[1] == width
        if bool((torch.cdist(tensor.float(), rows, p=float("inf")).amin(1) == 0.0).any())
    ]
    held = holds_target(format, method, settings, width)
    assert held or not copied, copied
    assert bool(copied) == held or method == "draft-model", "it would be refused without a reason"


@pytest.mark.parametrize(("width", "held"), [(None, True), (0, True), (32, True), (16, False)])
def test_a_draft_model_of_the_targets_width_starts_from_its_embedding(width: int | None, held: bool) -> None:
    settings = {} if width is None else {"hidden_size": width}
    for format in ("causal-lm", "gguf"):
        assert holds_target(format, "draft-model", settings, 32) is held


def test_a_release_that_is_too_old_to_say_is_taken_to_hold_what_settings_decide() -> None:
    told = {
        name: {"format": format, "method": method}
        for name, format, method in (
            ("eagle3", "eagle3", "eagle3"),
            ("medusa", "medusa", "medusa"),
            ("causal-lm", "causal-lm", "draft-model"),
            ("speculators", "speculators", "p-eagle"),
        )
    }
    assert set(formats_with_target_weights(told)) == {"medusa", "causal-lm", "speculators"}
    told["medusa"]["holds_target"] = False  # type: ignore[assignment]
    assert set(formats_with_target_weights(told)) == {"causal-lm", "speculators"}
