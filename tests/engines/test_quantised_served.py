"""Engines and drafters in few bits: what loads drafts as our rounded weights do, what does not says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import engine_llama_cpp, engine_vllm
from benchmarks.engine_cases import EngineCases
from benchmarks.engine_quantised import as_gguf, in_bfloat16, quantised
from components.contract import UserError
from components.drafts.storage.files import read_draft
from components.drafts.storage.quantisation import pack
from tests.engines.engine_homes import llama_cpp_home, vllm_home

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

PACKS = """
import sys
from safetensors.torch import load_file, save_file
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
codes = load_file(sys.argv[1])
save_file({name: pack_to_int32(tensor, int(name.split("-")[0])) for name, tensor in codes.items()}, sys.argv[2])
"""


def test_compressed_tensors_packs_as_we_do(vllm_ready: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = {}
    for bits, columns in ((4, 8), (4, 32), (4, 22), (8, 8), (8, 32), (8, 21)):
        values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, columns), generator=generator)
        codes[f"{bits}-{columns}"] = values.to(torch.int8)
    files = [str(tmp_path / name) for name in ("codes.safetensors", "packed.safetensors")]
    save_file(codes, files[0])
    subprocess.run([str(vllm_home() / "bin" / "python"), "-c", PACKS, *files], check=True, timeout=300)
    for name, theirs in load_file(files[1]).items():
        bits, columns = map(int, name.split("-"))
        assert torch.equal(pack(codes[name], bits), theirs), f"{bits} bits, {columns} inputs"


def test_vllm_serves_an_int4_drafter_in_bfloat16_and_keeps_what_ours_keeps(
    vllm_ready: Path, cases: EngineCases
) -> None:
    """Its CPU kernel has no float32, so rounds are those of two bfloat16 computations: nearly alike, not exactly."""
    row = in_bfloat16(quantised(cases, "eagle3", "int4", weights="int4"))
    assert row.num_paired >= row.num_prompts // 3, row
    assert row.al_engine is not None and row.al_ours is not None and row.al_ours > 1.1
    assert row.al_engine == pytest.approx(row.al_ours, rel=0.03), row


def test_vllm_on_a_cpu_says_that_it_has_no_kernel_for_int8(vllm_ready: Path, cases: EngineCases) -> None:
    """When this fails, it has one: the remark in engines/profiles.py is then out of date."""
    rounded = quantised(cases, "eagle3", "int8", weights="int8")
    told = {"method": "eagle3", "model": str(rounded.exported("eagle3", "eagle3"))}
    with pytest.raises(UserError, match="kernel that can implement the WNA16 linear layer"):
        engine_vllm.serve(rounded, "EAGLE-3 in int8", "eagle3", told)
    said = next(rounded.work.glob("vllm-*.log")).read_text(errors="replace")
    assert "Quant type (uint8b128) not supported by CPUWNA16" in said


def test_llama_cpp_s_q8_0_holds_our_int8_to_the_bit_and_drafts_nearly_alike(
    llama_cpp: Path, cases: EngineCases
) -> None:
    rounded = quantised(cases, "eagle3", "q8", weights="int8", group_size=32, keep=[])
    file = as_gguf(rounded, "eagle3")
    ours, found = read_draft(rounded.draft("eagle3").path)[1], q8_0_in(file)
    for name, theirs in (("midlayer.mlp.down_proj", "blk.0.ffn_down"), ("fc", "fc"), ("lm_head", "output")):
        assert np.array_equal(found[f"{theirs}.weight"], ours[f"{name}.weight"].numpy()), name
    served, _ = engine_llama_cpp.serve(rounded, "EAGLE-3 in Q8_0", file)
    assert served.same_text
    assert served.engine_rounds == pytest.approx(served.our_rounds, rel=0.02), "it rounds activations as well"


def q8_0_in(file: Path) -> dict[str, Any]:
    """name -> the floats that a GGUF's Q8_0 tensors stand for, by llama.cpp's own reader."""
    sys.path.insert(0, str(llama_cpp_home() / "source" / "gguf-py"))
    try:
        from gguf import GGUFReader  # type: ignore[import-not-found]
        from gguf.quants import dequantize  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    packed = [tensor for tensor in GGUFReader(file).tensors if tensor.tensor_type.name == "Q8_0"]
    return {tensor.name: dequantize(np.array(tensor.data), tensor.tensor_type) for tensor in packed}
