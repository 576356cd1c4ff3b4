"""Measures drafters on this machine: acceptance maps, step costs, end-to-end comparisons."""

from components.bench.steps import autotune as autotune
from components.bench.steps import compare_end_to_end as compare_end_to_end
from components.bench.steps import compare_stop as compare_stop
from components.bench.steps import measure_acceptance as measure_acceptance
from components.bench.steps import measure_llama_cpp as measure_llama_cpp
from components.bench.steps import measure_server as measure_server
from components.bench.steps import measure_step_cost as measure_step_cost
