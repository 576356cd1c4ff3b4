"""A moss."""

from __future__ import annotations


class Moss:
    """Grows evenly."""

    def at(self, step: int) -> int:
        """Its height at a step."""
        return step
