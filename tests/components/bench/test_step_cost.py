"""Cost rows are complete: every phase, depth, KV length and block once, all positive, plain steps counted as such."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from components.bench.phases import time_phases
from components.bench.step_cost import measure_step_cost
from components.bench.subjects import open_drafter
from components.contract import Context, Draft, Machine, Prompts, Target, UserError
from components.decoding.session import Session
from components.rows import CostCell, read_rows
from components.targets.model import AbstractTarget


def test_every_phase_of_every_depth_is_timed_in_every_block(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, context: Callable[[str], Context]
) -> None:
    ctx = context("cost")
    made = measure_step_cost(
        target, drafts[1], prompts, kv_lens=[32, 48], num_blocks=5, tokens_per_block=16, ctx=ctx, machine=machine
    )
    cells = read_rows(ctx.out, CostCell)
    kernel = made.info["kernel"]
    ours = [c for c in cells if c.phase != "control" and c.kernel == kernel]
    expected = set(itertools.product(["verify", "draft", "host"], [1, 2], [32, 48], range(1, 6)))
    expected |= set(itertools.product(["target_step", "host"], [0], [32, 48], range(1, 6)))
    assert sorted((c.phase, c.depth_k, c.kv_len, c.block) for c in ours) == sorted(expected)
    assert {c.block for c in cells if c.phase == "control"} == {0, 5}
    for c in cells:
        assert c.median_ns > 0 and c.mad_ns >= 0 and c.reps_in_block >= 1
        assert c.num_rows == (c.depth_k if c.phase == "draft" else c.depth_k + 1)
        assert (c.draft_key, c.method) == ((drafts[1].key, "mtp") if c.depth_k else ("", "none"))
        assert c.num_threads == made.info["num_threads"]
    assert made.info["timer_overhead_ns"] < min(c.median_ns for c in cells)


def test_the_phases_of_a_run_add_up_to_its_time(opened: AbstractTarget, drafts: list[Draft]) -> None:
    """A clock that counts its own readings: nothing between two calls is lost or counted twice."""
    ticks = itertools.count()
    drafter = open_drafter(drafts[0], opened)
    times = time_phases(
        opened,
        drafter,
        [5, 6, 7],
        depth=3,
        num_tokens=20,
        session=Session(opened),
        clock=lambda: next(ticks),
    )
    rounds = len(times.decoded.rounds)
    # Each call is two readings, hence one tick; a round has two gaps: propose to verify, verify to propose.
    assert times.target == [1] * rounds
    assert times.draft == [1] * (rounds - 1)
    assert times.host == [2] * (rounds - 1)
    plain = time_phases(
        opened, None, [5, 6, 7], depth=0, num_tokens=20, session=Session(opened), clock=lambda: next(ticks)
    )
    assert (plain.target, plain.draft, plain.host) == ([1] * 19, [], [1] * 18)


def test_a_cache_longer_than_the_target_is_refused(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, context: Callable[[str], Context]
) -> None:
    with pytest.raises(UserError, match="192 positions"):
        measure_step_cost(target, drafts[0], prompts, kv_lens=[180], ctx=context("cost"), machine=machine)
