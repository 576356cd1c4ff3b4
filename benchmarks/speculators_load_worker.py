"""The other side: speculators converts and loads an EAGLE-3 checkpoint, and says its first-step logits.

Imports nothing of Draftsmith; runs inside speculators' own environment. One JSON line on stdout: {"kind", "missing"}.

    python speculators_load_worker.py CHECKPOINT VERIFIER SAMPLE OUT [convert]

CHECKPOINT: with `convert` a checkpoint with `midlayer.*` that is converted first, else one in speculators' own layout.
SAMPLE: ids, taps and last of one text (eagle3_sample.py). OUT: a safetensors file for `logits` [T - 1, N].
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.convert.entrypoints import convert_model
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig


def opened(checkpoint: str, verifier: str) -> Eagle3DraftModel:
    """Their model from a checkpoint in their layout, with attention that a CPU can run.

    A checkpoint without embeddings leaves theirs to whatever memory held: their loader takes the target's only where it
    finds NaN, which transformers no longer puts there. So it is told to take them.
    """
    config = Eagle3SpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"
    config.speculators_config.verifier.name_or_path = verifier
    model = Eagle3DraftModel.from_pretrained(checkpoint, config=config)
    model._load_verifier_weights(overwrite_embed_tokens=True)
    return model.float().eval()


def first_logits(model: Eagle3DraftModel, sample: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits [T - 1, N] of the first drafting step at every column."""
    length = sample["ids"].shape[1] - 1
    caught: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: caught.append(call[2].detach().clone()))
    with torch.no_grad():
        model(
            hidden_states=sample["taps"][:, :-1].contiguous(),
            input_ids=sample["ids"][:, 1:].contiguous(),
            document_ids=torch.zeros(1, length, dtype=torch.long),
            loss_mask=torch.ones(1, length, dtype=torch.bool),
            position_ids=torch.arange(1, length + 1)[None],
            verifier_last_hidden_states=sample["last"][:, 1:].contiguous(),
            ttt_steps=1,
            loss_config=resolve_loss_config("kl_div", "eager"),  # it computes one in any case
        )
    hook.remove()
    return caught[0][0]


def main() -> None:
    """Convert, load, run."""
    checkpoint, verifier, sample, out, *convert = sys.argv[1:]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if convert:
            made = str(Path(folder) / "converted")
            convert_model(checkpoint, verifier, "eagle3", output_path=made)
            checkpoint = made
        model = opened(checkpoint, verifier)
        logits = first_logits(model, load_file(sample))
    save_file({"logits": logits.float().contiguous()}, out)
    print(json.dumps({"kind": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}))


if __name__ == "__main__":
    main()
