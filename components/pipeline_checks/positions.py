"""The rule that what is measured fits the positions of its target, checked before anything is trained.

Here from the config.json of a target on this machine; one from a hub is looked at when it has been loaded, one that a
step makes when it has been made (flows/execution/engine.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from components.outside_json import JsonObject
from components.pipeline_checks.engines import target_config
from components.pipeline_checks.step_view import Fault, StepView
from components.positions import positions_fault

STATED_AS: Final = ("max_position_embeddings", "n_positions")
"""Names of positions in a config.json; transformers knows more, and such a target is looked at when it is loaded."""


def check_target_positions(steps: Sequence[StepView]) -> Iterator[Fault]:
    """Each setting that asks for more positions than its target has, once for all combinations of a matrix."""
    by_name = {step.name: step for step in steps}
    faults: dict[Fault, None] = {}
    for step in steps:
        positions = positions_of(target_config(step, by_name))
        if positions is None:
            continue
        setting, fault = positions_fault(step.address, step.settings, positions)
        if fault:
            faults[Fault(step.base, f"setting '{setting}': {fault}", ("with", setting))] = None
    yield from faults


def positions_of(config: JsonObject | None) -> int | None:
    """The positions that a config.json states; None where it does not."""
    whole: Mapping[str, object] = config if isinstance(config, Mapping) else {}
    text = whole.get("text_config", whole)
    stated = [text.get(name) for name in STATED_AS] if isinstance(text, Mapping) else []
    return next((value for value in stated if isinstance(value, int) and value > 0), None)
