"""The speedup model, its uncertainty, and the depth policy. Arithmetic on rows: no torch."""

from components.speedup.choose import choose_depth
from components.speedup.confirm import confirm_depth
from components.speedup.drift import measure_drift
from components.speedup.engine_comparison import compare_engines
from components.speedup.languages import measure_languages

__all__ = ["choose_depth", "compare_engines", "confirm_depth", "measure_drift", "measure_languages"]
