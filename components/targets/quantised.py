"""A quantised target: what of it config.json says, and what stands in its way; known before any weight is read.

transformers loads such a checkpoint by the package of the method that wrote it. What a drafter takes over of it
(embedding, head, norm) is dequantised where it is taken (forward/transformers_model.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from components.contract import UserError
from components.outside_json import JsonObject
from components.text import message_of

_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "auto-round": ("auto-round", "accelerate"),
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed-tensors", "accelerate"),
    "gptq": ("gptqmodel", "optimum", "accelerate"),
    "torchao": ("torchao", "accelerate"),
    **dict.fromkeys(("bitnet", "fp8", "mxfp4", "mxfp8"), ("accelerate",)),
}
"""quant_method -> packages that transformers' loader imports; other methods are asked themselves."""
_USUAL_THRESHOLD: Final = 6.0  # of bitsandbytes, where the configuration says none
_OF_ITS_OWN: Final = ("bitsandbytes", "torchao", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
"""Methods, and formats of compressed-tensors, whose loader computes in the checkpoint's dtype whatever is asked."""


def quantisation_of(config: Any) -> JsonObject:
    """`quantization_config` of a transformers configuration or of its text part; {} where it is not quantised."""
    for part in (config, config.get_text_config(decoder=True)):
        if settings := getattr(part, "quantization_config", None):
            return dict(settings if isinstance(settings, dict) else settings.to_dict())
    return {}


def _method_of(settings: JsonObject) -> str:
    loads = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    return "bitsandbytes" if loads else str(settings.get("quant_method"))


def check_loader(config: Any, location: str) -> None:
    """Raises UserError where transformers lacks what loads this quantised model, or cannot load it on this machine."""
    if not (settings := quantisation_of(config)):
        return
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

    method = _method_of(settings)
    is_known = method == "bitsandbytes" or method in AUTO_QUANTIZATION_CONFIG_MAPPING
    if not is_known:
        raise UserError(
            f"target {location} is quantised by {method}, which transformers does not know: take a checkpoint that is"
            " not quantised, or one of compressed-tensors"
        )
    if threshold := _outlier_threshold(settings):
        raise UserError(
            f"target {location} is quantised by LLM.int8 with llm_int8_threshold {threshold:g}, where an outlier in one"
            " row changes how all rows of its pass are rounded: draft tokens would change what verifies them; set it to"
            " 0 in config.json (its weights are the same), or quantise in 4 bits"
        )
    if missing := missing_packages(config):
        raise UserError(
            f"target {location} is quantised by {method}: pip install {' '.join(missing)}"
            " (docs/my-model.md#quantised-models)"
        )
    try:
        AutoHfQuantizer.from_config(settings, pre_quantized=True).validate_environment(
            device_map=None, weights_only=True
        )
    except Exception as error:  # each method's own: a package, a device, a setting
        raise UserError(
            f"target {location} is quantised by {method}, which cannot be loaded here ({message_of(error)})"
        ) from error


def missing_packages(config: Any) -> list[str]:
    """The packages that the loader of a quantised model needs and that are not installed here."""
    if not (settings := quantisation_of(config)):
        return []
    return [package for package in _PACKAGES.get(_method_of(settings), ()) if not _is_installed(package)]


def _outlier_threshold(settings: JsonObject) -> float:
    """From what size on a number is left out of 8 bits, with the whole column that it is in; 0: none is."""
    if not settings.get("load_in_8bit"):
        return 0.0
    stated = settings.get("llm_int8_threshold")
    return _USUAL_THRESHOLD if stated is None else float(stated)


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def own_dtype(config: Any) -> str:
    """The dtype that the loader of this quantised model computes in whatever is asked; "" where it does as asked."""
    settings = quantisation_of(config)
    if _method_of(settings) == "auto-round":
        return "bfloat16"  # asked for float32, its loader computes in float16
    groups = [group.get("format") for group in _groups(settings)]
    if not {_method_of(settings), settings.get("format"), *groups} & set(_OF_ITS_OWN):
        return ""
    return "float32" if getattr(config.get_text_config(decoder=True), "dtype", None) == torch.float32 else "bfloat16"


def check_dtype(config: Any, dtype: str, location: str) -> None:
    """Raises UserError where a dtype is asked for ("auto" asks for none) that the loader would not compute in."""
    own = own_dtype(config)
    if own and dtype not in ("auto", own):
        method = _method_of(quantisation_of(config))
        raise UserError(
            f"target {location} is quantised by {method}, whose loader computes in {own}: leave dtype at auto"
        )


def check_all_read(unread: Iterable[str], location: str) -> None:
    """Raises UserError where the loader left scales or packed weights unread: the weights it made are wrong."""
    if left := sorted(name for name in unread if name.rsplit(".", 1)[-1] in _NEEDED):
        raise UserError(
            f"{location}: transformers leaves {len(left)} tensors of its quantisation unread, first {left[0]}: its"
            " config.json does not say how it is quantised; download it again, or take another checkpoint"
        )


def check_scales(dtypes: Mapping[str, str], settings: JsonObject, location: str) -> None:
    """Raises UserError where an 8-bit float has no scale beside it, which fp8's loader would take as it is.

    dtypes: name -> stored dtype of every tensor. settings: `quantisation_of`.
    """
    if _method_of(settings) not in ("fp8", "mxfp8", "compressed-tensors"):
        return
    for name, dtype in dtypes.items():
        stem = name.removesuffix("weight")
        scales = (f"{name}_scale_inv", f"{name}_scale", f"{stem}scale")
        if dtype.startswith("F8") and name.endswith(".weight") and not any(scale in dtypes for scale in scales):
            raise UserError(f"{location}: {name} is of {dtype} and has no scale beside it; download it again")


_NEEDED: Final = frozenset(
    ("weight_packed", "qweight", "weight_scale", "weight_scale_inv", "scales", "qzeros", "SCB", "absmax", "quant_map")
)
_BESIDE_WEIGHTS: Final = frozenset(
    (
        *("weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point", "weight_g_idx"),
        *("input_scale", "input_zero_point", "weight_global_scale", "input_global_scale", "k_scale", "v_scale"),
        *("scales", "qzeros", "g_idx", "_weight_scale", "_weight_zero_point", "SCB", "weight_format"),
        *("absmax", "quant_map", "nested_absmax", "nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4"),
        *("gate_up_proj_scales", "down_proj_scales"),
    )
)
"""Last parts of the names of tensors that quantisation stores beside the weights."""
_PACKED: Final = frozenset(("weight_packed", "qweight", "gate_up_proj_blocks", "down_proj_blocks"))
_WORD_BITS: Final = {"I32": 32, "U8": 8, "I8": 8}


def numbers_per_stored(name: str, stored_dtype: str, settings: JsonObject) -> int:
    """Weights that one stored number of a tensor stands for: 0 beside the weights, several where they are packed.

    settings: `quantisation_of`. Where the width is not said, four bits are assumed.
    """
    ending = name.rsplit(".", 1)[-1]
    if not settings:
        return 1
    if ending in _BESIDE_WEIGHTS:
        return 0
    in_nibbles = ending == "weight" and stored_dtype == "U8" and bool(settings.get("load_in_4bit"))
    if ending not in _PACKED and not in_nibbles:
        return 1
    widths = [bits for group in _groups(settings) if (bits := (group.get("weights") or {}).get("num_bits"))]
    return _WORD_BITS.get(stored_dtype, 32) // int(
        settings.get("bits") or settings.get("w_bit") or min(widths, default=4)
    )


def _groups(settings: JsonObject) -> list[JsonObject]:
    """The groups of layers of compressed-tensors."""
    return list((settings.get("config_groups") or {}).values())
