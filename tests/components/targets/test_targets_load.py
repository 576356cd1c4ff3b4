"""Opening a target: like transformers, and never with numbers that are none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_folders import changed_config, changed_tensors, without_tensor
from safetensors.torch import load_file, save_file
from tiny_families import make_family
from tiny_targets import make_tiny_target

from components.contract import UserError
from components.targets.forward.architecture import LIKE_LLAMA_AT_THE_ENDS
from components.targets.load import MAPPED, is_read_whole, open_target, open_tokenizer


def test_tied_and_bf16_checkpoints_open_like_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_target("llama", tmp_path / "tied")
    weights = {name: weight.bfloat16() for name, weight in load_file(folder / "model.safetensors").items()}
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    changed_config(tie_word_embeddings=True, dtype="bfloat16")(folder)
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for parameters in (rope, {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}):
        changed_config(rope_parameters=parameters)(folder)
        ids = torch.arange(1, 120)[None]
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            expected = model(ids).logits
        target = open_target(folder, kernel="plain")
        assert (target.kernel, target.dtype) == ("plain", torch.float32)
        torch.testing.assert_close(target.forward(ids, target.new_cache(1, 119)).logits, expected, rtol=1e-3, atol=1e-3)
        half = open_target(folder, kernel="plain", dtype="bfloat16")
        logits = half.forward(ids, half.new_cache(1, 119)).logits
        assert logits is not None
        assert float((logits - expected).abs().max() / expected.std()) < 0.25  # bf16 keeps eight bits
        assert float((logits.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.9


def spoilt_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return changed_tensors(lambda weights: weights.update({name: change(weights[name]).contiguous()}))


def odd_metadata(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps({**json.loads(data[8 : 8 + length]), "__metadata__": {"format": 1}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def weights_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "/etc/passwd"}}))


GATE, NORM = "model.layers.0.mlp.gate_proj.weight", "model.layers.2.input_layernorm.weight"


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoilt_tensor(GATE, lambda tensor: tensor.index_fill(0, torch.tensor([1]), torch.nan)), "NaN or infinity"),
        (spoilt_tensor(NORM, lambda tensor: tensor * torch.inf), "NaN or infinity"),
        (spoilt_tensor(NORM, lambda tensor: tensor.repeat(2)), "model"),
        (without_tensor(NORM), f"lack 1 of the tensors that config.json asks for, first {NORM}"),
        (odd_metadata, "no table of texts"),
        (weights_elsewhere, "first '/etc/passwd'"),
        (changed_config(vocab_size=400), "model"),
        (changed_config(num_hidden_layers=9, layer_types=None), "hold 8"),
        (changed_config(rms_norm_eps=-1.0), "give no numbers"),
        (changed_config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}), "NaN or infinity"),
    ],
)
def test_what_would_give_no_numbers_or_random_ones_is_refused_when_opened(
    family: str, tmp_path: Path, tiny_targets: dict[str, Path], spoil: Callable[[Path], None], said: str
) -> None:
    folder = Path(shutil.copytree(tiny_targets[family], tmp_path / "model"))
    spoil(folder)
    with pytest.raises(UserError) as refused:
        open_target(folder, kernel="plain")
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}},
    ],
)
def test_a_tokenizer_that_fails_on_its_first_text_is_refused(copied: Path, part: dict[str, Any]) -> None:
    file = copied / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **part}))
    with pytest.raises(UserError, match="its tokenizer cannot be loaded"):
        open_tokenizer(copied)


BLOCK = 16


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as blocks of 8-bit floats and their scales, as DeepSeek and Qwen store theirs."""
    rows, width = (extent // BLOCK for extent in weight.shape)
    blocks = weight.view(rows, BLOCK, width, BLOCK)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    stored = (blocks / scales[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
    return stored, scales


def from_fp8(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return stored.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_in_fp8_says_what_its_dequantised_weights_say(dtype: Any, tmp_path: Path) -> None:
    folder, plain = make_family("qwen3", tmp_path / "fp8"), make_family("qwen3", tmp_path / "plain")
    stored, restored = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if "_proj.weight" in name:
            stored[name], stored[f"{name}_scale_inv"] = in_fp8(weight)
            restored[name] = from_fp8(stored[name], stored[f"{name}_scale_inv"])
        else:
            stored[name] = restored[name] = weight.bfloat16()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(restored, plain / "model.safetensors", metadata={"format": "pt"})
    sizes = {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    changed_config(quantization_config={"quant_method": "fp8", "fmt": "e4m3", **sizes})(folder)
    ids = torch.arange(1, 20)[None]
    passes = []
    for path in (folder, plain):
        target = open_target(path, dtype=dtype, kernel="transformers")
        assert str(target.dtype) == f"torch.{dtype}"
        passes.append(target.forward(ids, target.new_cache(1, 20), features=True))
    quantised, expected = passes
    assert quantised.logits is not None and quantised.taps is not None
    torch.testing.assert_close(quantised.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(quantised.taps, expected.taps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_without_layers_it_reads_no_layer_and_says_the_same_at_both_ends(family: str, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path / "target")
    whole = open_target(folder, kernel="plain", dtype="bfloat16")
    spoilt_tensor(GATE, lambda weight: weight.fill_(torch.nan))(folder)
    ends = open_target(folder, kernel="plain", dtype="bfloat16", layers=False)
    with pytest.raises(UserError, match="holds NaN"):
        open_target(folder, kernel="plain", dtype="bfloat16")
    last = torch.randn(1, 5, whole.shape.hidden_size, dtype=torch.bfloat16)
    assert torch.equal(ends.embedding, whole.embedding)
    assert torch.equal(ends.unembed(ends.final_norm(last)), whole.unembed(whole.final_norm(last)))


@pytest.mark.parametrize("family", sorted(LIKE_LLAMA_AT_THE_ENDS))
def test_of_families_that_transformers_runs_the_ends_alone_are_read_as_well(family: str, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path / "target")
    spoilt_tensor("model.norm.weight", lambda weight: weight.uniform_(0.5, 1.5))(folder)
    whole = open_target(folder, dtype="float32")
    assert whole.kernel == "transformers" and not is_read_whole(folder)
    spoilt_tensor("model.layers.0.input_layernorm.weight", lambda weight: weight.fill_(torch.nan))(folder)
    ends = open_target(folder, kernel="plain", dtype="float32", layers=False)
    with pytest.raises(UserError, match="holds NaN"):
        open_target(folder, dtype="float32")
    last = torch.randn(1, 5, whole.shape.hidden_size)
    assert torch.equal(ends.embedding, whole.embedding)
    ours, theirs = (one.unembed(one.final_norm(last)) for one in (ends, whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_target_larger_than_the_free_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family("qwen3", tmp_path / "target")
    monkeypatch.setattr("components.targets.load.free_ram", lambda: 1000)
    with pytest.raises(UserError, match=r"weights take .* in float32, and .* are free: open it with dtype: bfloat16"):
        open_target(folder, kernel="plain", dtype="float32")
    assert open_target(folder, kernel="plain", dtype="float32", layers=False)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_large_embedding_stays_in_its_file_and_says_the_same(
    stored: str, dtype: Any, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_target("qwen3", tmp_path / "target")
    weights = {name: w.to(getattr(torch, stored)) for name, w in load_file(folder / "model.safetensors").items()}
    if is_tied:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    changed_config(tie_word_embeddings=is_tied)(folder)
    ids, said = torch.arange(1, 20)[None], []
    for large in (1 << 20, 1):
        monkeypatch.setattr("components.targets.load.LARGE_TABLE", large)
        target = open_target(folder, dtype=dtype, kernel="prepacked")
        state = torch.ones(1, target.shape.hidden_size, dtype=target.dtype, requires_grad=True)
        logits = target.unembed(target.final_norm(state))
        logits.amax().backward()
        passed = target.forward(ids, target.new_cache(1, 20)).logits
        said.append([passed, logits, state.grad, target.embedding.to(target.dtype)])
    for copied, mapped in zip(*said, strict=True):
        assert torch.equal(copied, mapped)
    if not is_tied:
        spoilt_tensor("model.embed_tokens.weight", lambda weight: weight.fill_(torch.inf))(folder)
        with pytest.raises(UserError, match=r"embed_tokens\.weight holds NaN or infinity"):
            open_target(folder, dtype=dtype, kernel="plain")


OPENED = """
import sys
from pathlib import Path
from components.targets.load import open_target

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

open_target(Path(sys.argv[1]), dtype="bfloat16", kernel="prepacked")  # what is loaded once, in small
Path("/proc/self/clear_refs").write_text("5")
before, anonymous = status("VmRSS:"), status("RssAnon:")
target = open_target(Path(sys.argv[2]), dtype=sys.argv[3], kernel="prepacked")
print(status("VmHWM:") - before, status("RssAnon:") - anonymous)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel counts peaks on Linux alone")
def test_opening_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    """A tied head is in memory once, and no more than one layer is there in two layouts.

    The peak counts pages of files, of which MAPPED bytes are what is being read; what is held does not.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 40000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 20}
    config = Qwen3Config(**sizes, num_attention_heads=8, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.01)
    model.save_pretrained(tmp_path / "large")
    small = make_tiny_target("qwen3", tmp_path / "small")
    shutil.copy(small / "tokenizer.json", tmp_path / "large")
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    for dtype, factor in (("float32", 2), ("bfloat16", 1)):
        command = [sys.executable, "-c", OPENED, str(small), str(tmp_path / "large"), dtype]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peak, held = (int(number) for number in done.stdout.split())
        ratios = (peak - MAPPED) / (factor * num_bytes), held / (factor * num_bytes)
        assert ratios[0] < 1.25 and ratios[1] < 1.1, f"{dtype}: peak and held {ratios} times the weights"
