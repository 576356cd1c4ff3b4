"""Measures drafters on this machine: acceptance maps, step costs, end-to-end comparisons."""

from components.bench.acceptance.measure import measure_acceptance
from components.bench.calibration import autotune
from components.bench.cost.measure import measure_step_cost
from components.bench.end_to_end.compare import compare_end_to_end
from components.bench.engines.llama_cpp import measure_llama_cpp
from components.bench.engines.server import measure_server

__all__ = [
    "autotune",
    "compare_end_to_end",
    "measure_acceptance",
    "measure_llama_cpp",
    "measure_server",
    "measure_step_cost",
]
