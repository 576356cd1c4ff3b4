"""A plugin for vLLM, run in its environment: imposed acceptance on a CPU.

vLLM 0.32.0 takes `rejection_sample_method: synthetic` on a CPU and stops at its first round, because the kernel that
stands there for Triton's lacks that branch. This is the branch, for greedy requests; other calls go where they went.
"""

from __future__ import annotations

from typing import Any

from vllm.utils import cpu_triton_utils  # type: ignore[import-not-found]

KERNEL = "_rejection_greedy_sample_kernel_impl"


def register() -> None:
    """Put the branch before the kernel; once, however often a process loads its plugins."""
    usual = getattr(cpu_triton_utils, KERNEL)
    if usual.__name__ == KERNEL:
        setattr(cpu_triton_utils, KERNEL, _with_imposed(usual))


def _with_imposed(usual: Any) -> Any:
    def either(  # vLLM launches it by these names
        output_token_ids: Any,
        cu_num_draft_tokens: Any,
        draft_token_ids: Any,
        target_argmax: Any,
        bonus_token_ids: Any,
        is_greedy: Any,
        max_spec_len: int,
        uniform_probs: Any = None,
        synthetic_conditional_rates: Any = None,
        SYNTHETIC_MODE: bool = False,
    ) -> None:
        tokens = (cu_num_draft_tokens, draft_token_ids, target_argmax, bonus_token_ids)
        if not SYNTHETIC_MODE:
            usual(output_token_ids, *tokens, is_greedy, max_spec_len)
            return
        ends, drafts, targets, bonus = (one.flatten().tolist() for one in tokens)
        chances, rates = uniform_probs.tolist(), synthetic_conditional_rates.tolist()
        greedy = [True] * len(ends) if is_greedy is None else is_greedy.tolist()
        for request, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if greedy[request]:
                kept = _kept(chances[begin:end], rates, drafts[begin:end])
                last = bonus[request] if kept == end - begin else targets[begin + kept]
                for place, token in enumerate([*drafts[begin : begin + kept], last]):
                    output_token_ids[request, place] = token

    return either


def _kept(chances: list[float], rates: list[float], drafts: list[int]) -> int:
    """Draft tokens before the first that its chance refuses; -1 stands for no draft token."""
    for place, draft in enumerate(drafts):
        if draft < 0 or chances[place] >= rates[place]:
            return place
    return len(drafts)
