"""A streamed weight gives the same bits for a row whatever rows are beside it; without a compiler it is plain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from components.targets.forward.compiled import compiled_functions
from components.targets.forward.kernel_times import recall_times, remember_times
from components.targets.forward.linear import STREAMED_IN_PIECES, Linear
from components.targets.forward.streamed import MOST_ROWS, can_stream, streamed

needs_compiler = pytest.mark.skipif(compiled_functions() is None, reason="needs a C compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 32), (33, 64), (24, 192), (100, 2080), (40, 4640)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_right_and_a_row_the_same_in_any_company(
    num_out: int, num_in: int, dtype: torch.dtype, with_bias: bool
) -> None:
    """Against double precision; outputs and inputs that fill no whole tile, group or piece are among the shapes."""
    generator = torch.Generator().manual_seed(num_in)
    weight, bias, x = (
        torch.randn(*shape, generator=generator) for shape in ((num_out, num_in), (num_out,), (8, num_in))
    )
    weight, x = weight.to(dtype), x.to(dtype)
    given = bias.to(dtype) if with_bias else None
    exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
    alone = torch.cat([streamed(row, weight, given) for row in x.split(1)])
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(alone.double(), exact, rtol=rounding, atol=rounding * num_in**0.5)
    for rows in range(2, MOST_ROWS + 1):
        assert torch.equal(streamed(x[:rows], weight, given), alone[:rows])
        assert torch.equal(streamed(x[-rows:], weight, given), alone[-rows:])


@needs_compiler
def test_the_number_of_threads_changes_no_bit() -> None:
    weight, x, threads = torch.randn(1000, 96), torch.randn(3, 96), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = streamed(x, weight, None)
        torch.set_num_threads(4)
        assert torch.equal(streamed(x, weight, None), alone)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38, -0.0, 2.0**-126])
def test_bfloat16_is_rounded_as_by_pytorch(value: float) -> None:
    weight = torch.zeros(2, 32, dtype=torch.bfloat16)
    weight[0, 0], weight[1, 1] = 1.0, 1.0
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = value
    wanted = torch.tensor([value]).to(torch.bfloat16)
    assert torch.equal(streamed(x, weight, None)[0, :1].nan_to_num(7.0), wanted.nan_to_num(7.0))


@needs_compiler
@pytest.mark.parametrize("rows", [0, 9, 17, STREAMED_IN_PIECES, STREAMED_IN_PIECES + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_rows_than_a_pass_has_are_right_too(rows: int, dtype: torch.dtype) -> None:
    weight, x = torch.randn(48, 64).to(dtype), torch.randn(rows, 64).to(dtype)
    layer = Linear(weight, kernels=("streamed",))
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.double().t(), rtol=rounding, atol=8 * rounding)


def test_a_weight_that_cannot_be_streamed_is_plain() -> None:
    """Its inputs fill no vector, or its dtype is another."""
    for weight in (torch.randn(64, 40), torch.randn(64, 64).half(), torch.randn(64, 64).t()[:, :32]):
        assert not can_stream(weight)
        assert Linear(weight, kernels=("streamed",)).kernels == ("plain",)


@needs_compiler
def test_times_of_before_there_was_a_compiler_are_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    times = {kernel: [1.0] * 8 for kernel in ("plain", "transposed", "columns", "streamed")}
    remember_times(torch.float32, {(64, 64): times})  # type: ignore[dict-item]
    assert recall_times(torch.float32, [(64, 64)]) == {(64, 64): times}
    del times["streamed"]
    remember_times(torch.float32, {(64, 64): times})  # type: ignore[dict-item]
    assert recall_times(torch.float32, [(64, 64)]) == {}
