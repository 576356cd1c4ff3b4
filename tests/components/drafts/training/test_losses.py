"""Every loss against a direct computation in float64, and what its gradient must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny_drafts import TRAINED, batch_of, new_draft
from torch import Tensor

from components.drafts.interface import AbstractDraft, Batch
from components.drafts.network.recompute import recomputing_blocks
from components.drafts.training import losses
from components.drafts.training.losses import (
    LK_ETA,
    LOSS_NAMES,
    Limits,
    StepLossAccumulator,
    Teacher,
    acceptance,
    average_losses,
    divisors,
    limited,
    loss_and_variation,
    row_loss,
    smooth_l1,
    soft_cross_entropy,
    survival_weights,
    teacher_at_target_columns,
    teacher_distributions,
    top_k_cross_entropy,
)
from components.targets.interface import AbstractTarget

NUM_TOKENS, ROWS = 13, 6


def sample(seed: int = 0, mass: float = 1.0) -> tuple[Tensor, Teacher]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, NUM_TOKENS, generator=generator) * 2
    probs = (torch.randn(ROWS, NUM_TOKENS, generator=generator) * 2).softmax(-1)
    return logits, Teacher(probs, probs.argmax(-1), torch.full((ROWS,), mass))


def direct(name: str, logits: list[float], p: list[float], mass: float) -> float:
    """One row in plain Python."""
    total = sum(math.exp(x) for x in logits)
    q = [math.exp(x) / total for x in logits]
    order = sorted(range(len(p)), key=lambda v: -p[v])
    kl = sum(pv * math.log(pv / qv) for pv, qv in zip(p, q, strict=True))
    alpha = sum(min(pv * mass, qv) for pv, qv in zip(p, q, strict=True))
    if name == "soft_ce":
        return -sum(pv * math.log(qv) for pv, qv in zip(p, q, strict=True))
    if name == "kl":
        return kl
    if name == "reverse_kl":
        return sum(qv * math.log(qv / pv) for pv, qv in zip(p, q, strict=True))
    if name == "js":
        mean = [(pv + qv) / 2 for pv, qv in zip(p, q, strict=True)]
        return sum(v * math.log(v / m) for side in (p, q) for v, m in zip(side, mean, strict=True)) / 2
    if name == "tv":
        return 1 - alpha
    if name == "lk_alpha":
        return -math.log(alpha)
    if name == "lk":
        share = math.exp(-LK_ETA * alpha)
        return share * kl + (1 - share) * (1 - alpha)
    if name == "top_k":
        return -sum(p[v] * math.log(q[v]) for v in order[:10])
    return -math.log(q[order[0]])


def gradient(name: str, logits: Tensor, teacher: Teacher) -> Tensor:
    logits = logits.clone().requires_grad_()
    row_loss(name, logits, teacher).sum().backward()  # type: ignore[arg-type]
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("mass", [1.0, 0.7])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_a_loss_equals_its_equation(name: str, mass: float) -> None:
    logits, teacher = sample(mass=mass)
    found = row_loss(name, logits, teacher)  # type: ignore[arg-type]
    expected = [direct(name, logits[i].tolist(), teacher.probs[i].tolist(), mass) for i in range(ROWS)]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_half_precision_logits_are_judged_in_float32(name: str) -> None:
    logits, teacher = sample()
    found = row_loss(name, logits.bfloat16(), teacher)  # type: ignore[arg-type]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, row_loss(name, logits.bfloat16().float(), teacher))  # type: ignore[arg-type]


def test_distances_vanish_where_both_agree_and_only_there() -> None:
    logits, teacher = sample()
    same = teacher.probs.log()
    for name in ("kl", "reverse_kl", "js", "tv", "lk", "lk_alpha"):
        torch.testing.assert_close(row_loss(name, same, teacher), torch.zeros(ROWS), atol=1e-6, rtol=0)
        assert (row_loss(name, logits, teacher) > 1e-3).all()


def test_kl_and_cross_entropy_have_one_gradient_and_differ_by_the_entropy() -> None:
    logits, teacher = sample()
    torch.testing.assert_close(gradient("kl", logits, teacher), gradient("soft_ce", logits, teacher))
    torch.testing.assert_close(gradient("soft_ce", logits, teacher), logits.softmax(-1) - teacher.probs)
    entropy = torch.distributions.Categorical(probs=teacher.probs).entropy()
    gap = row_loss("soft_ce", logits, teacher) - row_loss("kl", logits, teacher)
    torch.testing.assert_close(gap, entropy, atol=1e-5, rtol=1e-5)


def test_one_less_total_variation_is_how_often_rejection_sampling_keeps_a_guess() -> None:
    """Drawn, not computed: 40 000 draws from q kept with probability min(1, p / q); 5 standard errors."""
    logits, teacher = sample()
    generator = torch.Generator().manual_seed(1)
    q = logits.softmax(-1)
    drawn = torch.multinomial(q, 40_000, replacement=True, generator=generator)
    ratio = (teacher.probs / q).gather(1, drawn)
    kept = (torch.rand(drawn.shape, generator=generator) < ratio).float().mean(1)
    torch.testing.assert_close(kept, 1 - row_loss("tv", logits, teacher), atol=5 * 0.5 / 200, rtol=0)


def test_a_pruned_student_cannot_be_accepted_more_often_than_its_tokens_are_said() -> None:
    _, teacher = sample(mass=0.6)
    assert torch.allclose(acceptance(teacher.probs.log(), teacher), torch.full((ROWS,), 0.6))


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_impossible_tokens_leave_losses_and_gradients_finite(name: str) -> None:
    """Probabilities of zero on either side, or on both: float32 has them below e^-104."""
    logits = torch.tensor([[0.0, -200.0, -200.0, 0.0]])
    teacher = Teacher(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), torch.tensor([1]), torch.ones(1))
    assert torch.isfinite(row_loss(name, logits, teacher)).all()  # type: ignore[arg-type]
    assert torch.isfinite(gradient(name, logits, teacher)).all()


def test_no_gradient_flows_through_the_weight_of_the_hybrid() -> None:
    """It is the fixed mix of both gradients."""
    logits, teacher = sample()
    share = torch.exp(-LK_ETA * acceptance(logits, teacher))[:, None]
    mixed = share * gradient("kl", logits, teacher) + (1 - share) * gradient("tv", logits, teacher)
    torch.testing.assert_close(gradient("lk", logits, teacher), mixed)


def test_top_k_of_everything_is_cross_entropy_and_of_one_looks_at_the_best_token_only() -> None:
    logits, teacher = sample()
    everything = top_k_cross_entropy(logits, teacher.probs, 99)
    torch.testing.assert_close(everything, row_loss("soft_ce", logits, teacher))
    one = top_k_cross_entropy(logits, teacher.probs, 1)
    torch.testing.assert_close(one, teacher.probs.amax(-1) * row_loss("hard_ce", logits, teacher))


def test_smooth_l1_is_quadratic_near_zero_and_linear_beyond_one() -> None:
    hidden = torch.tensor([[0.0, 0.5, -3.0, 1.0]])
    found = smooth_l1(hidden, torch.zeros(1, 4))
    torch.testing.assert_close(found, torch.tensor([(0.0 + 0.125 + 2.5 + 0.5) / 4]))


def test_under_autocast_the_loss_is_still_taken_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(4, 64, generator=generator)
    probs = torch.randn(4, 64, generator=generator).softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = soft_cross_entropy(logits, probs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, soft_cross_entropy(logits, probs), rtol=0, atol=0)


def test_a_second_derivative_is_refused_and_not_taken_for_zero() -> None:
    logits, teacher = sample()
    loss = row_loss("soft_ce", logits.requires_grad_(), teacher).square().sum()
    (once,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


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


def test_dpace_weighs_a_step_by_the_chains_that_hang_on_it() -> None:
    """Against the sum over prefixes written out; what is not trained weighs nothing and cuts no chain."""
    losses = torch.rand(4, 3, generator=torch.Generator().manual_seed(2)) * 3
    trained = torch.tensor([[True, True, True], [True, True, False], [True, False, True], [True, False, False]])
    weights = survival_weights(losses, trained, 0.5)
    for column in range(3):
        steps = [k for k in range(4) if trained[k, column]]
        confidence = {k: 0.5 * math.exp(-float(losses[k, column])) + 0.5 for k in steps}
        for k in range(4):
            deeper = [j for j in steps if j >= k] if k in steps else []
            expected = sum(math.prod(confidence[i] for i in steps if i <= j) for j in deeper)
            assert float(weights[k, column]) == pytest.approx(expected, rel=1e-5)


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


def gradients(draft: AbstractDraft, batches: list[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    draft.zero_grad()
    results = [draft.losses(batch) for batch in batches]
    for result in results:
        result.loss.backward()
    counts = sum(torch.stack([result.accepted, result.num_reachable]) for result in results)
    weights = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    return torch.cat([sum(result.loss.detach() for result in results).view(1), counts.flatten().float()]), weights  # type: ignore[union-attr]


SETTINGS: dict[str, dict[str, Any]] = {
    "dflash": {"max_anchors": 6, "slot_weights": "dpace"},
    "dspark": {"max_anchors": 6},
    "p-eagle": {"kept_share": 0.6, "least_share": 0.1},
}
"""Of methods that draw the roots they train."""


@pytest.mark.parametrize("method", TRAINED)
def test_however_little_exists_at_once_losses_and_gradients_are_the_same(method: str, tiny_target: MakeTarget) -> None:
    """Logits of a few roots at a time, blocks computed again backwards, and a batch in parts whose losses add up."""
    target = tiny_target("llama")
    whole = batch_of(target, num_rows=3, num_tokens=40)._replace(step=5, row_seeds=(70, 71, 72))
    whole.mask[0, :21] = False
    whole.mask[2, 30:] = False
    draft = new_draft(target, method, **SETTINGS.get(method, {})).train()
    expected = gradients(draft, [whole])

    def check(batches: list[Batch]) -> None:
        found = gradients(draft, batches)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1].keys() == expected[1].keys()
        for name, gradient in found[1].items():
            torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=2e-6, msg=name)

    with recomputing_blocks(True):
        check([whole])
    for limits in (Limits(0, 1 << 14), Limits(1 << 16, 1 << 14, together=0)):
        with limited(limits):
            check([whole])
    shared = sum(divisors(part, draft) for part in parts_of(whole))
    check([part._replace(divisors=shared) for part in parts_of(whole)])


@pytest.mark.parametrize("kept, times", [(1 << 30, 1), (0, 2)])
def test_logits_are_computed_again_only_beyond_what_is_kept(
    kept: int, times: int, tiny_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama")
    draft, batch, asked = new_draft(target, "dspark").train(), batch_of(target), []
    unembed = target.unembed
    monkeypatch.setattr(target, "unembed", lambda normed: (asked.append(normed.shape[1]), unembed(normed))[1])
    with limited(Limits(kept)):
        loss = draft.losses(batch).loss
        forwards = sum(asked)
        loss.backward()
    assert forwards > 0 and sum(asked) == times * forwards


def test_a_loss_and_the_variation_together_are_both_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their sum and in its gradient, four rows at a time and with each of the weights at zero."""
    monkeypatch.setattr(losses, "ENTRIES_IN_CACHE", 4 * NUM_TOKENS)
    logits, teacher = sample(mass=0.7)
    for name in ("soft_ce", "kl", "js"):
        for of_loss, of_variation in ((0.1, 0.9), (2.0, 0.0), (0.0, 1.0)):
            ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
            mixed, alpha = loss_and_variation(name, ours, teacher, of_loss, of_variation)  # type: ignore[arg-type]
            apart = row_loss(name, theirs, teacher), 1.0 - acceptance(theirs, teacher)  # type: ignore[arg-type]
            torch.testing.assert_close(mixed, of_loss * apart[0] + of_variation * apart[1])
            if of_variation:
                torch.testing.assert_close(alpha, 1.0 - apart[1].detach())
            weights = torch.arange(1.0, ROWS + 1)
            (mixed * weights).sum().backward()
            ((of_loss * apart[0] + of_variation * apart[1]) * weights).sum().backward()
            torch.testing.assert_close(ours.grad, theirs.grad)


def parts_of(batch: Batch) -> list[Batch]:
    tensors = (batch.ids, batch.mask, batch.taps, batch.last, batch.lengths)
    seeds = batch.row_seeds or (0, 1, 2)
    return [
        Batch(*(tensor[at] for tensor in tensors), step=batch.step, row_seeds=seeds[at])
        for at in (slice(0, 1), slice(1, 3))
    ]


def test_parts_weigh_sequences_alike(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    whole, draft = batch_of(target, 3, 40), new_draft(target, "eagle3", normaliser="sequence")
    whole.mask[0, :21] = False
    shared = sum(divisors(part, draft) for part in parts_of(whole))
    parts = [draft.losses(part._replace(divisors=shared)).loss for part in parts_of(whole)]
    torch.testing.assert_close(sum(parts), draft.losses(whole).loss)
