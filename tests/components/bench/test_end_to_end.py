"""An honest comparison: arms interleaved, equal work, equal text, and every difference explained."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.bench.arms import chosen_depths, depths_to_run
from components.bench.end_to_end import compare_end_to_end, only_untimed
from components.bench.loaded_off import kept_off
from components.bench.request_rows import sha256_of_tokens
from components.bench.subjects import EncodedPrompt, open_drafter, spread
from components.bench.timed_runs import batches
from components.contract import Context, DepthPolicy, Draft, Machine, Prompts, Target, UserError
from components.decoding.chain import decode
from components.drafts.draft import Columns, Sampling
from components.drafts.files import save_untrained
from components.rows import QualityFlag, Request, Round, read_rows
from components.targets.model import AbstractTarget

Rows = tuple[list[Request], list[Round], list[QualityFlag]]


@pytest.fixture(scope="module")
def measured(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, tmp_path_factory: pytest.TempPathFactory
) -> Rows:
    """Three prompts, twice, around depth 2 for EAGLE-3 and 1 for MTP."""
    folder = tmp_path_factory.mktemp("end_to_end")
    choices = [
        {"draft_key": draft.key, "workload": workload, "depth_k": depth}
        for draft, depth in zip(drafts, (2, 1), strict=True)
        for workload in ("even", "all")
    ]
    (folder / "policy.json").write_text(json.dumps({"choices": choices}), encoding="utf-8")
    policy = DepthPolicy(key="c" * 64, path=folder)
    ctx = Context(key="e" * 64, out=folder, scratch=folder, num_threads=1)
    made = compare_end_to_end(
        target, drafts, prompts, policy, num_prompts=3, max_new_tokens=24, reps=2, ctx=ctx, machine=machine
    )
    assert {arm["method"] for arm in made.info["arms"]} == {"none", "ngram", "eagle3", "mtp"}
    return read_rows(ctx.out, Request), read_rows(ctx.out, Round), read_rows(ctx.out, QualityFlag)


def test_arms_are_interleaved_and_do_equal_work(measured: Rows) -> None:
    requests, _, _ = measured
    arms = {(r.method, r.depth_k) for r in requests}
    chosen = {*(("mtp", k) for k in (0, 1, 2)), *(("eagle3", k) for k in (0, 1, 2, 3, 4))}
    assert arms == {("none", 0), ("ngram", 4), *chosen}
    assert sorted(r.order_index for r in requests) == list(range(len(requests)))
    assert [r.is_warmup for r in sorted(requests, key=lambda r: r.order_index)] == [True] * 20 + [False] * 60
    timed = [r for r in requests if not r.is_warmup]
    assert not {r.prompt_id for r in timed} & {r.prompt_id for r in requests if r.is_warmup}
    # Every arm once in every (repetition, prompt), these one after the other, the order of arms not always the same.
    orders = []
    for start in range(0, 60, 10):
        turn = sorted(timed, key=lambda r: r.order_index)[start : start + 10]
        assert len({(r.rep, r.prompt_id) for r in turn}) == 1
        assert {(r.method, r.depth_k) for r in turn} == arms
        orders.append(tuple((r.method, r.depth_k) for r in turn))
    assert len(set(orders)) > 1
    kept = Counter((r.prompt_id, r.tokens_kept) for r in timed)
    assert set(kept.values()) == {20}, "each prompt keeps the same number of tokens in all 10 arms and 2 repetitions"
    assert len({(r.dtype, r.num_threads) for r in timed}) == 1


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
    drafted = [r for r in requests if r.depth_k and not r.is_warmup]
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


def test_drafting_resumes_after_a_drafter_was_off(opened: AbstractTarget, drafts: list[Draft]) -> None:
    """Its state is kept up to date: what it drafts afterwards is what it would have drafted all along."""
    text = decode(opened, None, [4, 9, 30], max_new_tokens=20, ignore_eos=True).tokens
    ids = torch.tensor([4, 9, 30, *text])
    passed = opened.forward(ids[None], opened.new_cache(1, len(ids)), logits="none", features=True)
    assert passed.taps is not None and passed.last is not None
    whole = Columns(ids[1:], passed.taps[0, :-1], passed.last[0, :-1])
    for draft in drafts:
        drafter = open_drafter(draft, opened)
        state, done = drafter.new_state(64), 0
        for size in (7, *[1] * 13):
            part = Columns(*(one[done : done + size] for one in whole))
            assert kept_off(drafter).propose(state, part, 1, Sampling(), torch.Generator()).tokens.numel() == 0
            done += size
        asked = (drafter.num_steps, Sampling(), torch.Generator())
        resumed = drafter.propose(state, Columns(*(one[done:] for one in whole)), *asked).tokens
        assert resumed.tolist() == drafter.propose(drafter.new_state(64), whole, *asked).tokens.tolist()


def test_batches_and_trees_are_arms_of_their_own(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    machine: Machine,
    tmp_path: Path,
    context: Callable[[str], Context],
) -> None:
    """Side by side, as a tree, both: same tokens as plain decoding; what fills no batch is left out."""
    choice = {"draft_key": drafts[0].key, "workload": "all", "depth_k": 2}
    (tmp_path / "policy.json").write_text(json.dumps({"choices": [choice]}), encoding="utf-8")
    ctx = context("batches")
    made = compare_end_to_end(
        target,
        drafts[:1],
        prompts,
        DepthPolicy(key="c" * 64, path=tmp_path),
        num_prompts=5,
        max_new_tokens=12,
        reps=1,
        depths=[2],
        batch_sizes=[2, 1],
        trees=[6],
        ctx=ctx,
        machine=machine,
    )
    requests = [r for r in read_rows(ctx.out, Request) if not r.is_warmup]
    arms = {(r.method, r.depth_k, r.tree_budget) for r in requests}
    assert arms == {
        ("none", 0, None),
        ("ngram", 4, None),
        *(("eagle3", *way) for way in ((0, None), (2, None), (4, 6))),
    }
    assert Counter((r.method, r.batch_size, r.tree_budget) for r in requests if r.depth_k != 2) == {
        (method, size, tree): count
        for size, count in ((1, 5), (2, 4))
        for method, tree in (("none", None), ("ngram", None), ("eagle3", None), ("eagle3", 6))
    }
    assert all(r.identical or r.tie for r in requests if r.method != "none")
    for r in requests:
        assert (r.batch_id is None) == (r.batch_size == 1)
        assert (r.decode_ns > 0 and r.tokens_kept == 12) or r.status == "eos"
    together = Counter(r.batch_id for r in requests if r.batch_id)
    assert set(together.values()) == {2}
    assert {(arm["tree_budget"], arm["batch_size"]) for arm in made.info["arms"]} >= {(6, 1), (6, 2)}


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
    assert only_untimed([copy, spare], asked) == [spare]
    with pytest.raises(UserError, match="warm-up prompts of their own"):
        only_untimed([copy], asked)


@given(st.lists(st.sampled_from("xyz"), max_size=20), st.integers(1, 6), st.booleans())
def test_batches_are_whole_and_of_one_workload_where_that_goes(
    workloads: list[str], batch_size: int, fill: bool
) -> None:
    asked = [EncodedPrompt(str(number), workload, [number]) for number, workload in enumerate(workloads)]
    groups = batches(asked, batch_size, fill)
    assert all(len(group) == batch_size for group in groups)
    used = [prompt.prompt_id for group in groups for prompt in group]
    assert len(groups) == max(len(asked) // batch_size, int(fill and bool(asked)))
    assert len(set(used)) == len(used) or len(asked) < batch_size
    mixed = sum(len({prompt.workload for prompt in group}) > 1 for group in groups)
    assert mixed <= 2, "at most where one workload ends and the next begins"


def test_depths_stay_within_reach() -> None:
    assert depths_to_run("around", {3}, 7) == [1, 2, 3, 4, 7]
    assert depths_to_run("around", {}, 3) == [1, 3]
    assert depths_to_run("around", {7}, 7) == [1, 3, 6, 7], "3 and 7 are what engines ship with"
    assert depths_to_run("around", {2}, 9) == [1, 2, 3, 7, 9]
    assert depths_to_run("all", {2}, 3) == [1, 2, 3]
    assert depths_to_run([5, 2, 9], {2}, 7) == [2, 5]


def test_a_depth_chosen_for_any_batch_size_or_beyond_training_is_run(tmp_path: Path) -> None:
    rows = [("a", 1, 5, "all"), ("a", 8, 2, "all"), ("a", 32, 0, "all"), ("a", 1, 7, "code"), ("b", 1, 0, "all")]
    names = ("draft_key", "batch_size", "depth_k", "workload")
    (tmp_path / "policy.json").write_text(json.dumps({"choices": [dict(zip(names, r, strict=True)) for r in rows]}))
    assert chosen_depths(DepthPolicy(key="p", path=tmp_path)) == {"a": {5, 2}}
    written = json.loads((tmp_path / "policy.json").read_text()) | {"served": {"a": 3, "champion": 4, "off": 0}}
    (tmp_path / "policy.json").write_text(json.dumps(written))
    assert chosen_depths(DepthPolicy(key="p", path=tmp_path)) == {"a": {5, 2, 3}, "champion": {4}}
    assert depths_to_run("around", {5, 2}, 9) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert depths_to_run("around", {6}, 4) == [1, 3, 4, 6]
    assert depths_to_run("all", {6}, 4) == [1, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_sizes": [1, 2]}, "batch_sizes: lookahead .* one sequence"),
        ({"trees": [6]}, "trees: lookahead .* chains"),
    ],
)
def test_what_lookahead_cannot_do_is_refused_before_anything_runs(
    settings: dict[str, list[int]],
    said: str,
    target: Target,
    prompts: Prompts,
    machine: Machine,
    tmp_path: Path,
    context: Callable[[str], Context],
) -> None:
    save_untrained(tmp_path, "lookahead", {"window": 3}, target)
    missing = Target(key=target.key, path=tmp_path / "never opened")
    policy = DepthPolicy(key="d" * 64, path=tmp_path / "nowhere")
    drafts = [Draft(key="l" * 64, path=tmp_path)]
    with pytest.raises(UserError, match=said):
        compare_end_to_end(missing, drafts, prompts, policy, ctx=context("e2e"), machine=machine, **settings)  # type: ignore[arg-type]


def test_prompts_are_spread_over_the_split() -> None:
    everything = list(range(24))
    assert spread(everything, 12) == everything[::2]  # type: ignore[arg-type, comparison-overlap]
    assert spread(everything, 30) == everything  # type: ignore[arg-type, comparison-overlap]


def test_a_digest_depends_on_every_token() -> None:
    assert len(sha256_of_tokens([1, 2])) == 64
    assert sha256_of_tokens([1, 2]) != sha256_of_tokens([2, 1])


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
