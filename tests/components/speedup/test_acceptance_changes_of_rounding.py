"""What rounding costs is told from maps of the same prompts, paired; the policy names the drafters by their weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from simulated_rows import make_cells, make_maps

from components.contract import Context, Measurements
from components.policy import read_policy
from components.refusals import PROMPTS
from components.rows import AcceptanceMap, write_rows
from components.speedup import choose_depth
from components.speedup.acceptance_changes import weights_costs

BEFORE, AFTER = "b" * 64, "a" * 64
P = [0.8, 0.7, 0.6]


def before(num_prompts: int = 40) -> list[AcceptanceMap]:
    return make_maps(P, num_prompts=num_prompts, num_tokens=64, seed=1, spread=0.15, draft_key=BEFORE)


def rounded(maps: list[AcceptanceMap], worse: float, seed: int = 2) -> list[AcceptanceMap]:
    """The same maps, a share of whose rounds is kept one draft less far."""
    rng = np.random.default_rng(seed)
    return [
        dataclasses.replace(
            m,
            draft_key=AFTER,
            accepted=[max(0, a - int(rng.random() < worse)) for a in m.accepted],
            weights="int4, groups of 32",
            quantised_from=BEFORE,
        )
        for m in maps
    ]


def test_a_loss_is_found_and_its_interval_is_far_narrower_than_that_of_either_side() -> None:
    maps = before()
    (cost,) = weights_costs({BEFORE: maps, AFTER: rounded(maps, 0.1)}, {AFTER: 2}, 2000, 0)
    assert (cost.depth_k, cost.num_prompts, cost.verdict) == (2, 40, "lower")
    assert cost.change_lo < cost.change < cost.change_hi < 0
    assert cost.change == cost.al - cost.al_before
    assert cost.change_hi - cost.change_lo < 0.6 * (cost.al_hi - cost.al_lo), "what a prompt does to both cancels"
    assert "lower" in cost.summary_line and "int4" in cost.summary_line


def test_the_same_guesses_cost_nothing_and_are_not_said_to_be_lower() -> None:
    maps = before()
    (cost,) = weights_costs({BEFORE: maps, AFTER: rounded(maps, 0.0)}, {}, 500, 0)
    assert (cost.change, cost.change_lo, cost.change_hi, cost.verdict) == (0.0, 0.0, 0.0, "undecided")
    assert cost.depth_k == 3, "without a depth of its own, the deepest"


@pytest.mark.parametrize(("num_prompts", "verdict"), [(1, "undecided"), (PROMPTS.decide, "lower")])
def test_a_single_prompt_decides_nothing(num_prompts: int, verdict: str) -> None:
    """Its interval has no width: any change at all would lie outside 0."""
    maps = before(num_prompts)
    (cost,) = weights_costs({BEFORE: maps, AFTER: rounded(maps, 0.9)}, {}, 500, 0)
    assert cost.change_hi < 0 and cost.verdict == verdict
    assert ("no difference shown" in cost.summary_line) == (verdict == "undecided")


def test_only_shared_prompts_count_and_without_the_original_nothing_is_said() -> None:
    maps = before()
    after = rounded(maps, 0.1)
    (cost,) = weights_costs({BEFORE: maps[:10], AFTER: after[5:]}, {}, 500, 0)
    assert cost.num_prompts == 5
    assert weights_costs({AFTER: after}, {}, 500, 0) == []
    assert weights_costs({BEFORE: maps[:5], AFTER: after[5:]}, {}, 500, 0) == []


def test_the_policy_tells_the_cost_and_survives_its_file(tmp_path: Path) -> None:
    maps = before(12)
    acceptance: list[Measurements] = []
    cost: list[Measurements] = []
    for key, rows in ((BEFORE, maps), (AFTER, rounded(maps, 0.1))):
        for name, table in (("maps", rows), ("cost", make_cells(3.0, [3.2, 3.4, 3.6], [0.2, 0.4, 0.6], draft_key=key))):
            folder = tmp_path / f"{name}-{key[0]}"
            folder.mkdir()
            write_rows(folder, table)
            (acceptance if name == "maps" else cost).append(Measurements(key=folder.name, path=folder))
    out = tmp_path / "policy"
    out.mkdir()
    notes: list[str] = []
    ctx = Context(key="c" * 64, out=out, scratch=out, send=lambda event: notes.append(str(event.get("message"))))
    choose_depth(acceptance, cost, num_draws=300, ctx=ctx)
    policy = read_policy(out)
    (found,) = policy.weights
    assert (found.draft_key, found.quantised_from) == (AFTER, BEFORE)
    assert policy.roles == {AFTER: "int4, groups of 32"}
    assert found.summary_line in notes
