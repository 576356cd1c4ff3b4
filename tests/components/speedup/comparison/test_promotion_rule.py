"""A challenger against the champion: paired, not worse with 95 % confidence, and only the challenger can win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated_rows import make_cells, make_maps, make_request

from components.contract import Context, DepthPolicy, Draft, Measurements, UserError
from components.policy import Policy, Winner, read_policy, served_depths
from components.refusals import PROMPTS
from components.rows import PairedComparison, read_rows
from components.speedup import choose_depth, confirm_depth
from components.speedup.comparison.paired import verdict_of
from components.speedup.policy_markdown import write_policy

Rows = Callable[[list[object]], Measurements]
NewCtx = Callable[..., Context]
NEW = Draft("n" * 64, Path(), {"best_step": 40, "continued_from": "o" * 64})
OLD = Draft("o" * 64, Path())
P = {"n" * 64: 0.97, "o" * 64: 0.97}


def policy_of(measurements: Rows, new_ctx: NewCtx, p: dict[str, float] | None = None, num: int = 40) -> DepthPolicy:
    """Two drafters of one method, measured on the same prompts of two workloads."""
    maps, costs = [], []
    for key, chance in (p or P).items():
        chats = make_maps(
            [chance], num_prompts=num, num_tokens=65, seed=1, draft_key=key, method="mtp", workload="chat"
        )
        code = make_maps([0.97], num_prompts=num, num_tokens=65, seed=2, draft_key=key, method="mtp", workload="code")
        maps.append(measurements([*chats, *code]))
        costs.append(measurements(list(make_cells(3.0, [3.5], [0.5], draft_key=key, method="mtp"))))
    return choose_depth(maps, costs, ctx=new_ctx())


def requests(ratio: float, noise: float = 0.0, num: int = 40) -> list[object]:
    """Plain, champion 1.5 times as fast, challenger `ratio` times as fast as the champion; prompts differ a lot."""
    rng = np.random.default_rng(0)
    rows: list[object] = []
    for n in range(2 * num):
        workload = "chat" if n < num else "code"
        name = {"workload": workload, "prompt_id": f"{workload}-{n % num:04d}", "session_id": "s1"}
        seconds = 1.0 + 2.0 * (n % 7)
        rows.append(make_request("none", 0, n, 65, seconds, **name))
        for draft, speed in ((OLD, 1.5), (NEW, 1.5 * ratio)):
            took = seconds / speed * (1 + noise * rng.standard_normal())
            rows.append(make_request("mtp", 1, n, 65, took, draft_key=draft.key, **name))
    return rows


def confirm(
    policy: DepthPolicy, rows: list[object], measurements: Rows, new_ctx: NewCtx, **more: object
) -> DepthPolicy:
    return confirm_depth(policy, measurements(rows), NEW, OLD, ctx=new_ctx(), **more)  # type: ignore[arg-type]


def check(policy: Policy, name: str) -> bool:
    assert policy.gate is not None
    return bool(next(c.passed for c in policy.gate.checks if c.name == name))


@pytest.mark.parametrize(
    ("ratio", "noise", "verdict", "passed"),
    [
        (1.2, 0.05, "better", True),
        (1.0, 0.0, "not_worse", True),
        (0.99, 0.0, "not_worse", True),
        (1.0, 0.3, "undecided", False),
        (0.9, 0.05, "worse", False),
    ],
)
def test_not_worse_needs_evidence(
    ratio: float, noise: float, verdict: str, passed: bool, measurements: Rows, new_ctx: NewCtx
) -> None:
    made = confirm(policy_of(measurements, new_ctx), requests(ratio, noise), measurements, new_ctx)
    rows = read_rows(made.path, PairedComparison)
    speed = next(r for r in rows if (r.quantity, r.workload) == ("decode_speed", "all"))
    assert speed.verdict == verdict
    assert check(read_policy(made.path), "speed_against_champion") is passed
    assert speed.ratio == pytest.approx(ratio, rel=0.1) and speed.lo <= speed.ratio <= speed.hi
    assert (speed.challenger_key, speed.champion_key, speed.num_prompts) == (NEW.key, OLD.key, 80)
    assert speed.session_id == "s1" and speed.challenger_depth == speed.champion_depth == 1
    assert {(r.quantity, r.workload) for r in rows} == {
        (quantity, workload)
        for quantity in ("decode_speed", "acceptance_length")
        for workload in ("all", "chat", "code")
    }
    assert made.info["vs_champion_verdict"] == verdict and made.info["champion_key"] == OLD.key


def test_pairing_removes_what_prompts_do_to_both(measurements: Rows, new_ctx: NewCtx) -> None:
    """Prompts take 1 to 13 seconds: unpaired, an interval this narrow would be out of reach."""
    made = confirm(policy_of(measurements, new_ctx), requests(1.05, 0.01), measurements, new_ctx)
    speed = read_rows(made.path, PairedComparison)[0]
    assert 1.04 < speed.lo < speed.hi < 1.06


def test_a_champion_is_held_against_at_the_depth_it_serves_and_a_guess_is_flagged(
    measurements: Rows, new_ctx: NewCtx
) -> None:
    chosen = policy_of(measurements, new_ctx)
    unsaid = read_policy(confirm(chosen, requests(1.0), measurements, new_ctx).path)
    assert [f.draft_key for f in unsaid.flags if f.code == "champion_depth_not_known"] == [OLD.key]
    # Its release turned drafting off: it decodes plainly, 1.5 times slower.
    told = replace(read_policy(chosen.path), served={OLD.key: 0})
    out = new_ctx()
    write_policy(out.out, told)
    made = confirm(DepthPolicy("told", out.out), requests(1.0), measurements, new_ctx)
    speed = read_rows(made.path, PairedComparison)[0]
    assert speed.champion_depth == 0 and speed.ratio == pytest.approx(1.5, rel=0.01)
    assert "champion_depth_not_known" not in {f.code for f in read_policy(made.path).flags}
    told = replace(told, served={OLD.key: 3})
    write_policy(out.out, told)
    with pytest.raises(UserError, match=r"never timed end to end: champion \(challenger at depth 1, champion at 3\)"):
        confirm(DepthPolicy("told", out.out), requests(1.0), measurements, new_ctx)


def test_the_champion_never_wins_the_challengers_run(measurements: Rows, new_ctx: NewCtx) -> None:
    made = confirm(policy_of(measurements, new_ctx), requests(0.8), measurements, new_ctx)
    policy = read_policy(made.path)
    assert policy.winner == Winner(NEW.key, "mtp", 1)
    assert policy.roles == {NEW.key: "challenger", OLD.key: "champion"}
    assert policy.gate is not None and not policy.gate.passed
    assert made.info["draft_key"] == NEW.key and policy.verdict == "use"


def test_one_workload_that_forgets_is_enough_to_fail(measurements: Rows, new_ctx: NewCtx) -> None:
    forgets = {NEW.key: 0.80, OLD.key: 0.97}
    made = confirm(policy_of(measurements, new_ctx, forgets), requests(1.1), measurements, new_ctx)
    policy = read_policy(made.path)
    assert not check(policy, "acceptance_against_champion[chat]")
    assert check(policy, "acceptance_against_champion[code]") and check(policy, "speed_against_champion")
    assert policy.gate is not None and not policy.gate.passed


@pytest.mark.parametrize(("num_prompts", "worse"), [(1, False), (PROMPTS.decide, True)])
def test_a_workload_of_a_single_prompt_shows_nothing(
    num_prompts: int, worse: bool, measurements: Rows, new_ctx: NewCtx
) -> None:
    """Its interval has no width, so that any loss at all would lie beyond the margin."""
    maps, costs = [], []
    for key, chance in {NEW.key: 0.50, OLD.key: 0.97}.items():
        few = make_maps(
            [chance], num_prompts=num_prompts, num_tokens=65, seed=1, draft_key=key, method="mtp", workload="chat"
        )
        code = make_maps([0.97], num_prompts=40, num_tokens=65, seed=2, draft_key=key, method="mtp", workload="code")
        maps.append(measurements([*few, *code]))
        costs.append(measurements(list(make_cells(3.0, [3.5], [0.5], draft_key=key, method="mtp"))))
    policy = read_policy(confirm(choose_depth(maps, costs, ctx=new_ctx()), requests(1.1), measurements, new_ctx).path)
    (chat,) = [c for c in policy.comparisons if (c.workload, c.quantity) == ("chat", "acceptance_length")]
    assert (chat.num_prompts, chat.verdict) == (num_prompts, "worse" if worse else "undecided")
    assert check(policy, "acceptance_against_champion[chat]") != worse
    assert policy.gate is not None
    (asked,) = [c.limit for c in policy.gate.checks if c.name == "acceptance_against_champion[chat]"]
    assert asked == ("lower bound >= 0.9" if worse else "not asked of 1 prompts")


def test_too_few_prompts_in_all_are_no_evidence(measurements: Rows, new_ctx: NewCtx) -> None:
    num = PROMPTS.decide // 2 - 1  # of each of two workloads
    policy = read_policy(
        confirm(policy_of(measurements, new_ctx, num=num), requests(1.1, num=num), measurements, new_ctx).path
    )
    assert not check(policy, "acceptance_against_champion[all]") and not check(policy, "speed_against_champion")


def mapped_to(deepest: dict[str, int], measurements: Rows, new_ctx: NewCtx, shared: bool = True) -> DepthPolicy:
    """Both drafters with maps and costs down to depths of their own; two guesses pay."""
    maps, costs = [], []
    for key, depth in deepest.items():
        seed, workload = (1, "code") if shared or key == NEW.key else (2, "chat")
        mine = make_maps(
            [0.97] * depth, num_prompts=40, num_tokens=65, seed=seed, draft_key=key, method="mtp", workload=workload
        )
        maps.append(measurements(list(mine)))
        verify, draft = [3.2 + 0.1 * k for k in range(depth)], [0.1 + 0.1 * k for k in range(depth)]
        costs.append(measurements(list(make_cells(3.0, verify, draft, draft_key=key, method="mtp"))))
    return choose_depth(maps, costs, ctx=new_ctx())


def decoded_at(policy: DepthPolicy) -> list[object]:
    """Both drafters at their chosen depths, equally fast."""
    depths = {c.draft_key: c.depth_k for c in read_policy(policy.path).choices if c.workload == "all"}
    rows: list[object] = [make_request("none", 0, n, 65, 2.0) for n in range(40)]
    return rows + [make_request("mtp", k, n, 65, 1.0, draft_key=key) for key, k in depths.items() for n in range(40)]


def test_acceptance_is_compared_where_the_champion_was_mapped_too(measurements: Rows, new_ctx: NewCtx) -> None:
    policy = mapped_to({NEW.key: 4, OLD.key: 2}, measurements, new_ctx)
    made = confirm(policy, decoded_at(policy), measurements, new_ctx)
    rows = {(r.quantity, r.workload): r for r in read_rows(made.path, PairedComparison)}
    assert rows["decode_speed", "all"].challenger_depth == 4
    row = rows["acceptance_length", "all"]
    assert (row.challenger_depth, row.champion_depth, row.num_prompts) == (2, 2, 40)
    assert check(read_policy(made.path), "acceptance_against_champion[all]")


def test_acceptance_that_cannot_be_compared_fails_the_gate(measurements: Rows, new_ctx: NewCtx) -> None:
    policy = mapped_to({NEW.key: 2, OLD.key: 2}, measurements, new_ctx, shared=False)
    found = read_policy(confirm(policy, decoded_at(policy), measurements, new_ctx).path)
    assert {r.quantity for r in found.comparisons} == {"decode_speed"}
    assert not check(found, "acceptance_against_champion[all]")
    assert found.gate is not None and not found.gate.passed


def test_a_challenger_that_learned_nothing_is_not_promoted(measurements: Rows, new_ctx: NewCtx) -> None:
    same = Draft(NEW.key, Path(), {"best_step": 0, "continued_from": OLD.key})
    rows = measurements(requests(1.0))
    made = confirm_depth(policy_of(measurements, new_ctx), rows, same, OLD, ctx=new_ctx())
    policy = read_policy(made.path)
    assert not check(policy, "differs_from_champion") and check(policy, "speed_against_champion")


def test_a_challenger_not_worth_drafting_with_says_so(measurements: Rows, new_ctx: NewCtx) -> None:
    policy = policy_of(measurements, new_ctx, {NEW.key: 0.0, OLD.key: 0.97})
    cells = [make_cells(3.0, [3.5], [0.5 if key == OLD.key else 9.0], draft_key=key, method="mtp") for key in P]
    maps = [make_maps([P[key]], num_prompts=40, num_tokens=65, seed=1, draft_key=key, method="mtp") for key in P]
    policy = choose_depth([measurements(list(m)) for m in maps], [measurements(list(c)) for c in cells], ctx=new_ctx())
    rows = [r for r in requests(1.0) if r.draft_key != NEW.key]  # type: ignore[attr-defined]
    rows += [make_request("mtp", 1, n, 65, 9.0, draft_key=NEW.key, prompt_id=f"code-{n:04d}") for n in range(40)]
    found = read_policy(confirm(policy, rows, measurements, new_ctx).path)
    assert found.winner is None and found.verdict == "do_not_speculate"
    assert not check(found, "depth_chosen_and_measured") and not check(found, "speed_against_champion")


@pytest.mark.parametrize(
    ("challenger", "champion", "said"),
    [
        (OLD, OLD, "both are ooo"),
        (Draft("x" * 64, Path()), OLD, r"nothing about the challenger \(xxx"),
        (NEW, Draft("x" * 64, Path()), r"nothing about the champion \(xxx"),
        (None, OLD, "give `challenger` too"),
    ],
)
def test_a_wrong_pair_is_told_in_one_line(
    challenger: Draft | None, champion: Draft, said: str, measurements: Rows, new_ctx: NewCtx
) -> None:
    policy, rows = policy_of(measurements, new_ctx, num=5), measurements(requests(1.0, num=5))
    with pytest.raises(UserError, match=said):
        confirm_depth(policy, rows, challenger, champion, ctx=new_ctx())


def test_a_release_serves_its_winner_or_decodes_plainly(measurements: Rows, new_ctx: NewCtx) -> None:
    policy = replace(read_policy(policy_of(measurements, new_ctx).path), winner=None)
    assert served_depths(policy) == {}
    for verdict, depth in (("use", 2), ("undecided", 2), ("do_not_speculate", 0), ("invalid", 0)):
        assert served_depths(replace(policy, winner=Winner(OLD.key, "mtp", 2), verdict=verdict)) == {OLD.key: depth}


def test_verdicts() -> None:
    assert [
        verdict_of(lo, hi, 0.02, decisive=True) for lo, hi in ((1.01, 1.2), (0.98, 1.0), (0.9, 1.1), (0.9, 0.979))
    ] == [
        "better",
        "not_worse",
        "undecided",
        "worse",
    ]
