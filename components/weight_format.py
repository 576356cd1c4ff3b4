"""The weight format of a drafter: settings of drafts.quantise_draft, recorded in draft.json. Imports no torch.

The arithmetic is in quantisation.py; engines/profiles.py checks engine support before anything is trained.
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
    """The weight format of a drafter. group_size: 0 is one scale for each output channel; bf16 has no groups.

    keep: layers that stay in bfloat16, by the last part of their name.
    """

    weights: Weights
    group_size: int = 0
    keep: tuple[str, ...] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Storage | None:
        """The format in draft.json; None for an unquantised drafter, in float32.

        Raises:
            ValueError: drafts.quantise_draft never writes such a format.
        """
        stored = record.get("storage")
        if stored is None:
            return None
        fields = stored if isinstance(stored, dict) else {}
        weights, size, keep = fields.get("weights"), fields.get("group_size"), fields.get("keep")
        valid_keep = isinstance(keep, list) and all(isinstance(name, str) for name in keep)
        if weights not in DEFAULT_GROUP or type(size) is not int or size < 0 or not valid_keep:
            raise ValueError(f"storage {str(stored)[:80]} is none that drafts.quantise_draft writes")
        return cls.from_settings(fields)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Storage:
        """The format for resolved settings of drafts.quantise_draft."""
        return cls(settings["weights"], int(settings["group_size"]), tuple(settings["keep"]))

    @property
    def bits(self) -> int | None:
        """Bits of a code; None where nothing is quantised."""
        return BITS.get(self.weights)

    @property
    def description(self) -> str:
        """For people, e.g. "int4, groups of 32; fc, lm_head in bf16"."""
        if self.weights == "bf16":
            return "bf16"
        scale = f"groups of {self.group_size}" if self.group_size else "a scale for each output channel"
        return f"{self.weights}, {scale}" + (f"; {', '.join(self.keep)} in bf16" if self.keep else "")
