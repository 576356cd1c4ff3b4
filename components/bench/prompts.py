"""Inputs of measurements: encoded prompts, the target's greedy answers, and loaded drafters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from components.contract import Context, Draft, Prompts, Target, UserError
from components.data.formats.control_marks import HoldsControlMark
from components.data.formats.prompts import encode_prompt, read_prompts
from components.drafts.interface import Drafter
from components.drafts.storage.files import open_draft
from components.positions import PromptLength, prompts_left_out
from components.targets.generate import batches_of, continue_batch
from components.targets.interface import AbstractTarget
from components.targets.load import open_tokenizer, target_facts


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids. language: of the answer, "" where unknown."""

    prompt_id: str
    workload: str
    ids: list[int]
    language: str = ""


def num_positions(target: Target) -> int:
    """The tokens of the longest text that the target reads."""
    return int(target_facts(target)["shape"]["max_position_embeddings"])


def fitting_prompts(
    target: Target, prompts: Prompts, split: str, new_tokens: int, ctx: Context, *, least_share: float = 0.0
) -> list[EncodedPrompt]:
    """The prompts of a split that leave room for `new_tokens` more and have no control mark; others are set aside.

    least_share: of those without a mark, that must fit. Raises UserError when fewer do, or none is left.
    """
    tokenizer, positions = open_tokenizer(target), num_positions(target)
    room = positions - new_tokens
    fitting, lengths = list[EncodedPrompt](), list[PromptLength]()
    for number, prompt in enumerate(read_prompts(prompts, split), start=1):
        try:
            ids = encode_prompt(tokenizer, prompt)
        except HoldsControlMark as error:
            ctx.set_aside(f"prompts ({split})", number, str(error), prompt.prompt_id)
            continue
        lengths.append(PromptLength(len(ids), prompt.num_characters))
        if len(ids) <= room:
            fitting.append(EncodedPrompt(prompt.prompt_id, prompt.workload, ids, prompt.language))
        else:
            reason = f"{len(ids)} tokens, and only {room} fit before {new_tokens} new ones"
            ctx.set_aside(f"prompts ({split})", number, reason, prompt.prompt_id)
    counted, fault = prompts_left_out(lengths, split, positions, new_tokens, least_share)
    if fault:
        raise UserError(f"prompts: {fault}")
    if counted:
        ctx.note(f"{counted}: they are left out")
    if not fitting:
        raise UserError(
            f"prompts ({prompts.key[:12]}): no {split} prompt fits: collect some, or ask for fewer new tokens"
        )
    return fitting


def greedy_answers(
    model: AbstractTarget,
    prompt_ids: Sequence[Sequence[int]],
    num_tokens: int,
    batch_size: int,
) -> list[list[int]]:
    """Exactly `num_tokens` greedy tokens for each prompt, end-of-text ignored; see `batches_of`."""
    answers: list[list[int]] = [[] for _ in prompt_ids]
    for rows in batches_of(model, [len(ids) for ids in prompt_ids], num_tokens, batch_size):
        batch = [prompt_ids[row] for row in rows]
        continued = continue_batch(model, batch, max_new_tokens=num_tokens, stop_at_eos=False)
        for row, continuation in zip(rows, continued, strict=True):
            answers[row] = continuation.ids
    return answers


def kept_length(tokens: Sequence[int], ends: Collection[int]) -> int:
    """The number of kept tokens of an answer: up to and including the first end-of-text token."""
    for index, token in enumerate(tokens):
        if token in ends:
            return index + 1
    return len(tokens)


def open_drafter(draft: Draft, model: AbstractTarget, kernel: str = "auto") -> Drafter:
    """The drafter, loaded for this target. kernel: of its linear layers, see open_draft."""
    return open_draft(draft, model, dtype=model.dtype, kernel=kernel)


def spread(prompts: Sequence[EncodedPrompt], count: int) -> list[EncodedPrompt]:
    """At most `count` prompts, evenly over the list: a split sorted by file gives more than its first files."""
    if len(prompts) <= count:
        return list(prompts)
    return [prompts[index * len(prompts) // count] for index in range(count)]


def spread_by_workload(prompts: Sequence[EncodedPrompt], count: int) -> list[EncodedPrompt]:
    """At most `count` prompts of each workload, evenly over its list; workloads in alphabetical order."""
    workloads = sorted({prompt.workload for prompt in prompts})
    return [p for name in workloads for p in spread([p for p in prompts if p.workload == name], count)]


def drop_timed(warm_up: Sequence[EncodedPrompt], timed_prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
    """The warm-up prompts that are not also timed; raises UserError when none is left."""
    timed = {tuple(prompt.ids) for prompt in timed_prompts}
    untimed = [prompt for prompt in warm_up if tuple(prompt.ids) not in timed]
    if not untimed:
        raise UserError("prompts: every warm_up prompt is also a test prompt: give warm-up prompts of their own")
    return untimed


def warm_up_prompts(
    target: Target, prompts: Prompts, timed: Sequence[EncodedPrompt], count: int, new_tokens: int, ctx: Context
) -> list[EncodedPrompt]:
    """The first `count` warm-up prompts that leave room for `new_tokens` more and are not timed; [] for 0."""
    if not count:
        return []
    return drop_timed(fitting_prompts(target, prompts, "warm_up", new_tokens, ctx), timed)[:count]
