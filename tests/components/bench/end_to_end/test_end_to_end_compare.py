"""An honest comparison: arms in turns, equal work, equal text, and every difference explained."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_subjects import LOOKAHEAD_CANNOT, lookahead_of
from chosen_depths import policy_of_depths

from components.bench import compare_end_to_end, measure_acceptance
from components.bench.end_to_end.arms import Arm
from components.bench.end_to_end.compare import plan_arms
from components.bench.prompts import EncodedPrompt, drop_timed
from components.contract import Context, DepthPolicy, Draft, Machine, Measurements, Prompts, Target, UserError
from components.rows import AcceptanceMap, CostCell, Request, Round, read_rows
from components.speedup.prediction.costs import Setting, cost_table
from components.speedup.prediction.replay import replay

Rows = tuple[list[Request], list[Round], list[CostCell]]


@pytest.fixture(scope="module")
def made(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, tmp_path_factory: pytest.TempPathFactory
) -> Measurements:
    """Three prompts around depth 2 for EAGLE-3 and 1 for MTP, in two real processes."""
    folder = tmp_path_factory.mktemp("end_to_end")
    depths = zip(drafts, (2, 1), strict=True)
    policy = policy_of_depths(folder, [(draft.key, w, 1, depth) for draft, depth in depths for w in ("even", "all")])
    ctx = Context(key="e" * 64, out=folder, scratch=folder, num_threads=1)
    asked: dict[str, Any] = {"num_prompts": 3, "max_new_tokens": 24, "seconds": 0.2, "num_processes": 2}
    return compare_end_to_end(target, drafts, prompts, policy, **asked, ctx=ctx, machine=machine)


@pytest.fixture(scope="module")
def measured(made: Measurements) -> Rows:
    return read_rows(made.path, Request), read_rows(made.path, Round), read_rows(made.path, CostCell)


def test_every_arm_does_equal_work_in_every_process(made: Measurements, measured: Rows) -> None:
    requests, _, _ = measured
    assert {arm["method"] for arm in made.info["arms"]} == {"none", "ngram", "eagle3", "mtp"}
    assert made.info["ended"].startswith(("settled: ", "not settled in "))
    num_processes = made.info["num_processes"]
    assert {r.process for r in requests} == set(range(1, num_processes + 1)) and num_processes >= 2
    arms = {(r.method, r.depth_k) for r in requests}
    chosen = {*(("mtp", k) for k in (0, 1, 2)), *(("eagle3", k) for k in (0, 1, 2, 3, 4))}
    assert arms == {("none", 0), ("ngram", 4), *chosen}
    assert sorted(r.order_index for r in requests) == list(range(len(requests)))
    assert not any(r.is_warmup for r in requests), "what warms up is no row"
    # In the first two processes every arm decodes every prompt that the process took, once each time.
    groups: dict[tuple[int, str, int], list[tuple[str, int]]] = {}
    for r in requests:
        groups.setdefault((r.process, r.prompt_id, r.rep), []).append((r.method, r.depth_k))
    for (process, _, _), ours in groups.items():
        assert len(set(ours)) == len(ours) and (process > 2 or set(ours) == arms)
    # Four groups in all at least, so that all three came.
    assert {r.prompt_id for r in requests} == {"test-0", "test-1", "test-3"}
    assert made.info["num_prompts_decoded"] == made.info["num_prompts"] == 3
    for prompt_id in {r.prompt_id for r in requests}:
        kept = {r.tokens_kept for r in requests if r.prompt_id == prompt_id}
        assert len(kept) == 1, "each prompt keeps the same number of tokens in all arms and processes"
    assert len({(r.dtype, r.num_threads) for r in requests}) == 1


def test_every_request_has_the_steady_time_of_its_arm_and_what_passed(measured: Rows) -> None:
    """Rounds at the arm's steady time in its process: requests of as many rounds differ by their first round alone."""
    requests, _, _ = measured
    for r in requests:
        assert r.elapsed_ns is not None and r.elapsed_ns > 0 and r.decode_ns > 0 and r.ttft_ns > 0
    busy = [r for r in requests if r.elapsed_ns != r.decode_ns]
    assert len(busy) > len(requests) / 2, "steady times are of the quietest slices"


