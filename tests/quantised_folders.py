"""Tiny targets that each quantising project's own code writes, and what holds of everyone of them here."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from family_decoding import LENGTH, PROMPTS, TIE, said_by, trained_on_own_text
from tiny_targets import VOCAB_SIZE, make_tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from components.decoding.batch import decode_batch
from components.decoding.chain import decode
from components.decoding.tree_shapes import DynamicShape
from components.targets.config import facts_of

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
STEPS = 5


class Quantised(NamedTuple):
    """One way of quantising. packages: what must be installed to write and to load it."""

    method: str
    way: str
    packages: tuple[str, ...]
    make: Callable[[Path, Path], None]  # a plain model's folder, and the one to write


def plain_model(folder: Path, **changes: Any) -> Path:
    """A random Qwen3 in bfloat16 whose matrices are wide enough for groups of 32; its largest logits stand clear."""
    folder.mkdir(parents=True)
    make_tiny_tokenizer(folder)
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = Qwen3Config(vocab_size=VOCAB_SIZE, **{**SIZES, **heads, **ids, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).float().requires_grad_(False)
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, 0.5 if "lm_head" in name else weight.shape[-1] ** -0.5)
    model.bfloat16().save_pretrained(folder)
    return folder


def by_transformers(settings: Callable[[], Any], **arguments: Any) -> Callable[[Path, Path], None]:
    """Written by transformers with this quantisation config."""

    def make(plain: Path, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=settings(), dtype=torch.bfloat16, **arguments
        )
        model.save_pretrained(folder)

    return make


def by_compressed_tensors(preset: str, ignored: tuple[str, ...] = ("lm_head",)) -> Callable[[Path, Path], None]:
    """Written by compressed-tensors with the scales of its own formulae, rounded to nearest."""

    def make(plain: Path, folder: Path) -> None:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        scheme = preset_name_to_scheme(preset, ["Linear"])
        if preset.endswith("A16"):
            scheme.weights.group_size = 32
        settings = {"config_groups": {"group_0": scheme}, "ignore": list(ignored)}
        apply_quantization_config(model, QuantizationConfig(**settings, quantization_status="initialized"))
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                _set_scales(module)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))

    return make


def _set_scales(module: Any) -> None:
    """The scales of a layer's weights by their least and largest numbers, and of its inputs by guess."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight, scale, weights = module.weight.data.float(), module.weight_scale, module.quantization_scheme.weights
    if weights.strategy == "block":
        rows, width = weights.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % rows))
        blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // width, width).transpose(1, 2).flatten(2)
    else:
        blocks = weight.reshape(1 if scale.numel() == 1 else len(weight), 1 if scale.ndim == 1 else scale.shape[1], -1)
    whole: dict[str, Any] = {}
    if hasattr(module, "weight_global_scale"):
        module.weight_global_scale.data.copy_(generate_gparam(weight.amin(), weight.amax()))
        whole = {"global_scale": module.weight_global_scale}
    scales, zeros = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights, **whole)
    scale.data.copy_(scales.reshape(scale.shape).to(scale.dtype))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zeros.reshape(module.weight_zero_point.shape))
    for name, value in (("input_scale", 0.05), ("input_global_scale", 100.0)):
        if hasattr(module, name):
            getattr(module, name).data.fill_(value)


def by_auto_round(format: str) -> Callable[[Path, Path], None]:
    """Written by AutoRound, rounded to nearest in groups of 32; its formats are those of GPTQ and AWQ too."""

    def make(plain: Path, folder: Path) -> None:
        from auto_round import AutoRound

        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        settings: dict[str, Any] = {"bits": 4, "group_size": 32, "iters": 0, "disable_opt_rtn": True}
        rounded = AutoRound(model, AutoTokenizer.from_pretrained(plain), device_map="cpu", **settings)
        rounded.quantize_and_save(str(folder / "rounded"), format=format)
        found = next(file.parent for file in folder.rglob("config.json"))
        for file in list(found.iterdir()):
            shutil.move(file, folder / file.name)

    return make


def _bitsandbytes(**settings: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**settings)


def _torchao(name: str, **settings: Any) -> Any:
    from torchao import quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, name)(), **settings)


def _torchao_with_embeddings() -> Any:
    """The embedding and the head quantised as well."""
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis
    from transformers import TorchAoConfig

    embedding = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    layers = FqnToConfig({"_default": Int8WeightOnlyConfig(), "model.embed_tokens": embedding})
    return TorchAoConfig(layers, include_input_output_embeddings=True)


