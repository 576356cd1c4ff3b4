"""A model's own multi-token-prediction module: where checkpoints keep it, read as it is stored, and named back.

transformers drops these tensors when it loads the model, so they are read straight from safetensors. Three layouts:
  deepseek  model.layers.{n}.*    n = num_hidden_layers. enorm, hnorm, eh_proj (embedding first), the block's tensors
            beside them, shared_head.norm. Embedding of position 0 zeroed; the block's output itself is recycled.
            (DeepSeek-V3, arXiv:2412.19437, README_WEIGHTS; GLM-4.5 and Kimi-K2 alike)
  qwen      mtp.*                 pre_fc_norm_embedding, pre_fc_norm_hidden, fc (embedding first), layers.0.*, norm.
            The normed output is recycled. (Qwen3-Next)
  mimo      model.mtp_layers.0.*  token_layernorm, hidden_layernorm, input_proj (HIDDEN STATE first), the block's
            tensors, final_layernorm. Embedding of position 0 zeroed; the normed output is recycled. (MiMo-7B)
Embedding and LM head are the target's: copies of them in a checkpoint are neither read nor changed. Experts are stored
one by one and computed as one tensor; only the first module of several is used, again and again.
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
class OwnLayout:
    """How one family of checkpoints names a module's parts, and what it does with them."""

    name: Literal["deepseek", "qwen", "mimo"]
    prefix: str  # with {n} for the number of the target's layers
    token_norm: str
    hidden_norm: str
    projection: str
    block: str  # what stands before the block's own names
    last_norm: str
    embedding_first: bool
    zero_first: bool
    recycles_normed: bool

    def renamed(self, num_layers: int) -> dict[str, str]:
        """Beginning of a name in the checkpoint -> its beginning in OwnModule."""
        at = self.prefix.format(n=num_layers)
        parts = {
            self.token_norm: "token_norm",
            self.hidden_norm: "hidden_norm",
            self.projection: "projection",
            self.last_norm: "last_norm",
        }
        return {
            **{f"{at}{theirs}.": f"{ours}." for theirs, ours in parts.items()},
            **{
                f"{at}{self.block}{part}": f"block.{part}"
                for part in ("input_", "post_attention_", "self_attn.", "mlp.")
            },
        }


LAYOUTS = (
    OwnLayout("deepseek", "model.layers.{n}.", "enorm", "hnorm", "eh_proj", "", "shared_head.norm", True, True, False),
    OwnLayout(
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
    OwnLayout(
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
)


@dataclass(frozen=True)
class OwnWeights:
    """What a checkpoint holds. files: name in the checkpoint -> the safetensors file it is in."""

    layout: OwnLayout
    num_layers: int
    files: Mapping[str, Path]

    def read(self, wanted: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """The tensors of OwnModule, as stored, under OwnModule's names; `wanted` gives those names and shapes.

        Raises UserError, one line, when one is missing, of another shape, or stored beside scales.
        """
        if scales := [name for name in self.files if name.endswith(("_scale_inv", "weight_scale"))]:
            raise UserError(
                f"{where}: its {self.layout.name} module is quantised ({scales[0]}): convert the checkpoint to "
                "bfloat16, or train a new one with start: new"
            )
        found = stacked(self._stored())
        wrong = [
            f"{name} is {_shape(found.get(name))}, must be {_shape(tensor)}"
            for name, tensor in wanted.items()
            if _shape(found.get(name)) != _shape(tensor)
        ]
        if wrong:
            raise UserError(
                f"{where}: its {self.layout.name} module does not fit its config.json: {wrong[0]}"
                f"{f' and {len(wrong) - 1} more' if len(wrong) > 1 else ''}; train a new one with start: new"
            )
        return {name: found[name] for name in wanted}

    def _stored(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for theirs, file in self.files.items():
            for before, after in self.layout.renamed(self.num_layers).items():
                if theirs.startswith(before):
                    with safe_open(file, framework="pt") as opened:
                        tensor = opened.get_tensor(theirs)
                    check_finite(tensor, f"{file}: {theirs}")
                    found[after + theirs.removeprefix(before)] = tensor
        return found

    def named_back(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """OwnModule's tensors under the checkpoint's names, experts one by one where the checkpoint has them so."""
        back = {after: before for before, after in self.layout.renamed(self.num_layers).items()}
        named: dict[str, Tensor] = {}
        apart = any(EXPERT.fullmatch(name) for name in self.files)
        for name, tensor in (unstacked(tensors) if apart else tensors).items():
            after = next(after for after in back if name.startswith(after))
            named[back[after] + name.removeprefix(after)] = tensor
        return named


def find_own(folder: Path, num_layers: int, where: str) -> OwnWeights:
    """The module in the checkpoint of `folder`; raises UserError when there is none."""
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    for layout in LAYOUTS:
        at = layout.prefix.format(n=num_layers)
        if f"{at}{layout.projection}.weight" in files:
            inside = {name: file for name, file in files.items() if name.startswith(at)}
            return OwnWeights(layout, num_layers, inside)
    known = ", ".join(f"{one.prefix.format(n=num_layers)}{one.projection}.weight" for one in LAYOUTS)
    raise UserError(f"{where}: its checkpoint has no MTP module (none of {known}); train a new one with start: new")


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts 0, 1, ... as one tensor each: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    kept = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match["at"], {}).setdefault(int(match["number"]), {})[match["part"]] = tensor
    for at, numbered in experts.items():
        each = [numbered[number] for number in sorted(numbered)]
        kept[f"{at}gate_up_proj"] = torch.stack([torch.cat((one["gate"], one["up"])) for one in each])
        kept[f"{at}down_proj"] = torch.stack([one["down"] for one in each])
    return kept


def unstacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `stacked`."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        at, _, part = name.rpartition(".")
        if not at.endswith("experts"):
            apart[name] = tensor
            continue
        for number, one in enumerate(tensor):
            if part == "gate_up_proj":
                gate, up = one.chunk(2)
                apart |= {f"{at}.{number}.gate_proj.weight": gate, f"{at}.{number}.up_proj.weight": up}
            else:
                apart[f"{at}.{number}.down_proj.weight"] = one
    return apart


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))
