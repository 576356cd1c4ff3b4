"""MTP modules in three shapes: DeepSeek-V3's names, one module as MiMo-7B's, and a model with its own module replaced.

`mtp`: `model.layers.{n + j}.*`, n = the target's layers, j = 0 .. modules - 1. Each module is one decoder block between
a join (`enorm`, `hnorm`, `eh_proj`, embedding first) and `shared_head.norm`. The embedding and the LM head are the
target's and are not copied; DeepSeek's files repeat them as `embed_tokens` and `shared_head.head`, and a checkpoint
with these copies is accepted as well. The block is a Llama block (grouped-query attention, SwiGLU), not DeepSeek's
latent attention and experts, so no engine can read this format.

`mimo`: one new module, which vLLM serves beside any dense target of the same block sizes and unscaled RoPE. MiMo's
module is our MTP module under other names: token_layernorm, hidden_layernorm, input_proj (HIDDEN STATE first, so the
halves of our projection are swapped), a Qwen2 block (a Llama block with biases on q, k and v: zeros here) and
final_layernorm; both zero the embedding of position 0. vLLM feeds the module the target's last state after the final
norm, and drafts every further token with the same module, fed its own normed output. A module trained for the first
draft token only is therefore served exactly at depth 1, and less well deeper. vLLM's loader requires every tensor of
the class, so copies of the target's embedding and LM head are written too. It does not read this folder's config.json
for the module: heads, MLP width, norm epsilon and rotary base come from the target's config, and so does the number of
modules, which is overridden by `--hf-overrides` (launch.py). Sizes are therefore compared with the target's. A target
with scaled RoPE is refused: vLLM would scale the module's positions as well, and it was trained without scaling.

`stitched`: engines read a native module from the model's checkpoint. The copy has the same files, names and dtypes;
only the module's tensors differ. Files without any of them are hard-linked where the disk allows, else copied. The
written files are read back and compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from components.contract import UserError
from components.drafts.importing.mtp import MIMO as PREFIX
from components.drafts.importing.mtp import MIMO_NAMES, SHARED
from components.drafts.methods.mtp_native_weights import find_native_mtp
from components.drafts.settings import MtpSettings
from components.publish.formats.checkpoint import (
    Checkpoint,
    Config,
    Spec,
    check_tensors,
    check_vocabulary,
    link_or_copy,
    require_equal,
    save_weights,
)
from components.publish.formats.interface import DrafterState, Source, without_vocabulary
from components.publish.formats.llama_block import (
    LAYERS,
    AbstractLlamaLayout,
    Fact,
    block_config,
    block_specs,
    check_facts,
    dtype_of,
    head_dim_of,
)
from components.release_record import WeightCounts
from components.targets.shape import TargetShape
from components.targets.source import list_files


@final
class MtpLayout(AbstractLlamaLayout):
    """MTP modules under DeepSeek-V3's names, for Draftsmith's own reader."""

    format = "mtp"
    methods = ("mtp",)
    shares_head = True
    architectures = ("LlamaMtpModel",)

    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        """Checks d2t and t2d (the cut draft vocabulary) and leaves them out."""
        shape, settings = source.shape, MtpSettings.model_validate(drafter.settings)
        check_omitted_vocabulary(drafter, shape.vocab_size, "mtp checkpoint")
        config = {
            **self.names(),
            # Heads, positions and num_hidden_layers are the target's: the modules' layer numbers continue it.
            **block_config(drafter, shape, shape.num_layers),
            "tie_word_embeddings": shape.tie_word_embeddings,
            "num_nextn_predict_layers": settings.mtp_modules,
            "shared_with_target": ["embed_tokens.weight", "shared_head.head.weight"],
            "mtp_first_hidden": settings.first_hidden,
        }
        return Checkpoint(config, without_vocabulary(drafter.tensors))

    def recognises(self, config: Config, names: frozenset[str]) -> bool:
        return "num_nextn_predict_layers" in config or any(name.endswith(".eh_proj.weight") for name in names)

    def check_config(self, config: Config, location: str) -> None:
        super().check_config(config, location)
        facts = {"num_nextn_predict_layers": LAYERS, "mtp_first_hidden": Fact(str, only=("post_norm", "pre_norm"))}
        check_facts(config, facts, location)

    def expected(self, config: Config) -> dict[str, Spec]:
        hidden, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        specs: dict[str, Spec] = {}
        for module in range(config["num_nextn_predict_layers"]):
            prefix = f"model.layers.{config['num_hidden_layers'] + module}."
            specs |= {
                f"{prefix}enorm.weight": Spec((hidden,)),
                f"{prefix}hnorm.weight": Spec((hidden,)),
                f"{prefix}eh_proj.weight": Spec((hidden, 2 * hidden)),
                **block_specs(config, prefix),
                f"{prefix}shared_head.norm.weight": Spec((hidden,)),
                f"{prefix}embed_tokens.weight": Spec((vocab_size, hidden), optional=True),
                f"{prefix}shared_head.head.weight": Spec((vocab_size, hidden), optional=True),
            }
        return specs

    def check_target(self, config: Config, shape: TargetShape, location: str) -> None:
        super().check_target(config, shape, location)
        check_numbering(config, shape, location)

    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        config = checkpoint.config
        settings = {
            "mtp_modules": config["num_nextn_predict_layers"],
            "first_hidden": config["mtp_first_hidden"],
            "intermediate_size": config["intermediate_size"],
        }
        shared = (".embed_tokens.weight", ".shared_head.head.weight")
        return DrafterState("mtp", settings, {n: t for n, t in checkpoint.tensors.items() if not n.endswith(shared)})


def check_omitted_vocabulary(drafter: DrafterState, vocab_size: int, location: str) -> None:
    """Check d2t and t2d of a drafter even though its format leaves them out. Raises UserError, one line."""
    vocabulary: dict[str, Tensor] = {name: drafter.tensors[name] for name in ("d2t", "t2d") if name in drafter.tensors}
    if vocabulary:
        size = vocabulary["d2t"].numel() if "d2t" in vocabulary else 0
        specs = {"d2t": Spec((size,), torch.int64), "t2d": Spec((vocab_size,), torch.bool)}
        check_tensors(vocabulary, specs, location)
        check_vocabulary(vocabulary["d2t"], vocabulary["t2d"], location)


def check_numbering(config: Config, shape: TargetShape, location: str) -> None:
    """Check that the modules' layer numbers continue the target's. Raises UserError, one line."""
    if config["num_hidden_layers"] != shape.num_layers:
        raise UserError(
            f"{location}/config.json: num_hidden_layers is {config['num_hidden_layers']}, the target has"
            f" {shape.num_layers}: its modules bear the numbers of layers that are not theirs"
        )


NAMES = {ours: theirs for theirs, ours in MIMO_NAMES.items()}


@final
class MimoLayout(AbstractLlamaLayout):
    """One MTP module under the names of MiMo-7B, which vLLM serves."""

    format = "mimo"
    methods = ("mtp",)
    shares_head = True
    architectures = ("MiMoForCausalLM",)
    model_types = ("qwen2", "mimo")

    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        shape, settings, dtype = source.shape, MtpSettings.model_validate(drafter.settings), dtype_of(drafter)
        if (modules := settings.mtp_modules) != 1:
            raise UserError(f"mimo checkpoint: holds one module, the drafter has {modules}; train with mtp_modules: 1")
        if settings.first_hidden != "post_norm":
            raise UserError("mimo checkpoint: read after the final norm; train with first_hidden: post_norm")
        check_omitted_vocabulary(drafter, shape.vocab_size, "mimo checkpoint")
        config = {
            **self.names(),
            **block_config(drafter, shape, shape.num_layers),
            "num_nextn_predict_layers": 1,
            "use_sliding_window": False,
        }
        layer_prefix = f"model.layers.{shape.num_layers}."
        tensors: dict[str, Tensor] = {}
        for name, tensor in without_vocabulary(drafter.tensors).items():
            inside = name.removeprefix(layer_prefix)
            tensors[PREFIX + NAMES.get(inside, inside) if name.startswith(layer_prefix) else name] = tensor
        joined = tensors.get(f"{PREFIX}input_proj.weight")
        if joined is not None:
            tensors[f"{PREFIX}input_proj.weight"] = _swap_halves(joined)
        for part in "qkv":
            weight = tensors.get(f"{PREFIX}self_attn.{part}_proj.weight")
            if weight is not None:
                tensors[f"{PREFIX}self_attn.{part}_proj.bias"] = torch.zeros(weight.shape[0], dtype=dtype)
        shared = zip(SHARED, (source.embedding(), source.head()), strict=True)
        return Checkpoint(config, tensors | {name: tensor.to(dtype).clone() for name, tensor in shared})

    def recognises(self, config: Config, names: frozenset[str]) -> bool:
        return "MiMo" in str(config.get("architectures")) or any(name.startswith(PREFIX) for name in names)

    def check_config(self, config: Config, location: str) -> None:
        super().check_config(config, location)
        check_facts(config, {"num_nextn_predict_layers": Fact(int, only=(1,))}, location)
        if head_dim_of(config) * config["num_attention_heads"] != config["hidden_size"]:
            raise UserError(
                f"{location}/config.json: {config['num_attention_heads']} heads of {head_dim_of(config)} are not"
                f" hidden_size {config['hidden_size']}, and vLLM's Qwen2 block takes their size from it"
            )

    def expected(self, config: Config) -> dict[str, Spec]:
        hidden, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        widths = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        widths["v"] = widths["k"]
        return {
            f"{PREFIX}token_layernorm.weight": Spec((hidden,)),
            f"{PREFIX}hidden_layernorm.weight": Spec((hidden,)),
            f"{PREFIX}input_proj.weight": Spec((hidden, 2 * hidden)),
            **block_specs(config, PREFIX),
            **{f"{PREFIX}self_attn.{part}_proj.bias": Spec((n * head_dim_of(config),)) for part, n in widths.items()},
            f"{PREFIX}final_layernorm.weight": Spec((hidden,)),
            **{name: Spec((vocab_size, hidden)) for name in SHARED},
        }

    def check_target(self, config: Config, shape: TargetShape, location: str) -> None:
        super().check_target(config, shape, location)
        check_numbering(config, shape, location)
        if shape.rope_scaling:
            raise UserError(
                f"{location}: the target's RoPE is scaled ({shape.rope_scaling}), by which vLLM would rotate a module"
                " that was trained with plain positions; take another format, or a target whose RoPE is not scaled"
            )
        for name in ("intermediate_size", "rms_norm_eps"):
            if config[name] != getattr(shape, name):
                raise UserError(
                    f"{location}/config.json: {name} is {config[name]}, must be the target's {getattr(shape, name)}:"
                    " vLLM builds the module by the target's config"
                )

    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        tensors: dict[str, Tensor] = {}
        for name, tensor in checkpoint.tensors.items():
            if name in SHARED:
                continue
            if name.endswith("_proj.bias"):
                if bool(tensor.count_nonzero()):
                    raise UserError(f"mimo: {name} is not zero, and Draftsmith's block has no biases")
                continue
            inside = name.removeprefix(PREFIX)
            tensors[f"model.layers.{source.shape.num_layers}.{MIMO_NAMES.get(inside, inside)}"] = tensor
        joined = f"model.layers.{source.shape.num_layers}.eh_proj.weight"
        tensors[joined] = _swap_halves(tensors[joined])
        settings = {"mtp_modules": 1, "intermediate_size": checkpoint.config["intermediate_size"]}
        return DrafterState("mtp", settings, tensors)


def _swap_halves(weight: Tensor) -> Tensor:
    return torch.cat(weight.chunk(2, 1)[::-1], 1)


MODULE_PREFIX = "module."  # prefix of the drafter's tensor names


def stitch(source: Path, out: Path, tensors: Mapping[str, Tensor], num_layers: int) -> WeightCounts:
    """Write the model in `source` into `out` with the tensors of a fine-tuned module (mtp_native.py) in place of its
    own.

    Returns {"num_tensors", "num_params", "dtype"} of the replaced tensors. Raises UserError, one line, when the model
    has no MTP module, or one of other shapes.
    """
    module = find_native_mtp(source, num_layers, source.name)
    inside = {n.removeprefix(MODULE_PREFIX): t for n, t in tensors.items() if n.startswith(MODULE_PREFIX)}
    named = module.to_checkpoint_names(inside)
    absent = sorted(set(named) - set(module.files))
    if absent or not all(bool(torch.isfinite(tensor).all()) for tensor in named.values()):
        what = f"{absent[0]} is not in it" if absent else "the fine-tuned module holds NaN or infinity"
        raise UserError(f"{source.name}: cannot take the fine-tuned module: {what}; train it again on this target")
    out.mkdir(parents=True, exist_ok=True)
    changed = {module.files[name] for name in named}
    for file in list_files(source, source.name):
        if file not in changed:
            link_or_copy(file, out / file.name)
    dtypes = set()
    for file in sorted(changed):
        with safe_open(file, framework="pt") as tensors_file:
            metadata = tensors_file.metadata()
        stored = load_file(file)
        for name in named.keys() & stored.keys():
            if named[name].shape != stored[name].shape:
                raise UserError(f"{source.name}: {name} has another shape now; train the module again on this target")
            dtypes.add(stored[name].dtype)
            stored[name] = named[name].to(stored[name].dtype).contiguous()
        save_weights(stored, out / file.name, metadata)
        require_equal(stored, load_file(out / file.name), file.name)
    return {
        "num_tensors": len(named),
        "num_params": sum(tensor.numel() for tensor in named.values()),
        "dtype": ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
    }
