"""How a drafter's weights are stored: what drafts.quantise_draft was told, and draft.json says. Imports no torch.

The arithmetic is in quantised.py; engines are asked about it by publish/profiles.py, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Weights = Literal["bf16", "int8", "int4"]
BITS: Final[dict[str, int]] = {"int8": 8, "int4": 4}
DEFAULT_GROUP: Final[dict[str, int]] = {"bf16": 0, "int8": 0, "int4": 32}


@dataclass(frozen=True)
class Storage:
    """How a drafter's weights are stored. group_size: 0 is one scale for each output channel; bf16 has no groups.

    keep: layers that stay in bfloat16, by the last part of their name.
    """

    weights: Weights
    group_size: int = 0
    keep: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Storage | None:
        """What draft.json says; None for a drafter as it was trained, in float32.

        Raises:
            ValueError: it says what drafts.quantise_draft never writes.
        """
        told = record.get("storage")
        if told is None:
            return None
        own = told if isinstance(told, dict) else {}
        weights, size, keep = own.get("weights"), own.get("group_size"), own.get("keep")
        named = isinstance(keep, list) and all(isinstance(name, str) for name in keep)
        if weights not in DEFAULT_GROUP or type(size) is not int or size < 0 or not named:
            raise ValueError(f"storage {str(told)[:80]} is none that drafts.quantise_draft writes")
        return cls.told(own)

    @classmethod
    def told(cls, settings: Mapping[str, Any]) -> Storage:
        """Of the settings of drafts.quantise_draft, resolved."""
        return cls(settings["weights"], int(settings["group_size"]), tuple(settings["keep"]))

    @property
    def bits(self) -> int | None:
        """Bits of a code; None where nothing is quantised."""
        return BITS.get(self.weights)

    @property
    def in_words(self) -> str:
        """int4, groups of 32; fc, lm_head in bf16."""
        if self.weights == "bf16":
            return "bf16"
        scale = f"groups of {self.group_size}" if self.group_size else "a scale for each output channel"
        return f"{self.weights}, {scale}" + (f"; {', '.join(self.keep)} in bf16" if self.keep else "")
