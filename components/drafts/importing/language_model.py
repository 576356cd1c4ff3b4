"""A small causal language model as a drafter.

A Llama with the target's head size, norm epsilon and plain rotary base becomes a drafter whose weights are ours: it is
trained, quantised and exported like one that was trained here. Any other language model is used as it is, by its own
code in transformers (`draft-model` with `model`), and learns nothing here. Either has the target's own tokenizer.
"""

from __future__ import annotations

from typing import final

from components.drafts.importing.block import FoundBlock, read_block
from components.drafts.importing.checkpoint import FoundCheckpoint
from components.drafts.importing.reader import AbstractReader, Faults, Imported
from components.drafts.methods.draft_model import narrower
from components.drafts.network.layers import BlockShape
from components.targets.interface import AbstractTarget

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MOST_LAYERS = 16
COMPUTED = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")


@final
class LanguageModelReader(AbstractReader):
    """A causal language model in Hugging Face format."""

    layout = "causal-lm"

    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        return {EMBEDDING, "model.norm.weight"} <= checkpoint.files.keys()

    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        vocab_size = checkpoint.config.get("vocab_size")
        if type(vocab_size) is not int or vocab_size < target.shape.vocab_size:
            faults.add(
                f"vocab_size is {vocab_size!r:.40}, the target's is {target.shape.vocab_size}: another tokenizer"
            )
            faults.raise_any()
        tried = Faults(checkpoint.label)
        block = read_block(checkpoint.config, tried)
        if block is None or not _is_ours(block, checkpoint, target):
            why = tried.found[0] if tried.found else "its block differs from the target's in more than its sizes"
            remark = f"used as it is, by its own code; it cannot be trained here ({why})"
            return Imported("draft-model", {"model": str(checkpoint.folder)}, {}, remarks=[remark], untrained=True)
        imported = Imported("draft-model", {"num_layers": block.num_layers}, checkpoint.read(checkpoint.files))
        imported.settings["intermediate_size"] = block.intermediate_size
        if block.hidden_size != target.shape.hidden_size:
            imported.settings["hidden_size"] = block.hidden_size
        if checkpoint.config.get("tie_word_embeddings") or HEAD not in imported.tensors:
            if not checkpoint.config.get("tie_word_embeddings"):
                faults.add(f"{HEAD} is missing, and tie_word_embeddings is off")
            imported.tensors[HEAD] = imported.tensors[EMBEDDING].clone()
        return imported


def _is_ours(block: FoundBlock, checkpoint: FoundCheckpoint, target: AbstractTarget) -> bool:
    """Whether our own network computes the same: its heads, rotary base and epsilon follow from target and width."""
    if block.rope_scaling or any(name.endswith(".bias") for name in checkpoint.files):
        return False
    if block.vocab_size != target.shape.vocab_size or block.num_layers > MOST_LAYERS:
        return False
    own = BlockShape.of(target, block.intermediate_size)
    if block.hidden_size != own.hidden_size:
        if block.hidden_size % own.head_dim:
            return False
        own = narrower(own, block.hidden_size, block.intermediate_size)
    return all(getattr(own, name) == getattr(block, name) for name in COMPUTED)
