"""What `draftsmith compare` takes: a run, a drafter, a policy, a release or a registered version, as one way to serve.

A side is a drafter at a depth, or with a tree of some budget. A run, a policy and a release say both; a drafter is
taken at the depth that was last chosen for it, unless one is given. Nothing is measured here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.contract import UserError
from components.promotion import Way
from storage import journal
from storage.artifacts import Store
from storage.results import query

_RUN = re.compile(r"\d{8}-\d{6}-\w+")
_VERSION = re.compile(r"(?:registry:)?(?P<name>[^@:/]+)@(?P<which>[A-Za-z0-9_-]+)")
_CHAMPION = "champion"


@dataclass(frozen=True)
class Side:
    """One way to serve. measured_in: keys of the artifacts to look at; empty: every measurement of this drafter.

    tree_budget: guesses verified in one pass of a tree, whose depth is then the one that was measured; None: a chain.
    """

    said: str
    draft_key: str
    method: str
    depth_k: int
    target_key: str
    measured_in: frozenset[str] = frozenset()
    tree_budget: int | None = None

    def name(self) -> str:
        """For a heading."""
        how = f"depth {self.depth_k}" if self.tree_budget is None else f"tree of {self.tree_budget}"
        return f"{self.said} ({self.method}, {how}, {self.draft_key[:12]})"

    def way(self) -> Way:
        """What is compared of it."""
        return Way(self.name(), self.draft_key, self.depth_k, self.tree_budget, self.measured_in)


def find_side(store: Store, said: str, depth: int | None, tree: int | None = None) -> Side:
    """What a user has named. depth: instead of the chosen one. tree: a tree of this budget instead of a chain.

    Raises:
        UserError: there is nothing of this name, or it says of no drafter how deep to draft.
    """
    if depth is not None and tree is not None:
        raise UserError(f"compare: {said} at a depth or with a tree, not both; a tree is as deep as it was measured")
    version = _VERSION.fullmatch(said)
    if version is not None:
        side = _of_version(store.home, said, version["name"], version["which"])
    elif _RUN.fullmatch(said):
        side = _of_run(store, said)
    else:
        side = _of_artifact(store, said)
    return dataclasses.replace(side, depth_k=side.depth_k if depth is None else depth, tree_budget=tree)


def find_champion(store: Store, other: Side) -> Side:
    """The champion for the same target: that of the same method, else the one that measured fastest.

    Raises:
        UserError: no champion drafts for this target.
    """
    from storage.registry import versions_of

    found: list[tuple[bool, float, Side]] = []
    for name in sorted({row.name for row in journal.promotions(store.home)}):
        for number, aliases, tags in versions_of(store.home, name):
            if _CHAMPION in aliases and tags.get("draftsmith.target_key") == other.target_key:
                side = _of_tags(f"{name}@{number}", tags)
                speed = float(tags.get("draftsmith.speedup_meas") or 0.0)
                found.append((side.method == other.method, speed, side))
    if not found:
        raise UserError(
            f"compare: no registered champion drafts for target {other.target_key[:12]}; name what to compare"
        )
    return max(found, key=lambda entry: entry[:2])[2]


def _of_version(home: Path, said: str, name: str, which: str) -> Side:
    from storage.registry import versions_of

    versions = versions_of(home, name)
    for number, aliases, tags in versions:
        if which == str(number) or which in aliases:
            return _of_tags(said, tags)
    known = ", ".join(f"{number} ({', '.join(aliases)})" if aliases else str(number) for number, aliases, _ in versions)
    raise UserError(f"compare: {name} has no version {which}; it has: {known or 'none'}")


def _of_tags(said: str, tags: Mapping[str, str]) -> Side:
    facts = {key.removeprefix("draftsmith."): value for key, value in tags.items()}
    return _side(said, facts, frozenset())


def _of_run(store: Store, run_id: str) -> Side:
    """The winner of a run, measured in that run."""
    parameters = {"run_id": run_id}
    sql = "SELECT kind, artifact_key FROM step WHERE run_id = $run_id AND artifact_key IS NOT NULL ORDER BY ended_at"
    steps = query(sql, store.home, parameters)[1]
    if not steps:
        raise UserError(f"compare: no finished run {run_id}; `draftsmith query runs` lists them")
    policies = [key for kind, key in steps if kind == "DepthPolicy"]
    if not policies:
        raise UserError(f"compare: run {run_id} has chosen no depth; name a drafter instead")
    side = _side(run_id, store.record_of(policies[-1])["info"] | _target_of(store, policies[-1]), frozenset())
    return dataclasses.replace(side, measured_in=frozenset(key for _, key in steps))


def _of_artifact(store: Store, said: str) -> Side:
    key = store.resolve(said)
    content = store.record_of(key)
    kind, info = content["kind"], dict(content["info"])
    if kind == "Draft":
        return _side(said, info | {"draft_key": key, "depth_k": _chosen_depth(store.home, key)}, frozenset())
    if kind not in ("DepthPolicy", "Release"):
        raise UserError(f"compare: {said} is a {kind}; give a run, Draft, DepthPolicy, Release or NAME@ALIAS")
    return _side(said, info | _target_of(store, key), frozenset())


def _target_of(store: Store, key: str) -> dict[str, Any]:
    """The target that a policy or release is about, as its rows in the history say."""
    sql = "SELECT any_value(target_key) FROM depth_choice WHERE artifact_key = $key"
    found = query(sql, store.home, {"key": key})[1][0][0]
    return {"target_key": found} if found else {}


def _chosen_depth(home: Path, draft_key: str) -> int:
    """That of the newest selection, at its smallest batch size."""
    sql = """SELECT depth_k FROM v_choice WHERE draft_key = $key AND workload = 'all' AND kv_len IS NULL
             ORDER BY created_at DESC, batch_size, artifact_key LIMIT 1"""
    found = query(sql, home, {"key": draft_key})[1]
    if not found:
        raise UserError(f"compare: no depth was ever chosen for drafter {draft_key[:12]}; give one with --depth")
    return int(found[0][0])


def _side(said: str, facts: Mapping[str, Any], measured_in: frozenset[str]) -> Side:
    if not facts.get("draft_key"):
        raise UserError(f"compare: {said} has no drafter (its verdict: {facts.get('verdict', 'unknown')})")
    return Side(
        said,
        str(facts["draft_key"]),
        str(facts.get("method", "?")),
        int(facts.get("depth_k", 0)),
        str(facts.get("target_key", "")),
        measured_in,
    )
