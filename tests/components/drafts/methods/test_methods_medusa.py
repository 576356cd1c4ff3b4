"""Medusa against its formula, and for all heads that do not see each other one at a time against all at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_drafts import INDEPENDENT, batch_of, new_draft
from torch import Tensor

from components.drafts.interface import AbstractDraft, Batch, CommittedPositions, Sampling
from components.drafts.settings import Distilled
from components.drafts.training.losses import step_losses, teacher_for_steps
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]


def steps_of(draft: AbstractDraft, batch: Batch, rows: Tensor) -> list[Tensor]:
    return list(draft.teacher_forced(batch, rows))  # type: ignore[operator]


def all_at_once(draft: AbstractDraft, batch: Batch) -> Tensor:
    """The same loss with every head in one graph."""
    teacher = teacher_for_steps(draft.target, batch, draft.draft_ids)  # type: ignore[arg-type]
    return step_losses(batch, lambda rows: steps_of(draft, batch, rows), draft.num_steps, teacher, Distilled()).loss


@pytest.mark.parametrize("method", INDEPENDENT)
def test_an_untrained_head_says_what_the_target_says_next(method: str, tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = new_draft(target, method, spread=False), batch_of(target, num_rows=1)
    expected = target.unembed(target.final_norm(batch.last))[0, 5:9, draft.draft_ids]  # type: ignore[index]
    for logits in steps_of(draft, batch, torch.arange(5, 9)[None]):
        torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", ["own", "tied"])
def test_medusa_is_residual_blocks_and_a_linear_layer(head: str, tiny_target: MakeTarget) -> None:
    target = tiny_target("qwen3")
    draft, batch = new_draft(target, "medusa", num_layers=2, num_heads=2, head=head), batch_of(target, num_rows=1)
    weights = draft.state_dict()
    assert ("medusa_head.1.2.weight" in weights) == (head == "own")
    for i, logits in enumerate(steps_of(draft, batch, torch.arange(24)[None])):
        h = target.final_norm(batch.last[0])
        for j in range(2):
            at = f"medusa_head.{i}.{j}.linear."
            inner = h @ weights[at + "weight"].T + weights[at + "bias"]
            h = h + inner / (1 + (-inner).exp())
        table = weights[f"medusa_head.{i}.2.weight"] if head == "own" else draft.lm_head.weight
        torch.testing.assert_close(logits[0], h @ table.T, atol=1e-4, rtol=1e-4)  # type: ignore[operator]


@pytest.mark.parametrize("method", INDEPENDENT)
def test_one_head_at_a_time_gives_the_loss_and_gradients_of_all_at_once(method: str, tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = new_draft(target, method), batch_of(target)
    expected = all_at_once(draft, batch)
    (expected * 3.0).backward()
    wanted = {name: parameter.grad for name, parameter in draft.named_parameters()}
    draft.zero_grad()
    found = draft.losses(batch)
    (found.loss * 3.0).backward()
    torch.testing.assert_close(found.loss, expected)
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])


def kept_for_backward(loss: Callable[[], Tensor], draft: AbstractDraft) -> tuple[int, int]:
    """(elements saved for backward when the loss is ready, most elements saved at any time) without parameters."""
    own = {parameter.data_ptr() for parameter in draft.parameters()} | {b.data_ptr() for b in draft.buffers()}
    now, peak = [0], [0]

    class Held:
        """A saved tensor that says when it is let go."""

        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            self.size = 0 if tensor.data_ptr() in own else tensor.numel()
            now[0] += self.size
            peak[0] = max(peak[0], now[0])

        def __del__(self) -> None:
            now[0] -= self.size

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        value = loss()
        kept = now[0]
        del value
    return kept, peak[0]


@pytest.mark.parametrize("method", INDEPENDENT)
def test_memory_for_activations_does_not_grow_with_the_number_of_heads(method: str, tiny_target: MakeTarget) -> None:
    """Two heads against eight: the largest sum of saved activations is the same, and all at once it is four times."""
    target = tiny_target("llama")
    batch = batch_of(target, num_rows=4, num_tokens=64)
    peaks, at_once = [], []
    for num_heads in (2, 8):
        draft = new_draft(target, method, num_heads=num_heads)
        parameters = sum(p.numel() for p in draft.parameters())
        kept, peak = kept_for_backward(lambda draft=draft: draft.losses(batch).loss, draft)  # type: ignore[misc]
        assert kept <= parameters  # what waits for backward are gradients, no activations
        peaks.append(peak - kept)
        at_once.append(kept_for_backward(lambda draft=draft: all_at_once(draft, batch), draft)[1])  # type: ignore[misc]
    assert peaks[1] < 1.2 * peaks[0]
    assert at_once[1] > 3 * at_once[0]


@pytest.mark.parametrize("method", [*INDEPENDENT, "draft-model"])
def test_bfloat16_training_gives_finite_gradients_close_to_float32(method: str, tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = new_draft(target, method), batch_of(target)
    found = []
    for enabled in (False, True):
        draft.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            result = draft.losses(batch)
        result.loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None])
        found.append((float(result.loss.detach()), gradient))
    assert abs(found[1][0] / found[0][0] - 1) < 0.03
    assert torch.nn.functional.cosine_similarity(found[0][1], found[1][1], dim=0) > 0.98


@pytest.mark.parametrize("method", INDEPENDENT)
def test_branches_say_one_distribution_a_depth_that_of_the_chain(method: str, tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = new_draft(target, method, num_heads=3), batch_of(target, num_rows=1)
    chain, tree = draft.new_state(32), draft.new_state(32)
    for start, stop in ((0, 9), (9, 12)):
        columns = CommittedPositions(
            batch.ids[0, start + 1 : stop + 1], batch.taps[0, start:stop], batch.last[0, start:stop]
        )
        said = draft.propose(chain, columns, 3, Sampling(), torch.Generator()).tokens
        branches = draft.begin(tree, columns, 3)  # type: ignore[operator]
        logits = [branches.root, branches.expand([-1, -1], torch.tensor([4, 6]))[1]]
        logits.append(branches.expand([1, 0], torch.tensor([8, 2]))[0])
        assert draft.draft_ids[torch.stack(logits).argmax(-1)].tolist() == said.tolist()  # type: ignore[index]
