"""The speedup model, its uncertainty, and the depth policy. Arithmetic on rows: no torch."""

from components.speedup.steps import (
    choose_depth,
    choose_stop,
    compare_engines,
    confirm_depth,
    confirm_stop,
    measure_drift,
    measure_languages,
    measure_tuning,
)

__all__ = [
    "choose_depth",
    "choose_stop",
    "compare_engines",
    "confirm_depth",
    "confirm_stop",
    "measure_drift",
    "measure_languages",
    "measure_tuning",
]
