"""One EAGLE-3 drafter, the frozen parts of its target and one batch, in a file that any trainer can be given.

Tensors: `draft.*` under the names of the first EAGLE-3 release; `embed`, `head` and `final_norm`; `ids`,
`taps`, `last` and `mask` of one text; `draft_ids`. The sizes of the block are in the file's metadata.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.drafts.interface import Batch
from components.drafts.methods.eagle3 import Eagle3
from components.drafts.network.layers import head_rows, norm_weight_of
from components.drafts.network.training_linear import linear
from components.drafts.settings import Eagle3Settings


class Sample(NamedTuple):
    """A drafter and what it is trained on."""

    draft: Eagle3
    batch: Batch


@dataclass
class FrozenParts:
    """What training uses of a target: embedding, final norm and LM head, without the layers between."""

    shape: Any
    embedding: Tensor
    norm: Tensor
    head: Tensor  # [V, H]
    dtype: torch.dtype = torch.float32
    tap_layers: tuple[int, ...] = (1, 2, 3)  # only their number counts here

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.embedding.device

    def final_norm(self, last: Tensor) -> Tensor:
        """See AbstractTarget."""
        return F.rms_norm(last, self.norm.shape, self.norm, self.shape.rms_norm_eps)

    def unembed(self, normed: Tensor) -> Tensor:
        """See AbstractTarget."""
        return linear(normed, self.head)

    def silence(self, logits: Tensor) -> Tensor:
        """See AbstractTarget; it suppresses nothing."""
        return logits


def new_drafter(target: Any, draft_ids: Tensor, taps: Tensor, settings: dict[str, Any]) -> Eagle3:
    """An untrained drafter for a target with such taps [T, 3H], every weight drawn wide.

    Norm weights differ from one and matrices are as large as trained ones, so that nothing hides behind a start value.
    """
    draft = Eagle3.build(target, Eagle3Settings.model_validate(settings), draft_ids)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.6, 1.4, generator=generator)
            elif name != "lm_head.weight":
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    draft.scale_to_target_features(taps)
    return draft


def write_sample(file: Path, sample: Sample, mask: Tensor) -> None:
    """Write it. mask: bool [1, T], the loss mask that the reader is to use at token t."""
    draft, batch = sample
    target = draft.target
    tensors = {f"draft.{name}": weight for name, weight in draft.state_dict().items()}
    tensors |= {"ids": batch.ids, "taps": batch.taps, "last": batch.last, "mask": mask, "draft_ids": draft.draft_ids}
    tensors |= {"embed": target.embedding.float(), "head": head_rows(target, torch.arange(target.shape.vocab_size))}
    tensors["final_norm"] = norm_weight_of(target)
    facts = {**asdict(draft.shape), "vocab_size": target.shape.vocab_size, "num_steps": draft.num_steps}
    save_file(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
        file,
        metadata={"shape": json.dumps(facts)},
    )


def read_sample(file: Path, device: str, settings: dict[str, Any]) -> Sample:
    """The drafter and the batch of a written sample, on a device."""
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["shape"])
    tensors = {name: tensor.to(device) for name, tensor in load_file(file).items()}
    frozen = (tensors[name] for name in ("embed", "final_norm", "head"))
    draft = Eagle3.build(
        FrozenParts(SimpleNamespace(**facts), *frozen),
        Eagle3Settings(ttt_steps=facts["num_steps"], intermediate_size=facts["intermediate_size"], **settings),
        tensors["draft_ids"],
    )
    draft.load_state_dict({n.removeprefix("draft."): w for n, w in tensors.items() if n.startswith("draft.")})
    length = torch.tensor([tensors["ids"].shape[1]], device=device)
    return Sample(draft, Batch(tensors["ids"], tensors["mask"], tensors["taps"], tensors["last"], length))
