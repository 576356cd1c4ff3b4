"""Whether a model rotates positions plainly, and what it does otherwise: read from a config, without torch.

Our drafters rotate whole heads by rope_theta alone, whatever their target does (drafts/layers.py). That is theirs to
choose where an engine builds them by their own config, and a fault where it builds them by the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rope_scaling_of(rope: Mapping[str, Any], partial_rotary_factor: float | None = None) -> str:
    """Nothing for plain positions, else what is done with them: "yarn", "partial_rotary_factor 0.5", both.

    rope: `rope_parameters`, or `rope_scaling` as older configs call it; {} for neither. partial_rotary_factor: where
    the config has it beside them.
    """
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    share = rope.get("partial_rotary_factor") or partial_rotary_factor or 1.0
    said = [] if kind == "default" else [kind]
    if float(share) != 1.0:
        said.append(f"partial_rotary_factor {float(share):g}")
    return " and ".join(said)
