"""Every kernel of Linear computes the same product, and calibration decides by time alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, cast, get_args

import pytest
import torch
import torch.nn.functional as F

from components.targets.forward import linear
from components.targets.forward.compiled import compiled_functions
from components.targets.forward.linear import (
    PLAIN,
    Kernel,
    Kernels,
    Layouts,
    Linear,
    calibrate,
    choose_kernels,
    describe_kernels,
    lay_out,
    pack,
    parse_kernels,
)

MIXES: list[Kernels] = [
    PLAIN,
    ("prepacked",),
    ("transposed",),
    ("columns",),
    ("streamed",),
    ("convolved",),
    ("transposed", "plain", "columns", "prepacked"),
    (3, 3, "convolved", 5, "prepacked", 8, "columns", "convolved"),
]


def test_nothing_is_convolved_without_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many numbers of rows would take hundreds of times as long, of which eight are timed."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    layer = Linear(torch.randn(160, 128))
    assert "convolved" not in calibrate([layer])[160, 128]
    of_another_processor = Linear(torch.randn(160, 128), kernels=("prepacked", "convolved"))
    assert of_another_processor.kernels == ("prepacked", "plain")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", MIXES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_all_kernels_compute_the_same_product(dtype: torch.dtype, kernels: Kernels, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 48, generator=generator).to(dtype)
    bias = torch.randn(128, generator=generator).to(dtype) if with_bias else None
    layer = Linear(weight, bias, kernels=kernels)
    tolerance: dict[str, Any] = (
        {"rtol": 2e-2, "atol": 2e-1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    for rows in (1, 2, 3, 4, 6, 7, 12, 70):
        x = torch.randn(rows, 48, generator=generator).to(dtype)
        residual = torch.randn(rows, 128, generator=generator).to(dtype)
        exact = F.linear(x, weight, bias)
        assert layer(x).is_contiguous() and layer.add_to(residual, x).is_contiguous()
        assert torch.allclose(layer(x), exact, **tolerance)
        assert torch.allclose(layer.add_to(residual, x), residual + exact, **tolerance)


def test_without_the_private_operators_the_others_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_linear_operators", lambda: None)
    monkeypatch.setattr(linear, "_convolution_operators", lambda: None)
    weight = torch.randn(16, 8)
    layer = Linear(weight, kernels=(2, "prepacked", "convolved"))
    assert pack(weight, "prepacked") is None and pack(weight, "convolved") is None
    assert layer.kernels == (2, "plain", "plain")
    layer.use(("prepacked", "convolved"))
    assert describe_kernels([layer]) == "plain"
    large = Linear(torch.randn(160, 128))
    calibrate([large])
    assert not {"prepacked", "convolved"} & set(large.kernels)
    assert torch.allclose(layer(torch.ones(2, 8)), weight.sum(1).expand(2, -1), atol=1e-5)


def choose(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Kernel, int], float]) -> Linear:
    """A layer whose kernels were chosen by these times."""
    layer = Linear(torch.zeros(160, 128))

    def timed(trials: Any, rows: int, *_: Any) -> dict[Kernel, dict[tuple[int, int], float]]:
        return {kernel: {layer.shape: seconds(kernel, rows)} for kernel in trials}

    monkeypatch.setattr(linear, "_quick_seconds", timed)
    calibrate([layer], placements=2)
    return layer


def test_the_quickest_kernel_of_each_row_count_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: Kernels = ("transposed", "transposed", "transposed", "columns", "columns", "plain", "plain", "plain")
    layer = choose(monkeypatch, lambda kernel, rows: 1.0 if kernel == wanted[rows - 1] else 2.0)
    assert layer.kernels == wanted
    assert describe_kernels([layer]) == "mixed[160x128:tttccppp]"


@pytest.mark.parametrize("kernels", [*MIXES, ("columns", "columns")])
def test_a_description_lays_out_another_target_alike(kernels: Kernels) -> None:
    """A shape keeps its kernels where layers differ; one kernel throughout is that kernel on every shape."""
    small, large = Linear(torch.zeros(8, 4)), Linear(torch.zeros(80, 48), kernels=kernels)
    for layers in ([large], [small, large]):
        said = describe_kernels(layers)
        again = [Linear(torch.zeros(layer.shape)) for layer in layers]
        for layer in again:
            layer.use(parse_kernels(said)(layer.shape))
        assert describe_kernels(again) == said
        assert [layer.kernels[-1] for layer in again] == [layer.kernels[-1] for layer in layers]
    with pytest.raises(ValueError, match="describes no kernels"):
        parse_kernels("unknown")


def test_a_gain_within_the_noise_keeps_the_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = choose(monkeypatch, lambda kernel, rows: 1.0 if kernel == "plain" else 0.98)
    assert set(layer.kernels) == {"plain"}


def test_of_kernels_as_good_as_each_other_the_one_of_a_row_less_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would flip from run to run, and with it what another row costs."""
    order = ("transposed", "columns", "transposed", "columns", "transposed", "columns", "plain", "columns")
    layer = choose(monkeypatch, lambda kernel, rows: {order[rows - 1]: 0.90, "plain": 1.0}.get(kernel, 0.92))
    assert layer.kernels == ("transposed",) * 8
    layer = choose(monkeypatch, lambda kernel, rows: {order[rows - 1]: 0.80, "plain": 1.0}.get(kernel, 0.92))
    assert layer.kernels == (*order[:6], 8, "columns")


