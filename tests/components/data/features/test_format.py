"""Stored features: fp8 errs as e4m3 must, bf16 not at all, and a row is read without its shard.

A row's states are those of a pass of the row alone to bf16 rounding, whatever it was batched and padded with.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_targets import FAMILIES, VOCAB_SIZE, Family, make_tiny_target
from torch import Tensor

from components.contract import Features, UserError
from components.data.features.format import (
    OPEN_SHARDS,
    Storage,
    bytes_per_token,
    decode,
    encode,
    forward_pass,
    forward_passes,
    group_rows,
    open_features,
    padded_tokens,
)
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

HIDDEN = 16
NUM_STATES = {"taps": 5, "last": 1}


def states(name: str, scale: float, seed: int, num_tokens: int = 8) -> Tensor:
    """States with a channel far larger than the rest, as real ones have."""
    drawn = torch.randn(num_tokens, NUM_STATES[name] * HIDDEN, generator=torch.Generator().manual_seed(seed))
    drawn[:, 3] *= 200.0
    return drawn * scale


@given(st.sampled_from(["taps", "last"]), st.integers(-30, 30), st.integers(0, 1000))
def test_fp8_errs_by_a_sixteenth_at_most_down_to_a_small_share_of_the_largest(
    name: str, binade: int, seed: int
) -> None:
    given_states = states(name, 2.0**binade, seed)
    written = encode(name, given_states, "fp8", NUM_STATES[name])
    back = decode(name, written.__getitem__, "fp8").float()
    apart, found = (part.unflatten(-1, (NUM_STATES[name], HIDDEN)) for part in (given_states, back))
    largest = apart.abs().amax(-1, keepdim=True)
    # largest / 896 <= 2^e < largest / 224: e4m3's smallest normal is 2^-6, its spacing below that 2^-9
    assert bool(((apart - found).abs() <= torch.maximum(apart.abs() / 16, largest / 224 * 2.0**-10)).all())
    assert torch.equal(back, back.bfloat16().float())


def test_zeros_stay_zeros_and_the_largest_value_stays_finite() -> None:
    for value in (0.0, 448.0, 3.0e38, torch.finfo(torch.bfloat16).max, 1.2e-38):
        written = encode("last", torch.full((2, HIDDEN), value), "fp8", 1)
        back = decode("last", written.__getitem__, "fp8").float()
        assert bool(torch.isfinite(back).all())
        torch.testing.assert_close(back, torch.full((2, HIDDEN), value), rtol=2**-4, atol=1e-37)


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_the_estimate_is_the_size(storage: Storage) -> None:
    encoded = [encode(name, states(name, 1.0, 0), storage, num) for name, num in NUM_STATES.items()]
    tensors = {name: part for parts in encoded for name, part in parts.items()}
    tensors |= {"ids": torch.zeros(8, dtype=torch.int32), "mask": torch.zeros(8, dtype=torch.bool)}
    size = sum(part.numel() * part.element_size() for part in tensors.values())
    assert size == 8 * bytes_per_token(HIDDEN, storage, NUM_STATES["taps"])


def write_store(folder: Path, num_shards: int, rows_in_shard: int, num_tokens: int, hidden: int) -> Features:
    """A store whose every state is its row's number."""
    rows = []
    for shard in range(num_shards):
        name = f"shard-{shard:05d}.safetensors"
        numbers = torch.arange(rows_in_shard) + shard * rows_in_shard
        of_tokens = numbers.repeat_interleave(num_tokens)
        wide = of_tokens.to(torch.bfloat16)[:, None]
        tensors = {
            "ids": of_tokens.to(torch.int32),
            "mask": torch.ones(len(of_tokens), dtype=torch.bool),
            "taps": wide.expand(-1, 3 * hidden).contiguous(),
            "last": wide.expand(-1, hidden).contiguous(),
            "offsets": torch.arange(rows_in_shard + 1) * num_tokens,
        }
        save_file(tensors, folder / name)
        for index, number in enumerate(numbers.tolist()):
            row = {"row_id": str(number), "workload": "w", "split": "train", "shard": name, "index": index}
            rows.append({**row, "num_tokens": num_tokens, "num_answer_tokens": num_tokens})
    manifest = {"target_key": "", "vocab_size": 4096, "rows": rows, "shards": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Features(key="f", path=folder)


def test_rows_come_in_any_order_from_more_shards_than_are_open(tmp_path: Path) -> None:
    source = open_features(write_store(tmp_path, OPEN_SHARDS + 3, 2, 3, 4))
    for number in torch.randperm(2 * (OPEN_SHARDS + 3), generator=torch.Generator().manual_seed(0)).tolist():
        example = source.load(source.row(str(number)))
        assert example.ids.tolist() == [number] * 3 and example.taps.shape == (3, 12)
        assert example.taps.unique().tolist() == [float(torch.tensor(number).bfloat16())]
    (cut,) = source.load_all([source.row("1")], max_tokens=2)
    assert [len(part) for part in cut[2:]] == [2, 2, 2, 2]


READER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from components.contract import Features
from components.data.features.format import open_features

def resident():
    return {{line.split(":")[0]: int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("Rss")}}

source = open_features(Features(key="f", path=Path({folder!r})))
rows = source.rows("train")
source.load(rows[0]).taps.sum()
before = resident()
for place in range(0, len(rows), len(rows) // 8):
    assert source.load(rows[-1 - place]).taps.sum() >= 0
after = resident()
print(*(after[name] - before[name] for name in ("RssAnon", "RssFile")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads memory from /proc")
def test_reading_a_row_does_not_load_its_shard(tmp_path: Path) -> None:
    """Eight rows of 0.2 MiB from a shard of 64 MiB: the process takes next to no memory of its own for them.

    Mapped pages belong to the page cache; a kernel may map 2 MiB of them at a time.
    """
    write_store(tmp_path, 1, 256, 64, 512)
    assert (tmp_path / "shard-00000.safetensors").stat().st_size > 64 << 20
    program = READER.format(path=sys.path, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    private_kib, mapped_kib = map(int, done.stdout.split())
    assert private_kib < 4 << 10
    assert mapped_kib < 32 << 10


Lengths = st.lists(st.integers(1, 70), min_size=1, max_size=7)


@functools.cache
def target(family: Family) -> AbstractTarget:
    with tempfile.TemporaryDirectory() as folder:
        return open_target(make_tiny_target(family, Path(folder)), dtype="float32", kernel="plain")


def rows_of(lengths: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def off_by(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of bf16's rounding of the largest state of its token."""
    unit = wanted.float().abs().amax(-1, keepdim=True) * 2.0**-8
    return float(((found.float() - wanted.float()).abs() / unit).max())


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12)
@given(lengths=Lengths, tokens_per_pass=st.integers(1, 300), seed=st.integers(0, 99))
def test_states_do_not_depend_on_the_company(
    family: Family, lengths: list[int], tokens_per_pass: int, seed: int
) -> None:
    """In float32 batching moves states by far less than rounding to bf16 does, so the two differ by one step at most.

    Mixtures of experts too, as long as no router score is a near-tie; random ones have none so close.
    """
    model, rows = target(family), rows_of(lengths, seed)
    found = {
        place: states for passed in forward_passes(model, rows, tokens_per_pass) for place, states in passed.items()
    }
    assert sorted(found) == list(range(len(rows)))
    for place, row in enumerate(rows):
        alone = model.forward(row[None], model.new_cache(1, len(row)), logits="none", features=True)
        for stored, exact in zip(found[place], (alone.taps, alone.last), strict=True):
            assert exact is not None and stored.dtype == torch.bfloat16
            assert off_by(stored, exact[0]) <= 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_in_the_padding_reaches_no_row(family: Family) -> None:
    """The same bits whatever tokens fill the row beside: neither padding nor the neighbour is seen."""
    model, (row, short, other) = target(family), rows_of([40, 9, 9], seed=1)
    with_short, with_other = forward_pass(model, [row, short]), forward_pass(model, [row, other])
    assert all(torch.equal(a, b) for a, b in zip(with_short[0], with_other[0], strict=True))
    filled = torch.cat((short, other, other, other, other[:4]))
    longer = forward_pass(model, [row, filled])[1]
    assert all(off_by(a[:9], b) <= 1.0 for a, b in zip(longer, with_short[1], strict=True))


@given(Lengths, st.integers(1, 300))
def test_groups_hold_every_row_once_within_the_limit(lengths: list[int], tokens_per_pass: int) -> None:
    groups = group_rows(lengths, tokens_per_pass)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    sizes = [len(group) * max(lengths[place] for place in group) for group in groups]
    assert all(size <= tokens_per_pass or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
    assert padded_tokens(lengths, tokens_per_pass) == sum(sizes)


def test_states_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = open_target(make_tiny_target("llama", tmp_path), dtype="float32", kernel="plain")
    with torch.no_grad():
        model.embedding[5] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        forward_pass(model, [torch.tensor([4, 5, 6])])
