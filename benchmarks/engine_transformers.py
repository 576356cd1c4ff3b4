"""transformers' own multi-token prediction, `generate(use_mtp=True)`, held against our loop.

It guesses one token a round with one module, and finds a model's MTP weights by the layer numbers that the released
checkpoints have (GLM-4.5: 46 and 92). It differs from the released modules' own code, vLLM and us in one place: the
embedding at position 0 is not zeroed. Ours are therefore counted both ways, and the line holds those without zeroing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers.generation import utils as generation

from benchmarks.engine_cases import MAX_NEW_TOKENS, EngineCases, Served, by_position
from components.bench.prompts import open_drafter
from components.decoding.chain import decode
from components.decoding.session import Session
from components.targets.generate import continue_batch

DEPTH = 1


def accepted_by_transformers(model: Any, prompt: list[int]) -> tuple[list[int], list[int]]:
    """(new tokens, tokens beyond the bonus that each round emitted) of generate(use_mtp=True), greedy."""
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    counted: list[int] = []

    class Counting(MTPCandidateGenerator):
        """Notes what the loop tells its generator of guesses after every round."""

        def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: Any) -> None:
            counted.append(int(num_matches))

    before = generation.MTPCandidateGenerator
    generation.MTPCandidateGenerator = Counting
    try:
        ids = torch.tensor([prompt])
        asked = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "use_mtp": True}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    finally:
        generation.MTPCandidateGenerator = before
    return out[0, len(prompt) :].tolist(), counted[1:]  # the first pass makes one token and drafts nothing


def serve(cases: EngineCases, checkpoint: Path, layout: str) -> Served:
    """Every test prompt through generate(use_mtp=True) on the stitched checkpoint."""
    import transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    drafter, session = open_drafter(cases.draft("mtp"), cases.opened), Session(cases.opened)
    layout_of_module = drafter.module.layout  # type: ignore[union-attr]
    drafter.module.layout = dataclasses.replace(layout_of_module, zero_first=False)  # type: ignore[union-attr]
    same, different = 0, 0
    ours, theirs = list[int](), list[int]()
    for prompt in cases.encoded.values():
        expected = continue_batch(cases.opened, [prompt], max_new_tokens=MAX_NEW_TOKENS)[0].ids
        said, counted = accepted_by_transformers(model, prompt)
        if said != expected:
            continue
        same += 1
        asked = {"max_new_tokens": MAX_NEW_TOKENS, "depth": DEPTH, "session": session}
        mine = [one.emitted - 1 for one in decode(cases.opened, drafter, prompt, **asked).rounds]  # type: ignore[arg-type]
        different += mine != counted
        ours += mine
        theirs += counted
    return Served(
        format=layout,
        engine="transformers use_mtp",
        version=transformers.__version__,
        method="mtp",
        depth_k=DEPTH,
        prompts=len(cases.encoded),
        identical=same,
        compared=same,
        different=different,
        our_rounds=len(ours),
        our_accepted=by_position(ours, DEPTH),
        engine_rounds=len(theirs),
        engine_accepted=by_position(theirs, DEPTH),
        note="one guess a round; ours with the first embedding not zeroed, as it does",
    )
