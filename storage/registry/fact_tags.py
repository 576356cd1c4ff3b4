"""The facts of a version as MLflow keeps them: one tag `draftsmith.facts`, a JSON object, and few tags of their own.

What people search versions by, and what says at a glance how a version stands, is a tag of its own (OWN_TAGS); all
other facts are in the one tag. Everywhere else a fact goes by the name that it has among `ReleaseFacts.tags`, such as
`draftsmith.depth_k`, whatever it is kept in. Versions of earlier releases have a tag for every fact; the same function
reads them, and whoever writes a version's facts puts them into the new form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from storage.registry.tracking import KEY_TAG, MlflowClient

FACTS_TAG = "draftsmith.facts"
SESSION_TAG = "draftsmith.session"  # when the release was measured; older versions have none
PUBLISHED = "draftsmith.published"  # a version that bears it has had its aliases; people may have moved them since
KEEP = "draftsmith.keep"  # a tag that people give a version in MLflow; any value but "no"
FILES = "draftsmith.files"  # says that `draftsmith gc` has let the files of a version go, and when
OWN_TAGS = (
    KEY_TAG,
    SESSION_TAG,
    "draftsmith.pipeline",
    "draftsmith.method",
    "draftsmith.verdict",
    "gate.status",
    "gate.answer",
    PUBLISHED,
    KEEP,
    FILES,
)
_OURS = ("draftsmith.", "gate.")
_LONGEST = 8000  # characters of a tag that MLflow takes of a run, which bears them too; a version may have longer ones


def as_tags(facts: Mapping[str, str]) -> dict[str, str]:
    """The tags for the facts of a version; facts that one tag cannot hold stay tags of their own, the longest first."""
    facts = {name: fact for name, fact in facts.items() if name != FACTS_TAG}  # one that somebody has spoilt
    folded = {name: fact for name, fact in facts.items() if name.startswith(_OURS) and name not in OWN_TAGS}
    while len(text := _as_text(folded)) > _LONGEST:
        del folded[max(folded, key=lambda name: len(folded[name]))]
    own = {name: fact for name, fact in facts.items() if name not in folded}
    return {**own, FACTS_TAG: text} if folded else own


def facts_in(tags: Mapping[str, str]) -> dict[str, str]:
    """The facts of a version, and what else people have tagged it with. tags: all that it has.

    A tag comes before the fact of its name: what somebody writes in MLflow is seen, not hidden. A tag of facts that
    somebody has spoilt stays among them as it is.
    """
    own = {name: value for name, value in tags.items() if name != FACTS_TAG}
    try:
        folded = json.loads(tags.get(FACTS_TAG, "{}"))
    except ValueError:
        folded = None
    if not isinstance(folded, dict):
        return dict(tags)
    return {_full(name): fact if isinstance(fact, str) else json.dumps(fact) for name, fact in folded.items()} | own


def tags_of(client: MlflowClient, name: str, version: int) -> dict[str, str]:
    """The facts of a version in MLflow, and what else people have tagged it with."""
    return facts_in(client.get_model_version(name, str(version)).tags)


def write_facts(
    client: MlflowClient, name: str, version: int, facts: Mapping[str, str], present: Mapping[str, str] | None = None
) -> None:
    """Let a version have these facts and no others of ours. It can be repeated: what is there is not written again.

    present: its tags now, where they are known.
    """
    wanted = as_tags(facts)
    if present is None:
        present = client.get_model_version(name, str(version)).tags
    for tag, value in wanted.items():
        if present.get(tag) != value:
            client.set_model_version_tag(name, str(version), tag, value)
    for tag in (tag for tag in present.keys() - wanted.keys() - {KEEP, FILES} if tag.startswith(_OURS)):
        client.delete_model_version_tag(name, str(version), tag)


def _as_text(facts: Mapping[str, str]) -> str:
    """A JSON object in which a fact that is JSON itself is no text in a text."""
    return json.dumps({name.removeprefix("draftsmith."): _value(fact) for name, fact in sorted(facts.items())})


def _value(fact: str) -> object:
    try:
        value = json.loads(fact)
        return value if json.dumps(value, allow_nan=False) == fact else fact
    except ValueError:
        return fact


def _full(name: str) -> str:
    return name if name.startswith("gate.") else f"draftsmith.{name}"
