"""llama.cpp's own converter makes a GGUF of what we export, and every number of the drafter is in it."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_formats import drafter_state
from torch import Tensor

from components.contract import Context, Target, UserError
from components.drafts.storage.files import build_draft
from components.drafts.storage.quantisation import Packed, pack, quantise
from components.publish import try_release
from components.publish.formats.gguf import check_gguf, find_converter, rounded_scales, write_gguf
from components.publish.release.export import source_of
from components.publish.release.public_copy import refuse_leaks
from components.targets import load_target
from components.targets.load import open_target
from tests.engines.engine_homes import is_ready, llama_cpp_home

NAMES = {
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "fc.weight": "fc.weight",
}
"""Ours and llama.cpp's; q and k are stored in another order of rows."""


@pytest.fixture(scope="module")
def llama_cpp() -> Path:
    if not is_ready(llama_cpp_home()):
        pytest.skip("llama.cpp is not built here; tests/engines/install_llama_cpp.py builds it")
    return llama_cpp_home() / "source"


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(model="builtin", dtype="float32", ctx=context(tmp_path_factory.mktemp("t") / "target"))


def context(folder: Path) -> Context:
    folder.mkdir(parents=True)
    return Context(key="k", out=folder, scratch=folder, num_threads=1)


def stored(file: Path, llama_cpp: Path) -> dict[str, Tensor]:
    sys.path.insert(0, str(llama_cpp / "gguf-py"))
    try:
        from gguf import GGUFReader  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    return {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in GGUFReader(file).tensors}


@pytest.mark.engines
@pytest.mark.timeout(300)
def test_every_number_of_the_drafter_is_in_the_gguf(builtin: Target, llama_cpp: Path, tmp_path: Path) -> None:
    opened, settings = open_target(builtin, dtype="float32", kernel="plain"), {"intermediate_size": 128}
    network: Any = build_draft("eagle3", opened, settings, torch.arange(5, opened.shape.vocab_size, 3))
    own = drafter_state(network, settings, opened.shape.vocab_size)
    facts = write_gguf(own, source_of(builtin), tmp_path / "gguf", str(llama_cpp), context(tmp_path / "c"))
    assert facts is not None and facts["dtype"] == "float32"
    file = tmp_path / "gguf" / "draft.gguf"
    found = stored(file, llama_cpp)
    assert check_gguf(file, "here") == len(found)
    for ours, theirs in NAMES.items():
        assert torch.equal(found[theirs].reshape(own.tensors[ours].shape), own.tensors[ours]), theirs
    d2t = next(tensor for name, tensor in found.items() if "d2t" in name)
    assert torch.equal(d2t.long().flatten(), network.draft_ids), "llama.cpp keeps target ids"


@pytest.mark.engines
@pytest.mark.timeout(300)
def test_the_dry_run_takes_the_gguf_in(builtin: Target, llama_cpp: Path, tmp_path: Path) -> None:
    """A cut vocabulary too: DFlash's goes by the converter's class for DSpark, which keeps it."""
    made = try_release(
        builtin,
        methods=["eagle3", "dflash", "dspark", "draft-model"],
        settings={"draft-model": {"num_layers": 1, "hidden_size": 128}},
        engines=["llama.cpp"],
        llama_cpp=str(llama_cpp),
        ctx=context(tmp_path / "run"),
    )
    assert made.info["tried"] == {name: ["gguf"] for name in ("eagle3", "dflash", "dspark", "draft-model")}


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    for number, head in enumerate((b"", b"GGUF", b"GGUF" + b"\0" * 20, b"PK\x03\x04" + b"\1" * 20)):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(head)
        with pytest.raises(UserError, match=rf"here/{number}\.gguf: no sound GGUF"):
            check_gguf(file, "here")


def test_the_converter_is_found_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "convert_hf_to_gguf.py").write_text("")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("DRAFTSMITH_LLAMA_CPP", raising=False)
    assert find_converter() is None
    assert find_converter(str(tmp_path)) == tmp_path
    monkeypatch.setenv("DRAFTSMITH_LLAMA_CPP", str(tmp_path))
    assert find_converter() == tmp_path


@pytest.mark.parametrize(
    ("largest", "said"),
    [(0.5, ""), (127 * 2.0**-17, ""), (1e-4, "1 of 2 scales are too small for float16"), (0.0, "")],
)
def test_scales_that_q8_0_cannot_hold_are_told(largest: float, said: str) -> None:
    weight = torch.linspace(-1.0, 1.0, 64).unflatten(0, (2, 32)) * torch.tensor([[0.25], [largest]])
    weight[1] = weight[1] / weight[1].abs().max().clamp(min=1e-30) * largest
    codes, scales = quantise(weight, 8, 32)
    told = rounded_scales([Packed(pack(codes, 8), scales, torch.tensor(weight.shape))])
    assert told.startswith(said) and bool(told) == bool(said)


def test_scales_that_q8_0_would_call_infinite_are_refused() -> None:
    codes, scales = quantise(torch.full((1, 32), 1e8), 8, 32)
    with pytest.raises(UserError, match="too large for Q8_0"):
        rounded_scales([Packed(pack(codes, 8), scales, torch.tensor([1, 32]))])


def test_the_builtin_target_is_known_by_its_folder_whatever_it_is_called(
    builtin: Target, llama_cpp: Path, tmp_path: Path
) -> None:
    """`target_name` is what others read; the converter has to be told of a tokenizer that it has never seen."""
    opened = open_target(builtin, dtype="float32", kernel="plain")
    network = build_draft("eagle3", opened, {}, torch.arange(64))
    own = drafter_state(network, {}, opened.shape.vocab_size)
    source = dataclasses.replace(source_of(builtin), name="something else")
    assert write_gguf(own, source, tmp_path / "out", str(llama_cpp), context(tmp_path / "ctx"))
    assert check_gguf(tmp_path / "out" / "draft.gguf", "out") > 0


def gguf(entries: dict[str, str | list[str]]) -> bytes:
    """A GGUF file without tensors."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    raw = b"GGUF" + struct.pack("<IQQ", 3, 1, len(entries) + 1)
    for name, value in entries.items():
        if isinstance(value, str):
            raw += string(name) + struct.pack("<I", 8) + string(value)
        else:
            raw += string(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(string, value))
    return raw + string("scores") + struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 1, 2, 3)


def test_of_a_gguf_file_its_metadata_is_read_and_its_vocabulary_is_not(tmp_path: Path) -> None:
    """A chat template stands behind a vocabulary of megabytes, in which every word is a word of its own."""
    release, copy = tmp_path / "release", tmp_path / "copy"
    (release / "draftsmith").mkdir(parents=True)
    (copy / "gguf").mkdir(parents=True)
    (release / "draftsmith" / "target.json").write_text(json.dumps({"model": "acme/atlas", "folder": ""}))
    (copy / "SHA256SUMS").write_text("")
    words = ["atlas", *(f"w{number}" for number in range(300_000))]
    file = copy / "gguf" / "draft.gguf"
    file.write_bytes(gguf({"general.name": "Draft", "tokens": words, "chat_template": "You are a helper."}))
    refuse_leaks(copy, release, ["atlas"])
    file.write_bytes(gguf({"general.name": "Draft", "tokens": words, "chat_template": "You are Atlas."}))
    with pytest.raises(UserError, match=r"gguf/draft\.gguf: names the private target 'atlas'"):
        refuse_leaks(copy, release, ["atlas"])
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match="no sound GGUF file"):
        refuse_leaks(copy, release, ["atlas"])
