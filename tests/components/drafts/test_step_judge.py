"""From losses of rows to one number, written out on six tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from components.drafts.interface import Batch
from components.drafts.training.losses import (
    LOSS_NAMES,
    StepLossAccumulator,
    Teacher,
    average_losses,
    row_loss,
    teacher_at_target_columns,
    teacher_distributions,
)
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]


def six_tokens() -> Batch:
    """x_2 .. x_5 is the answer: roots 1, 2 and 3 can draft one token, 1 and 2 two, 1 three."""
    nothing = torch.zeros(1, 6, 1)
    mask = torch.tensor([[False, False, True, True, True, True]])
    return Batch(torch.arange(6)[None], mask, nothing, nothing, torch.tensor([6]))


def test_steps_are_judged_one_column_further_each_and_weighted_by_powers_of_the_decay() -> None:
    teacher = Teacher(torch.eye(6)[None], torch.arange(6)[None], torch.ones(1, 6))  # column t says token t
    judge = StepLossAccumulator(six_tokens(), teacher, 3, "token")
    assert judge.roots.rows[0, :3].tolist() == [1, 2, 3] and judge.roots.valid.sum() == 3
    right = [{1, 2, 3}, {1}, {1}]  # which roots guess right at each step
    for k in range(3):
        judged = judge.target_columns()[0, :3].tolist()
        assert judged == [min(t + k + 1, 5) for t in (1, 2, 3)]
        logits = torch.zeros(1, judge.roots.rows.shape[1], 6)
        for i, root in enumerate((1, 2, 3)):
            logits[0, i, judged[i] if root in right[k] else 0] = 9.0
        numbers = torch.tensor([[1.0, 2.0, 4.0]]) * 10**k
        loss = torch.nn.functional.pad(numbers, (0, logits.shape[1] - 3))
        judge.add(logits, lambda said, wanted, loss=loss: loss)  # type: ignore[misc]
    result = judge.result(0.5)
    assert result.num_reachable.tolist() == [3, 2, 1]
    assert result.accepted.tolist() == [3, 1, 1]
    means = [(1 + 2 + 4) / 3, (10 + 20) / 2, 100.0]
    torch.testing.assert_close(result.per_step, torch.tensor(means))
    expected = (means[0] + 0.5 * means[1] + 0.25 * means[2]) / 1.75
    torch.testing.assert_close(result.loss, torch.tensor(expected))


def test_a_step_given_for_fewer_roots_counts_those_only() -> None:
    teacher = Teacher(torch.eye(6)[None], torch.arange(6)[None], torch.ones(1, 6))
    judge = StepLossAccumulator(six_tokens(), teacher, 2, "token")
    for width in (3, 1):
        judge.add(teacher.at(judge.target_columns(width)).probs, partial(row_loss, "soft_ce"))
    assert judge.result(1.0).num_reachable.tolist() == [3, 1] == judge.result(1.0).accepted.tolist()


@pytest.mark.parametrize("normaliser, expected", [("token", 14 / 4), ("sequence", (2 + 8) / 2), ("position", 14 / 10)])
def test_the_three_normalisers(normaliser: str, expected: float) -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [8.0, 100.0, 100.0]])
    wanted = torch.tensor([[True, True, True], [True, False, False]])
    assert float(average_losses(rows, wanted, normaliser, 10)) == pytest.approx(expected)  # type: ignore[arg-type]


def test_a_pruned_teacher_is_renormalised_and_remembers_its_mass(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    last = torch.randn(1, 5, target.shape.hidden_size, generator=torch.Generator().manual_seed(0))
    full, ids = teacher_distributions(target, last, None), torch.arange(0, target.shape.vocab_size, 3)
    pruned = teacher_distributions(target, last, ids)
    torch.testing.assert_close(pruned.probs * pruned.mass[..., None], full.probs[..., ids], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(pruned.probs.sum(-1), torch.ones(1, 5))
    for best, place in zip(full.best[0].tolist(), pruned.best[0].tolist(), strict=True):
        assert place == (ids.tolist().index(best) if best % 3 == 0 else -1)
    assert all(torch.isfinite(row_loss(name, torch.zeros(1, 5, len(ids)), pruned)).all() for name in LOSS_NAMES)


def test_the_teacher_of_judged_columns_says_there_what_that_of_all_columns_says(tiny_target: MakeTarget) -> None:
    """Two answers in one row, one in the other; no column of a prompt is computed."""
    target, num_steps = tiny_target("llama"), 3
    generator = torch.Generator().manual_seed(0)
    last = torch.randn(2, 12, target.shape.hidden_size, generator=generator)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, 2:6] = mask[0, 8:11] = mask[1, 7:] = True
    batch = Batch(torch.zeros(2, 12, dtype=torch.int64), mask, last, last, torch.tensor([12, 12]))
    everywhere, chosen = teacher_distributions(target, last, None), teacher_at_target_columns(target, batch, None)
    assert chosen.teacher.best.shape == (1, 16)  # 3 + 2 + 4 columns after a root, in steps of 16
    judge, met = StepLossAccumulator(batch, chosen, num_steps, "token"), 0
    for step in range(num_steps):
        rows = judge.target_columns()
        allowed = judge.reachable_at_step[step].gather(1, judge.roots.rows) & judge.roots.valid
        for found, expected in zip(chosen.at(rows), everywhere.at(rows), strict=True):
            torch.testing.assert_close(found[allowed], expected[allowed])
        met += int(allowed.sum())
        judge.losses.append(torch.zeros(()))  # on to the next step
    assert met == 9 + 6 + 3


def test_a_batch_without_an_answer_has_a_teacher_that_is_never_needed(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    last = torch.zeros(1, 5, target.shape.hidden_size)
    nothing = torch.zeros(1, 5, dtype=torch.bool)
    batch = Batch(torch.zeros(1, 5, dtype=torch.int64), nothing, last, last, torch.tensor([5]))
    judge = StepLossAccumulator(batch, teacher_at_target_columns(target, batch, None), 1, "token")
    judge.add(torch.zeros(1, 5, target.shape.vocab_size), partial(row_loss, "soft_ce"))
    assert float(judge.result(1.0).loss) == 0.0 and judge.result(1.0).num_reachable.tolist() == [0]
