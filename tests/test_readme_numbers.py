"""Every timing that the README claims is that of the newest record of its machine, to the digits it shows.

Records that somebody else's `make bench` leaves beside them are of another machine and change nothing here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.engines_table import ELSEWHERE, line_of, table
from benchmarks.record import RESULTS

README = " ".join((Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8").split())
MACHINE = "2cfee56fde51e37c"
"""Where the timings of the README were taken: two cores, no GPU."""


def record(name: str) -> dict[str, Any]:
    """The newest record of a benchmark on that machine; the README must name it."""
    assert f"{name}-*" in README, f"the README does not say that its numbers are of {name}-*"
    files = sorted(RESULTS.glob(f"{name}-20*.json"))
    found: list[dict[str, Any]] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return next(one for one in reversed(found) if one["machine"]["machine_id"] == MACHINE)


def claimed(pattern: str) -> tuple[str, ...]:
    """What the README says in the places of a sentence's groups."""
    found = re.findall(pattern, README)
    assert len(found) == 1, f"{len(found)} sentences of the README are like {pattern}"
    return (found[0],) if isinstance(found[0], str) else tuple(found[0])


def test_every_record_named_is_there() -> None:
    names = set(re.findall(r"`(?:benchmarks/results/)?([a-z_0-9-]+)-\*`", README)) - {"NAME"}
    assert len(names) > 8
    assert not [name for name in names if not list(RESULTS.glob(f"{name}-20*.json"))]


def test_training_speed() -> None:
    said = claimed(
        r"EAGLE-3 is ([\d.]+) times as fast .* in ([\d.]+) of its memory; .* ([\d.]+) times as fast in ([\d.]+) of"
    )
    results = record("training-speed")["results"]
    ours = [results[shape]["ours, LM head frozen"] for shape in ("builtin", "medium")]
    assert said == tuple(x for o in ours for x in (f"{o['times_as_fast']:.1f}", f"{o['memory_ratio']:.2f}"))
    assert results["medium"]["shape"]["hidden_size"] == 512


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chains_and_trees(dtype: str) -> None:
    (line,) = claimed(rf"\| {dtype} \| ([\d. |]+) \|")
    found = record(f"trees-{dtype}")
    best: dict[tuple[str, str], float] = {}
    for drafter in found["drafters"]:
        for arm in drafter["arms"]:
            kind = arm["arm"].split()[0]
            best[drafter["method"], kind] = max(best.get((drafter["method"], kind), 0.0), arm["speedup"])
    order = [("eagle3", "chain"), ("eagle3", "tree"), ("mtp", "chain"), ("mtp", "tree"), ("mtp", "two-row")]
    assert line.strip(" |").split(" | ") == [f"{best[place]:.2f}" for place in order]
    assert f"at commit {found['commit'].rstrip('+')};" in README


def test_history() -> None:
    said = claimed(r"over ([\d,]+) runs the slowest of (\d+) named ones took ([\d.]+) s")
    found = record("history")
    slowest = max(found["query_ms_p50"].values())
    assert said == (f"{found['runs']:,}", str(len(found["query_ms_p50"])), f"{slowest / 1000:.2f}")


def test_a_million_rows() -> None:
    minutes, seconds, gib, times = claimed(
        r"in (\d+) min (\d+) s with at most ([\d.]+) GiB, ([\d.]+) times the time of a tenth"
    )
    sizes = record("datasets_at_scale")["sizes"]
    large, small = sizes["1000000"], sizes["100000"]
    assert 60 * int(minutes) + int(seconds) == round(large["seconds"]["all"])
    assert gib == f"{large['peak_gib']:.1f}" and times == f"{large['seconds']['all'] / small['seconds']['all']:.1f}"
    shares = {v for name, v in large["planted"].items() if name.startswith(("recall", "precision"))}
    assert shares == {1.0}, "all found, nothing else lost"


def test_answering_speed() -> None:
    both, low, high = claimed(
        r"come ([\d.]+) times as fast as .* in bfloat16 and ([\d.]+) to ([\d.]+) times in float32"
    )
    found = record("answering-speed")["found"]
    assert {f"{v['ratio']:.1f}" for name, v in found.items() if "bfloat16" in name} == {both}
    assert sorted(f"{v['ratio']:.1f}" for name, v in found.items() if "float32" in name) == [low, high]


def test_feature_precision() -> None:
    both, fp8, bf16 = claimed(r"was ([\d.]+) with both for EAGLE-3, and ([\d.]+) instead of ([\d.]+) for MTP")
    found = record("feature-precision")["results"]
    means = {m: {p: f"{fmean(v):.3f}" for p, v in found[m]["held_out_al"].items()} for m in found}
    assert means == {"eagle3": {"bf16": both, "fp8": both}, "mtp": {"bf16": bf16, "fp8": fp8}}
    assert all(abs(v["mean_difference"]) < v["spread_between_seeds"] for v in found.values())


def test_languages() -> None:
    said = claimed(
        r"took Chinese from ([\d.]+) tokens a round to ([\d.]+) \(change (-[\d.]+) \[(-[\d.]+), (-[\d.]+)\]\) and "
        r"English from ([\d.]+) to ([\d.]+)"
    )
    rows = {(row["language"], len(row["trained_on"])): row for row in record("languages")["results"]}
    fell = [f"{rows['zh', 1][name]:.2f}" for name in ("change", "change_lo", "change_hi")]
    al = {place: f"{row['al']:.2f}" for place, row in rows.items()}
    assert said == (al["zh", 2], al["zh", 1], *fell, al["en", 2], al["en", 1])


def test_packing() -> None:
    said = claimed(r"EAGLE-3 ([\d.]+) times the speed of `none`, where `pack` has ([\d.]+)")
    found = record("packing")["results"]["eagle3"]
    assert said == tuple(f"{found[way]['times_as_fast_as_none']:.2f}" for way in ("bucket", "pack"))


def test_fewer_bits() -> None:
    cost = r"([\d.]+) (?:tokens a round )?\[([\d.]+), ([\d.]+)\]"
    said = claimed(rf"int4 in groups of 32 cost {cost} for EAGLE-3 and {cost} for MTP")
    found = {d["method"]: d["rows"] for d in record("quantised-drafts")["drafters"]}
    changes: list[str] = []
    for method in ("eagle3", "mtp"):
        at_three = [row for row in found[method] if row["depth_k"] == 3]
        small = [row for row in at_three if (row["weights"], row["group_size"]) == ("int4", 32) and row.get("keep")]
        changes += [f"{-small[0][name]:.3f}" for name in ("change", "change_hi", "change_lo")]
        assert {row["verdict"] for row in at_three if row["weights"] != "int4"} == {"undecided"}, "no loss was shown"
    assert said == tuple(changes)


def test_fifty_kills() -> None:
    found = record("soak-kills")
    assert found["kills"] == 50 and not found["faults"] and "in fifty kills" in README


def test_the_table_of_engines_is_that_of_the_record() -> None:
    elsewhere = json.loads(ELSEWHERE.read_text(encoding="utf-8"))
    lines = table([line_of(line) for line in [*record("engines")["lines"], *elsewhere]]).splitlines()
    assert [line for line in lines if " ".join(line.split()) not in README] == []
