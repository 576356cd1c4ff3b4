"""Every number of a view is that of the function of its name, on random rows: one definition, two programs.

Rows have tails that were cut, overshoot, eos, warm-ups, failures, repetitions, workloads, trees, batches, chunks.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from random_rows import (
    crossed_session,
    engine_session,
    random_counters,
    random_maps,
    random_session,
    replayed,
)

from components import definitions
from components.bench.end_to_end.compare import summary
from components.bench.engines.rows import EngineRows
from components.definitions import counts, has_decoding, has_rounds, position_counts, round_counts
from components.rows import Request, Round
from components.speedup.measured import measured_arms
from components.speedup.prediction.replay import replay_counts, summarise_acceptance
from storage.history.query import query
from storage.history.write import record_artifact

SEEDS = range(6)
ARM = ("method", "draft_key", "depth_k", "tree_budget", "batch_size", "kernel", "engine")
Key = tuple[Any, ...]


def seen(home: Path, view: str, by: Sequence[str], *values: str) -> dict[Key, dict[str, float | None]]:
    """What a view says: key -> column -> value. A key that comes twice is a fault."""
    columns, rows = query(f"SELECT {', '.join([*by, *values])} FROM {view}", home)
    found = {row[: len(by)]: dict(zip(columns[len(by) :], row[len(by) :], strict=True)) for row in rows}
    assert len(found) == len(rows)
    return found


def expect(found: dict[Key, dict[str, Any]], told: dict[Key, dict[str, Any]]) -> None:
    assert found.keys() == told.keys() and len(told) > 0
    for key, values in told.items():
        for name, value in values.items():
            wanted = None if value is None else pytest.approx(value, rel=1e-9)
            assert found[key][name] == wanted, (key, name)


def grouped(requests: Iterable[Request], by: Sequence[str]) -> dict[Key, list[Request]]:
    """Requests by arm and workload, `all` last; a workload that is called all is no other."""
    groups: dict[Key, list[Request]] = defaultdict(list)
    for r in requests:
        for workload in {r.workload, "all"}:
            groups[*(getattr(r, name) for name in by), workload].append(r)
    return groups


def by_prompt(requests: Iterable[Request]) -> list[list[Request]]:
    groups: dict[str, list[Request]] = defaultdict(list)
    for r in requests:
        groups[r.prompt_id].append(r)
    return list(groups.values())


def ask(home: Path, make: Any, *rows: Any) -> None:
    record_artifact(home, make("k1", rows=rows).path)


def acceptance(requests: Sequence[Request]) -> dict[str, Any]:
    """Every convention of acceptance of one arm on one workload, by the functions."""
    found, apart = round_counts(requests), [round_counts(one) for one in by_prompt(requests)]
    return {
        "requests": len(requests),
        "rounds": found.rounds,
        "al": definitions.al_of(requests),
        "al_macro": definitions.al_macro([definitions.al_of(one) for one in by_prompt(requests)]),
        "al_with_overshoot": definitions.al_with_overshoot(found.accepted, found.rounds),
        "accepted_per_round": definitions.accepted_per_round(found.accepted, found.rounds),
        "accepted_per_round_macro": definitions.macro(
            definitions.accepted_per_round(one.accepted, one.rounds) for one in apart
        ),
        "draft_acceptance_rate": definitions.draft_acceptance_rate(found.accepted, found.drafted),
        "draft_acceptance_rate_macro": definitions.macro(
            definitions.draft_acceptance_rate(one.accepted, one.drafted) for one in apart
        ),
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_every_acceptance_length_is_that_of_its_function(seed: int, home: Path, make: Any) -> None:
    rng = random.Random(seed)
    requests, rounds = random_session(rng)
    requests += engine_session(rng)
    ask(home, make, *requests, *rounds)
    arm = [name for name in ARM if name != "engine"]
    drafting = [r for r in requests if has_rounds(r)]
    told = {key: acceptance(rows) for key, rows in grouped(drafting, arm).items()}
    expect(seen(home, "v_acceptance", [*arm, "workload"], *next(iter(told.values()))), told)
    assert any(values["al"] is None for values in told.values())  # rounds were left out
    each = ("al", "accepted_per_round", "draft_acceptance_rate")
    expect(
        seen(home, "v_acceptance_request", ["request_id"], *each),
        {(r.request_id,): {name: acceptance([r])[name] for name in each} for r in drafting},
    )


def positions(requests: Sequence[Request], rounds: dict[str, list[Round]], depth: int) -> dict[int, dict[str, Any]]:
    """Every rate of each draft position of one arm on one workload, by the functions."""

    def count(some: Iterable[Request], position: int) -> definitions.PositionCounts:
        every = [(one.drafted, one.accepted, one.emitted) for r in some for one in rounds.get(r.request_id, ())]
        return position_counts(every, position)

    found = {position: count(requests, position) for position in range(1, depth + 1)}
    joint = definitions.accept_joint([definitions.accept_cond(one) for one in found.values()])
    return {
        position: {
            "rounds": one.rounds,
            "drafted": one.drafted,
            "reached": one.reached,
            "accepted": one.accepted,
            "accept_uncond": definitions.accept_uncond(one),
            "accept_cond": definitions.accept_cond(one),
            "accept_joint": joint[position - 1],
            "accept_of_rounds": definitions.accept_of_rounds(one),
            "accept_uncond_macro": definitions.macro(
                definitions.accept_uncond(count(some, position)) for some in by_prompt(requests)
            ),
            "accept_cond_macro": definitions.macro(
                definitions.accept_cond(count(some, position)) for some in by_prompt(requests)
            ),
        }
        for position, one in found.items()
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rate_of_a_position_is_that_of_its_function(seed: int, home: Path, make: Any) -> None:
    requests, rounds = random_session(random.Random(seed))
    ask(home, make, *requests, *rounds)
    own: dict[str, list[Round]] = defaultdict(list)
    for one in rounds:
        own[one.request_id].append(one)
    told = {
        (*key, position): values
        for key, rows in grouped((r for r in requests if has_rounds(r)), ARM).items()
        for position, values in positions(rows, own, key[ARM.index("depth_k")]).items()
    }
    by = [name for name in ARM if name != "engine"]  # rounds are our own loop's here: engine is None
    told = {(*key[:6], *key[7:]): values for key, values in told.items()}
    expect(seen(home, "v_position", [*by, "workload", "position"], *next(iter(told.values()))), told)


SPEEDS: dict[str, Callable[[Sequence[Request]], float | None]] = {
    "tokens_per_s": definitions.tokens_per_s,
    "tokens_per_s_e2e": definitions.tokens_per_s_e2e,
    "ttft_ms_p50": definitions.ttft_ms_p50,
    "tpot_ms_p50": definitions.tpot_ms_p50,
    "tpot_ms_p99": definitions.tpot_ms_p99,
}


@pytest.mark.parametrize("seed", SEEDS)
def test_every_speed_is_that_of_its_function(seed: int, home: Path, make: Any) -> None:
    rng = random.Random(seed)
    requests = [*random_session(rng)[0], *engine_session(rng)]
    ask(home, make, *requests)
    timed = [r for r in requests if counts(r)]
    groups = grouped(timed, ARM)
    told = {key: {name: speed(rows) for name, speed in SPEEDS.items()} for key, rows in groups.items()}
    expect(seen(home, "v_speed", [*ARM, "workload"], *SPEEDS), told)
    beside = [ARM.index(name) for name in ("batch_size", "engine")]
    speedups = {}
    for key, rows in groups.items():
        if key[0] == "none":
            continue
        same = [r for r in timed if (r.batch_size, r.engine) == tuple(key[place] for place in beside)]
        plain = [r for r in definitions.best_plain(same) if key[-1] in ("all", r.workload)]
        pairs = definitions.timed_pairs(rows).keys() & definitions.timed_pairs(plain).keys()
        shared = {prompt for prompt, _ in pairs}
        ours, theirs = ([r for r in side if has_decoding(r) and r.prompt_id in shared] for side in (rows, plain))
        speedups[key] = {
            "requests": len(ours),
            "tokens_per_s": definitions.tokens_per_s(ours),
            "plain_tokens_per_s": definitions.tokens_per_s(theirs),
            "speedup": definitions.speedup(rows, plain),
            "speedup_e2e": definitions.speedup_e2e(rows, plain),
        }
    expect(seen(home, "v_speedup", [*ARM, "workload"], *next(iter(speedups.values()))), speedups)


@pytest.mark.parametrize("seed", SEEDS)
def test_throughput_is_that_of_its_function(seed: int, home: Path, make: Any) -> None:
    requests = random_session(random.Random(seed))[0]
    ask(home, make, *requests)
    arms: dict[Key, dict[str, list[Request]]] = defaultdict(lambda: defaultdict(list))
    for r in requests:
        if counts(r):
            arms[tuple(getattr(r, name) for name in ARM)][r.batch_id or r.request_id].append(r)
    speeds = {key: definitions.throughput_tokens_per_s(list(batches.values())) for key, batches in arms.items()}
    told = {}
    for key, speed in speeds.items():
        plain = [value or 0.0 for other, value in speeds.items() if other[0] == "none" and other[4] == key[4]]
        ratio = definitions.ratio(speed or 0.0, max(plain, default=0.0)) if speed is not None else None
        told[key] = {"throughput_tokens_per_s": speed, "throughput_speedup": ratio}
    expect(seen(home, "v_throughput", ARM, "throughput_tokens_per_s", "throughput_speedup"), told)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_steps_say_of_a_measurement_is_what_the_views_say(seed: int, home: Path, make: Any) -> None:
    """measured_arms (policy.json) and the summary of bench.compare_end_to_end, on rows without gaps."""
    requests, rounds = crossed_session(random.Random(seed))
    ask(home, make, *requests, *rounds)
    by = ("method", "draft_key", "depth_k", "tree_budget", "batch_size", "kernel")
    found = [one.arm for one in measured_arms(requests, 200, 0)]
    arms = {(*(getattr(a, name) for name in by), a.workload): a for a in found}
    names = ("tokens_per_s", "plain_tokens_per_s", "speedup")
    told = {key: {name: getattr(arm, name) for name in names} for key, arm in arms.items()}
    expect(seen(home, "v_speedup", [*by, "workload"], *names), told)
    told = {key: {"al": arm.al, "draft_acceptance_rate": arm.draft_acceptance_rate} for key, arm in arms.items()}
    expect(seen(home, "v_acceptance", [*by, "workload"], "al", "draft_acceptance_rate"), told)
    for line in summary(requests):
        arm = arms.get((*(line[name] for name in by), "all"))
        if arm is not None:
            assert arm.al is not None
            assert (line["tokens_per_s"], line["al"]) == (round(arm.tokens_per_s, 2), round(arm.al, 4))
            assert line["speedup"] == round(arm.speedup, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_replayed_from_maps_is_what_decoding_is_told_as(seed: int, home: Path, make: Any) -> None:
    """AcceptanceSummary (policy.json, cards, pages) and the views over the rounds that such decoding writes."""
    maps = random_maps(random.Random(seed))
    lived = {depth: list(replayed(maps, depth)) for depth in (1, 2, 4)}
    ask(home, make, *maps, *(row for one in lived.values() for request, own in one for row in (request, *own)))
    found = summarise_acceptance(maps, replay_counts(maps, [*lived]), "e", "eagle3", "all")
    told = {(one.depth_k,): {"al": one.al, "al_macro": one.al_macro, "rounds": one.num_rounds} for one in found}
    here = "(FROM {} WHERE workload = 'all')"
    expect(seen(home, here.format("v_acceptance"), ["depth_k"], "al", "al_macro", "rounds"), told)
    told = {
        (one.depth_k, i): {"reached": one.reached[i - 1], "accepted": one.kept[i - 1]}
        for one in found
        for i in range(1, one.depth_k + 1)
    }
    expect(seen(home, here.format("v_position"), ["depth_k", "position"], "reached", "accepted"), told)
    joint = "SELECT depth_k, 1 + sum(coalesce(accept_joint, 0)) AS al_uncut"
    sums = f"({joint} FROM v_position WHERE workload = 'all' GROUP BY 1)"
    expect(seen(home, sums, ["depth_k"], "al_uncut"), {(one.depth_k,): {"al_uncut": one.al_uncut} for one in found})
    everywhere = [definitions.accept_joint_everywhere([n for m in maps for n in m.accepted], i) for i in (1, 2, 3, 4)]
    told = {(i,): {"accept_joint_everywhere": share} for i, share in enumerate(everywhere, start=1)}
    expect(seen(home, here.format("v_map"), ["position"], "accept_joint_everywhere"), told)
    forced = seen(home, here.format("v_map"), ["position"], "accept_joint_teacher_forced")
    for one in found:
        shares = [forced[i,]["accept_joint_teacher_forced"] for i in range(1, one.depth_k + 1)]
        assert one.al_proxy == pytest.approx(1.0 + sum(share or 0.0 for share in shares), rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_engines_counted_is_that_of_the_functions(seed: int, home: Path, make: Any) -> None:
    rng = random.Random(seed)
    counters, requests = random_counters(rng), engine_session(rng)
    ask(home, make, *counters, *requests)
    told = {
        (one.workload,): {
            "al_with_overshoot": definitions.al_with_overshoot(one.num_accepted, one.num_rounds),
            "accepted_per_round": definitions.accepted_per_round(one.num_accepted, one.num_rounds),
            "draft_acceptance_rate": definitions.draft_acceptance_rate(one.num_accepted, one.num_drafted),
            "accept_of_rounds": [definitions.ratio(kept, one.num_rounds) for kept in one.accepted_per_position],
        }
        for one in counters
    }
    found = seen(home, "v_engine_acceptance", ["workload"], *next(iter(told.values())))
    assert found == told
    by = ("kernel", "method", "depth_k")
    speeds = seen(home, "(FROM v_speed WHERE workload = 'all')", by, "ttft_ms_p50", "tpot_ms_p50")
    lengths = seen(home, "(FROM v_acceptance WHERE workload = 'all')", by, "al_with_overshoot")
    for line in EngineRows(requests, [], []).summary():
        key = (line["engine"], line["method"], line["depth_k"])
        seen_of_it = {**speeds.get(key, {}), **lengths.get(key, {})}
        for name in ("ttft_ms_p50", "tpot_ms_p50", "al_with_overshoot"):
            value = seen_of_it.get(name)
            assert line[name] == (None if value is None else round(value, 4 if name.startswith("al") else 3))
