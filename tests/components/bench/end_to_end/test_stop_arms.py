"""compare_stop: chains that end by confidence decode the prompts of their fixed depth, in turns, and say the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bench_subjects import HereInstead, through_json
from chosen_depths import policy_of_depths

from components.bench import compare_stop, measure_acceptance, measure_step_cost
from components.bench.end_to_end.arms import Arm
from components.contract import Context, DepthPolicy, Draft, Machine, Measurements, Prompts, Target, UserError
from components.policy import read_policy
from components.rows import AcceptanceMap, CostCell, StopRun, read_rows, write_rows
from components.speedup import choose_depth, choose_stop, confirm_stop
from components.stop_rule import Calibration, StopRule

ROWS = {"num_prompts": 4, "max_new_tokens": 24, "seconds": 0.2, "num_processes": 2}


def context(folder: Path, name: str) -> Context:
    out = folder / name
    out.mkdir()
    return Context(key=name[0] * 64, out=out, scratch=out, num_threads=1)


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """Measure in this process: real decoding in real turns; only starting others, seconds each, is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("components.bench.measurement.process.FreshProcess", HereInstead)
        yield


def maps_depth(maps: Measurements) -> int:
    return read_rows(maps.path, AcceptanceMap)[0].k_max


@pytest.fixture(scope="module")
def ruled(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, DepthPolicy]:
    """A policy with a rule for EAGLE-3, for one sequence and for two side by side."""
    folder, draft = tmp_path_factory.mktemp("stop"), drafts[0]
    maps = measure_acceptance(target, draft, prompts, max_new_tokens=24, ctx=context(folder, "maps"))
    cost_settings = {"batch_sizes": [1, 2], "kv_lengths": [32], "stop_rule": True, "seconds": 0.1, "num_processes": 1}
    cost = measure_step_cost(target, [draft], prompts, **cost_settings, ctx=context(folder, "cost"), machine=machine)  # type: ignore[arg-type]
    cells = read_rows(cost.path, CostCell)
    read = [cell for cell in cells if cell.phase == "draft_read"]
    assert {(cell.batch_size, cell.depth_k) for cell in read} == {(1, maps_depth(maps)), (2, maps_depth(maps))}
    unread = [cell for cell in cells if cell.phase != "draft_read"]
    write_rows(context(folder, "unread").out, unread)
    depth = choose_depth([maps], [cost], ctx=context(folder, "depth"))
    with pytest.raises(UserError, match=r"set stop_rule: true in bench\.measure_step_cost"):
        choose_stop(depth, [maps], [replace(cost, path=folder / "unread")], ctx=context(folder, "asks"))
    return folder, choose_stop(depth, [maps], [cost], ctx=context(folder, "rule"))


@pytest.fixture(scope="module")
def measured(
    ruled: tuple[Path, DepthPolicy], target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine
) -> Measurements:
    folder, policy = ruled
    return compare_stop(target, drafts, prompts, policy, **ROWS, ctx=context(folder, "stop"), machine=machine)  # type: ignore[arg-type]


def test_each_rule_decodes_the_prompts_of_its_fixed_depth(
    ruled: tuple[Path, DepthPolicy], measured: Measurements
) -> None:
    stops, rows = read_policy(ruled[1].path).stops, read_rows(measured.path, StopRun)
    assert [stop.batch_size for stop in stops] == [1, 2] == sorted({row.batch_size for row in rows})
    for stop in stops:
        of_size = [row for row in rows if row.batch_size == stop.batch_size]
        assert {(row.arm, row.depth_k) for row in of_size} == {
            ("plain", 0),
            ("fixed", stop.fixed_depth),
            ("stop", stop.rule.depth),
            ("p_min", stop.p_min_depth),
        }
        # Two processes of one prompt each at least, every arm on the same prompts as often.
        turns = {(row.prompt_id, row.process, row.rep): 0 for row in of_size}
        for row in of_size:
            turns[row.prompt_id, row.process, row.rep] += 1
        assert set(turns.values()) <= {3, 4} and len({row.process for row in of_size}) >= 2
    assert all(row.identical or row.tie for row in rows if row.arm != "plain")
    assert all(row.num_accepted <= row.num_drafted <= row.depth_k * row.num_rounds for row in rows)


def test_the_policy_tells_what_was_measured(ruled: tuple[Path, DepthPolicy], measured: Measurements) -> None:
    folder, policy = ruled
    content = read_policy(confirm_stop(policy, measured, ctx=context(folder, "told")).path)
    for before, after in zip(read_policy(policy.path).stops, content.stops, strict=True):
        rows = [row for row in read_rows(measured.path, StopRun) if row.batch_size == after.batch_size]
        assert after.gain == before.gain and after.divergences == 0
        assert after.gain_meas is not None and after.meas_lo is not None and after.meas_hi is not None
        assert after.meas_lo <= after.gain_meas <= after.meas_hi
        assert after.p_min_gain_meas is not None and after.p_min_meas_lo is not None
        assert after.num_prompts_meas == len({row.prompt_id for row in rows if row.arm == "stop"})
        assert not after.chosen, "four prompts decide nothing"


def test_a_policy_without_rules_is_refused(
    target: Target, drafts: list[Draft], prompts: Prompts, machine: Machine, tmp_path: Path
) -> None:
    policy = policy_of_depths(tmp_path, [(drafts[0].key, "all", 1, 2)])
    with pytest.raises(UserError, match=r"run speedup\.choose_stop"):
        compare_stop(target, drafts, prompts, policy, **ROWS, ctx=context(tmp_path, "none"), machine=machine)  # type: ignore[arg-type]


def test_an_arm_comes_back_from_json_as_it_was() -> None:
    curve = Calibration((0.0, 0.5, 1.0), (0.1, 0.4, 0.9))
    for stop in (None, StopRule((curve, curve), (0.0, 0.3), (0.1, 0.2))):
        arm = Arm("eagle3", "d", 2, stop=stop)
        again = Arm.of_json(through_json(asdict(arm)))
        assert again == arm and hash(again) == hash(arm)