_CT, _BNB, _AO = ("compressed-tensors",), ("bitsandbytes", "accelerate"), ("torchao", "accelerate")
QUANTISED: tuple[Quantised, ...] = (
    *(Quantised("compressed-tensors", preset, _CT, by_compressed_tensors(preset))
      for preset in ("W4A16", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4")),
    Quantised("compressed-tensors", "W8A16, head too", _CT, by_compressed_tensors("W8A16", ignored=())),
    Quantised("bitsandbytes", "nf4", _BNB,
              by_transformers(lambda: _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                                    bnb_4bit_use_double_quant=True), device_map="cpu")),
    Quantised("bitsandbytes", "8 bits, threshold 0", _BNB,
              by_transformers(lambda: _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0), device_map="cpu")),
    Quantised("torchao", "int8", _AO, by_transformers(lambda: _torchao("Int8WeightOnlyConfig"))),
    Quantised("torchao", "float8", _AO, by_transformers(lambda: _torchao("Float8WeightOnlyConfig"))),
    Quantised("torchao", "int8, embedding and head too", _AO, by_transformers(_torchao_with_embeddings)),
    Quantised("gptq", "4 bits", ("auto-round", "gptqmodel", "optimum"), by_auto_round("auto_gptq")),
    Quantised("awq", "4 bits", ("auto-round", "gptqmodel"), by_auto_round("auto_awq")),
    Quantised("auto-round", "4 bits", ("auto-round",), by_auto_round("auto_round")),
)  # fmt: skip


def written(case: Quantised, folder: Path) -> Path:
    """The folder of a tiny target quantised so; skips the test where a package is not installed."""
    for package in case.packages:
        pytest.importorskip(package.replace("-", "_"), reason=f"{case.method} needs {package}: not in make setup")
    out = folder / "quantised"
    out.mkdir(parents=True)
    make_tiny_tokenizer(out)
    case.make(plain_model(folder / "plain"), out)
    return out


def held_against_loader(case: Quantised, folder: Path) -> dict[str, Any]:
    """A target quantised so beside transformers' own loader: how far apart features and answers are, and what trains.

    features_apart: largest difference of auxiliary hidden states. loader_apart: largest difference of logits between
    the loader's own two ways, all of a text at once and token by token; formats that round activations multiply the
    last bits there. faults: answers that differ where the best two tokens lie further apart than twice that.
    """
    model = written(case, folder)
    alone = said_by(f"{case.method} {case.way}", model)
    target = alone.target
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=target.dtype).eval()
    ids = torch.arange(1, 20)[None]
    passed = target.forward(ids, target.new_cache(1, 20), features=True)
    with torch.no_grad():
        theirs = loaded(ids, output_hidden_states=True)
    taps = torch.cat([theirs.hidden_states[layer] for layer in target.shape.tap_layers], -1)
    assert passed.taps is not None and passed.logits is not None
    loader_apart = 0.0
    for prompt, tokens, logits in zip(PROMPTS, alone.tokens, alone.logits, strict=True):
        with torch.no_grad():
            whole = loaded(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        loader_apart = max(loader_apart, float((whole - logits.float()).abs().max()))
    tie = max(TIE, 2 * loader_apart)
    as_asked: dict[str, Any] = {"location": "here", "trust_remote_code": False, "dtype": "auto", "device": "cpu"}
    facts = facts_of(model, **as_asked)
    draft = trained_on_own_text(alone, "eagle3", {"ttt_steps": 4}, STEPS)
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "ignore_eos": True}
    answers = {
        "chain": [decode(target, draft, prompt, depth=3, **options).tokens for prompt in PROMPTS],
        "batch": [one.tokens for one in decode_batch(target, draft, PROMPTS, depth=3, **options)],
        "tree": [one.tokens for one in decode_batch(target, draft, PROMPTS, shape=DynamicShape(3, 3, 8), **options)],
    }
    return {
        "packages": {package: version(package) for package in case.packages},
        "dtype": str(target.dtype).removeprefix("torch."),
        "num_params": facts["num_params"],
        "params_of_plain": facts_of(folder / "plain", **as_asked)["num_params"],
        "features_apart": float((passed.taps - taps).abs().max()),
        "loader_apart": loader_apart,
        "logits_apart": float((passed.logits - theirs.logits.float()).abs().max()),
        "embedding": list(target.embedding.shape),
        "embedding_is_plain": type(target.embedding) in (torch.Tensor, torch.nn.Parameter),
        "faults": [f"{way}: {fault}" for way, said in answers.items() if (fault := alone.first_fault(said, tie))],
    }