def test_the_phases_of_every_arm_are_cost_cells_of_the_same_moments(made: Measurements, measured: Rows) -> None:
    requests, _, cells = measured
    drafted = {(r.draft_key, r.depth_k, r.process) for r in requests if r.depth_k}
    for phase in ("verify", "draft", "host", "draft_prefill"):
        assert {(c.draft_key, c.depth_k, c.process) for c in cells if c.phase == phase and c.depth_k} == drafted
    assert {c.process for c in cells if c.phase == "target_step"} == {r.process for r in requests}
    assert len({(c.kv_len, c.batch_size) for c in cells}) == 1 and all(c.median_ns > 0 for c in cells)
    assert {c.kernel for c in cells} == {made.info["kernel"]}
    for key in {r.draft_key for r in requests if r.depth_k and r.draft_key}:
        depths = sorted({r.depth_k for r in requests if r.draft_key == key and r.depth_k})
        assert cost_table(cells, Setting(key, 1)).depths == [0, *depths]


def test_what_was_accepted_while_decoding_is_the_replay_of_the_map(
    measured: Rows,
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    context: Callable[[str], Context],
) -> None:
    requests, rounds, _ = measured
    for draft in drafts:
        maps = measure_acceptance(target, draft, prompts, max_new_tokens=24, ctx=context(str(draft.info["method"])))
        by_prompt = {row.prompt_id: row for row in read_rows(maps.path, AcceptanceMap)}
        mine = [r for r in requests if r.draft_key == draft.key and 0 < r.depth_k <= 2 and r.identical]
        assert len({(r.prompt_id, r.depth_k) for r in mine}) == 6, "three prompts at two depths"
        for request in mine:
            live = [r.accepted for r in rounds if r.request_id == request.request_id]
            replayed = [r.accepted for r in replay(by_prompt[request.prompt_id].accepted, request.depth_k)]
            assert live == replayed[: len(live)], "round for round"
            assert len(live) == len(replayed) or request.status == "eos"


def test_every_output_is_that_of_plain_decoding(measured: Rows) -> None:
    requests, _, _ = measured
    for r in requests:
        if r.method == "none":
            assert r.identical is None
        else:
            assert r.identical or r.tie, f"{r.method} at depth {r.depth_k} says something else"
    digests = {(r.prompt_id, r.output_sha256) for r in requests if r.method == "none" or r.identical}
    assert len(digests) == len({r.prompt_id for r in requests})


def test_rounds_account_for_every_kept_token(measured: Rows) -> None:
    requests, rounds, _ = measured
    by_request: dict[str, list[Round]] = {}
    for r in rounds:
        by_request.setdefault(r.request_id, []).append(r)
    drafted = [r for r in requests if r.depth_k]
    assert set(by_request) == {r.request_id for r in drafted if r.tokens_kept > 1}
    for request in drafted:
        mine = by_request.get(request.request_id, [])
        assert [r.round_no for r in mine] == list(range(request.num_rounds))
        assert sum(r.emitted for r in mine) == request.tokens_kept - 1
        assert sum(r.drafted for r in mine) == request.num_drafted
        assert sum(r.accepted for r in mine) == request.num_accepted
        cut = sum(r.accepted + 1 - r.emitted for r in mine)
        assert request.tokens_raw == request.tokens_kept + cut
        assert request.decode_ns > 0 and request.ttft_ns > 0


def test_a_drafter_that_is_off_takes_everything_in_and_drafts_nothing(measured: Rows, drafts: list[Draft]) -> None:
    requests, rounds, _ = measured
    off = [r for r in requests if r.method != "none" and r.depth_k == 0]
    assert {r.draft_key for r in off} == {draft.key for draft in drafts}
    assert all(r.num_drafted == r.num_accepted == 0 and r.num_rounds == r.tokens_kept - 1 for r in off)
    assert all(r.tokens_raw == r.tokens_kept and r.identical for r in off)
    assert not {r.request_id for r in off} & {r.request_id for r in rounds}


