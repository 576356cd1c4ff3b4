"""The speedup model, its uncertainty, and the depth policy. Arithmetic on rows: no torch."""

from components.speedup.choose import choose_depth
from components.speedup.confirm import confirm_depth

__all__ = ["choose_depth", "confirm_depth"]
