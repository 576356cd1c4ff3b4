"""Measures drafters on this machine: acceptance maps, step costs, end-to-end comparisons."""

from components.bench.steps import (
    autotune,
    compare_end_to_end,
    measure_acceptance,
    measure_llama_cpp,
    measure_server,
    measure_step_cost,
)

__all__ = [
    "autotune",
    "compare_end_to_end",
    "measure_acceptance",
    "measure_llama_cpp",
    "measure_server",
    "measure_step_cost",
]
