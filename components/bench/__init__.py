"""Measures drafters on this machine: acceptance maps, step costs, end-to-end comparisons."""

from components.bench.acceptance import measure_acceptance
from components.bench.autotune import autotune
from components.bench.end_to_end import compare_end_to_end
from components.bench.llama_cpp import measure_llama_cpp
from components.bench.openai_server import measure_server
from components.bench.step_cost import measure_step_cost

__all__ = [
    "autotune",
    "compare_end_to_end",
    "measure_acceptance",
    "measure_llama_cpp",
    "measure_server",
    "measure_step_cost",
]