def test_calibration_on_the_clock_leaves_the_product_as_it_is() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(192, 256, generator=generator)
    layer = Linear(weight)
    calibrate([layer])
    for rows in (1, 4, 9):
        x = torch.randn(rows, 256, generator=generator)
        assert torch.allclose(layer(x), F.linear(x, weight), rtol=1e-5, atol=1e-4)


def test_a_layer_that_nobody_holds_gives_its_weights_back_at_once() -> None:
    """Python's collector comes by too seldom for tensors: gigabytes of trial layouts once waited for it."""
    gc.disable()
    try:
        weights = [torch.ones(256, 128) for _ in get_args(Kernel)]
        layers = [Linear(weight, kernels=(kernel,)) for weight, kernel in zip(weights, get_args(Kernel), strict=True)]
        calibrate(layers[:1])
        held = [weakref.ref(weight) for weight in weights]
        del weights, layers
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_of_a_large_weight_its_first_rows_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SAMPLED_BYTES_OF_ONE", 64 * 128 * 4)
    timed: list[tuple[int, ...]] = []

    def noted(weight: torch.Tensor, kernel: Kernel) -> Any:
        timed.append(tuple(weight.shape))
        return pack(weight, kernel)

    monkeypatch.setattr(linear, "pack", noted)
    head, small = Linear(torch.ones(1000, 128)), Linear(torch.ones(128, 128))
    calibrate([small, head])
    assert (64, 128) in timed and len(head.kernels) == len(small.kernels) == linear.PROBED_ROWS
    assert torch.equal(head(torch.ones(2, 128)), torch.full((2, 1000), 128.0))


@pytest.mark.parametrize(
    "kernel", ["plain", "prepacked", "transposed", "mixed[32x48:cp,48x32:2cp,160x128:33o5c]", "thorough"]
)
def test_layers_are_laid_out_as_another_process_said(kernel: str) -> None:
    """What is said of them lays others of the same shapes out alike, and they compute the same."""
    torch.manual_seed(0)
    weights = [torch.randn(48, 32), torch.randn(32, 48), torch.randn(160, 128)]
    ours, theirs = ([Linear(weight.clone()) for weight in weights] for _ in range(2))
    said = lay_out(ours, kernel)
    assert said == kernel or kernel == "thorough"
    assert lay_out(theirs, said) == said
    assert [layer.kernels for layer in theirs] == [layer.kernels for layer in ours]
    for layer, weight in zip(theirs, weights, strict=True):
        for rows in (1, 2, 5):
            x = torch.randn(rows, weight.shape[1])
            torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_layers_are_laid_out_as_they_are_read_once_there_is_a_sample(
    timings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "SAMPLED_BYTES", 2 * 160 * 128 * 4)
    layouts = Layouts("auto", linear.HELD_ONCE + 1)
    layers = [Linear(torch.ones(160, 128)) for _ in range(4)]
    layouts.add(layers[:1])
    assert not timings and layers[0].kernels == PLAIN, "too few to be timed"
    for layer in layers[1:]:
        layouts.add([layer])
        assert len(layer.kernels) == linear.PROBED_ROWS
    assert len(timings) == linear.PROBED_ROWS and len({layer.kernels for layer in layers}) == 1
    other = Linear(torch.ones(128, 192))
    layouts.add([other])  # a shape that only later layers have
    assert len(timings) == 2 * linear.PROBED_ROWS and len(other.kernels) == linear.PROBED_ROWS
    assert layouts.finish() == describe_kernels([*layers, other])


