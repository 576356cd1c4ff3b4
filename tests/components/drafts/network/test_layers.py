"""The exact loss mask on an example small enough to check by hand, packing of the wanted columns, the target's head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_drafts import TRAINED, batch_of, new_draft
from tiny_families import make_family

from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.network.layers import (
    CausalMask,
    Documents,
    TargetHead,
    final_norm_of,
    packed_rows,
    reachable,
    shift_left,
)
from components.targets.interface import AbstractTarget
from components.targets.load import open_target


def test_six_token_example() -> None:
    """Prompt x_0 x_1, answer x_2 x_3 x_4, then x_5 of the next turn's prompt.

    The target gives x_2 after column 1. Root column 1 is fed x_2 and guesses x_3 (step 0), then x_4 (step 1); column 2
    is fed x_3 and guesses x_4 (step 0). Nothing guesses x_5, and column 0 is never a root: x_1 is not an answer.
    """
    mask = torch.tensor([[False, False, True, True, True, False]])
    expected = [
        [False, True, True, False, False, False],
        [False, True, False, False, False, False],
        [False, False, False, False, False, False],
    ]
    assert reachable(mask, 3)[:, 0].tolist() == expected


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 6))
def test_a_step_is_reached_exactly_when_root_and_chain_are_answer_tokens(answer: list[bool], num_steps: int) -> None:
    found = reachable(torch.tensor([answer]), num_steps)[:, 0]
    for k in range(num_steps):
        for t in range(len(answer)):
            chain = [answer[t + j] if t + j < len(answer) else False for j in range(1, k + 3)]
            assert bool(found[k, t]) == all(chain)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_packing_keeps_every_wanted_column_once_and_in_order(wanted: list[list[bool]]) -> None:
    rows, valid = packed_rows(torch.tensor(wanted))
    for sequence, kept, ok in zip(wanted, rows.tolist(), valid.tolist(), strict=True):
        chosen = [column for column, keep in zip(kept, ok, strict=True) if keep]
        assert chosen == [column for column, want in enumerate(sequence) if want]


def test_shifting_left_ends_in_zeros() -> None:
    values = torch.tensor([[1, 2, 3]])
    assert shift_left(values, 1).tolist() == [[2, 3, 0]]
    assert shift_left(values, 5).tolist() == [[0, 0, 0]]


def test_with_a_window_a_packed_column_sees_the_last_positions_of_its_own_document() -> None:
    numbers = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1]])
    causal = CausalMask(9, numbers.device, Documents(numbers, torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0]])))
    seen, rows = causal.within(3), torch.tensor([[4, 7]])
    assert seen is not None
    for column in range(8):
        expected = [number == numbers[0, column] and 0 <= column - i < 3 for i, number in enumerate(numbers[0])]
        assert seen[0, 0, column].tolist() == expected
    assert torch.equal(~causal.masked_columns(rows, 3)[0, 0, 0], seen[0, 0, rows[0]])
    two_ahead = ~causal.masked_columns(rows, 3, 2)[0, 0, 0]
    assert two_ahead.nonzero().tolist() == [[0, 4], [1, 7]]


HEADS = {"llama": 0.0, "gemma2": 30.0, "cohere": 0.0, "gpt2": 0.0, "granite": 0.0, "phimoe": 0.0}
"""Family -> soft cap of its logits. Cohere's norm takes a mean away, GPT-2's adds a bias too, Phi-MoE's head as well;
Cohere and Granite scale logits."""


@pytest.fixture(scope="module", params=HEADS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, AbstractTarget]:
    return request.param, open_target(make_family(request.param, tmp_path_factory.mktemp("target")), kernel="plain")


def test_norm_and_head_of_a_drafter_are_those_of_its_target(family: tuple[str, AbstractTarget]) -> None:
    name, target = family
    batch, ids = batch_of(target, num_rows=1), torch.arange(1, target.shape.vocab_size, 2)
    normed = target.final_norm(batch.last)
    expected = target.unembed(normed)[..., ids]
    if cap := HEADS[name]:
        expected = torch.atanh(expected / cap) * cap
    torch.testing.assert_close(TargetHead.of(target, ids)(normed), expected, rtol=1e-4, atol=1e-4)
    norm, state = final_norm_of(target), batch.last
    state = state - state.mean(-1, keepdim=True) if norm.centres else state
    state = norm.weight * torch.nn.functional.rms_norm(state, state.shape[-1:], eps=target.shape.rms_norm_eps)
    torch.testing.assert_close(state if norm.bias is None else state + norm.bias, normed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("method", "settings"), [("medusa", {"head": "tied"}), ("mtp-parallel", {})])
def test_an_untrained_head_says_what_the_target_says(
    method: str, settings: dict[str, Any], family: tuple[str, AbstractTarget]
) -> None:
    name, target = family
    draft, batch = new_draft(target, method, spread=False, num_heads=1, **settings), batch_of(target, num_rows=1)
    expected = target.unembed(target.final_norm(batch.last))[..., draft.draft_ids]
    (logits,) = draft.teacher_forced(batch, torch.arange(24)[None])  # type: ignore[operator]
    if cap := HEADS[name]:
        logits = torch.tanh(logits / cap) * cap
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_decoding_drafts_what_training_sees_whatever_norm_and_head_the_target_has(tmp_path: Path) -> None:
    target = open_target(make_family("phimoe", tmp_path), kernel="transformers")
    batch = batch_of(target, num_rows=1)
    ids, taps, last = batch.ids[0], batch.taps[0], batch.last[0]
    for method in TRAINED:
        draft = new_draft(target, method)
        everywhere = draft.propose_at_every_position(ids, taps, last, 2).tokens
        committed = CommittedPositions(ids[1:], taps[:-1], last[:-1])
        proposed = draft.propose(draft.new_state(64), committed, 2, Sampling(), torch.Generator())
        assert proposed.tokens.tolist() == everywhere[-1].tolist(), method


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_products_with_a_frozen_head_share_one_weight(stored: torch.dtype) -> None:
    """Autocast would round it for every product and the graph would keep each: 311 MB at a vocabulary of 151,936."""
    weight = (torch.randn(512, 64) / 8).to(torch.bfloat16)
    head, states = TargetHead(weight.to(stored), None), torch.randn(1, 3, 64, requires_grad=True)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == weight.numel():
            kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        products = [head(states * scale) for scale in (1.0, 2.0, 4.0)]
    assert list(kept.values()) == [weight.nbytes], "one, and of half the size"
    assert torch.equal(products[1], torch.nn.functional.linear((states * 2.0).to(torch.bfloat16), weight))
    torch.testing.assert_close(head(states.detach()), states.detach() @ weight.float().T)
