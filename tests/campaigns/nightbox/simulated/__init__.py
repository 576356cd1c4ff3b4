"""A room of steps that measure drafters whose truth is known."""

from nightbox.simulated.measure import compare_end_to_end, measure_acceptance, measure_step_cost
from nightbox.simulated.traffic import collect_traffic

__all__ = ["collect_traffic", "compare_end_to_end", "measure_acceptance", "measure_step_cost"]
