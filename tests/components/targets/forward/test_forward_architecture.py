"""Which checkpoints our own forward pass runs: the families it knows, with settings that it knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES, family_config, make_family
from tiny_targets import OURS
from transformers import AutoModelForCausalLM

from components.targets.forward import architecture
from components.targets.forward.architecture import architecture_of
from components.targets.load import open_target


def test_every_family_of_the_tests_and_no_other_is_known() -> None:
    known = {family for family in FAMILIES if architecture_of(family_config(family)) is not None}
    assert known == architecture.FAMILIES & set(FAMILIES) >= set(OURS)


@pytest.mark.parametrize("family", ["llama", *sorted(architecture.FAMILIES & set(FAMILIES) - {"llama"})])
def test_a_family_opens_with_our_own_pass_and_says_what_transformers_says(family: str, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path / family)
    ids = torch.arange(1, 31)[None]
    for dtype, most in (("float32", 1e-4), ("bfloat16", 0.05)):
        ours, theirs = (open_target(folder, kernel=kernel, dtype=dtype) for kernel in ("plain", "transformers"))  # type: ignore[arg-type]
        assert (ours.kernel, theirs.kernel) == ("plain", "transformers")
        passes = [one.forward(ids, one.new_cache(1, 30), features=True) for one in (ours, theirs)]
        for mine, other in zip(*passes, strict=True):
            assert mine is not None and other is not None
            assert float((mine.float() - other.float()).abs().mean() / other.float().abs().mean()) < most


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("qwen3", {"layer_types": ["chunked_attention"] * 8, "attention_chunk_size": 4}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma2", {"query_pre_attn_scalar": 0}),
        ("mistral", {"sliding_window": -1}),
        ("mixtral", {"num_experts_per_tok": 5}),
    ],
)
def test_settings_that_it_does_not_know_go_to_transformers(family: str, changes: dict[str, Any]) -> None:
    config = family_config(family)
    assert architecture_of(config) is not None
    for name, value in changes.items():
        setattr(config, name, value)
    assert architecture_of(config) is None


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_window_that_the_familys_class_does_not_read_is_not_heeded(family: str, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path / family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 4, "attention_chunk_size": 4}))
    ids = torch.arange(1, 31)[None]
    with torch.no_grad():
        said = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids, use_cache=False).logits
    for kernel in ("plain", "transformers"):
        target = open_target(folder, kernel=kernel, dtype="float32")
        assert target.kernel == kernel
        torch.testing.assert_close(target.forward(ids, target.new_cache(1, 30)).logits, said, rtol=1e-4, atol=1e-4)
