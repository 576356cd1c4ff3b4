"""What a block of cost cells decodes, side by side as far as memory goes, and which rounds become which cell."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from made_runs import KERNELS, arm_run

from components.bench.end_to_end.arms import PLAIN, RIVAL, Arm
from components.bench.step_cost import (
    MEMORY_SHARE,
    BlockConditions,
    Grid,
    Setting,
    TimedBlock,
    contexts,
    cost_cells,
    run_block,
)
from components.positions import longest_context

DRAFTED = [Arm("mtp", "m", depth) for depth in range(1, 8)]
TREE = Arm("mtp", "m", 4, tree_budget=12)
TAKEN = BlockConditions("t", "float32", 1, KERNELS, 2, 5, 0.25, 3000.0)


def grid_of(num_drafted: int, rival: bool, tree: bool, tokens: int = 16) -> Grid:
    arms = [PLAIN, *([RIVAL] if rival else []), *DRAFTED[:num_drafted], *([TREE] if tree else [])]
    return Grid(tuple(arms), (Setting(1, 32), Setting(4, 64)), tokens)


@given(
    st.integers(1, 7),
    st.booleans(),
    st.booleans(),
    st.integers(1, 64),
    st.integers(16, 500),
    st.integers(1, 10**6),
    st.integers(0, 10**9),
)
def test_what_takes_turns_at_once_fits_the_memory(
    num_drafted: int, rival: bool, tree: bool, batch_size: int, kv_len: int, bytes_per_token: int, free: int
) -> None:
    grid, setting = grid_of(num_drafted, rival, tree), Setting(batch_size, kv_len)
    room = grid.room_for(setting, bytes_per_token, free)
    longest = longest_context([kv_len], [batch_size], grid.tokens) + max(arm.rows_of_pass for arm in grid.arms)
    one = batch_size * longest * bytes_per_token
    assert room * one <= MEMORY_SHARE * free < (room + 1) * one + 1
    assert grid.room_for(setting, bytes_per_token, free + one) >= room, "more memory, no less room"


@given(st.integers(1, 7), st.booleans(), st.booleans(), st.integers(1, 20))
def test_every_arm_is_in_one_group_and_plain_decoding_in_each(
    num_drafted: int, rival: bool, tree: bool, room: int
) -> None:
    grid = grid_of(num_drafted, rival, tree)
    groups = grid.groups(room)
    assert all(len(group) <= room for group in groups)
    others = [arm for group in groups for arm in group if arm != PLAIN]
    assert sorted(others, key=grid.arms.index) == [arm for arm in grid.arms if arm != PLAIN]
    if room >= 2:
        assert all(group[0] == PLAIN for group in groups), "what is compared meets the same moment"
    if room >= len(grid.arms):
        assert groups == [list(grid.arms)]


class Asked:
    """A process with so much memory, which notes what it is asked for."""

    def __init__(self, free_bytes: int) -> None:
        self.facts, self.turns_asked = {"bytes_per_token": 10, "free_bytes": free_bytes}, list[tuple[Any, list[Arm]]]()

    def turns(self, texts: Any, arms: list[Arm], **asked: Any) -> list[Any]:
        self.turns_asked.append((texts, arms))
        return [arm_run(arm, [[5, 5, 5]], size=len(texts)) for arm in arms]


def test_a_block_decodes_every_arm_on_the_same_text_in_as_many_groups_as_memory_needs() -> None:
    grid, setting = grid_of(3, rival=False, tree=False), Setting(2, 48)
    one = 2 * (48 + 6 + 16 + 4) * 10  # sequences, their longest with its guesses, bytes a token
    texts = [list(range(100)), list(range(200, 300))]
    for room, groups in ((4, 1), (3, 2), (2, 3), (1, 4)):
        process: Any = Asked(round(one * room / MEMORY_SHARE) + 1)
        runs = run_block(process, grid, setting, texts, 1, 4)
        assert len(process.turns_asked) == groups
        assert {run.arm for run in runs} == set(grid.arms)
        assert all(asked == process.turns_asked[0][0] for asked, _ in process.turns_asked)
    none: Any = Asked(round(one / MEMORY_SHARE) - 10)
    assert run_block(none, grid, setting, texts, 1, 4) == [] and none.turns_asked == []


def test_cells_are_the_quietest_slices_without_the_first_round() -> None:
    run = arm_run(DRAFTED[2], [[4000, 1000, 1200], [800, 800], [8000, 8000], [900, 900]])
    found = {cell.phase: cell for cell in cost_cells([TimedBlock([run], Setting(1, 48), TAKEN)])}
    assert set(found) == {"verify", "draft", "draft_prefill", "host", "prefill"}
    # Rounds of 1100, 800, 8000 and 900 in the middle of each slice: the lower half is 800 and 900.
    assert (found["verify"].median_ns, found["draft"].median_ns, found["host"].median_ns) == (425.0, 212.5, 212.5)
    assert found["draft_prefill"].median_ns == 1000 and found["prefill"].median_ns == 7
    assert {cell.reps_in_block for cell in found.values()} == {8, 1}
    for cell in found.values():
        assert (cell.depth_k, cell.process, cell.block, cell.load_average, cell.clock_mhz) == (3, 2, 5, 0.25, 3000.0)
        assert (cell.draft_key, cell.method, cell.kernel) == ("m", "mtp", "mixed")
    assert {phase: cell.num_rows for phase, cell in found.items()} == {
        "verify": 4, "host": 4, "draft": 3, "prefill": 3, "draft_prefill": 3,
    }  # fmt: skip


def test_rounds_of_an_emptying_batch_are_in_no_cell() -> None:
    run = arm_run(TREE, [[4000, 1000, 9000], [1000, 9000]], size=3, left=1)
    found = {cell.phase: cell for cell in cost_cells([TimedBlock([run], Setting(3, 48), TAKEN)])}
    assert (found["verify"].median_ns, found["verify"].reps_in_block) == (500.0, 2)
    assert (found["verify"].num_rows, found["draft"].num_rows, found["verify"].tree_budget) == (13, 12, 12)


def test_plain_steps_belong_to_nobody_and_a_second_baseline_says_only_what_it_costs() -> None:
    found = cost_cells([TimedBlock([arm_run(PLAIN, [[9, 6, 6]]), arm_run(RIVAL, [[9, 4, 4]])], Setting(1, 48), TAKEN)])
    assert {(cell.draft_key, cell.method, cell.depth_k) for cell in found} == {("", "none", 0)}
    assert sorted((cell.phase, cell.kernel, cell.median_ns) for cell in found) == [
        ("host", "mixed", 3.0),
        ("prefill", "mixed", 7.0),
        ("target_step", "mixed", 3.0),
        ("target_step", "plain", 2.0),
    ]


def test_an_arm_that_is_off_or_was_never_whole_has_no_cell() -> None:
    off, first_only, nothing = Arm("mtp", "m", 0), arm_run(DRAFTED[0], [[5]]), arm_run(DRAFTED[1], [])
    assert cost_cells([TimedBlock([arm_run(off, [[5, 5, 5]]), first_only, nothing], Setting(1, 48), TAKEN)]) == []


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 9), st.integers(1, 9), st.integers(16, 100))
def test_contexts_are_real_text_of_ragged_lengths_around_the_asked_one(
    sizes: list[int], block: int, batch_size: int, kv_len: int
) -> None:
    texts = [[100 * number + i for i in range(size)] for number, size in enumerate(sizes)]
    found = contexts(texts, block, batch_size, kv_len, 16)
    assert len(found) == batch_size
    lengths = [len(one) for one in found]
    middle = kv_len - 8
    assert lengths == sorted(lengths) and abs(sum(lengths) / batch_size - middle) <= 1
    assert lengths[-1] + 16 <= longest_context([kv_len], [batch_size], 16)
    assert batch_size == 1 or lengths[-1] - lengths[0] == 2 * round(kv_len / 8)
    for one in found:
        for earlier, later in itertools.pairwise(one):
            inside = later == earlier + 1
            assert inside or (later % 100 == 0 and earlier % 100 == sizes[earlier // 100] - 1), "texts follow whole"
