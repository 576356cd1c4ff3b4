"""A target is counted from its configuration as it is counted from its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.targets.config import facts_of
from components.targets.size import size_of_model
from components.targets.source import find_folder

CONFIGS = Path(__file__).resolve().parents[3] / "recipes" / "configs"


def test_the_builtin_target_has_the_parameters_of_its_files() -> None:
    folder = find_folder("builtin")
    facts = facts_of(folder, location="builtin", trust_remote_code=False, dtype="float32", device="cpu")
    size = size_of_model("builtin")
    assert size.num_params == facts["num_params"]
    assert 2 * size.kv_bytes == facts["kv_bytes_per_token"]
    assert size.num_in_layers + size.num_in_head == pytest.approx(size.num_params, rel=1e-3)  # the rest: norms


def test_a_dense_model_of_eight_billion_is_counted() -> None:
    size = size_of_model(str(CONFIGS / "meta-llama--Llama-3.1-8B-Instruct"))
    assert size.num_params == 8_030_261_248  # as its card says
    assert size.num_active == size.num_in_layers == 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    assert size.kv_bytes == 2 * 2 * 32 * 8 * 128
    assert size.flops(10, 100, 1) == 10 * (2 * size.num_in_layers + 4 * 32 * 32 * 128 * 100) + 2 * 128256 * 4096


def test_a_token_goes_to_some_experts_and_a_large_pass_reads_them_all() -> None:
    size = size_of_model(str(CONFIGS / "Qwen--Qwen3-30B-A3B"))
    assert 30.4e9 < size.num_params < 30.7e9
    assert 2.9e9 < size.num_active + size.num_in_head < 3.4e9  # "A3B"
    assert size.num_read(1) == pytest.approx(size.num_active)
    assert size.num_active < size.num_read(8) < size.num_read(4096) <= size.num_in_layers
