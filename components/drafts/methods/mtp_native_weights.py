"""The native multi-token-prediction module of a checkpoint: its tensors, read and renamed in both directions.

transformers drops these tensors when it loads the model, so they are read straight from safetensors. Four layouts:
  deepseek  model.layers.{n}.*    n = num_hidden_layers. enorm, hnorm, eh_proj (embedding first), the block's tensors
            beside them, shared_head.norm. Embedding of position 0 zeroed; the block's output itself is fed back.
            (DeepSeek-V3, arXiv:2412.19437, README_WEIGHTS; GLM-4.5 and Kimi-K2 alike)
  qwen      mtp.*                 pre_fc_norm_embedding, pre_fc_norm_hidden, fc (embedding first), layers.0.*, norm.
            The normed output is fed back. (Qwen3-Next)
  mimo      model.mtp_layers.0.*  token_layernorm, hidden_layernorm, input_proj (HIDDEN STATE first), the block's
            tensors, final_layernorm. Embedding of position 0 zeroed; the normed output is fed back. (MiMo-7B)
  ernie     model.mtp_*.0.*       mtp_emb_norm, mtp_hidden_norm, mtp_linear_proj (embedding first), mtp_block, without
            experts. The last norm is the model's own; the normed output is fed back. (ERNIE 4.5, as FastDeploy runs it;
            vLLM 0.32 leaves that norm out and zeroes the embedding of position 0)
Embedding and LM head are the target's: copies of them in a checkpoint are neither read nor changed. Experts are stored
one by one and computed as one tensor; of several modules only the first is used, for every step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor

from components.contract import UserError
from components.targets.load import check_finite

EXPERT = re.compile(r"(?P<at>.*experts\.)(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class NativeMtpLayout:
    """The tensor names of one family of checkpoints, and how its module computes."""

    name: Literal["deepseek", "qwen", "mimo", "ernie"]
    prefix: str  # with {n} for the number of the target's layers
    token_norm: str
    hidden_norm: str
    projection: str
    block: str  # prefix of the block's own names
    last_norm: str  # "": the target's final norm
    embedding_first: bool
    zero_first: bool
    recycles_normed: bool

    def prefixes(self, num_layers: int) -> dict[str, str]:
        """Name prefix in the checkpoint -> name prefix in NativeMtpModule."""
        prefix = self.prefix.format(n=num_layers)
        parts = {
            self.token_norm: "token_norm",
            self.hidden_norm: "hidden_norm",
            self.projection: "projection",
            self.last_norm: "last_norm",
        }
        return {
            **{f"{prefix}{there}.": f"{module_part}." for there, module_part in parts.items() if there},
            **{
                f"{prefix}{self.block}{part}": f"block.{part}"
                for part in ("input_", "post_attention_", "self_attn.", "mlp.")
            },
        }


LAYOUTS = (
    NativeMtpLayout(
        "deepseek", "model.layers.{n}.", "enorm", "hnorm", "eh_proj", "", "shared_head.norm", True, True, False
    ),
    NativeMtpLayout(
        "qwen",
        "mtp.",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "fc",
        "layers.0.",
        "norm",
        embedding_first=True,
        zero_first=False,
        recycles_normed=True,
    ),
    NativeMtpLayout(
        "mimo",
        "model.mtp_layers.0.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "",
        "final_layernorm",
        embedding_first=False,
        zero_first=True,
        recycles_normed=True,
    ),
    NativeMtpLayout(
        "ernie",
        "model.mtp_",
        "emb_norm.0",
        "hidden_norm.0",
        "linear_proj.0",
        "block.0.",
        "",
        embedding_first=True,
        zero_first=False,
        recycles_normed=True,
    ),
)


@dataclass(frozen=True)
class NativeMtpWeights:
    """The module in a checkpoint. files: name in the checkpoint -> the safetensors file it is in."""

    layout: NativeMtpLayout
    num_layers: int
    files: Mapping[str, Path]

    @property
    def has_experts(self) -> bool:
        """Whether the module's block is a mixture of experts."""
        return any(".experts." in name for name in self.files)

    def read(self, expected: Mapping[str, Tensor], checkpoint: str) -> dict[str, Tensor]:
        """Read the tensors as stored, under NativeMtpModule's names; `expected` has those names and shapes.

        Raises UserError, one line, when one is missing, of another shape, or stored beside scales.
        """
        if scales := [name for name in self.files if name.endswith(("_scale_inv", "weight_scale"))]:
            raise UserError(
                f"{checkpoint}: its {self.layout.name} module is quantised ({scales[0]}): convert the checkpoint to "
                "bfloat16, or train a new one with start: new"
            )
        tensors = stack_experts(self._read_renamed())
        mismatched = [
            f"{name} is {_shape(tensors.get(name))}, must be {_shape(tensor)}"
            for name, tensor in expected.items()
            if _shape(tensors.get(name)) != _shape(tensor)
        ]
        if mismatched:
            raise UserError(
                f"{checkpoint}: its {self.layout.name} module does not fit its config.json: {mismatched[0]}"
                f"{f' and {len(mismatched) - 1} more' if len(mismatched) > 1 else ''}; train a new one with start: new"
            )
        return {name: tensors[name] for name in expected}

    def _read_renamed(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, file in self.files.items():
            for checkpoint_prefix, module_prefix in self.layout.prefixes(self.num_layers).items():
                if name.startswith(checkpoint_prefix):
                    with safe_open(file, framework="pt") as tensor_file:
                        tensor = tensor_file.get_tensor(name)
                    check_finite(tensor, f"{file}: {name}")
                    tensors[module_prefix + name.removeprefix(checkpoint_prefix)] = tensor
        return tensors

    def to_checkpoint_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """NativeMtpModule's tensors under the checkpoint's names, experts split where the checkpoint has them so."""
        prefixes = {
            module_prefix: checkpoint_prefix
            for checkpoint_prefix, module_prefix in self.layout.prefixes(self.num_layers).items()
        }
        named: dict[str, Tensor] = {}
        separate = any(EXPERT.fullmatch(name) for name in self.files)
        for name, tensor in (unstack_experts(tensors) if separate else tensors).items():
            module_prefix = next(module_prefix for module_prefix in prefixes if name.startswith(module_prefix))
            named[prefixes[module_prefix] + name.removeprefix(module_prefix)] = tensor
        return named


def find_native_mtp(folder: Path, num_layers: int, checkpoint: str) -> NativeMtpWeights:
    """Find the module in the checkpoint of `folder`; raises UserError when there is none."""
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensor_file:
            files |= dict.fromkeys(tensor_file.keys(), file)
    for layout in LAYOUTS:
        prefix = layout.prefix.format(n=num_layers)
        if f"{prefix}{layout.projection}.weight" in files:
            module_files = {name: file for name, file in files.items() if name.startswith(prefix)}
            return NativeMtpWeights(layout, num_layers, module_files)
    names = ", ".join(f"{layout.prefix.format(n=num_layers)}{layout.projection}.weight" for layout in LAYOUTS)
    raise UserError(
        f"{checkpoint}: its checkpoint has no MTP module (none of {names}); train a new one with start: new"
    )


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts 0, 1, ... as one tensor each: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    merged = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match["at"], {}).setdefault(int(match["number"]), {})[match["part"]] = tensor
    for prefix, numbered in experts.items():
        in_order = [numbered[number] for number in sorted(numbered)]
        merged[f"{prefix}gate_up_proj"] = torch.stack(
            [torch.cat((expert["gate"], expert["up"])) for expert in in_order]
        )
        merged[f"{prefix}down_proj"] = torch.stack([expert["down"] for expert in in_order])
    return merged


def unstack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `stack_experts`."""
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".")
        if not prefix.endswith("experts"):
            separate[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            if part == "gate_up_proj":
                gate, up = expert.chunk(2)
                separate |= {f"{prefix}.{number}.gate_proj.weight": gate, f"{prefix}.{number}.up_proj.weight": up}
            else:
                separate[f"{prefix}.{number}.down_proj.weight"] = expert
    return separate


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))
