"""MLflow's model registry: a release becomes a version, aliases say which version is which, a log says who moved them.

One registered model for each target and method, `<target name>-<method>`. Every version gets `candidate`; one worth
using `challenger`; one that the promotion gate lets through (storage/promotion_gate.py) `champion`, and `previous` is
where a rollback goes. The pipeline, `draftsmith promote` and an approval in the UI go through the same steps: take the
lock, finish what a kill cut short, log what was moved by hand in MLflow, re-read the champion, ask the gate, move, log.
"""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from components.contract import UserError
from components.promotion import Judge
from storage import alias_moves, evidence, journal, model_versions
from storage.alias_moves import MARK, aliases_of, made_in, mark_of
from storage.model_versions import RELEASE_FIRST, require_model, resolve, tags_of, versions_of_release
from storage.promotion_gate import Decision, decide
from storage.records import PromotionRow, as_time, new_promotion
from storage.release_facts import SESSION_TAG, ReleaseFacts, facts_of
from storage.remote_store import shared_store
from storage.sealed import release_of, sealed_tags
from storage.sharing import catch_up_promotions
from storage.tracking import KEY_TAG, asking, has_database, is_own, mlflow_lock, open_client

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

__all__ = [
    "Registered",
    "aliases_of",
    "changed_facts",
    "find_release",
    "notice_moves",
    "promote",
    "register",
    "restore",
    "rollback",
    "to_restore",
    "versions_of",
]

PUBLISHED = "draftsmith.published"  # a version that bears it has had its aliases; people may have moved them since
_ANSWERS = ("gate.against", "gate.answer", "gate.comparison")  # of the gate, when a version was last asked about


@dataclass(frozen=True)
class Registered:
    """A version of a registered model.

    is_new: it was not there before. note: one line to show. waits: the gate has passed it and only an approval is
    missing. decision: what the gate said; None when it was not asked. renewed: it was there, with older evidence.
    """

    name: str
    version: int
    is_new: bool
    aliases: tuple[str, ...]
    note: str
    waits: bool = False
    decision: Decision | None = None
    renewed: bool = False


def register(
    home: Path,
    release: Path,
    judge: Judge,
    *,
    source_run: str | None = None,
    code: Path | None = None,
    may_promote: bool = True,
) -> Registered:
    """Make a Release a model version, once; one that was measured again gives its version newer evidence.

    release: the artifact's directory, in the store or among its earlier sessions. judge: the rule of the gate
    (components/speedup/promotion_rule.py). source_run: the MLflow run it is logged under; None starts one. code: the
    model file, MODEL_CODE unless given. may_promote: False leaves `champion` alone even if the gate passes; so does the
    journal of a run that wants an approval.
    """
    facts = facts_of(home, release)
    may_promote = may_promote and facts.may_promote
    with _registry(home) as client:
        invalid = evidence.counts_for_nothing(home, client, facts, _who())
        if invalid is not None:
            name, number = invalid
            at = tuple(alias for alias, there in aliases_of(client, name).items() if there == number)
            said = f"{name} version {number} was measured again, but that is invalid and does not count"
            return Registered(name, number, False, at, said)
        known = versions_of_release(client, facts.name, facts.release_key)
        found = next((n for n in reversed(known) if _is_of(client, n, facts)), None)
        is_new = found is None
        if found is None:
            found = model_versions.log_version(home, release, facts, source_run, code or model_versions.MODEL_CODE)
        tags = tags_of(client, facts.name, found)
        renewed = evidence.is_newer(facts, tags)
        if renewed:
            decision = _renew(home, client, facts, found, judge, may_promote)
        else:
            _add_tags(client, facts, found, tags)
            decision = None if PUBLISHED in tags else _publish(home, client, facts, found, judge, may_promote)
        for name, version in evidence.older_versions(client, facts):
            now = f"what it serves now is {facts.name} version {found}"
            evidence.log_evidence(home, client, facts, name, version, _who(), now)
            if _ANSWERS[1] in tags_of(client, name, version):
                _decide(home, client, name, version, judge)  # its page says what the gate says of it now
        aliases = tuple(alias for alias, at in aliases_of(client, facts.name).items() if at == found)
    said = f"{facts.name} version {found}" + (f" ({', '.join(aliases)})" if aliases else "")
    note = f"{'registered' if is_new else 'newer evidence for' if renewed else 'already registered:'} {said}"
    if decision is not None and not decision.passed:
        kept = "; it stays champion, but the gate now refuses" if "champion" in aliases else "; not promoted"
        note += f"{kept}: {decision.why_not()}"
    waits = decision is not None and decision.passed and not may_promote and "champion" not in aliases
    return Registered(facts.name, found, is_new, aliases, note, waits, decision, renewed)


