"""A static pass over a window of the cache says what the ordinary pass says; on a GPU it is a recorded graph."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tiny_targets import Family, make_tiny_target

from components.decoding.batch import decode_batch
from components.decoding.chain import decode
from components.decoding.session import Session
from components.targets.forward.cuda_graphs import GraphedTarget, RecordedWork, window_length
from components.targets.forward.llama import FastTarget
from components.targets.load import open_target
from components.targets.shape import TapLayers

DEVICES = [
    "cpu",
    pytest.param(
        os.environ.get("DRAFTSMITH_TEST_DEVICE", "cuda"),
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]
FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("graphed")
    return {family: make_tiny_target(family, root / family) for family in FAMILIES}


def pair(folder: Path, device: str) -> tuple[FastTarget, GraphedTarget]:
    ordinary = open_target(folder, dtype="float32", device=device, kernel="plain")
    assert isinstance(ordinary, FastTarget)
    return ordinary, GraphedTarget(ordinary)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_small_passes_over_ragged_caches_say_the_same(folders: dict[str, Path], family: str, device: str) -> None:
    """One row, a verification, one row after forgetting, twice on the same memory: logits, taps, last, lengths."""
    ordinary, graphed = pair(folders[family], device)
    dice = torch.Generator().manual_seed(3)
    lengths = torch.tensor([9, 2, 14])
    for _ in range(2):
        caches = [target.new_cache(3, 40) for target in (ordinary, graphed)]
        prompt = torch.randint(1, 384, (3, 14), generator=dice)
        plans = [(1, 0), (5, 3), (5, 0), (1, 1), (4, 2)]  # rows of a pass, and how many of them are forgotten
        for target, cache in zip((ordinary, graphed), caches, strict=True):
            target.forward(prompt, cache, num_valid=lengths, logits="last")
        for rows, forgotten in plans:
            ids = torch.randint(1, 384, (3, rows), generator=dice)
            ours, theirs = (
                target.forward(ids, cache, logits="all" if rows > 1 else "last", features=rows > 1)
                for target, cache in zip((graphed, ordinary), caches[::-1], strict=True)
            )
            for mine, other in zip(ours, theirs, strict=True):
                assert (mine is None) == (other is None)
                if mine is not None and other is not None:
                    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
            for cache in caches:
                cache.truncate(cache.lengths - forgotten)
            assert torch.equal(*(cache.lengths for cache in caches))
        del caches


@pytest.mark.parametrize("device", DEVICES)
def test_a_graphed_target_decodes_the_same_text(folders: dict[str, Path], device: str) -> None:
    """Alone and side by side; sequences that end leave the batch, whose cache is then other memory."""
    ordinary, graphed = pair(folders["llama"], device)
    prompts = [[5, 9, 2], [7], [11, 4, 4, 8]]
    session = Session(graphed)
    alone = [decode(ordinary, None, prompt, max_new_tokens=20) for prompt in prompts]
    for prompt, expected in zip(prompts, alone, strict=True):
        assert decode(graphed, None, prompt, max_new_tokens=20, session=session).tokens == expected.tokens
    together = decode_batch(graphed, None, prompts, max_new_tokens=20)
    assert [run.tokens for run in together] == [run.tokens for run in alone]


def test_memory_is_used_again_only_when_nobody_holds_it(folders: dict[str, Path]) -> None:
    _, graphed = pair(folders["llama"], "cpu")
    first = graphed.new_cache(2, 16)
    address = first.kv.data_ptr()
    second = graphed.new_cache(2, 16)
    assert second.kv.data_ptr() != address
    address = second.kv.data_ptr()
    del second
    third = graphed.new_cache(2, 16)
    assert third.kv.data_ptr() == address and third.lengths.tolist() == [0, 0]
    assert graphed.new_cache(2, 32).kv.data_ptr() != address


def test_caches_of_one_size_that_live_at_once_are_all_recorded(folders: dict[str, Path]) -> None:
    """Generations that take turns have equal caches: one must not fall back to ordinary passes, slower or quicker."""
    _, graphed = pair(folders["llama"], "cpu")
    caches = [graphed.new_cache(1, 16) for _ in range(3)]
    for cache in caches:
        graphed.forward(torch.tensor([[3, 4, 5]]), cache, logits="last")
    for _ in range(2):
        for cache in caches:
            graphed.forward(torch.tensor([[6]]), cache)
    assert {address for address, *_ in graphed._passes} == {cache.kv.data_ptr() for cache in caches}
    assert len(graphed._passes) == 3


def test_what_a_pass_gave_outlives_the_next_pass(folders: dict[str, Path]) -> None:
    _, graphed = pair(folders["llama"], "cpu")
    cache = graphed.new_cache(1, 16)
    graphed.forward(torch.tensor([[3, 4, 5]]), cache, logits="last")
    first = graphed.forward(torch.tensor([[6]]), cache, features=True)
    kept = [part.clone() for part in first if part is not None]
    graphed.forward(torch.tensor([[7]]), cache, features=True)
    assert len(kept) == 3
    assert all(torch.equal(a, b) for a, b in zip(kept, first, strict=True) if b is not None)


@pytest.mark.parametrize("device", DEVICES)
def test_passes_that_tap_other_layers_are_recorded_apart(folders: dict[str, Path], device: str) -> None:
    """Drafters of different taps take turns on one cache, whose memory and window are the same."""
    ordinary, graphed = pair(folders["llama"], device)
    caches = [target.new_cache(1, 40) for target in (ordinary, graphed)]
    turns: list[bool | TapLayers] = [True, (1,), (1, 6), (6, 1), False, (2, 4, 5), (1, 6)]
    for target, cache in zip((ordinary, graphed), caches, strict=True):
        target.forward(torch.tensor([[3, 4, 5]]), cache, logits="last")
    for token, features in enumerate(turns, start=6):
        ours, theirs = (
            target.forward(torch.tensor([[token, 9]]), cache, features=features)
            for target, cache in zip((graphed, ordinary), caches[::-1], strict=True)
        )
        assert (ours.taps is None) == (theirs.taps is None) == (features is False)
        if ours.taps is not None and theirs.taps is not None:
            torch.testing.assert_close(ours.taps, theirs.taps, rtol=1e-4, atol=1e-4)
    assert len(graphed._passes) == 5  # the usual taps are the same by name and by default


def test_windows_double_and_never_pass_the_end() -> None:
    asked = (1, 256, 257, 1025, 4097, 5000)
    assert [window_length(columns, 5000) for columns in asked] == [256, 256, 512, 2048, 5000, 5000]
    assert window_length(10, 40) == 40


def test_without_a_gpu_the_work_itself_runs() -> None:
    calls: list[int] = []
    captured = RecordedWork(lambda: calls.append(1), torch.device("cpu"))
    captured()
    captured()
    assert calls == [1, 1]
