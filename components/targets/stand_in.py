"""Step `targets.make_stand_in`: a small random target in the place of a large one, made of its configuration alone.

It has the architecture, every layer and kind of layer, the head size, the positions, the vocabulary, the tokenizer and
the chat template of the target that it stands for; only widths and numbers of heads and experts are smaller. What a
pipeline would meet after hours with the target, it meets with the stand-in within minutes (`draftsmith rehearse`).
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from components.contract import Context, Target, UserError
from components.targets.config import facts_of, has_text_part, read_config
from components.targets.quantised import missing_packages
from components.targets.shape import shape_of
from components.targets.source import TOKENIZERS, find_folder, settings_files
from components.text import message_of

WIDTH, FEED_FORWARD, HEADS, KV_HEADS = 128, 128, 4, 2
_AT_MOST: Mapping[str, int] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "n_group", "num_expert_group"), 2),
    **dict.fromkeys(("n_shared_experts", "topk_group", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 64),
    **dict.fromkeys(("index_n_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("swa_num_key_value_heads", "num_global_key_value_heads"), KV_HEADS),
    **dict.fromkeys(("mamba_num_heads", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
}
"""Settings of configurations, by their names in transformers -> the most that a stand-in has of them."""
_FEED_FORWARD: tuple[str, ...] = ("intermediate_size", "intermediate_size_mlp", "ffn_dim", "n_inner")


def make_stand_in(*, model: str, ctx: Context) -> Target:
    """The step `targets.make_stand_in`; its settings are explained in components/targets/steps.py."""
    source = find_folder(model, weights=False)
    stated = read_config(source, location=model, trust_remote_code=False)
    config = shrink(stated, model)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
        packages = missing_packages(stated)
        needs = f"; where it runs: pip install {' '.join(packages)}" if packages else ""
        ctx.note(f"{model}: is quantised; its stand-in is not, so its loader is not tried{needs}")
    _write_random(config, model, ctx)
    _write_own_mtp(config.get_text_config(decoder=True), ctx)
    for file in settings_files(source):  # after the weights, beside which transformers writes a generation_config.json
        if file.name != "config.json":
            shutil.copyfile(file, ctx.out / file.name)
    if not any((source / name).is_file() for name in TOKENIZERS):
        _copy_builtin_tokenizer(ctx.out)
        ctx.note(f"{model}: has no tokenizer; the built-in target's stands for it, so its chat template is not tried")
    facts = facts_of(ctx.out, location=model, trust_remote_code=False, dtype="auto", device=ctx.device)
    ctx.note(f"{model}: a stand-in of {facts['num_params'] / 1e6:.0f} M random weights, every layer of it")
    return Target.of_step(ctx, {**facts, "model": f"stand-in of {model}"})


def shrink(config: Any, location: str) -> Any:
    """The configuration of the stand-in: widths, heads and experts are small, all else is as it was.

    Raises:
        UserError: it describes no target that Draftsmith works with.
    """
    shape = shape_of(config, location)
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    text.allow_global_per_layer_attribute_access = True
    own_head_dim = getattr(text, "head_dim", None)
    for name in [*vars(text), *text.attribute_map]:
        value = getattr(text, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            if name.endswith(_FEED_FORWARD):
                setattr(text, name, FEED_FORWARD)
            elif value > _AT_MOST.get(name, value):
                setattr(text, name, _AT_MOST[name])
    text.num_attention_heads = HEADS
    if getattr(text, "num_key_value_heads", None):
        same = shape.num_key_value_heads == shape.num_attention_heads
        text.num_key_value_heads = HEADS if same else min(shape.num_key_value_heads, KV_HEADS)
    # Where no head size is named it is width over heads: rotary tables and engines' limits depend on it. Where it is,
    # targets of different widths keep different ones two times in three: a drafter of the one does not fit the other.
    own_width = WIDTH + 32 * (shape.hidden_size // 64 % 3)
    text.hidden_size = own_width if own_head_dim else HEADS * (shape.hidden_size // shape.num_attention_heads)
    for name in ("vision_config", "audio_config"):
        for layers in ("num_hidden_layers", "depth", "num_layers"):
            if getattr(getattr(small, name, None), layers, None):
                setattr(getattr(small, name), layers, 1)
    return small


def _write_random(config: Any, location: str, ctx: Context) -> None:
    """Write a model of random weights in bfloat16, with which its answers depend on all of what was asked."""
    kind = AutoModelForImageTextToText if has_text_part(config) else AutoModelForCausalLM
    torch.manual_seed(ctx.seed)
    try:
        model = kind.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(ctx.out)
    except Exception as error:  # each architecture breaks in its own way on a configuration that does not fit
        raise UserError(f"{location}: no stand-in can be made of its config.json ({message_of(error)})") from error


def _write_own_mtp(config: Any, ctx: Context) -> None:
    """Beside a target with an MTP module of its own, one under DeepSeek-V3's names: its last layer and what joins it.

    transformers, which makes the rest, knows no such module.
    """
    if not getattr(config, "num_nextn_predict_layers", 0):
        return
    number, width = config.num_hidden_layers, config.hidden_size
    layer, own = f"model.layers.{number - 1}.", f"model.layers.{number}."
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(ctx.out.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            names = [name for name in list(stored.keys()) if name.startswith(layer)]
            tensors |= {name.replace(layer, own): stored.get_tensor(name) for name in names}
    tensors |= {f"{own}{norm}.weight": torch.ones(width) for norm in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{own}eh_proj.weight"] = torch.randn(width, 2 * width) * (2 * width) ** -0.5
    named = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(named, ctx.out / "model-mtp.safetensors", metadata={"format": "pt"})


def _copy_builtin_tokenizer(folder: Path) -> None:
    """Write the tokenizer of the built-in target into a folder."""
    builtin = find_folder("builtin")
    for file in settings_files(builtin):
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copyfile(file, folder / file.name)
