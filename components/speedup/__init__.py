"""The speedup model, its uncertainty, and the depth policy. Arithmetic on rows: no torch."""

from components.speedup.steps import choose_depth as choose_depth
from components.speedup.steps import compare_engines as compare_engines
from components.speedup.steps import confirm_depth as confirm_depth
from components.speedup.steps import measure_drift as measure_drift
from components.speedup.steps import measure_languages as measure_languages

__all__ = ["choose_depth", "compare_engines", "confirm_depth", "measure_drift", "measure_languages"]