def promote(
    home: Path,
    name: str,
    version: int | str = "challenger",
    why: str = "",
    *,
    judge: Judge,
    force: bool = False,
) -> Registered:
    """Make a version the champion if the gate lets it; the one before becomes `previous`.

    version: a number, or an alias. why: what the log keeps beside the gate's own reason. judge: the rule of the gate.
    force: override it.

    Raises:
        UserError: there is no such model or version, the gate refuses, or it is overridden without a reason.
    """
    if force and not why.strip():
        raise UserError(f"promote {name} --force: say why (--why), the promotion log keeps it")
    with _registry(home) as client:
        number = resolve(client, name, version)
        before = _moved_by_others(home, client, name, number)
        if aliases_of(client, name).get("champion") == number and before is None:
            return Registered(name, number, False, ("champion",), f"{name} version {number} is the champion already")
        decision = _decide(home, client, name, number, judge, before)
        if not decision.passed and not force:
            raise UserError(
                f"promote {name} version {number}: the gate refuses: {decision.why_not()}; --force --why overrides it"
            )
        forced = f"{why}; the gate refused: {decision.why_not()}" if not decision.passed else ""
        reason = forced or "; ".join(part for part in (why.strip(), decision.why()) if part)
        action = "force" if forced else "promote"
        _move(home, client, name, "champion", number, action, reason, decision, before)
    return Registered(name, number, False, ("champion",), f"{name} version {number} is now champion", decision=decision)


def rollback(home: Path, name: str, why: str) -> Registered:
    """Make the previous champion the champion again; the present one becomes `previous`. The gate is not asked.

    Raises:
        UserError: there is no such model, no previous champion, or no reason is given.
    """
    if not why.strip():
        raise UserError(f"rollback {name}: say why (--why), the promotion log keeps it")
    with _registry(home) as client:
        require_model(client, name)
        number = aliases_of(client, name).get("previous")
        if number is None:
            raise UserError(f"rollback {name}: no version has the alias 'previous', there was one champion only")
        _move(home, client, name, "champion", number, "rollback", why)
    return Registered(name, number, False, ("champion",), f"{name} is back at version {number}")


def notice_moves(home: Path) -> list[PromotionRow]:
    """Log the aliases that somebody has moved in MLflow itself; returns the new entries of the promotion log."""
    if not journal.promotions(home) or not has_database(home):
        return []
    with mlflow_lock(home, "registry"), asking(home):
        return _catch_up(home, open_client(home))


def _moved_by_others(home: Path, client: MlflowClient, name: str, version: int) -> int | None:
    """The champion before this version, where somebody else than Draftsmith made this one champion; else None."""
    moves = [row for row in made_in(mark_of(home, client), journal.promotions(home)) if row.name == name]
    last = next((row for row in reversed(moves) if row.alias == "champion"), None)
    return last.from_version if last is not None and (last.action, last.to_version) == ("external", version) else None


def find_release(home: Path, name: str, which: str, judge: Judge) -> tuple[str, str]:
    """The key and session of the Release behind a version. which: its number, or an alias such as "champion".

    An alias champion that was moved in MLflow by somebody else is obeyed when the gate would have moved it.

    Raises:
        UserError: there is no such model, version or alias, the version was not made by Draftsmith, or the gate
            refuses what somebody else has made champion.
    """
    if not has_database(home):
        raise UserError(f"there is no registered model '{name}' (known: none yet); {RELEASE_FIRST}")
    with _registry(home) as client:
        number = resolve(client, name, which)
        if KEY_TAG not in tags_of(client, name, number):
            raise UserError(f"{name} version {number} has no tag {KEY_TAG}: it was not registered by Draftsmith")
        log = _log_of(home, client, name, number)
        found = release_of(tags_of(client, name, number), log, f"{name} version {number}")
        before = _moved_by_others(home, client, name, number) if which == "champion" else None
        if before is not None and not (decision := _decide(home, client, name, number, judge, before)).passed:
            raise UserError(
                f"somebody has made version {number} champion of {name} in MLflow, and the gate refuses it: "
                f"{decision.why_not()}; draftsmith rollback {name}, or promote {name} {number} --force --why"
            )
    return found


