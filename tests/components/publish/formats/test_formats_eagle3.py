"""EAGLE-3's checkpoint names its tapped layers as every engine reads them, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tiny_formats import drafter_state

from components.contract import UserError
from components.drafts.interface import AbstractDraft
from components.publish.formats.checkpoint import Checkpoint
from components.publish.formats.eagle3 import TAPS, tap_ids
from components.publish.formats.interface import Source
from components.publish.formats.registry import (
    check_checkpoint,
    layout_of,
)

Networks = Callable[[str, dict[str, Any]], AbstractDraft]


def test_taps_of_a_shallow_target_are_named_at_both_places(networks: Networks, source: Source) -> None:
    """Engines would tap [2, 2, 2] of five layers; where their default is right, nothing is named."""
    layout, drafter = layout_of("eagle3"), drafter_state(networks("eagle3", {}), {})
    assert TAPS not in layout.lay_out(drafter, source).config
    shallow = replace(source, shape=replace(source.shape, num_layers=5))
    config = layout.lay_out(drafter, shallow).config
    assert (config[TAPS], config["eagle_config"][TAPS]) == ([1, 2, 4], [0, 1, 3])
    assert tap_ids(config) == list(shallow.shape.tap_layers)
    check_checkpoint(layout, layout.lay_out(drafter, shallow), "here", shallow.shape)


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, "the last layer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, "the last layer"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"fc.weight"),
        ({"eagle_aux_hidden_state_layer_ids": "2,4,5"}, "ascending"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
            },
            r"the same layers there are \[1, 3, 4\]",
        ),
    ],
)
def test_tapped_layers_that_engines_would_read_differently_are_refused(
    inside: dict[str, Any], why: str, networks: Networks, source: Source
) -> None:
    layout = layout_of("eagle3")
    checkpoint = layout.lay_out(drafter_state(networks("eagle3", {}), {}), source)
    both = {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }
    check_checkpoint(layout, Checkpoint(checkpoint.config | both, checkpoint.tensors), "here", source.shape)
    with pytest.raises(UserError, match=why):
        check_checkpoint(layout, Checkpoint(checkpoint.config | inside, checkpoint.tensors), "here", source.shape)
