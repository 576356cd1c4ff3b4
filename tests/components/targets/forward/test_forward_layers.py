"""Layers in one call of our own: the same bits as layer by layer, whatever the rows, the family and the dtype."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from tiny_targets import OURS, Family
from torch import Tensor

from components.targets.forward.compiled import compiled_functions
from components.targets.forward.kernel_times import Times
from components.targets.forward.linear import choose_kernels
from components.targets.forward.llama import FastTarget
from components.targets.interface import TreeRows
from components.targets.load import open_target

pytestmark = pytest.mark.skipif(compiled_functions() is None, reason="needs a C compiler")

ONE_BY_ONE = {"gemma2", "gemma3_text", "qwen3_moe", "gpt_oss", "mixtral"}
"""Families whose layers have more than the one call runs: norms after a part, experts, capped scores."""

PASSES = ((6, None), (1, None), (4, "tree"), (3, None), (8, None), (1, None))


def _passes(target: FastTarget, sequences: int) -> Iterator[Tensor]:
    """Logits, features of all layers and the cache of chains and trees, up to eight rows in all and more."""
    dice = torch.Generator().manual_seed(1)
    cache = target.new_cache(sequences, 60)
    visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    for rows, kind in PASSES:
        ids = torch.randint(0, target.shape.vocab_size, (sequences, rows), generator=dice)
        tree = None
        if kind == "tree":
            tree = TreeRows(torch.tensor([[0, 1, 1, 2]] * sequences), visible.expand(sequences, -1, -1))
        out = target.forward(ids, cache, features=True, tree=tree)
        assert out.logits is not None and out.taps is not None
        yield from (out.logits, out.taps, cache.kv.clone())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", OURS)
def test_layers_in_one_call_have_the_bits_of_layers_one_by_one(
    family: Family, dtype: Literal["float32", "bfloat16"], tiny_targets: dict[str, Path]
) -> None:
    target = open_target(tiny_targets[family], kernel="streamed", dtype=dtype)
    assert isinstance(target, FastTarget)
    in_one = target._in_one_call
    assert (in_one is None) == (family in ONE_BY_ONE)
    if in_one is None:
        return
    assert in_one.rows == frozenset(range(1, 9))
    for sequences in (1, 2):
        target._in_one_call = in_one
        ours = list(_passes(target, sequences))
        target._in_one_call = None
        for one, other in zip(ours, _passes(target, sequences), strict=True):
            assert torch.equal(one, other)


def test_rows_of_which_a_layer_has_another_kernel_go_one_by_one(tiny_targets: dict[str, Path]) -> None:
    target = open_target(tiny_targets["llama"], kernel="streamed", dtype="float32")
    assert isinstance(target, FastTarget)
    layer = target._layers[-1]
    layer.out.use(("streamed", "plain", "streamed", 5, "streamed"))
    assert target._in_one_call is not None
    assert target._in_one_call.rows == {1, 3, 5, 6, 7, 8}


def test_streamed_is_chosen_for_what_one_call_saves() -> None:
    """It is not padded, and another must be quicker by a tenth."""
    streamed = [58.0, 61.0, 58.0, 50.0, 62.0, 80.0, 80.0, 80.0]
    times: Times = {"plain": [19.0] * 8, "columns": [30.0] * 8, "transposed": [30.0] * 8, "streamed": streamed}
    assert choose_kernels(times, in_one=True) == ("streamed",) * 4 + ("plain",) * 4
    assert choose_kernels(times) == ("plain",) * 8
