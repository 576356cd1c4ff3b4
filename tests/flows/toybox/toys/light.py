"""Light, which ferns need."""

from __future__ import annotations

STRENGTH = 1


def shine(step: int) -> int:
    """Light at a step."""
    return step * STRENGTH


def unused() -> int:
    """Nobody calls this."""
    return 7
