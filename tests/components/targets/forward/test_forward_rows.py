"""Norm, rotation and gate in one function each give what their definitions give, and a row's bits do not depend on
the rows beside it."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from components.targets.forward.compiled import can_run, compiled_functions
from components.targets.forward.rows import gated, normed, rotate

pytestmark = pytest.mark.skipif(compiled_functions() is None, reason="needs a C compiler")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [16, 48, 64, 1040]
HEADS, KV_HEADS, EPS = 6, 2, 1e-5


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_rounded(given: Tensor, exact: Tensor) -> None:
    """Within one rounding of the dtype, as nothing is rounded in between."""
    rounding = 2.0**-8 if given.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(given.double(), exact, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_a_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = 3 * numbers(rows, size, dtype=dtype), numbers(size)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    assert_rounded(normed(x, weight, size * EPS), exact * weight.double())
    assert_rounded(normed(x, None, size * EPS), exact / size**0.5)
    assert torch.equal(normed(x, weight, size * EPS)[:1], normed(x[:1], weight, size * EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "activation"), [("silu", F.silu), ("gelu_pytorch_tanh", functools.partial(F.gelu, approximate="tanh"))]
)
def test_a_gate(name: str, activation: functools.partial[Tensor], size: int, dtype: torch.dtype) -> None:
    gate_up = 4 * numbers(9, 2 * size, dtype=dtype)
    gate_up[0, :6] = torch.tensor([0.0, -200.0, 200.0, 88.5, -88.5, 1e-30]).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_rounded(gated(gate_up, name), activation(gate) * up)
    assert torch.equal(gated(gate_up, name)[2:3], gated(gate_up[2:3].contiguous(), name))


def test_a_number_that_is_none_stays_none() -> None:
    gate_up = torch.ones(1, 32)
    gate_up[0, 3] = float("nan")
    assert gated(gate_up, "silu").isnan().nonzero().tolist() == [[0, 3]]
    assert normed(gate_up, None, 1e-5).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 48, 128])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("rotates_alike", [True, False])
def test_a_rotation_puts_keys_and_values_into_the_cache(
    rotates_alike: bool, has_norms: bool, batch: int, size: int, dtype: torch.dtype
) -> None:
    rows, columns = 5, 9
    qkv = numbers(batch, rows, HEADS + 2 * KV_HEADS, size, dtype=dtype)
    norms = numbers(HEADS + KV_HEADS, size) if has_norms else None
    angles = numbers(1 if rotates_alike else batch, rows, 1, size // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    exact = qkv[:, :, :-KV_HEADS].double()
    if norms is not None:
        exact = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * norms
    pairs = torch.view_as_complex(exact.unflatten(-1, (-1, 2)).contiguous())
    exact = torch.view_as_real(pairs * rotation).flatten(-2)

    cache = torch.zeros(batch, 2 * KV_HEADS, columns, size, dtype=dtype)
    slots, with_slots, alone = cache[:, :, 3 : 3 + rows], qkv.clone(), qkv.clone()
    given_rotation = rotation[0] if rotates_alike else rotation
    rotate(with_slots, KV_HEADS, norms, size * EPS, given_rotation, slots)
    rotate(alone, KV_HEADS, norms, size * EPS, given_rotation, None)

    assert_rounded(alone[:, :, :-KV_HEADS], exact)
    assert torch.equal(alone[:, :, -KV_HEADS:], qkv[:, :, -KV_HEADS:]), "values are not rotated"
    assert torch.equal(with_slots[:, :, :HEADS], alone[:, :, :HEADS])
    assert torch.equal(slots, alone[:, :, HEADS:].transpose(1, 2))
    assert not cache[:, :, :3].any() and not cache[:, :, 3 + rows :].any()


def test_rows_that_fill_no_vector_are_left_to_pytorch() -> None:
    assert can_run(CPU, torch.float32, 64, 48)
    assert not can_run(CPU, torch.float32, 64, 40)
    assert not can_run(CPU, torch.float16, 64)
    assert not can_run(torch.device("meta"), torch.float32, 64)
    for odd in (lambda: normed(torch.ones(1, 40), None, 1e-5), lambda: gated(torch.ones(1, 80), "silu")):
        with pytest.raises(AssertionError):
            odd()  # it would write beyond its row
