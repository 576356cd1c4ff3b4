"""Every format with drafters that use all of it, for the tests of this room."""

from __future__ import annotations

from typing import Any

from components.drafts.interface import AbstractDraft
from components.drafts.network.vocabulary import membership_of, offsets_of
from components.publish.formats.interface import DrafterState

VOCAB = 96
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 7, "intermediate_size": 0},
    "mtp": {"mtp_modules": 3, "first_hidden": "post_norm"},
    "eagle1": {"fc_bias": True},
    "hass": {"fc_bias": False},
    "medusa": {"num_heads": 2, "num_layers": 2},
    "p-eagle": {"parallel_depth": 3, "num_layers": 2},
    "dflash": {"block_size": 4, "num_layers": 1},
    "dspark": {"block_size": 4, "markov_rank": 8, "window": 6},
    "draft-model": {"num_layers": 1},
}
KEYS = {"eagle3": "e" * 64, "mtp": "m" * 64}
FORMS: list[tuple[str, str, dict[str, Any]]] = [
    ("eagle3", "eagle3", {}),
    ("eagle3", "eagle3", {"fc_norm": True, "norm_output": True, "intermediate_size": 40}),
    ("speculators", "eagle3", {}),
    ("speculators", "eagle3", {"fc_norm": True}),
    ("speculators", "p-eagle", SETTINGS["p-eagle"]),
    ("dflash", "dflash", SETTINGS["dflash"]),
    ("dflash", "dspark", SETTINGS["dspark"]),
    ("z-lab", "dflash", SETTINGS["dflash"]),
    ("z-lab", "dspark", SETTINGS["dspark"] | {"window": 0}),
    ("eagle1", "eagle1", SETTINGS["eagle1"]),
    ("eagle1", "hass", SETTINGS["hass"]),
    ("medusa", "medusa", SETTINGS["medusa"]),
    ("medusa", "medusa", {"num_heads": 2, "head": "tied"}),
    ("mtp", "mtp", SETTINGS["mtp"]),
    ("mimo", "mtp", {"mtp_modules": 1}),
    ("causal-lm", "draft-model", SETTINGS["draft-model"]),
    ("causal-lm", "draft-model", {"num_layers": 2, "hidden_size": 16}),
]
"""(format, method, settings): every layout at least once, with what changes its tensors."""
WHOLE = ("z-lab",)
"""Formats that hold no drafter of a part of the vocabulary."""


def drafter_state(network: AbstractDraft, settings: dict[str, Any], vocab_size: int = VOCAB) -> DrafterState:
    """The drafter as releases take it."""
    ids: Any = network.draft_ids
    tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    return DrafterState(
        network.method, settings, tensors | {"d2t": offsets_of(ids), "t2d": membership_of(ids, vocab_size)}
    )