def test_a_large_model_holds_every_weight_in_one_layout(timings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "HELD_ONCE", 160 * 128)
    weight = torch.randn(160, 128, generator=torch.Generator().manual_seed(0))
    layer = Linear(weight)
    lay_out([layer], "auto")
    assert sum(layout is not None for layout in (layer.weight, layer.weight_t, *layer.packed.values())) == 1
    torch.testing.assert_close(layer(torch.ones(3, 128)), weight.sum(1).expand(3, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("slower", "chosen"),
    [
        ({"transposed": 0.5, "prepacked": 1.5}, "transposed"),  # at each number of rows
        ({"transposed": 1.3, "prepacked": 1.3, "convolved": 1.3}, "plain"),
        ({"transposed": 0.99, "prepacked": 0.99}, "plain"),  # within the noise
    ],
)
def test_the_one_layout_is_the_quickest_over_all_rows(slower: dict[Kernel, float], chosen: Kernel) -> None:
    rows = [float(number) for number in range(1, linear.PROBED_ROWS + 1)]
    times = {kernel: [slower.get(kernel, 1.0) * 1e3 * time for time in rows] for kernel in get_args(Kernel)}
    assert choose_kernels(times, most_layouts=1) == (chosen,) * linear.PROBED_ROWS
    one_row = min(times[chosen])
    times["convolved"] = [1.3 * one_row] * len(rows)
    assert choose_kernels(times, most_layouts=1)[0] == chosen, "one row pays a quarter for flat verification, no more"
    two = choose_kernels(times, most_layouts=2)
    assert two[0] != "convolved" and set(two[2:]) == {"convolved"}, "two layouts pay nothing"
    times["convolved"] = [1.2 * one_row] * len(rows)
    assert set(choose_kernels(times, most_layouts=1)) == {"convolved"}


def test_slow_kernels_are_given_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"columns": 100.0, "transposed": 2.0}
    calls = dict.fromkeys(get_args(Kernel), 0)

    def seconds(layer: Linear, _: torch.Tensor) -> float:
        (name,) = layer.kernels
        calls[cast(Kernel, name)] += 1
        return spent.get(cast(str, name), 1.0)

    monkeypatch.setattr(linear, "_seconds", seconds)
    times = calibrate([Linear(torch.randn(256, 128)) for _ in range(5)])[256, 128]
    assert calls["columns"] == linear.PROBED_ROWS, "of one layer, for each number of rows"
    assert calls["transposed"] == linear.PROBED_ROWS * (1 + 2 * 5), "a pass to warm up and one that counts"
    assert calls["plain"] == linear.PROBED_ROWS * (1 + (1 + linear.PASSES) * 5)
    assert [times[name][0] for name in ("plain", "transposed", "columns")] == [1e6, 2e6, 100e6]


def test_rows_are_padded_to_a_number_that_is_quicker_by_more_than_padding_costs() -> None:
    """One row too: plain decoding is what drafting is compared with."""
    flat = {kernel: [1e3] * linear.PROBED_ROWS for kernel in get_args(Kernel)}
    times = {**flat, "prepacked": [700.0, 900.0, 600.0, 500.0, 490.0, 499.0, 600.0, 550.0]}
    assert choose_kernels(times) == (5, 5, 5, "prepacked", "prepacked", "prepacked", 8, "prepacked")
    quick = {kernel: [time / 200 for time in of_kernel] for kernel, of_kernel in times.items()}
    assert set(choose_kernels(quick)) == {"prepacked"}, "microseconds: padding takes longer than it saves"


def test_a_description_of_no_kernels_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="describes no kernels"):
        lay_out([Linear(torch.ones(4, 4))], "quickest")


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_steady_kernel_is_never_timed(is_quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on the machine alone; a layer that cannot have it is plain."""
    monkeypatch.setattr(linear, "_has_quick_product", lambda dtype: is_quick)
    monkeypatch.setattr(linear, "calibrate", lambda *_, **__: pytest.fail("it was timed"))
    layers = [Linear(torch.randn(64, columns).bfloat16()) for columns in (64, 40)]
    lay_out(layers, "steady")
    streams = not is_quick and compiled_functions() is not None
    assert [layer.kernels for layer in layers] == [("streamed",) if streams else ("plain",), ("plain",)]