def versions_of(home: Path, name: str) -> list[tuple[int, list[str], dict[str, str]]]:
    """(number, aliases, tags) of every version of a model, oldest first."""
    client = open_client(home)
    with asking(home):
        require_model(client, name)
        aliases = aliases_of(client, name)
        numbers = alias_moves.version_numbers(client, name)
        names = {n: sorted(alias for alias, at in aliases.items() if at == n) for n in sorted(numbers)}
        return [(n, at, tags_of(client, name, n)) for n, at in names.items()]


def to_restore(home: Path) -> list[PromotionRow]:
    """The moves made in the registry that this home had before its own database was made anew, if it had a champion.

    Nothing where many homes share the log: which of the moves were made here is not known then, and the gate decides.
    """
    if not is_own(home) or shared_store() is not None:
        return []
    log = [(json.loads(row.numbers).get(MARK), row) for row in journal.promotions(home)]
    mark = mark_of(home, open_client(home))
    before = [known for known, _ in log if known not in (None, mark)]
    if not before or any(known == mark and row.alias == "champion" for known, row in log):
        return []
    rows = [row for known, row in log if known == before[-1]]
    return rows if "champion" in alias_moves.replayed(rows) else []


def restore(home: Path, rows: list[PromotionRow]) -> None:
    """Put the aliases of versions that were registered anew to where they were. rows: the moves before."""
    with _registry(home) as client:
        for name in dict.fromkeys(row.name for row in rows):
            moves = [row for row in rows if row.name == name]
            keys = {row.to_version: json.loads(row.numbers).get(KEY_TAG, "") for row in moves}
            for alias, number in alias_moves.replayed(moves).items():
                known = versions_of_release(client, name, keys.get(number, ""))
                if known and aliases_of(client, name).get(alias) != known[-1]:
                    why = f"it was there before the registry was made anew (as version {number})"
                    _move(home, client, name, alias, known[-1], "restore", why)


def changed_facts(home: Path, name: str) -> list[str]:
    """What MLflow says of the versions of a model that is not what was sealed, a line each."""
    client, said = open_client(home), []
    for number, _, tags in versions_of(home, name):
        whose = f"{name} version {number}"
        try:
            sealed = _sealed(home, client, name, number)
        except UserError as error:
            said.append(str(error))
            continue
        for tag in sorted(tag for tag, value in sealed.items() if tags.get(tag, value) != value):
            said.append(f"{whose}: MLflow says {tag} {tags[tag][:40]!r}, and {sealed[tag][:40]!r} was sealed")
    return said


@contextmanager
def _registry(home: Path) -> Iterator[MlflowClient]:
    """Hold the registry, with nothing unfinished or unnoticed in it."""
    client = open_client(home)
    with mlflow_lock(home, "registry"), asking(home):
        _catch_up(home, client)
        yield client


def _catch_up(home: Path, client: MlflowClient) -> list[PromotionRow]:
    catch_up_promotions(home)
    alias_moves.finish_interrupted(home, client)
    return alias_moves.outside_moves(home, client)


def _is_of(client: MlflowClient, version: int, facts: ReleaseFacts) -> bool:
    """This version is the release, in this session or another."""
    tags = tags_of(client, facts.name, version)
    return tags.get(SESSION_TAG, "") == facts.session or evidence.serves_the_same(tags, facts)


def _renew(
    home: Path, client: MlflowClient, facts: ReleaseFacts, version: int, judge: Judge, may_promote: bool
) -> Decision | None:
    """Give a version its newest evidence and decide by it. Safe to repeat: the session is noted last of all."""
    row = evidence.log_evidence(home, client, facts, facts.name, version, _who())
    evidence.renew_tags(client, facts, version)
    decision = _publish(home, client, facts, version, judge, may_promote, since=row.promoted_at)
    evidence.settle_session(client, facts, version)
    return decision


