"""What the fork server of steps loads, once for them all: it imports this module (step_process.py names it)."""

from __future__ import annotations

from components.source_code import import_to_stay

import_to_stay(
    "torch",
    "transformers",
    "safetensors.torch",
    "psutil",
    "flows.planning.step_signature",
    # What transformers loads late, with the first configuration (Llama's needs its activations) or tokenizer: two
    # seconds in each step otherwise. Its own models are not among it: most targets have a pass of ours.
    "transformers.activations",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
