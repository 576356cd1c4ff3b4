"""A room of steps that measure drafters whose truth is known."""

from nightbox.simulated.measure import compare_end_to_end, measure_acceptance, measure_step_cost

__all__ = ["compare_end_to_end", "measure_acceptance", "measure_step_cost"]
