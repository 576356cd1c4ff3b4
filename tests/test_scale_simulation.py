"""The simulation of training at scale: what its parts cost, which part is the bottleneck, and a record made anew."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.record import RESULTS
from benchmarks.scale.factory import BLOCK_TOKENS, Cluster, Factory, best_split, stored, streamed
from benchmarks.scale.shapes import SHAPES, Shape
from benchmarks.scale.simulate import NEVER, SEED, scenario

CALM = Cluster(gpu_hours_between_failures=NEVER, restart_s=0.0)
EIGHT = SHAPES["8B"]
TOKENS = 400 * BLOCK_TOKENS


def hours_alone(shape: Shape, engines: int, trainers: int, cluster: Cluster) -> tuple[float, float]:
    """Hours of the engines and of the training if neither waited for the other."""
    group = Factory(shape, cluster, engines, trainers, seed=0)
    steps = TOKENS / (group.blocks_a_step * BLOCK_TOKENS)
    return TOKENS / (engines * shape.engine_tokens_per_s) / 3600, steps * group.step_s() / 3600


def test_costs_of_a_token_are_those_of_the_published_shapes() -> None:
    assert [round(SHAPES[name].feature_bytes / 1000, 1) for name in ("8B", "70B")] == [32.8, 65.5]
    assert EIGHT.draft_params == pytest.approx(425e6, rel=0.01)
    assert EIGHT.training_flops == pytest.approx(17e9, rel=0.02)
    assert EIGHT.engine_tokens_per_s == pytest.approx(27_000, rel=0.05), "what SpecForge measured"
    both = 1 / (1 / EIGHT.engine_tokens_per_s + 1 / EIGHT.trainer_tokens_per_s)
    assert both == pytest.approx(12_000, rel=0.05), "target and drafter on one GPU in turns"
    kimi = SHAPES["1T MoE"]
    gpu_hours = 6e9 * (kimi.gpus / kimi.engine_tokens_per_s + 1 / kimi.trainer_tokens_per_s) / 3600
    assert gpu_hours == pytest.approx(1500, rel=0.05), "TorchSpec's total, which MOE_PREFILL_SHARE was taken from"


@pytest.mark.parametrize("name", SHAPES)
def test_without_failures_the_slower_part_decides(name: str) -> None:
    shape, gpus = replace(SHAPES[name], weight_bytes=0.0), 4 * SHAPES[name].gpus + 4
    engines, trainers = best_split(shape, CALM, gpus)
    assert engines * shape.gpus + trainers == gpus
    made, alone = streamed(shape, CALM, gpus, TOKENS, 1), hours_alone(shape, engines, trainers, CALM)
    assert max(alone) <= made.hours <= 1.15 * max(alone)
    assert made.moved_bytes == pytest.approx(TOKENS * shape.feature_bytes) and made.repeated_tokens == 0


def test_a_slow_store_is_the_bottleneck_and_decides_how_long_it_takes() -> None:
    slow = replace(CALM, store=1e8)
    made = stored(EIGHT, slow, 8, TOKENS, 2)
    assert made.bottleneck == "store, then store"
    assert made.hours == pytest.approx(3 * TOKENS * EIGHT.feature_bytes / slow.store / 3600, rel=0.02)
    assert made.stored_bytes == TOKENS * EIGHT.feature_bytes


def test_a_death_costs_the_work_since_the_checkpoint_and_nothing_is_lost_for_good() -> None:
    dying = replace(CALM, gpu_hours_between_failures=0.6, restart_s=60.0)
    often, seldom = (
        streamed(EIGHT, replace(dying, checkpoint_every_s=every), 8, TOKENS, 4, seed=3) for every in (20.0, 400.0)
    )
    at_rest = streamed(EIGHT, CALM, 8, TOKENS, 4)
    assert often.failures["trainers"] > 0 and seldom.failures["trainers"] > 0
    assert at_rest.hours < often.hours and often.repeated_tokens < seldom.repeated_tokens
    passed = 4 * TOKENS + seldom.repeated_tokens
    assert seldom.moved_bytes >= passed * EIGHT.feature_bytes * 0.999, "what died untrained was asked for again"


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    dying = replace(CALM, gpu_hours_between_failures=5.0)
    first, again, other = (streamed(EIGHT, dying, 8, TOKENS, 4, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_the_record_is_what_the_simulation_says_today() -> None:
    recorded: dict[str, Any] = json.loads(max(RESULTS.glob("scale-simulation-*.json")).read_text(encoding="utf-8"))
    assert recorded["simulated"] is True and recorded["seed"] == SEED
    runs = [run for run in recorded["runs"] if run["conversations"] == 100_000]
    for run in runs:
        today = scenario(run["target"], run["conversations"], run["gpus"], run["way"])
        assert today == run
