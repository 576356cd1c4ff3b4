"""The speedup model, its uncertainty, and the depth policy. Arithmetic on rows: no torch."""

from components.speedup.choose import choose_depth
from components.speedup.confirm import confirm_depth
from components.speedup.drift import measure_drift

__all__ = ["choose_depth", "confirm_depth", "measure_drift"]
