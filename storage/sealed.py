"""The facts of a registered version as they were sealed, whatever its tags say now.

Tags in MLflow are for people to read and to search, and whoever reaches MLflow can write them. What decides is read
from the release itself, whose files are verified by their digests, or, where the store no longer holds it, from the
promotion log, which has kept the facts since the version was published. A tag only says which release it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.contract import UserError
from storage.artifacts import Store
from storage.records import PromotionRow
from storage.release_facts import SESSION_TAG, facts_of
from storage.sessions import require_path_part
from storage.tracking import KEY_TAG


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
