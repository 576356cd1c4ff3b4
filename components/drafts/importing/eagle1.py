"""EAGLE-1 checkpoints, which EAGLE-2 and HASS share: `fc.*` and `layers.0.*` of the first release.

fc joins the embedding and the feature, embedding first; the one layer has no input norm. The LM head is the target's,
and so is the embedding, unless the file has one that is no copy of it. Our network reads embeddings scaled to the size
of the features, so the first half of fc is divided by that scale here; the product is the checkpoint's own.
"""

from __future__ import annotations

from typing import final

from components.drafts.importing.block import EAGLE_TYPES, check_block, read_block, read_own_block
from components.drafts.importing.checkpoint import FoundCheckpoint
from components.drafts.importing.eagle3 import read_embedding
from components.drafts.importing.reader import AbstractReader, Faults, Imported, pop_zero_biases
from components.drafts.methods.eagle1 import token_scale_of
from components.targets.interface import AbstractTarget


@final
class Eagle1Reader(AbstractReader):
    """EAGLE-1, EAGLE-2 and HASS under the names of the first EAGLE release."""

    layout = "eagle1"

    def recognises(self, found: FoundCheckpoint) -> bool:
        return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= found.files.keys() and "d2t" not in found.files

    def read(self, found: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        imported = Imported("eagle1", {}, found.read(found.files))
        tensors, hidden = imported.tensors, target.shape.hidden_size
        read_embedding(imported, target, faults)
        bias = tensors.get("fc.bias")
        if bias is not None and not bool(bias.count_nonzero()):
            del tensors["fc.bias"]
            bias = None
        pop_zero_biases(tensors, ("fc.bias",), imported, faults)
        fuse = tensors.get("fc.weight")
        if fuse is not None and fuse.shape == (hidden, 2 * hidden) and fuse.is_floating_point():
            fuse = fuse.float().clone()
            fuse[:, :hidden] /= token_scale_of(target)
            tensors["fc.weight"] = fuse
        imported.settings["fc_bias"] = bias is not None
        block = read_block(found.config, faults, model_types=EAGLE_TYPES)
        if block is not None:
            imported.settings["intermediate_size"] = block.intermediate_size
            check_block(block, target.shape, faults, imported.remarks, tied=("hidden_size",))
            imported.settings |= read_own_block(block, target.shape, faults, imported.remarks)
            if block.num_layers != 1:
                faults.add(f"it has {block.num_layers} layers, an EAGLE-1 drafter here has one")
        return imported
