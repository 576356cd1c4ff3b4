"""Newer evidence for a registered version: its release was measured again, and what it is believed by is the newest.

A version's evidence stands in its tags, and `promote` decides by them. When the release behind it is measured again (a
newer session of the same release key) and still serves the same drafter at the same depth, the version gets the new
numbers, and the promotion log an entry with those before and those after. A release that now serves something else is a
version of its own, since what a version serves never changes; the one before is told so, and is no longer promoted on
numbers that a newer measurement has overtaken. An invalid measurement takes the place of no valid one: it is logged.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from components.promotion import Check
from storage import alias_moves, journal
from storage.alias_moves import MARK, mark_of
from storage.model_versions import tags_of
from storage.records import PromotionRow, new_promotion
from storage.release_facts import SESSION_TAG, ReleaseFacts
from storage.tracking import KEY_TAG

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

EVIDENCE = "evidence"  # the action of a log entry that moves no alias
_SERVED = ("draftsmith.draft_key", "draftsmith.depth_k")
# What an entry keeps of the numbers before, and what goes when it was not measured this time.
_EVIDENCE_TAGS = (
    "gate.status",
    "gate.checks",
    *(f"draftsmith.{name}" for name in ("al", "meas_", "pred_", "speedup_")),
)
_EVIDENCE_TAGS += ("draftsmith.depth_", "draftsmith.verdict", "draftsmith.machine", SESSION_TAG)
_VERDICT, _INVALID = "draftsmith.verdict", "invalid"
_TOLD = ("speedup_meas", "speedup_pred", "depth_k", "verdict")


def serves_the_same(tags: Mapping[str, str], facts: ReleaseFacts) -> bool:
    """A version with these tags decodes as the release would: the same drafter at the same depth."""
    return all(tags.get(name) == facts.tags.get(name) for name in _SERVED)


def is_newer(facts: ReleaseFacts, tags: Mapping[str, str]) -> bool:
    """The release was measured after what a version has for evidence."""
    return facts.session > tags.get(SESSION_TAG, "")


def log_evidence(
    home: Path, client: MlflowClient, facts: ReleaseFacts, name: str, version: int, who: str, outcome: str = ""
) -> PromotionRow:
    """Say in the promotion log, once, that a version was measured again: its numbers before and those now.

    outcome: why they are not its evidence, where they are not.
    """
    mark = mark_of(home, client)
    promotion_id = f"{EVIDENCE}-{facts.session}-{name}-{version}-{mark[:8]}"
    known = next((row for row in journal.promotions(home) if row.promotion_id == promotion_id), None)
    if known is not None:
        return known
    before = {tag: value for tag, value in tags_of(client, name, version).items() if tag.startswith(_EVIDENCE_TAGS)}
    changes = [f"{what} {old} -> {new}" for what, old, new in _changes(before, facts.tags)]
    why = f"measured again in session {facts.session}: {', '.join(changes) or 'the same numbers'}"
    why += f"; {outcome}" if outcome else ""
    numbers = {**facts.tags, MARK: mark, "before": json.dumps(before, sort_keys=True)}
    row = new_promotion(name, "", EVIDENCE, version, version, who, why, numbers)
    row = dataclasses.replace(row, promotion_id=promotion_id)
    alias_moves.log(home, row)
    return row


def renew_tags(client: MlflowClient, facts: ReleaseFacts, version: int) -> None:
    """Give a version the numbers of its newest session; the tag that says which session comes with `settle_session`."""
    there = tags_of(client, facts.name, version)
    for tag, value in facts.tags.items():
        if tag != SESSION_TAG and there.get(tag) != value:
            client.set_model_version_tag(facts.name, str(version), tag, value)
    for tag in there.keys() - facts.tags.keys():
        if tag.startswith(_EVIDENCE_TAGS):  # not measured this time
            client.delete_model_version_tag(facts.name, str(version), tag)


def settle_session(client: MlflowClient, facts: ReleaseFacts, version: int) -> None:
    """Note that a version has the evidence of this session, and that everything that follows from it is done."""
    client.set_model_version_tag(facts.name, str(version), SESSION_TAG, facts.session)


def older_versions(client: MlflowClient, facts: ReleaseFacts, *, valid: bool = False) -> list[tuple[str, int]]:
    """(model, version) of the same release with evidence of earlier sessions. valid: those alone whose evidence is."""
    found = client.search_model_versions(f"tags.`{KEY_TAG}` = '{facts.release_key}'")
    older = [one for one in found if is_newer(facts, one.tags) and not (valid and one.tags.get(_VERDICT) == _INVALID)]
    return sorted((one.name, int(one.version)) for one in older)


def counts_for_nothing(home: Path, client: MlflowClient, facts: ReleaseFacts, who: str) -> tuple[str, int] | None:
    """Log an invalid measurement of a release that has valid ones; the version it was of, or None when it counts."""
    valid = older_versions(client, facts, valid=True) if facts.tags.get(_VERDICT) == _INVALID else []
    for name, version in valid:
        log_evidence(home, client, facts, name, version, who, "it is invalid and does not count")
    return valid[-1] if valid else None


def overtaken(client: MlflowClient, tags: Mapping[str, str]) -> list[Check]:
    """A failed check when the release of a version was measured again and now serves something else; else nothing."""
    key = tags.get(KEY_TAG)
    found = client.search_model_versions(f"tags.`{KEY_TAG}` = '{key}'") if key else []
    valid = [one for one in found if one.tags.get(_VERDICT) != _INVALID]
    newer = [one for one in valid if one.tags.get(SESSION_TAG, "") > tags.get(SESSION_TAG, "")]
    if not newer:
        return []
    newest = max(newer, key=lambda one: one.tags[SESSION_TAG])
    said = f"1: its release was measured again, and is {newest.name} version {newest.version} now"
    return [Check("newest_evidence", False, 0.0, None, None, said)]


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(fact, before, now) of what people look at first."""
    facts = [("gate", before.get("gate.status"), now.get("gate.status"))]
    facts += [(name, before.get(f"draftsmith.{name}"), now.get(f"draftsmith.{name}")) for name in _TOLD]
    return [(name, _short(old), _short(new)) for name, old, new in facts if old != new]


def _short(value: str | None) -> str:
    try:
        return "-" if value is None else f"{float(value):.4g}"
    except ValueError:
        return str(value)
