"""Newer evidence for a registered version whose release was measured again.

The tags of a version hold its evidence, and `promote` decides by them. When the release behind it is measured again (a
newer session of the same release key) and still serves the same drafter at the same depth, the version gets the new
numbers, and the promotion log an entry with those before and those after. A release that now serves something else is a
version of its own, since what a version serves never changes; the older one is then no longer promoted, since a newer
measurement exists. An invalid measurement never replaces a valid one: it is only logged.

The facts of a registered version as they were sealed, whatever its tags say now.

Tags in MLflow are for people to read and to search, and whoever reaches MLflow can write them. What decides is read
from the release itself, whose files are verified by their digests, or, where the store no longer holds it, from the
promotion log, which has kept the facts since the version was published. A tag only says which release it is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.contract import UserError
from components.promotion import Check
from storage import journal
from storage.artifacts.sessions import require_path_part
from storage.artifacts.store import Store
from storage.history.records import PromotionRow, new_promotion
from storage.home import MARK
from storage.registry import aliases as alias_moves
from storage.registry.aliases import mark_of
from storage.registry.fact_tags import SESSION_TAG, tags_of, write_facts
from storage.registry.tracking import KEY_TAG, MlflowClient
from storage.registry.versions import ReleaseFacts, facts_of

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
_CHANGED_FACTS = ("speedup_meas", "speedup_pred", "depth_k", "verdict")


def serves_the_same(tags: Mapping[str, str], facts: ReleaseFacts) -> bool:
    """Whether a version with these tags decodes as the release would: the same drafter at the same depth."""
    return all(tags.get(name) == facts.tags.get(name) for name in _SERVED)


def is_newer(facts: ReleaseFacts, tags: Mapping[str, str]) -> bool:
    """Whether the release was measured after the evidence of a version with these tags."""
    return facts.session > tags.get(SESSION_TAG, "")


def log_evidence(
    home: Path, client: MlflowClient, facts: ReleaseFacts, name: str, version: int, who: str, outcome: str = ""
) -> PromotionRow:
    """Log once that a version was measured again, with its numbers before and after; returns the log entry.

    outcome: why the new numbers are not its evidence, where they are not.
    """
    mark = mark_of(home, client)
    promotion_id = f"{EVIDENCE}-{facts.session}-{name}-{version}-{mark[:8]}"
    logged = next((row for row in journal.promotions(home) if row.promotion_id == promotion_id), None)
    if logged is not None:
        return logged
    before = {tag: value for tag, value in tags_of(client, name, version).items() if tag.startswith(_EVIDENCE_TAGS)}
    changes = [f"{what} {old} -> {new}" for what, old, new in _changed_facts(before, facts.tags)]
    reason = f"measured again in session {facts.session}: {', '.join(changes) or 'the same numbers'}"
    reason += f"; {outcome}" if outcome else ""
    numbers = {**facts.tags, MARK: mark, "before": json.dumps(before, sort_keys=True)}
    row = new_promotion(name, "", EVIDENCE, version, version, who, reason, numbers)
    row = dataclasses.replace(row, promotion_id=promotion_id)
    alias_moves.log_move(home, row)
    return row


def renew_tags(client: MlflowClient, facts: ReleaseFacts, version: int) -> None:
    """Give a version the numbers of its newest session; the tag that says which session comes with `settle_session`."""
    present = tags_of(client, facts.name, version)
    kept = {  # but what was measured then and not this time
        tag: value
        for tag, value in present.items()
        if tag == SESSION_TAG or tag in facts.tags or not tag.startswith(_EVIDENCE_TAGS)
    }
    measured = {tag: value for tag, value in facts.tags.items() if tag != SESSION_TAG}
    write_facts(client, facts.name, version, kept | measured)


def settle_session(client: MlflowClient, facts: ReleaseFacts, version: int) -> None:
    """Note that a version has the evidence of this session, once everything that follows from it is done."""
    client.set_model_version_tag(facts.name, str(version), SESSION_TAG, facts.session)


def older_versions(client: MlflowClient, facts: ReleaseFacts, *, valid: bool = False) -> list[tuple[str, int]]:
    """(model, version) of the same release with evidence of earlier sessions. valid: only those with valid evidence."""
    versions = client.search_model_versions(f"tags.`{KEY_TAG}` = '{facts.release_key}'")
    older = [
        version
        for version in versions
        if is_newer(facts, version.tags) and not (valid and version.tags.get(_VERDICT) == _INVALID)
    ]
    return sorted((version.name, int(version.version)) for version in older)


def log_invalid_measurement(home: Path, client: MlflowClient, facts: ReleaseFacts, who: str) -> tuple[str, int] | None:
    """Log an invalid measurement of a release that has valid ones; its (model, version), or None when it counts."""
    valid = older_versions(client, facts, valid=True) if facts.tags.get(_VERDICT) == _INVALID else []
    for name, version in valid:
        log_evidence(home, client, facts, name, version, who, "it is invalid and does not count")
    return valid[-1] if valid else None


def newest_evidence_checks(client: MlflowClient, tags: Mapping[str, str]) -> list[Check]:
    """[a failed check] when the release of a version was measured again and now serves something else; else []."""
    key = tags.get(KEY_TAG)
    versions = client.search_model_versions(f"tags.`{KEY_TAG}` = '{key}'") if key else []
    valid = [version for version in versions if version.tags.get(_VERDICT) != _INVALID]
    newer = [version for version in valid if version.tags.get(SESSION_TAG, "") > tags.get(SESSION_TAG, "")]
    if not newer:
        return []
    newest = max(newer, key=lambda version: version.tags[SESSION_TAG])
    requirement = f"1: its release was measured again, and is {newest.name} version {newest.version} now"
    return [Check("newest_evidence", False, 0.0, None, None, requirement)]


def _changed_facts(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(fact, before, now) of what people look at first."""
    facts = [("gate", before.get("gate.status"), after.get("gate.status"))]
    facts += [(name, before.get(f"draftsmith.{name}"), after.get(f"draftsmith.{name}")) for name in _CHANGED_FACTS]
    return [(name, _format_value(old), _format_value(new)) for name, old, new in facts if old != new]


