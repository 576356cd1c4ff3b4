"""A depth policy of chosen depths alone, for tests of steps that take one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from history_rows import choice

from components.contract import DepthPolicy
from components.policy import Policy
from components.speedup.policy_markdown import write_policy


def policy_of_depths(
    folder: Path, choices: Iterable[tuple[str, str, int, int]], served: Mapping[str, int] | None = None
) -> DepthPolicy:
    """Write a policy into `folder`. choices: (draft_key, workload, batch size, depth). served: draft_key -> depth."""
    rows = [
        choice(
            selection_id="s",
            draft_key=draft_key,
            workload=workload,
            batch_size=batch_size,
            depth_k=depth,
            rule="",
            tolerance=0.0,
            reasons=[],
        )
        for draft_key, workload, batch_size, depth in choices
    ]
    policy = Policy("s", "t", "float32", "", "", 0.0, rows, [], [], [], [], [], served=dict(served or {}))
    write_policy(folder, policy)
    return DepthPolicy(key="c" * 64, path=folder)