def test_batches_and_trees_are_arms_of_their_own(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    machine: Machine,
    tmp_path: Path,
    context: Callable[[str], Context],
    here_instead: None,
) -> None:
    """Side by side, as a tree, both: same tokens as plain decoding; what fills no batch is left out."""
    ctx = context("batches")
    made = compare_end_to_end(
        target,
        drafts[:1],
        prompts,
        policy_of_depths(tmp_path, [(drafts[0].key, "all", 1, 2)]),
        num_prompts=3,
        max_new_tokens=12,
        seconds=0.1,
        num_processes=3,
        depths=[2],
        batch_sizes=[2, 1],
        trees=[6],
        ctx=ctx,
        machine=machine,
    )
    requests = read_rows(ctx.out, Request)
    arms = {(r.method, r.depth_k, r.tree_budget) for r in requests}
    assert arms == {
        ("none", 0, None),
        ("ngram", 4, None),
        *(("eagle3", *way) for way in ((0, None), (2, None), (4, 6))),
    }
    ways = {(r.method, r.depth_k, r.tree_budget, r.batch_size) for r in requests if r.process == 1}
    assert ways == {(*arm, size) for arm in arms for size in (1, 2)}
    # Four groups of each size at least, those decoded least often first: all that fill a group have come.
    assert len({r.prompt_id for r in requests if r.batch_size == 1}) == 3
    assert len({r.prompt_id for r in requests if r.batch_size == 2}) == 2
    assert all(r.identical or r.tie for r in requests if r.method != "none")
    for r in requests:
        assert (r.batch_id is None) == (r.batch_size == 1)
        assert (r.decode_ns > 0 and r.tokens_kept == 12) or r.status == "eos"
    together = Counter((r.batch_id, r.method, r.depth_k, r.tree_budget) for r in requests if r.batch_id)
    assert set(together.values()) == {2}
    assert {(arm["tree_budget"], arm["batch_size"]) for arm in made.info["arms"]} >= {(6, 1), (6, 2)}
    cells = read_rows(ctx.out, CostCell)
    assert {(c.batch_size, c.tree_budget) for c in cells if c.phase == "verify"} == {
        (size, tree) for size in (1, 2) for tree in (None, 6)
    }


def test_a_batch_larger_than_the_prompts_is_refused(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, context: Callable[[str], Context]
) -> None:
    policy = DepthPolicy(key="d" * 64, path=Path("nowhere"))
    with pytest.raises(UserError, match="9 side by side need as many prompts, and there are 3"):
        compare_end_to_end(
            target, drafts, prompts, policy, num_prompts=3, batch_sizes=[9], ctx=context("e2e"), machine=machine
        )


def test_prompts_for_warming_up_are_never_timed() -> None:
    asked = [EncodedPrompt(name, "w", [number]) for number, name in enumerate("abc")]
    spare = EncodedPrompt("d", "w", [9])
    copy = dataclasses.replace(asked[1], prompt_id="another name, the same text")
    assert drop_timed([copy, spare], asked) == [spare]
    with pytest.raises(UserError, match="warm-up prompts of their own"):
        drop_timed([copy], asked)


def test_arms_beside_the_decision_are_prompt_lookup_and_drafters_that_are_off(
    drafts: list[Draft], target: Target, tmp_path: Path
) -> None:
    _, (own_loop,) = lookahead_of(target, tmp_path)
    asked: dict[str, Any] = {"policy_depths": {drafts[0].key: frozenset({2, 99})}, "depths": [1, 2], "trees": [6, 6]}
    arms, side = plan_arms([drafts[0], own_loop], **asked, lookup_depths=[4], loaded_off=True, rival=True)
    lookup, off = Arm("ngram", "", 4), Arm("eagle3", drafts[0].key, 0)
    assert side == {lookup, off}
    labels = ["plain", "plain on plain kernels", "ngram k=4", "eagle3 off", "eagle3 k=1", "eagle3 k=2"]
    assert [arm.label for arm in arms][:7] == [*labels, "eagle3 k=4 tree of 6"]
    assert [arm.label for arm in arms if arm.method == "lookahead"] == [
        "lookahead k=1",
        "lookahead k=2",
        *(arm.label for arm in arms if arm.method == "lookahead" and arm.tree_budget),
    ]
    alone, nobody = plan_arms([drafts[0]], **asked | {"trees": []}, lookup_depths=[], loaded_off=False, rival=False)
    assert [arm.label for arm in alone] == ["plain", "eagle3 k=1", "eagle3 k=2"] and nobody == frozenset()


@pytest.mark.parametrize(("settings", "said"), LOOKAHEAD_CANNOT)
def test_what_lookahead_cannot_do_is_refused_before_anything_runs(
    settings: dict[str, list[int]],
    said: str,
    target: Target,
    prompts: Prompts,
    machine: Machine,
    tmp_path: Path,
    context: Callable[[str], Context],
) -> None:
    missing, drafts = lookahead_of(target, tmp_path)
    policy = DepthPolicy(key="d" * 64, path=tmp_path / "nowhere")
    with pytest.raises(UserError, match=said):
        compare_end_to_end(missing, drafts, prompts, policy, ctx=context("e2e"), machine=machine, **settings)  # type: ignore[arg-type]


def test_a_policy_without_its_file_is_refused(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    machine: Machine,
    tmp_path: Path,
    context: Callable[[str], Context],
) -> None:
    empty = DepthPolicy(key="d" * 64, path=tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no policy\.json"):
        compare_end_to_end(target, drafts, prompts, empty, max_new_tokens=8, ctx=context("e2e"), machine=machine)
