"""What a token costs: bytes of hidden states, operations of the target's pass and of training, of three targets.

Everything here is a published shape, a published measurement or an assumption, and says which. We measured none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PEAK_FLOPS: Final = 989e12
"""Dense bf16 operations a second of one H100 or H200, by its data sheet."""
DENSE_PREFILL_SHARE: Final = 0.43
"""Share of the peak in prefill. SpecForge: one H200 prefills 27,000 tokens a second of Qwen3-8B at about 43 %."""
MOE_PREFILL_SHARE: Final = 0.08
"""The same for a mixture of experts, from TorchSpec's total of Kimi-K2.5 (6 billion tokens in 1,500 H200 hours), with
what training takes by TRAINING_SHARE subtracted."""
TRAINING_SHARE: Final = 0.40
"""Share of the peak in training. SpecForge: 43.5 % on H200."""
DRAFT_VOCABULARY: Final = 32_000
TTT_STEPS: Final = 7
STATES_A_TOKEN: Final = 4
"""Three tapped layers and the last hidden state, in bf16, as `data.record_features` keeps them."""


@dataclass(frozen=True)
class Shape:
    """A target, and the EAGLE-3 drafter for it.

    active_params: weights that a token meets. weight_bytes: of the whole model, to load. gpus: GPUs of one engine.
    intermediate_size, kv_width: of the drafter's layer. prefill_share: share of the peak in the engine's prefill.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    kv_width: int
    vocabulary: int
    active_params: float
    weight_bytes: float
    gpus: int
    prefill_share: float

    @property
    def feature_bytes(self) -> float:
        """Bytes of hidden states a token."""
        return STATES_A_TOKEN * self.hidden_size * 2.0

    @property
    def fused_params(self) -> float:
        """Weights of the drafter that a token meets once, whatever the number of training-time steps."""
        return 3.0 * self.hidden_size**2

    @property
    def draft_params(self) -> float:
        """Trained weights of the drafter: fusion, a decoder layer on twice the width, and the head."""
        width = self.hidden_size
        attention = 2 * width * width + 2 * 2 * width * self.kv_width + width * width
        return self.fused_params + attention + 3 * width * self.intermediate_size + DRAFT_VOCABULARY * width

    @property
    def training_flops(self) -> float:
        """Operations of one trained token: six a weight and step, and the teacher's logits once."""
        by_steps = 6.0 * TTT_STEPS * (self.draft_params - self.fused_params)
        return by_steps + 6.0 * self.fused_params + 2.0 * self.vocabulary * self.hidden_size

    @property
    def engine_tokens_per_s(self) -> float:
        """Tokens a second of one engine on its `gpus`, in prefill."""
        return self.prefill_share * PEAK_FLOPS * self.gpus / (2.0 * self.active_params)

    @property
    def trainer_tokens_per_s(self) -> float:
        """Trained tokens a second of one GPU, without what it waits for others."""
        return TRAINING_SHARE * PEAK_FLOPS / self.training_flops


SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape("8B", 4096, 14_336, 1024, 128_256, 8.03e9, 16.1e9, 1, DENSE_PREFILL_SHARE),  # Llama-3.1-8B
        Shape("70B", 8192, 28_672, 1024, 128_256, 70.6e9, 141e9, 4, DENSE_PREFILL_SHARE),  # Llama-3.3-70B
        Shape("1T MoE", 7168, 18_432, 1024, 163_840, 32.6e9, 1.03e12, 16, MOE_PREFILL_SHARE),  # Kimi-K2, fp8 weights
    )
}
