"""Rules that a whole pipeline must keep, checked from its settings before anything runs; it holds no steps."""

from components.pipeline_checks.engines import check_engine_compatibility
from components.pipeline_checks.named_things import check_names_and_sizes
from components.pipeline_checks.overlap import check_train_eval_overlap
from components.pipeline_checks.positions import check_target_positions
from components.pipeline_checks.tuning import check_method_known, check_tuning_consistency
from components.pipeline_checks.verdict_prompts import check_verdict_prompts

CHECKS = (
    check_train_eval_overlap,
    check_engine_compatibility,
    check_tuning_consistency,
    check_names_and_sizes,
    check_target_positions,
    check_method_known,
    check_verdict_prompts,
)
"""Each takes the steps of a pipeline and yields its faults."""

__all__ = ["CHECKS"]
