"""Two ways to serve, held against each other: ratios with intervals where comparable, and why not elsewhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_study  # noqa: F401 (simulated_rows lies beside the tests that it points to)
from simulated_rows import make_maps, make_request

from components.contract import UserError
from components.promotion import Margins
from components.refusals import PROMPTS
from components.rows import DepthChoice, write_rows
from flows.cli import main
from flows.commands.compare import Outcome, Side, compare_sides, find_side
from storage.artifacts.store import Store
from storage.history.write import record_artifact

A, B, TARGET = "a" * 64, "b" * 64, "t" * 64
Add = Callable[..., None]


@pytest.fixture
def add(tmp_path: Path) -> Add:
    """add(key, rows, machine=...) puts measured rows into the history of tmp_path."""

    def write(key: str, rows: list[Any], machine: str = "m1", kind: str = "Measurements", info: Any = None) -> None:
        store = Store(tmp_path)
        out, _ = store.open_staging(key)
        write_rows(out, rows)
        record = {"pipeline": "p", "step": "s", "run_id": "r", "seconds": 1.0, "machine": {"machine_id": machine}}
        record_artifact(tmp_path, store.commit(key, kind, info or {}, record).path)

    return write


def timed(
    draft: str, speed: float, prompts: int = 24, depth: int = 3, prompt_prefix: str = "code", **changes: Any
) -> list[Any]:
    """Requests of 101 tokens at `speed` tokens a second, a little different on every prompt."""
    return [
        make_request(
            "mtp",
            depth,
            n,
            101,
            100 / speed * (1 + 0.01 * (n % 5)),
            draft_key=draft,
            request_id=f"{draft[:4]}{n}",
            prompt_id=f"{prompt_prefix}-{n:04d}",
            **changes,
        )
        for n in range(prompts)
    ]


def plain(speed: float, prompts: int = 24) -> list[Any]:
    return [make_request("none", 0, n, 101, 100 / speed * (1 + 0.01 * (n % 3))) for n in range(prompts)]


def side(draft: str, depth: int = 3, target: str = TARGET) -> Side:
    return Side(draft[:8], draft, "mtp", depth, target)


def only(found: Outcome, quantity: str) -> Any:
    return next(row for row in found.ratios if (row.quantity, row.workload) == (quantity, "all"))


def test_in_one_session_speeds_are_compared_directly_and_prompts_together(tmp_path: Path, add: Add) -> None:
    add("e1", [*timed(A, 120.0), *timed(B, 100.0), *plain(80.0)])
    found = compare_sides(tmp_path, side(A), side(B), Margins())
    speed = only(found, "decode_speed")
    assert speed.ratio == pytest.approx(1.2) and speed.num_prompts == 24
    assert 1.19 < speed.lo <= speed.ratio <= speed.hi < 1.21, "what a prompt does to both cancels"
    assert (found.verdict(), found.exit_code()) == ("better", 0)
    back = compare_sides(tmp_path, side(B), side(A), Margins())
    assert (back.verdict(), back.exit_code()) == ("worse", 1)


def test_in_two_sessions_each_is_taken_over_its_own_plain_decoding(tmp_path: Path, add: Add) -> None:
    add("e1", [*timed(A, 120.0), *plain(80.0)])
    add("e2", [*timed(B, 240.0), *plain(160.0)])
    speed = only(compare_sides(tmp_path, side(A), side(B), Margins()), "speedup")
    assert (
        speed.ratio == pytest.approx(1.0, abs=1e-6)
        and speed.a == pytest.approx(speed.b)
        and speed.verdict == "not_worse"
    )


def test_a_tree_is_held_against_the_chain_of_the_same_drafter(tmp_path: Path, add: Add) -> None:
    trees = timed(A, 150.0, depth=4, tree_budget=12)
    trees = [dataclasses.replace(row, request_id=f"tree-{row.request_id}") for row in trees]
    add("e1", [*timed(A, 120.0), *trees, *plain(80.0)])
    chain_maps = make_maps([0.6] * 4, num_prompts=24, num_tokens=101, seed=1, draft_key=A)
    tree_maps = make_maps([0.8] * 4, num_prompts=24, num_tokens=101, seed=1, draft_key=A)
    add("m1", [*chain_maps, *(dataclasses.replace(m, tree_budget=12) for m in tree_maps)])
    tree = dataclasses.replace(side(A), tree_budget=12)
    found = compare_sides(tmp_path, tree, side(A), Margins())
    assert only(found, "decode_speed").ratio == pytest.approx(1.25) and found.verdict() == "better"
    length = only(found, "acceptance_length")
    assert length.a > length.b > 1 and any("depths 4 and 3" in note for note in found.notes)
    other = dataclasses.replace(tree, tree_budget=30)
    assert any(
        "never timed" in note and "tree of 30" in note for note in compare_sides(tmp_path, other, tree, Margins()).notes
    )


def test_a_serving_engines_speed_is_not_held_against_our_own_loops(tmp_path: Path, add: Add) -> None:
    add("e1", [*timed(A, 100.0), *timed(B, 120.0), *plain(80.0)])
    served = {"engine": "vllm", "kernel": "vllm 1", "concurrency": 1}
    fast = [dataclasses.replace(row, **served) for row in [*timed(A, 900.0), *plain(300.0)]]
    add("e2", fast)
    speed = only(compare_sides(tmp_path, side(A), side(B), Margins()), "decode_speed")
    assert speed.ratio == pytest.approx(100 / 120)
    alone = compare_sides(tmp_path, side("c" * 64), side(B), Margins())
    add("e3", [dataclasses.replace(row, **served) for row in timed("c" * 64, 900.0)])
    assert compare_sides(tmp_path, side("c" * 64), side(B), Margins()).notes == alone.notes, "never timed by us"


@pytest.mark.parametrize(
    ("other", "machine", "says"),
    [
        (timed(B, 100.0), "m2", "other machine (m1 and m2)"),
        (timed(B, 100.0, dtype="bfloat16"), "m1", "other dtype (float32 and bfloat16)"),
        (timed(B, 100.0, batch_size=8), "m1", "other batch size (1 and 8)"),
        (timed(B, 100.0, prompt_prefix="other"), "m1", "other prompts (none shared)"),
        ([], "m1", "never timed end to end"),
    ],
)
def test_what_is_not_comparable_is_said_and_gives_no_ratio(
    tmp_path: Path, add: Add, other: list[Any], machine: str, says: str
) -> None:
    add("e1", [*timed(A, 120.0), *plain(80.0)])
    add("e2", [*other, *plain(80.0)], machine)
    found = compare_sides(tmp_path, side(A), side(B), Margins())
    assert any(says in note for note in found.notes), found.notes
    assert not [row for row in found.ratios if row.quantity != "acceptance_length"]


def test_over_fewer_than_four_prompts_the_ratio_is_told_and_the_verdict_is_undecided(tmp_path: Path, add: Add) -> None:
    add("e1", [*timed(A, 120.0, prompts=PROMPTS.decide - 1), *timed(B, 100.0), *plain(80.0)])
    found = compare_sides(tmp_path, side(A), side(B), Margins())
    assert only(found, "decode_speed").num_prompts == 3 == PROMPTS.decide - 1
    assert (found.verdict(), found.exit_code()) == ("undecided", 3)
    add("e2", [*timed(A, 120.0, prompts=PROMPTS.decide), *timed(B, 100.0), *plain(80.0)])
    assert compare_sides(tmp_path, side(A), side(B), Margins()).verdict() == "better"


def test_other_targets_are_not_compared_at_all(tmp_path: Path) -> None:
    found = compare_sides(tmp_path, side(A), side(B, target="x" * 64), Margins())
    assert found.ratios == [] and found.exit_code() == 3 and "other target" in found.notes[0]


def test_acceptance_is_replayed_on_common_prompts_whatever_the_machine(tmp_path: Path, add: Add) -> None:
    good, bad = [0.8, 0.8, 0.8], [0.5, 0.5, 0.5]
    add("m0", make_maps(bad, num_prompts=20, num_tokens=64, seed=3, draft_key=A), "m1")  # measured again since
    add("m1", make_maps(good, num_prompts=20, num_tokens=64, seed=1, draft_key=A), "m1")
    add("m2", make_maps(bad, num_prompts=20, num_tokens=64, seed=2, draft_key=B), "m2")
    found = compare_sides(tmp_path, side(A), side(B), Margins())
    row = only(found, "acceptance_length")
    assert row.lo > 1.2 and row.verdict == "better" and row.a > row.b
    assert (found.verdict(), found.exit_code()) == ("better", 0)


def test_workloads_have_rows_of_their_own(tmp_path: Path, add: Add) -> None:
    rows = [*timed(A, 120.0), *timed(B, 100.0)]
    split = [dataclasses.replace(r, workload="chat" if int(r.prompt_id[-1]) % 2 else "code") for r in rows]
    add("e1", split)
    found = compare_sides(tmp_path, side(A), side(B), Margins())
    assert [row.workload for row in found.ratios if row.quantity == "decode_speed"] == ["all", "chat", "code"]


def test_the_command_names_drafts_by_the_beginning_of_their_keys(
    tmp_path: Path, add: Add, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    for key in (A, B):
        add(key, [], kind="Draft", info={"method": "mtp", "target_key": TARGET})
        choice = DepthChoice(
            "sel", TARGET, key, "mtp", "all", 1, 3, "r", 0.01, 1.0, 1.2, 1.1, 1.3, None, None, None, None, "use", []
        )
        add(f"c{key}", [choice])
    add("e1", [*timed(A, 100.0), *timed(B, 120.0)])
    assert main(["compare", A[:8], B[:8], "--format", "json"]) == 1
    told = capsys.readouterr()
    rows = json.loads(told.out)
    assert rows[0]["quantity"] == "decode_speed" and rows[0]["ratio"] == pytest.approx(100 / 120)
    assert "verdict: A is worse" in told.err
    assert main(["compare", A[:8], B[:8], "--depth-a", "5"]) == 3
    assert "never timed end to end: aaaaaaaa (mtp, depth 5" in capsys.readouterr().out
    assert main(["compare", "e1", B[:8]]) == 2
    assert "e1 is a Measurements" in capsys.readouterr().err
    assert main(["compare", A[:8]]) == 2, "there is no champion yet"
    assert "no registered champion" in capsys.readouterr().err


def test_acceptance_is_replayed_no_deeper_than_the_maps_of_both_go(tmp_path: Path, add: Add) -> None:
    for key, draft, k_max in (("m1", A, 2), ("m2", B, 5)):
        add(key, make_maps([0.9] * k_max, num_prompts=20, num_tokens=64, seed=1, draft_key=draft))
    found = compare_sides(tmp_path, side(A, depth=5), side(B, depth=5), Margins())
    assert "acceptance length is replayed at depth 2 for both" in found.notes
    assert only(found, "acceptance_length").b <= 3.0


def test_a_drafter_is_taken_at_the_depth_of_the_smallest_batch_of_its_newest_choice(tmp_path: Path, add: Add) -> None:
    add(A, [], kind="Draft", info={"method": "mtp", "target_key": TARGET})
    with pytest.raises(UserError, match="no depth was ever chosen"):
        find_side(Store(tmp_path), A[:8], None)
    one = DepthChoice(
        "sel", TARGET, A, "mtp", "all", 1, 4, "r", 0.01, 1.0, 1.2, 1.1, 1.3, None, None, None, None, "use", []
    )
    larger = [dataclasses.replace(one, batch_size=batch, depth_k=1) for batch in (16, 4)]
    for_long = dataclasses.replace(one, depth_k=2, kv_len=4096)
    add("older", [dataclasses.replace(one, selection_id="sel0", depth_k=7)])
    add("newer", [larger[0], one, larger[1], for_long])
    assert find_side(Store(tmp_path), A[:8], None).depth_k == 4
