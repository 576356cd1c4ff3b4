"""The library of a CPU's functions: nothing but this user's is loaded, it has no threads of its own, and without a
compiler PyTorch's operators do the same work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_targets import OURS, Family
from torch import Tensor

from components.targets.forward import compiled as module
from components.targets.forward.attention import can_attend
from components.targets.forward.compiled import can_run, compiled_functions
from components.targets.forward.linear import Linear, calibrate
from components.targets.load import open_target

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(compiled_functions() is None, reason="needs a C compiler")


@pytest.fixture
def found_anew() -> Iterator[None]:
    """The library is looked for again, before and after."""
    compiled_functions.cache_clear()
    yield
    compiled_functions.cache_clear()


@pytest.mark.parametrize("compiler", ["false", "/no/such/compiler"])
def test_without_a_compiler_there_are_no_such_functions(
    compiler: str, found_anew: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not can_attend(CPU, torch.float32, 64) and not can_run(CPU, torch.float32, 64)
    assert Linear(torch.randn(160, 128), kernels=("streamed",)).kernels == ("plain",)
    assert "streamed" not in calibrate([Linear(torch.randn(160, 128))])[160, 128]
    assert not list(tmp_path.rglob("forward-*")), "nothing of it is left"


@needs_compiler
@pytest.mark.parametrize("family", OURS)
def test_pytorchs_operators_give_the_same_logits(
    family: Family, found_anew: None, tiny_targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, a verification of several rows, one row, and a batch whose sequences differ in length."""

    def passes() -> Iterator[Tensor]:
        target = open_target(tiny_targets[family], kernel="plain")
        dice = torch.Generator().manual_seed(1)
        cache = target.new_cache(2, 60)
        for rows, valid in ((20, None), (5, [2, 5]), (3, None), (1, None)):
            ids = torch.randint(0, target.shape.vocab_size, (2, rows), generator=dice)
            num_valid = None if valid is None else torch.tensor(valid)
            logits = target.forward(ids, cache, num_valid=num_valid).logits
            assert logits is not None
            yield from (logits[b, : rows if valid is None else valid[b]] for b in range(2))

    ours = list(passes())
    monkeypatch.setenv("CC", "false")
    compiled_functions.cache_clear()
    assert compiled_functions() is None
    for one, other in zip(ours, passes(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_a_library_that_others_could_have_written_is_not_loaded(
    found_anew: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled_functions() is not None
    (folder,) = tmp_path.glob("*/compiled")
    assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    compiled_functions.cache_clear()
    assert compiled_functions() is None


@needs_compiler
def test_it_runs_on_pytorchs_own_threads(tmp_path: Path) -> None:
    """One OpenMP runtime is in the process: two would have twice the threads, which fight for the cores."""
    program = (
        "from components.targets.forward.compiled import compiled_functions\n"
        "assert compiled_functions()\n"
        "files = {line.split()[-1] for line in open('/proc/self/maps')}\n"
        "print(*sorted(file for file in files if 'omp' in file.rpartition('/')[2]), sep='\\n')"
    )
    run = [sys.executable, "-c", program]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    said = subprocess.run(
        run, check=True, capture_output=True, text=True, cwd=Path(module.__file__).parents[3], env=environment
    )
    runtimes = said.stdout.split()
    assert len(runtimes) == 1 and "torch" in runtimes[0], runtimes
