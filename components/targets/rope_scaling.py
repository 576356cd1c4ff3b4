"""Reads the scaling of rotary positions from a model's config, without torch.

Our drafters rotate whole heads by rope_theta alone, whatever their target does (drafts/network/layers.py). That is
right where an engine builds them from their own config, and a fault where it builds them from the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rope_scaling_of(rope: Mapping[str, Any], partial_rotary_factor: float | None = None) -> str:
    """The rotary scaling as text: "" for plain positions, else "yarn", "partial_rotary_factor 0.5" or both.

    rope: `rope_parameters`, or `rope_scaling` as older configs call it; {} for neither. partial_rotary_factor: the
    config's own entry of that name, if any.
    """
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    share = rope.get("partial_rotary_factor") or partial_rotary_factor or 1.0
    parts = [] if kind == "default" else [kind]
    if float(share) != 1.0:
        parts.append(f"partial_rotary_factor {float(share):g}")
    return " and ".join(parts)
