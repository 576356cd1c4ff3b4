"""A quantised target is what its loader gives, or one line says what stands in the way before anything runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_folders import changed_config, changed_tensors, context, without_tensor
from quantised_folders import QUANTISED, Quantised, held_against_loader
from safetensors.torch import load_file, save_file
from tiny_families import make_family

from components.contract import UserError
from components.publish.formats.interface import Source
from components.targets import load_target
from components.targets.config import facts_of
from components.targets.load import open_target
from components.targets.quantised import numbers_per_stored

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
SCALE = "model.layers.3.mlp.up_proj.weight_scale_inv"


def in_fp8(folder: Path, *endings: str) -> Path:
    """A tiny Qwen3 whose matrices of these names are eights of a bit pattern and scales of two."""

    def quantise(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.endswith(endings)]:
            rows, width = ((extent + 31) // 32 for extent in weights[name].shape)
            weights[name] = (weights[name] / 2).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = torch.full((rows, width), 2.0)

    changed_tensors(quantise)(make_family("qwen3", folder))
    changed_config(quantization_config=FP8)(folder)
    return folder


def is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize(
    ("settings", "packages"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, ["gptqmodel"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, ["gptqmodel", "optimum"]),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, ["compressed-tensors"]),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["bitsandbytes"]),
        ({"quant_method": "torchao", "quant_type": {}}, ["torchao"]),
    ],
)
def test_a_package_that_its_loader_needs_is_named_in_the_first_step(
    settings: dict[str, Any], packages: list[str], tmp_path: Path
) -> None:
    missing = [package for package in packages if not is_installed(package)]
    if not missing:
        pytest.skip(f"{' and '.join(packages)} are installed")
    folder = make_family("qwen3", tmp_path / "model")
    changed_config(quantization_config=settings)(folder)
    line = f"is quantised by {settings['quant_method']}: pip install {' '.join(missing)} "
    for act in (lambda: load_target(model=str(folder), ctx=context(tmp_path / "out")), lambda: open_target(folder)):
        with pytest.raises(UserError) as refused:
            act()
        assert str(refused.value).startswith(f"target {folder} {line}") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "by modelopt, which transformers does not know"),
        ({"quant_method": "fbgemm_fp8"}, "by fbgemm_fp8, which cannot be loaded here"),
        ({"quant_method": "nvfp4"}, "by nvfp4, which cannot be loaded here"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "LLM.int8 with llm_int8_threshold 6, where"),
        ({"load_in_8bit": True, "llm_int8_threshold": 4.5}, "LLM.int8 with llm_int8_threshold 4.5, where"),
    ],
)
def test_a_method_that_cannot_be_loaded_here_is_refused_in_one_line(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = make_family("qwen3", tmp_path / "model")
    changed_config(quantization_config=settings)(folder)
    with pytest.raises(UserError) as refused:
        load_target(model=str(folder), ctx=context(tmp_path / "out"))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_checkpoint_cut_short_is_refused(tmp_path: Path) -> None:
    folder = in_fp8(tmp_path / "model", "_proj.weight")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        open_target(folder)


def test_scales_that_are_missing_are_refused(tmp_path: Path) -> None:
    folder = in_fp8(tmp_path / "model", "_proj.weight")
    open_target(folder)
    without_tensor(SCALE)(folder)
    with pytest.raises(UserError, match="up_proj"):
        open_target(folder)


def test_scales_that_the_configuration_does_not_mention_are_refused(tmp_path: Path) -> None:
    """Their weights would be read without them."""
    folder = in_fp8(tmp_path / "model", "_proj.weight")
    changed_config(quantization_config=None)(folder)
    with pytest.raises(UserError, match="56 tensors of its quantisation unread"):
        open_target(folder)


def test_a_release_takes_the_head_of_a_quantised_target_dequantised(tmp_path: Path) -> None:
    folder = in_fp8(tmp_path / "model", "_proj.weight", "lm_head.weight")
    target = open_target(folder, dtype="float32")
    stored = load_file(folder / "model.safetensors")["lm_head.weight"].float() * 2
    source = Source(target.shape, "tiny", folder)
    torch.testing.assert_close(source.head(), stored)
    torch.testing.assert_close(source.embedding(), target.embedding)


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_experts_in_mxfp4_are_dequantised_where_their_kernels_are_not(tmp_path: Path) -> None:
    """GPT-OSS: 32 numbers of four bits share a power of two; two stand in a byte, the first one low."""
    folder, plain = make_family("gpt_oss", tmp_path / "packed"), make_family("gpt_oss", tmp_path / "plain")
    packed, restored = {}, {}
    random = torch.Generator().manual_seed(3)
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = restored[name] = weight
            continue
        experts, width, rows = weight.shape
        codes = torch.randint(0, 16, (experts, rows, width // 32, 32), generator=random)
        scales = torch.randint(122, 126, (experts, rows, width // 32), generator=random)
        packed[f"{name}_blocks"] = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
        packed[f"{name}_scales"] = scales.to(torch.uint8)
        numbers = FP4[codes % 8] * torch.where(codes < 8, 1.0, -1.0) * (2.0 ** (scales - 127))[..., None]
        restored[name] = numbers.flatten(2).transpose(1, 2).contiguous()
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(restored, plain / "model.safetensors", metadata={"format": "pt"})
    changed_config(quantization_config={"quant_method": "mxfp4"})(folder)
    ids = torch.arange(1, 20)[None]
    passes = []
    for path in (folder, plain):
        target = open_target(path, dtype="float32", kernel="transformers")
        passes.append(target.forward(ids, target.new_cache(1, 20), features=True))
    assert passes[0].logits is not None and passes[0].taps is not None
    torch.testing.assert_close(passes[0].logits, passes[1].logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(passes[0].taps, passes[1].taps, rtol=1e-5, atol=1e-5)
    facts = [
        facts_of(path, location="here", trust_remote_code=False, dtype="auto", device="cpu") for path in (folder, plain)
    ]
    assert facts[0]["num_params"] == facts[1]["num_params"]


@pytest.mark.parametrize(
    ("name", "dtype", "settings", "numbers"),
    [
        ("q_proj.weight", "F8_E4M3", {"quant_method": "fp8"}, 1),
        ("q_proj.weight_scale_inv", "F32", {"quant_method": "fp8"}, 0),
        ("q_proj.weight_scale_inv", "F32", {}, 1),
        ("q_proj.qweight", "I32", {"quant_method": "gptq", "bits": 4}, 8),
        ("q_proj.qweight", "I32", {"quant_method": "gptq", "bits": 8}, 4),
        ("q_proj.weight_packed", "U8", {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 2),
        ("q_proj.weight", "U8", {"load_in_4bit": True}, 2),
        ("q_proj.weight", "I8", {"load_in_8bit": True}, 1),
        ("q_proj._weight_qdata", "I8", {"quant_method": "torchao"}, 1),
    ],
)
def test_packed_numbers_count_each_and_scales_do_not(
    name: str, dtype: str, settings: dict[str, Any], numbers: int
) -> None:
    assert numbers_per_stored(name, dtype, settings) == numbers


QUICK = [case for case in QUANTISED if "auto-round" not in case.packages]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.method} {case.way}")
def test_a_target_is_as_its_own_loader_gives_it(case: Quantised, tmp_path: Path) -> None:
    found = held_against_loader(case, tmp_path)
    assert found["faults"] == [] and found["features_apart"] == found["logits_apart"] == 0
    assert found["embedding_is_plain"] and found["num_params"] == found["params_of_plain"]
