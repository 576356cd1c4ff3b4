"""What every engine owes to AbstractTarget, held against transformers run in one plain pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import FAMILIES, OURS, TELLING
from torch import Tensor
from transformers import AutoModelForCausalLM

from components.targets.forward.static_cache import BLOCK
from components.targets.interface import AbstractTarget, TargetPass, tapping
from components.targets.load import open_target

ENGINES = [
    *((family, "transformers") for family in FAMILIES),
    *((family, "plain") for family in ("llama", "qwen3", *TELLING)),
    *((family, kernel) for family in ("llama", "qwen3") for kernel in ("prepacked", "auto")),
]
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def engine(request: pytest.FixtureRequest, tiny_targets: dict[str, Path]) -> tuple[AbstractTarget, Path]:
    family, kernel = request.param
    target = open_target(tiny_targets[family], kernel=kernel, dtype="float32")
    assert (target.kernel == "transformers") == (kernel == "transformers")
    return target, tiny_targets[family]


def some_ids(num_sequences: int, num_rows: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 384, (num_sequences, num_rows), generator=torch.Generator().manual_seed(seed))


def run(target: AbstractTarget, ids: Tensor, chunks: list[int] | None = None) -> TargetPass:
    """All outputs of a pass in chunks over a fresh cache."""
    cache = target.new_cache(ids.shape[0], ids.shape[1] + 8)
    passes = [target.forward(part, cache, features=True) for part in ids.split(chunks or [ids.shape[1]], dim=1)]
    return TargetPass(*(torch.cat(parts, dim=1) for parts in zip(*passes, strict=True)))


def assert_same(ours: TargetPass, theirs: TargetPass) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


def reference(folder: Path, ids: Tensor) -> TargetPass:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    last: list[Tensor] = []
    model.get_decoder().layers[-1].register_forward_hook(lambda module, inputs, output: last.append(output))
    with torch.no_grad():
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    states = output.hidden_states
    n = len(states) - 1
    return TargetPass(output.logits, torch.cat([states[2], states[n // 2], states[n - 3]], dim=-1), last[0])


def test_outputs_equal_transformers(engine: tuple[AbstractTarget, Path]) -> None:
    target, folder = engine
    ids = some_ids(2, 23)
    assert_same(run(target, ids), reference(folder, ids))


def test_a_pass_taps_the_layers_that_it_or_its_target_names(engine: tuple[AbstractTarget, Path]) -> None:
    """In the order named, and the next pass of the target taps its own again."""
    target, folder = engine
    ids = some_ids(1, 12)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    usual = run(target, ids)
    opened = open_target(folder, kernel=target.kernel, dtype="float32", tap_layers=[1, 6])
    assert opened.tap_layers == (1, 6)
    torch.testing.assert_close(run(opened, ids).taps, torch.cat([states[1], states[6]], -1), **CLOSE)
    for taps in ((1,), (7,), (1, 3, 5), (6, 1), (1, 2, 3, 4, 5, 6, 7)):
        expected = torch.cat([states[tap] for tap in taps], -1)
        asked = target.forward(ids, target.new_cache(1, 12), features=taps)
        torch.testing.assert_close(asked.taps, expected, **CLOSE)
        torch.testing.assert_close(asked.last, usual.last, **CLOSE)
        view = tapping(target, taps)
        in_pieces = run(view, ids, [5, 1, 6])
        torch.testing.assert_close(in_pieces.taps, expected, **CLOSE)
        assert view.forward(ids, view.new_cache(1, 12)).taps is None
        assert_same(run(target, ids), usual)
        opened.tap_layers = taps
        torch.testing.assert_close(run(opened, ids).taps, expected, **CLOSE)


def test_any_chunking_equals_one_pass(engine: tuple[AbstractTarget, Path]) -> None:
    target, _ = engine
    ids = some_ids(1, 24)
    whole = run(target, ids)
    for chunks in ([1] * 24, [7, 1, 5, 11], [20, 4]):
        assert_same(run(target, ids, chunks), whole)


@pytest.mark.parametrize("family", OURS)
def test_long_texts_in_blocks_and_pieces_equal_transformers(family: str, tiny_targets: dict[str, Path]) -> None:
    """Longer than a window and than a block of rows, at once and continued, also by one row."""
    target, ids = open_target(tiny_targets[family], kernel="plain", dtype="float32"), some_ids(1, 2 * BLOCK + 40)
    expected = reference(tiny_targets[family], ids)
    for chunks in ([len(ids[0])], [3, BLOCK + 9, 1, BLOCK + 2, 25]):
        assert_same(run(target, ids, chunks), expected)


def test_truncated_and_redone_equals_fresh(engine: tuple[AbstractTarget, Path]) -> None:
    target, _ = engine
    ids, wrong = some_ids(3, 20), some_ids(3, 6, seed=2)
    cache = target.new_cache(3, 40)
    target.forward(ids[:, :10], cache)
    target.forward(wrong, cache)
    cache.truncate(torch.full((3,), 10))
    redone = target.forward(ids[:, 10:], cache, features=True)
    whole = run(target, ids)
    assert_same(redone, TargetPass(*(part[:, 10:] for part in whole if part is not None)))


def test_ragged_batch_equals_single_sequences(engine: tuple[AbstractTarget, Path]) -> None:
    """Prompts of different lengths, then rounds of which a different number of rows is kept, as speculation does it."""
    target, _ = engine
    ids = some_ids(3, 60)
    lengths = torch.tensor([12, 1, 7])
    cache = target.new_cache(3, 80)
    padded = ids[:, :12].masked_fill(torch.arange(12) >= lengths[:, None], 0)
    prefill = target.forward(padded, cache, num_valid=lengths, logits="last")
    assert cache.lengths.tolist() == lengths.tolist()
    singles = run(target, ids).logits
    assert singles is not None and prefill.logits is not None
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(prefill.logits[row, 0], singles[row, length - 1], **CLOSE)
    for step in range(24):  # enough dead slots for the transformers cache to be squeezed
        kept = torch.tensor([1 + step % 2, 2, 1])
        take = cache.lengths[:, None] + torch.arange(5)
        rows = ids.gather(1, take.clamp(max=59))
        rows = rows.masked_fill(torch.arange(5) >= kept[:, None], 3)  # the tail is a wrong guess, forgotten afterwards
        before = cache.lengths.clone()
        passed = target.forward(rows, cache)
        cache.truncate(before + kept)
        assert passed.logits is not None
        for row in range(3):
            for column in range(int(kept[row])):
                expected = singles[row, int(before[row]) + column]
                torch.testing.assert_close(passed.logits[row, column], expected, **CLOSE)


def test_padding_a_whole_row_out_leaves_no_trace(engine: tuple[AbstractTarget, Path]) -> None:
    target, _ = engine
    ids = some_ids(2, 6)
    cache = target.new_cache(2, 30)
    target.forward(ids, cache, num_valid=torch.tensor([6, 0]))
    passed = target.forward(ids, cache, num_valid=torch.tensor([0, 6]), logits="last")
    single = run(target, ids).logits
    assert passed.logits is not None and single is not None
    torch.testing.assert_close(passed.logits[1, 0], single[1, 5], **CLOSE)


def test_head_and_norm_rebuild_the_logits(engine: tuple[AbstractTarget, Path]) -> None:
    target, _ = engine
    passed = run(target, some_ids(1, 9))
    assert passed.last is not None
    torch.testing.assert_close(target.unembed(target.final_norm(passed.last)), passed.logits, **CLOSE)
    assert target.embedding.shape == (target.shape.vocab_size, target.shape.hidden_size)


def test_gradients_reach_the_input_of_the_head(engine: tuple[AbstractTarget, Path]) -> None:
    target, _ = engine
    hidden = torch.randn(3, target.shape.hidden_size, requires_grad=True)
    target.unembed(target.final_norm(hidden)).sum().backward()
    assert hidden.grad is not None and bool(hidden.grad.abs().sum() > 0)


def test_cache_bytes_equal_the_formula(engine: tuple[AbstractTarget, Path]) -> None:
    """MHA and GQA: 2 n h_kv d; MLA: n (latent + rotary key). Counted on the tensors that are really there."""
    target, _ = engine
    cache = target.new_cache(1, 10)
    target.forward(some_ids(1, 10), cache)
    if target.kernel == "transformers":
        layers = cache.cache.layers  # type: ignore[attr-defined]
        held = sum(part.numel() * part.element_size() for layer in layers for part in (layer.keys, layer.values))
    else:
        held = cache.kv.numel() * cache.kv.element_size()  # type: ignore[attr-defined]
    assert cache.bytes_per_token() == held // 10
    numbers = 24 + 8 if target.shape.model_type == "deepseek_v3" else 2 * 2 * 16
    assert cache.bytes_per_token() == target.shape.num_layers * numbers * 4


def test_greedy_margins_of_tiny_targets_are_far_above_noise(tiny_targets: dict[str, Path]) -> None:
    """Else greedy comparisons in other rooms would be coin tosses."""
    for folder in tiny_targets.values():
        logits = run(open_target(folder, kernel="plain"), some_ids(1, 100)).logits
        assert logits is not None
        top = logits[0].topk(2).values
        assert float((top[:, 0] - top[:, 1]).quantile(0.05)) > 0.01
