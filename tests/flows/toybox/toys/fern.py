"""A fern."""

from __future__ import annotations

from toybox.toys import light


class Fern:
    """Grows in squares."""

    def at(self, step: int) -> int:
        """Its height at a step."""
        return light.shine(step) * step  # a comment
