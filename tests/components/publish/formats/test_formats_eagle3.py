"""EAGLE-3's checkpoint names its tapped layers as every engine reads them, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiny_formats import drafter_state

from components.contract import UserError
from components.drafts.interface import AbstractDraft
from components.publish.formats.checkpoint import Checkpoint
from components.publish.formats.interface import Source
from components.publish.formats.registry import (
    check_checkpoint,
    layout_of,
)

Networks = Callable[[str, dict[str, Any]], AbstractDraft]


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, "the last layer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, "the last layer"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, "3 ascending"),
        ({"eagle_aux_hidden_state_layer_ids": "2,4,5"}, "3 ascending"),
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
