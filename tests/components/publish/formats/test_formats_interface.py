"""What all layouts share: a cut LM head written whole, and the facts of a target."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contract import Target
from components.publish.formats.interface import whole_vocabulary


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-3.0, 3.0))
def test_a_head_over_the_whole_vocabulary_has_the_argmax_of_the_cut_one(seed: int, shift: float) -> None:
    """Also where every drafted logit is negative, which rows of zeros would win."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(40, generator=generator)[:9].sort().values
    rows = torch.randn(9, 6, generator=generator) + shift
    hidden = torch.randn(50, 6, generator=generator)
    whole = whole_vocabulary(rows, ids - torch.arange(9), 40)
    assert torch.equal((hidden @ whole.T).argmax(-1), ids[(hidden @ rows.T).argmax(-1)])
    assert torch.equal(whole[ids], rows)


def test_facts_for_limits_come_from_the_shape(target: Target) -> None:
    from components.publish.formats.interface import facts_of
    from components.publish.release.export import source_of

    shape = source_of(target).shape
    assert facts_of(replace(shape, rope_theta=7.0, rope_scaling="yarn")) == replace(
        facts_of(shape), rope_theta=7.0, rope_scaling="yarn"
    )
