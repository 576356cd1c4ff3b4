"""Every kernel of Linear computes the same product, and calibration decides by time alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from components.targets import linear
from components.targets.linear import NEVER, Linear, calibrate, describe, pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed_from", [1, 3, NEVER])
@pytest.mark.parametrize("with_bias", [True, False])
def test_all_kernels_compute_the_same_product(dtype: torch.dtype, packed_from: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 48, generator=generator).to(dtype)
    bias = torch.randn(80, generator=generator).to(dtype) if with_bias else None
    layer = Linear(weight, bias, packed_from=packed_from)
    tolerance: dict[str, Any] = (
        {"rtol": 2e-2, "atol": 2e-1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    for rows in (1, 2, 3, 7):
        x = torch.randn(rows, 48, generator=generator).to(dtype)
        residual = torch.randn(rows, 80, generator=generator).to(dtype)
        exact = F.linear(x, weight, bias)
        assert torch.allclose(layer(x), exact, **tolerance)
        assert torch.allclose(layer.add_to(residual, x), residual + exact, **tolerance)


def test_without_the_private_operators_everything_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_operators", lambda: (None, None))
    weight = torch.randn(16, 8)
    layer = Linear(weight, packed_from=1)
    assert pack(weight) is None
    assert calibrate(weight) == NEVER
    assert describe([layer]) == "plain"
    assert torch.allclose(layer(torch.ones(2, 8)), weight.sum(1).expand(2, -1), atol=1e-5)


def test_the_quicker_kernel_is_chosen_from_where_it_wins_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    if pack(torch.zeros(8, 8)) is None:
        pytest.skip("this build of PyTorch cannot prepack")
    for wins_from in (1, 2, 5):

        def seconds(layers: list[Linear], x: torch.Tensor, repetitions: int, wins_from: int = wins_from) -> float:
            packed = layers[0].packed is not None
            return 1.0 if packed == (x.shape[0] >= wins_from) else 2.0

        monkeypatch.setattr(linear, "_quick_seconds", seconds)
        start = calibrate(torch.zeros(8, 8))
        assert start == wins_from
        expected = {1: "prepacked", 2: "mixed[8x8>=2]", 5: "mixed[8x8>=5]"}
        assert describe([Linear(torch.zeros(8, 8), packed_from=start)]) == expected[wins_from]