def _publish(
    home: Path,
    client: MlflowClient,
    facts: ReleaseFacts,
    version: int,
    judge: Judge,
    may_promote: bool,
    since: datetime | None = None,
) -> Decision | None:
    """Give a version its aliases. What a killed publication has done is in the log and not done again.

    since: when it got newer evidence, by which the gate decides anew whether it becomes champion.
    """
    moves = _log_of(home, client, facts.name, version)
    done = {row.alias for row in moves if row.alias != "champion" or since is None or row.promoted_at >= since}
    for alias in ("candidate", "challenger") if facts.worth_using else ("candidate",):
        if alias not in done:
            _move(home, client, facts.name, alias, version, "publish", "published")
    decision = _decide(home, client, facts.name, version, judge, facts=facts.tags) if facts.worth_using else None
    is_champion = aliases_of(client, facts.name).get("champion") == version
    if decision is None:
        model_versions.describe(client, facts.name, version, None)
    elif decision.passed and may_promote and "champion" not in done and not is_champion:
        _move(home, client, facts.name, "champion", version, "promote", decision.why(), decision)
    client.set_model_version_tag(facts.name, str(version), PUBLISHED, "yes")
    return decision


def _log_of(home: Path, client: MlflowClient, name: str, version: int) -> list[PromotionRow]:
    """The moves of a version in this registry, oldest first.

    Moves from before the version was made were of another that had its number: numbers start again in a database that
    is made anew, and in a model that was deleted.
    """
    born = as_time(client.get_model_version(name, str(version)).creation_timestamp / 1000)
    log = made_in(mark_of(home, client), journal.promotions(home))
    return [row for row in log if row.name == name and row.to_version == version and row.promoted_at >= born]


def _sealed(home: Path, client: MlflowClient, name: str, version: int) -> dict[str, str]:
    """The facts of a version that decisions are made by."""
    log = _log_of(home, client, name, version)
    return sealed_tags(home, tags_of(client, name, version), log, f"{name} version {version}")


def _decide(
    home: Path,
    client: MlflowClient,
    name: str,
    version: int,
    judge: Judge,
    before: int | None = None,
    facts: Mapping[str, str] | None = None,
) -> Decision:
    """Ask the gate about a version, and write its answer on the version.

    before: the champion, if not the one now. facts: those of the release that the version is just being given.
    """
    champion = before if before is not None else aliases_of(client, name).get("champion")
    against = champion if champion != version else None
    other = _sealed(home, client, name, against) if against is not None else None
    tags = facts if facts is not None else _sealed(home, client, name, version)
    decision = decide(home, tags, other, against, judge)
    decision = Decision((*decision.checks, *evidence.overtaken(client, tags)), decision.against)
    said = "passed" if decision.passed else decision.why_not()
    for tag, value in zip(_ANSWERS, (str(against or ""), said, decision.as_json()), strict=True):
        client.set_model_version_tag(name, str(version), tag, value)
    model_versions.describe(client, name, version, decision)
    return decision


def _add_tags(client: MlflowClient, facts: ReleaseFacts, version: int, there: Mapping[str, str]) -> None:
    """Give a version the facts that it lacks, if they are those of the session that it has."""
    if there.get(SESSION_TAG, "") != facts.session:
        return
    for tag in facts.tags.keys() - there.keys():
        client.set_model_version_tag(facts.name, str(version), tag, facts.tags[tag])


def _move(
    home: Path,
    client: MlflowClient,
    name: str,
    alias: str,
    version: int,
    action: str,
    why: str,
    decision: Decision | None = None,
    before: int | None = None,
) -> None:
    """Move an alias and log it with the version's facts and what the gate said of this move, if it was asked.

    before: where the alias was, if somebody else has moved it since.
    """
    numbers = {tag: value for tag, value in tags_of(client, name, version).items() if tag not in _ANSWERS}
    numbers[MARK] = mark_of(home, client)
    if decision is not None:
        numbers["gate.comparison"] = decision.as_json()
    before = before if before is not None else aliases_of(client, name).get(alias)
    alias_moves.move(home, client, new_promotion(name, alias, action, before, version, _who(), why, numbers))


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user entry
        return f"uid {os.getuid()}"
