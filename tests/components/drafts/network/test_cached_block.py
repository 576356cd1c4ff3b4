"""However the rows of a block arrive, its cached form gives what the layer gives that is trained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from components.drafts.network.cached_block import FEW_ROWS, CachedBlock, TokenTable, linear_kernel
from components.drafts.network.layers import BlockShape, LlamaLayer, RmsNorm, Rope
from components.targets.forward.compiled import compiled_functions
from components.targets.forward.linear import Linear

SHAPE = BlockShape(32, 48, 4, 2, 8, 1e-6, 10000.0)
STREAMED = BlockShape(64, 96, 4, 2, 16, 1e-6, 10000.0)
"""Of sizes that our own functions take."""
LENGTH = 40


class Block:
    """A layer of random weights, its rows and the output of the trained form."""

    def __init__(self, shape: BlockShape) -> None:
        generator = torch.Generator().manual_seed(3)
        layer = LlamaLayer(shape)
        for weight in layer.parameters():
            torch.nn.init.normal_(weight, 0.0 if weight.ndim > 1 else 1.0, 0.2, generator=generator)
        self.rows = torch.randn(LENGTH, shape.hidden_size, generator=generator)
        self.expected = layer(self.rows[None], Rope(shape, torch.arange(LENGTH)))[0].detach()
        self.cached = CachedBlock(shape, layer.self_attn, layer.post_attention_layernorm, layer.mlp, torch.float32)
        self.projection: Linear = linear_kernel(self.cached.norm.folded(self.cached.qkv_weight, layer.input_layernorm))

    def qkv(self, rows: Tensor) -> Tensor:
        return self.projection(self.cached.norm(rows))


@pytest.fixture(params=[SHAPE, STREAMED], ids=["plain", "streamed"])
def block(request: pytest.FixtureRequest) -> Block:
    block = Block(request.param)
    if request.param is STREAMED:
        for linear in block.cached.linears:
            linear.use(("streamed",))
    return block


@pytest.mark.skipif(compiled_functions() is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_what_follows_attention_has_the_same_bits_in_one_call(dtype: torch.dtype) -> None:
    layer = LlamaLayer(STREAMED)
    block = CachedBlock(STREAMED, layer.self_attn, layer.post_attention_layernorm, layer.mlp, dtype)
    for linear in block.linears:
        linear.use(("streamed",))
    end = block._end
    assert end is not None and end.rows == frozenset(range(1, 9))
    for rows in end.rows:
        residual, mixed = torch.randn(rows, 64).to(dtype), torch.randn(rows, 64).to(dtype)
        block._end = end
        ours = block._finish(residual, mixed)
        assert not torch.equal(ours, residual)
        block._end = None
        assert torch.equal(ours, block._finish(residual, mixed))


@pytest.mark.parametrize("sizes", [[LENGTH], [1] * LENGTH, [7, 1, FEW_ROWS + 1, 3, 12]])
@torch.no_grad()
def test_rows_in_pieces(block: Block, sizes: list[int]) -> None:
    all_rows, last_rows, start = block.cached.new_cache(LENGTH), block.cached.new_cache(LENGTH), 0
    for size in sizes:
        rows, expected = block.rows[start : start + size], block.expected[start : start + size]
        found = block.cached.run(block.qkv(rows), rows, all_rows, start, last_only=False)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        found = block.cached.run(block.qkv(rows), rows, last_rows, start, last_only=True)
        torch.testing.assert_close(found, expected[-1:], atol=1e-4, rtol=1e-4)
        start += size


@pytest.mark.parametrize("last_only", [True, False])
@torch.no_grad()
def test_ragged_rows_of_many_sequences(block: Block, last_only: bool) -> None:
    caches = [block.cached.new_cache(LENGTH) for _ in range(3)]
    starts = [0, 0, 0]
    for counts in ([5, 1, 20], [1, 1, 1], [4, 18, 2]):
        picked = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        rows = block.rows[torch.cat(picked)]
        found = block.cached.run_each(block.qkv(rows), rows, caches, starts, counts, last_only)
        wanted = torch.cat([places[-1:] if last_only else places for places in picked])
        torch.testing.assert_close(found, block.expected[wanted], atol=1e-4, rtol=1e-4)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


@torch.no_grad()
def test_rows_by_indices_on_the_device_over_a_longer_window(block: Block) -> None:
    cache, columns = block.cached.new_cache(LENGTH), torch.arange(30)
    for part in columns.split(6):
        rows, first = block.rows[part], torch.zeros(1, dtype=torch.int64)
        found = block.cached.run_at(block.qkv(rows), rows, cache.rows, part, first, window=36)
        torch.testing.assert_close(found, block.expected[part], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_two_branches_of_a_tree_are_two_continuations(block: Block) -> None:
    """After ten columns row 0 and row 1 are siblings, row 2 a child of row 0; row 0 and row 2 are columns 10 and 11."""
    cache, other = block.cached.new_cache(LENGTH), block.rows[33:34]
    block.cached.run(block.qkv(block.rows[:10]), block.rows[:10], cache, 0, last_only=True)
    rows = torch.cat((block.rows[10:11], other, block.rows[11:12]))
    visible = torch.tensor([[True, False, False], [False, True, False], [True, False, True]])
    found = block.cached.run_branches(block.qkv(rows), rows, copy.deepcopy(cache), 10, [10, 10, 11], visible)
    sibling = block.cached.run(block.qkv(other), other, cache, 10, last_only=True)
    torch.testing.assert_close(
        found, torch.cat((block.expected[10:11], sibling, block.expected[11:12])), atol=1e-4, rtol=1e-4
    )


def test_a_cache_grows_without_losing_a_row(block: Block) -> None:
    cache = block.cached.new_cache(4)
    before = cache.rows.normal_()
    block.cached.with_room(cache, 9)
    after = cache.rows
    assert after.shape[1] >= 9 and torch.equal(after[:, :4], before)
    block.cached.with_room(cache, 9)
    assert cache.rows is after


def test_a_table_of_tokens_is_the_layer_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, weight, bias, ids = torch.randn(9, 6), torch.randn(4, 6), torch.randn(4), torch.tensor([3, 0, 8])
    norm = RmsNorm(6, 1e-6)
    expected = torch.nn.functional.linear(norm(embedding[ids]), weight, bias)
    tabulated = TokenTable(embedding, norm, weight, torch.float32, bias)
    monkeypatch.setattr("components.drafts.network.cached_block.TABLE_LIMIT_BYTES", 1)
    computed = TokenTable(embedding, norm, weight, torch.float32, bias)
    assert tabulated.table is not None and computed.table is None
    for way in (tabulated, computed):
        torch.testing.assert_close(way(ids), expected)
