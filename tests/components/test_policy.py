"""A champion released with an older Draftsmith is read as it was: old names mean what the new ones do."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from components.contract import UserError
from components.policy import DROPPED_PARTS, RENAMED, AcceptanceSummary, MeasuredArm, Policy, read_policy

SUMMARY = AcceptanceSummary("d", "mtp", "all", 2, 4, 90, 3, 2.1, 2.2, 2.3, 2.4, [90, 60], [60, 40])
ARM = MeasuredArm(
    draft_key="d",
    method="mtp",
    workload="all",
    depth_k=2,
    batch_size=1,
    dtype="float32",
    kernel="plain",
    num_prompts=4,
    num_requests=4,
    num_rounds=90,
    tokens_per_s=300.0,
    plain_tokens_per_s=250.0,
    al=2.1,
    al_replayed=2.1,
    draft_acceptance_rate=0.55,
    speedup=1.2,
    lo=1.1,
    hi=1.3,
    checked=4,
    ties=0,
    divergences=0,
)


def written_before(folder: Path) -> Path:
    """The policy as it was written under the former names."""
    policy = Policy("s", "t", "float32", "plain", "rule", 0.01, [], [], [SUMMARY], [], [], [], arms=[ARM])
    raw = asdict(policy) | {part: {} for part in DROPPED_PARTS}
    for part, names in RENAMED.items():
        former = {now: before for before, now in names.items()}
        raw[part] = [{former.get(name, name): value for name, value in row.items()} for row in raw[part]]
    (folder / "policy.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_a_policy_of_former_names_is_read_under_todays(tmp_path: Path) -> None:
    raw = json.loads((written_before(tmp_path) / "policy.json").read_text(encoding="utf-8"))
    assert "al_kept" in raw["acceptance"][0] and "acceptance_rate" in raw["arms"][0] and "engines" in raw
    found = read_policy(tmp_path)
    assert found.acceptance == [SUMMARY] and found.arms == [ARM]


def test_what_has_no_name_at_all_is_refused(tmp_path: Path) -> None:
    raw = json.loads((written_before(tmp_path) / "policy.json").read_text(encoding="utf-8"))
    raw["acceptance"][0]["al_by_moonlight"] = 1.0
    (tmp_path / "policy.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(UserError, match="al_by_moonlight"):
        read_policy(tmp_path)
