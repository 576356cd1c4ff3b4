"""Inputs from outside a pipeline: a version of a registered model, an artifact of this store, a directory with one.

How they are written is in flows/spec/references.py. An input enters the plan by the key of its artifact, so a moved
alias makes anew what follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from components.contract import KINDS, Artifact, UserError
from components.files import sha256_of
from flows.spec.references import VERSION_OF_KIND, reference_error
from storage.artifacts.records import RECORD_FILE, ArtifactRecord, BadRecord, read_checked
from storage.artifacts.store import Store

if TYPE_CHECKING:
    from storage.registry.registry import FoundRelease


def kind_of_source(name: str, store: Store) -> str:
    """The kind that an outside input (as `source_name` has it) is; a registered version is not looked up.

    Raises:
        UserError: it is missing, broken, or malformed.
    """
    named = VERSION_OF_KIND.fullmatch(name)
    return named["kind"] if named else type(_find_artifact(name, store)).__name__


@dataclass
class Sources:
    """Finds the outside inputs of one plan, each alias once, so that the whole plan sees the same champion.

    past: name (see source_name) -> key, of inputs reused from a past run. artifacts: name -> artifact, verified.
    remarks: what the registry has to say of an alias that is not obeyed, one line each.
    """

    store: Store
    past: Mapping[str, str] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    _releases: dict[str, str] = field(default_factory=dict)  # NAME@WHICH -> the key of its release, in its session

    def kind_of(self, name: str) -> str:
        """Find an outside input; its kind.

        Raises:
            UserError: it is missing, broken, or malformed; there is no such model, alias or version.
        """
        if name not in self.artifacts:
            named = VERSION_OF_KIND.fullmatch(name)
            if name in self.past:
                self.artifacts[name] = _find_artifact(f"store:{self.past[name]}", self.store)
            else:
                self.artifacts[name] = self._find_version(named) if named else _find_artifact(name, self.store)
        return type(self.artifacts[name]).__name__

    def _find_version(self, named: re.Match[str]) -> Artifact:
        reference = f"registry:{named['name']}@{named['which']}"
        if reference not in self._releases:
            try:
                found = _find_release(self.store, named["name"], named["which"])
                self._releases[reference] = self.store.name_of_session(found.key, found.session)
                self.remarks += [found.remark] if found.remark else []
            except UserError as error:
                raise UserError(f"{reference}: {error}") from error
        release = self._releases[reference]
        key = _in_lineage(self.store, release, named["kind"], reference)
        state = self.store.ensure_local(key)
        if state.artifact is None:
            problem = "is not in the store any more" if state.fault == "absent" else f"is broken ({state.fault})"
            raise UserError(
                f"'{reference}': its {named['kind']} {key[:12]} {problem}; {_how_to_remake(self.store, release)}"
            )
        return state.artifact


def registry_names(artifact: Artifact) -> frozenset[str]:
    """The texts among an artifact's facts, for example its method: they choose code, as the settings of a step do."""
    return frozenset(value for value in artifact.info.values() if isinstance(value, str))


def _find_artifact(reference: str, store: Store) -> Artifact:
    """The artifact that `store:` or `path:` names, verified."""
    if fault := reference_error(reference):
        raise UserError(fault)
    scheme, _, rest = reference.partition(":")
    if scheme == "path":
        return _from_directory(Path(rest.strip()))
    state = store.ensure_local(store.resolve(rest.strip()))
    if state.artifact is None:
        raise UserError(f"'{reference}' is broken: {state.fault}")
    return state.artifact


def _find_release(store: Store, name: str, which: str) -> FoundRelease:
    """A registered release. The registry, and DuckDB with it, is loaded for such inputs alone."""
    from components.speedup.comparison.promotion_rule import judge
    from storage.registry.registry import find_release

    return find_release(store.home, name, which, judge)


def _in_lineage(store: Store, release: str, kind: str, reference: str) -> str:
    """The key of the one artifact of this kind behind a release; data is looked for behind the drafter itself."""
    content = _record(store, release)
    if content is None:
        raise UserError(f"'{reference}': its Release {release[:12]} is not in the store any more")
    if kind == "Release":
        return release
    if kind == "Draft":
        return str(content["info"]["draft_key"])
    direct = _input_keys(store, content)
    level = [str(content["info"]["draft_key"])] if kind not in ("Target", "DepthPolicy") else list(direct)
    visited: set[str] = set()
    while level:
        records = {key: _record(store, key) for key in level}
        matching = sorted(key for key, record in records.items() if record is not None and record["kind"] == kind)
        if len(matching) > 1:
            raise UserError(
                f"'{reference}' was made from {len(matching)} {kind}: name one of them, store:{matching[0][:12]}"
            )
        if matching:
            return matching[0]
        visited.update(level)
        further = {key for record in records.values() if record is not None for key in _input_keys(store, record)}
        level = sorted(further - visited)
    raise UserError(
        f"'{reference}': the {kind} it was made from is not in the store any more; {_how_to_remake(store, release)}"
    )


def _record(store: Store, key: str) -> ArtifactRecord | None:
    try:
        return store.record_of(key)
    except FileNotFoundError:
        return None


def _input_keys(store: Store, content: ArtifactRecord) -> Iterator[str]:
    """The keys of an artifact's inputs, each with the session that it had then."""
    then = content["record"].get("input_sessions", {})
    for value in content["record"].get("inputs", {}).values():
        for key in value if isinstance(value, list) else [value]:
            yield store.name_of_session(key, then[key]) if key in then else key


def _how_to_remake(store: Store, release: str) -> str:
    content = _record(store, release)
    pipeline = str(content["record"].get("pipeline", "")) if content else ""
    return f"`draftsmith run {pipeline}` makes it again" if pipeline else "make it again"


def _from_directory(path: Path) -> Artifact:
    if not (path / RECORD_FILE).exists():
        raise UserError(f"'path:{path}' has no {RECORD_FILE}: it is not the directory of an artifact")
    try:
        content = read_checked(path)
    except BadRecord as error:
        raise UserError(f"'path:{path}': {error}") from error
    for name, facts in content["files"].items():
        file = path / name
        if not file.is_file() or sha256_of(file) != facts["sha256"]:
            raise UserError(f"'path:{path}' is broken: {name} is missing or has changed")
    return KINDS[content["kind"]](key=content["key"], path=path.absolute(), info=content["info"])