def _format_value(value: str | None) -> str:
    try:
        return "-" if value is None else f"{float(value):.4g}"
    except ValueError:
        return str(value)


def release_of(tags: Mapping[str, str], log: Iterable[PromotionRow], title: str) -> tuple[str, str]:
    """(key, session) of the release behind a version.

    tags: those that MLflow has now. log: the moves and evidence of this version alone. title: its name in errors.

    Raises:
        UserError: its tags name another release than it was published as.
    """
    key = require_path_part(tags.get(KEY_TAG, ""))
    published = next((numbers[KEY_TAG] for numbers in _logged_facts(log) if KEY_TAG in numbers), key)
    if published != key:
        raise UserError(
            f"{title} was published as {published[:12]}, and its tag {KEY_TAG} says {key[:12]} now: somebody else has "
            "changed it in MLflow"
        )
    return key, tags.get(SESSION_TAG, "")


def sealed_tags(home: Path, tags: Mapping[str, str], log: Sequence[PromotionRow], title: str) -> dict[str, str]:
    """The facts of a version, under the names of its tags. tags, log, title: as in `release_of`.

    Raises:
        UserError: its tags name another release than it was published as, or one that neither the store nor the log
            knows.
    """
    key, session = release_of(tags, log, title)
    store = Store(home)
    artifact = store.verify_local(store.name_of_session(key, session)).artifact
    sealed = facts_of(home, artifact.path) if artifact is not None else None
    if sealed is not None and sealed.session == session:
        return sealed.tags
    for numbers in _logged_facts(log):  # the first of this session: later ones may repeat a changed tag
        if (numbers.get(KEY_TAG), numbers.get(SESSION_TAG, "")) == (key, session):
            return {tag: str(value) for tag, value in numbers.items()}
    raise UserError(
        f"{title}: its release {key[:12]} is neither in this store nor in the promotion log: release it again, or let "
        "$DRAFTSMITH_STORE name the shared store that has it"
    )


def _logged_facts(log: Iterable[PromotionRow]) -> list[dict[str, Any]]:
    """The facts logged by Draftsmith, oldest first; moves made in MLflow were logged with whatever tags there were."""
    return [json.loads(row.numbers) for row in log if row.action != "external"]
