"""A training loss against loops in the model's own greedy text: sequence-level unlikelihood, used in the decay.

Welleck et al. 2019, arXiv:1908.04319, section 5. The model continues windows of training text greedily; tokens that
complete an n-gram already present in that continuation are made less likely by -log(1 - p). The usual loss on corpus
text is added to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from components.targets.byte_bpe import EOS_ID, PAD_ID
from components.targets.lean_llama import LeanLlama

if TYPE_CHECKING:
    from components.targets.training_plan import TrainingPlan

PROMPT_TOKENS: Final = 64
CONTINUATION_TOKENS: Final = 96
NGRAM: Final = 4
BATCH: Final = 16
"""Continuations in one forward pass of one process."""


def repeated_ngrams(continuations: Tensor, ngram: int = NGRAM) -> Tensor:
    """[rows, time] bool: whether a token completes an n-gram that occurred earlier in its row; False from EOS on."""
    repeated = torch.zeros_like(continuations, dtype=torch.bool)
    for row, tokens in enumerate(continuations.tolist()):
        end = tokens.index(EOS_ID) if EOS_ID in tokens else len(tokens)
        earlier: set[tuple[int, ...]] = set()
        for last in range(ngram - 1, end):
            gram = tuple(tokens[last - ngram + 1 : last + 1])
            repeated[row, last] = gram in earlier
            earlier.add(gram)
    return repeated


def unlikelihood_loss(model: LeanLlama, prompts: Tensor, continuations: Tensor) -> Tensor:
    """Sum of -log(1 - p) over repeated tokens / number of continuation tokens.

    prompts [rows, time], continuations [rows, new] -> scalar, nats per continuation token.
    """
    tokens = torch.cat((prompts, continuations), 1)
    logits = model.logits(tokens[:, :-1])[:, prompts.shape[1] - 1 :].float()
    log_p = logits.log_softmax(-1).gather(-1, continuations[..., None])[..., 0]
    penalty = -torch.log((1.0 - log_p.exp()).clamp_min(1e-4))
    return (penalty * repeated_ngrams(continuations)).sum() / continuations.numel()


class GreedyWriter:
    """Continues prompts greedily with the current weights, by transformers' cached generation."""

    def __init__(self, plan: TrainingPlan) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        from components.targets.hf_files import llama_config

        dtype: Any = getattr(torch, plan.dtype)
        facts = {name: value for name, value in llama_config(plan.shape, dtype).items() if name != "torch_dtype"}
        self.model = LlamaForCausalLM(LlamaConfig(**facts)).to(device=plan.device, dtype=dtype).eval()

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor], prompts: Tensor) -> Tensor:
        """prompts [rows, time] -> greedy continuations [rows, CONTINUATION_TOKENS], padded after EOS."""
        self.model.load_state_dict(dict(weights), strict=False)  # the tied output matrix has no entry of its own
        out: Tensor = self.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=CONTINUATION_TOKENS,
            do_sample=False,
            pad_token_id=PAD_ID,
        )
        return torch.nn.functional.pad(out, (0, prompts.shape[1] + CONTINUATION_TOKENS - out.shape[1]), value=PAD_ID)[
            :, prompts.shape[1] :
        ]
