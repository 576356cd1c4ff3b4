"""Releases in MLflow's model registry: versions, their aliases, and the log of the aliases' moves.

One registered model for each target, whose versions may be of any method: what serves a target is one drafter, so it
has one champion, and a better method takes its place by the same gate. Every version gets `candidate`; one worth using
`challenger`; one that the promotion gate lets through (storage/registry/promotion_gate.py) `champion`, and `previous`
is where a rollback goes. The pipeline, `draftsmith promote` and an approval in the UI go through the same steps: take
the lock, finish an interrupted move, log moves made in MLflow itself, re-read the champion, let the gate decide, move,
log.
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
from typing import NamedTuple

from components.contract import UserError
from components.promotion import Judge
from storage import journal
from storage.artifacts.remote import shared_store
from storage.artifacts.sessions import read_record
from storage.artifacts.sync import catch_up_promotions
from storage.history.records import PromotionRow, as_time, new_promotion
from storage.home import MARK
from storage.registry import aliases as alias_moves
from storage.registry import evidence
from storage.registry import versions as model_versions
from storage.registry.aliases import aliases_of, last_deletion, mark_of, moves_in_registry
from storage.registry.evidence import release_of, sealed_tags
from storage.registry.fact_tags import FACTS_TAG, FILES, PUBLISHED, SESSION_TAG, facts_in, tags_of, write_facts
from storage.registry.promotion_gate import Decision, decide
from storage.registry.standing import Standing, standing_of
from storage.registry.tracking import (
    KEY_TAG,
    MlflowClient,
    has_database,
    mlflow_lock,
    open_client,
    translated_errors,
    uses_home_database,
)
from storage.registry.versions import (
    RELEASE_FIRST,
    ReleaseFacts,
    facts_of,
    model_name,
    require_model,
    resolve,
    versions_of_release,
)

_ANSWERS = ("gate.against", "gate.answer", "gate.comparison")  # facts: the gate's last decision about a version


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model.

    is_new: this call registered it. note: one line to show. waits: the gate passes it and only an approval is missing.
    decision: that of the gate; None when it did not decide. renewed: it was registered, with older evidence.
    """

    name: str
    version: int
    is_new: bool
    aliases: tuple[str, ...]
    note: str
    waits: bool = False
    decision: Decision | None = None
    renewed: bool = False


class FoundRelease(NamedTuple):
    """The release behind a version. remark: what is disputed about its alias, in one line; "" where nothing is."""

    key: str
    session: str
    remark: str = ""


def register(
    home: Path,
    release: Path,
    judge: Judge,
    *,
    source_run: str | None = None,
    code: Path | None = None,
    may_promote: bool = True,
) -> RegisteredVersion:
    """Make a Release a model version, once; one that was measured again gives its version newer evidence.

    release: the artifact's directory, in the store or among its earlier sessions. judge: the rule of the gate
    (components/speedup/comparison/promotion_rule.py). source_run: the MLflow run it is logged under; None starts
    one. code: the
    model file, MODEL_CODE unless given. may_promote: False leaves `champion` alone even if the gate passes; so does the
    journal of a run that wants an approval.
    """
    facts = facts_of(home, release)
    may_promote = may_promote and facts.may_promote
    with _registry(home) as client:
        invalid = evidence.log_invalid_measurement(home, client, facts, user_name())
        if invalid is not None:
            name, number = invalid
            aliases = tuple(alias for alias, at in aliases_of(client, name).items() if at == number)
            note = f"{name} version {number} was measured again, but that is invalid and does not count"
            return RegisteredVersion(name, number, False, aliases, note)
        numbers = versions_of_release(client, facts.name, facts.release_key)
        version = next((candidate for candidate in reversed(numbers) if _is_release(client, candidate, facts)), None)
        is_new = version is None
        if version is None:
            if (gone := _deleted_version(home, client, facts, release)) is not None:
                what = f"{facts.name} version {gone} was deleted in MLflow" if gone else f"{facts.name} was deleted"
                note = f"{what} and stays so; made anew, its release is another"
                return RegisteredVersion(facts.name, gone, False, (), note)
            version = model_versions.log_version(home, release, facts, source_run, code or model_versions.MODEL_CODE)
        elif (folder := model_versions.missing_files(client, home, facts.name, version)) is not None:
            model = code or model_versions.MODEL_CODE
            model_versions.log_version(home, release, facts, source_run, model, restore_to=folder)
            if FILES in tags_of(client, facts.name, version):
                client.delete_model_version_tag(facts.name, str(version), FILES)
        tags = tags_of(client, facts.name, version)
        standing = _standing(home, client, facts.name, judge)
        dispute = standing.sentence(facts.name)
        may_promote = may_promote and standing.is_settled
        renewed = evidence.is_newer(facts, tags)
        if renewed:
            decision = _renew_evidence(home, client, facts, version, judge, standing.number, may_promote)
        else:
            _add_facts(client, facts, version, tags)
            is_done = PUBLISHED in tags
            decision = None if is_done else _publish(home, client, facts, version, judge, standing.number, may_promote)
        for name, older_version in evidence.older_versions(client, facts):
            now = f"what it serves now is {facts.name} version {version}"
            evidence.log_evidence(home, client, facts, name, older_version, user_name(), now)
            if _ANSWERS[1] in tags_of(client, name, older_version):
                champion = _standing(home, client, name, judge).number
                _decide(home, client, name, older_version, champion, judge)  # so that its page shows that of now
        aliases = tuple(alias for alias, at in aliases_of(client, facts.name).items() if at == version)
    summary = f"{facts.name} version {version}" + (f" ({', '.join(aliases)})" if aliases else "")
    note = f"{'registered' if is_new else 'newer evidence for' if renewed else 'already registered:'} {summary}"
    if decision is not None and not decision.passed:
        outcome = "; it stays champion, but the gate now refuses" if "champion" in aliases else "; not promoted"
        note += f"{outcome}: {decision.refusal()}; {_again(facts.name, version)}"
    elif decision is None and not facts.worth_using:
        note += f"; not promoted: its verdict is {facts.tags['draftsmith.verdict'].replace('_', ' ')}"
    if dispute and decision is not None:
        note += f"; {dispute}"
    waits = decision is not None and decision.passed and not may_promote and "champion" not in aliases
    return RegisteredVersion(facts.name, version, is_new, aliases, note, waits, decision, renewed)


def promote(
    home: Path,
    name: str,
    version: int | str = "challenger",
    reason: str = "",
    *,
    judge: Judge,
    force: bool = False,
) -> RegisteredVersion:
    """Make a version the champion if the gate lets it; the one before becomes `previous`.

    version: a number, or an alias. reason: is logged beside the gate's own. judge: the rule of the gate.
    force: override it.

    Raises:
        UserError: there is no such model or version, the gate refuses, or it is overridden without a reason.
    """
    if force and not reason.strip():
        raise UserError(f"promote {name} --force: say why (--why), the promotion log keeps it")
    with _registry(home) as client:
        number = resolve(client, name, version)
        _require_files(client, name, number, "promote")
        standing = _standing(home, client, name, judge)
        before = standing.before if standing.number == number else standing.number
        if standing.number == number and standing.is_settled and before is None:
            return RegisteredVersion(
                name, number, False, ("champion",), f"{name} version {number} is the champion already"
            )
        decision = _decide(home, client, name, number, before, judge)
        if not decision.passed and not force:
            raise UserError(
                f"promote {name} version {number}: the gate refuses: {decision.refusal()}; {_again(name, number)}, "
                "--force --why overrides it"
            )
        forced_reason = f"{reason}; the gate refused: {decision.refusal()}" if not decision.passed else ""
        logged_reason = forced_reason or "; ".join(part for part in (reason.strip(), decision.justification()) if part)
        action = "force" if forced_reason else "promote"
        _move(home, client, name, "champion", number, action, logged_reason, decision=decision, before=before)
    return RegisteredVersion(
        name, number, False, ("champion",), f"{name} version {number} is now champion", decision=decision
    )


def rollback(home: Path, name: str, reason: str) -> RegisteredVersion:
    """Make the previous champion the champion again; the present one becomes `previous`. The gate does not decide.

    A move made in MLflow itself is undone: back to the champion before it, and `previous` stays.

    Raises:
        UserError: there is no such model, no previous champion, or no reason is given.
    """
    if not reason.strip():
        raise UserError(f"rollback {name}: say why (--why), the promotion log keeps it")
    with _registry(home) as client:
        require_model(client, name)
        aliases = aliases_of(client, name)
        standing = _standing(home, client, name)
        undone = standing.before if standing.is_settled else standing.number
        number = undone if undone is not None else aliases.get("previous")
        if number is None:
            why = f"version {aliases['champion']} is the first" if "champion" in aliases else "there was none yet"
            raise UserError(f"rollback {name}: there is no earlier champion to go back to: {why}")
        _require_files(client, name, number, "rollback")
        _move(home, client, name, "champion", number, "rollback", reason, before=undone)
    return RegisteredVersion(name, number, False, ("champion",), f"{name} is back at version {number}")


def notice_moves(home: Path) -> list[PromotionRow]:
    """Log the aliases that were moved in MLflow itself; returns the new entries of the promotion log."""
    if not journal.promotions(home) or not has_database(home):
        return []
    with mlflow_lock(home, "registry"), translated_errors(home):
        return _catch_up(home, open_client(home))


def find_release(home: Path, name: str, which: str, judge: Judge) -> FoundRelease:
    """The Release behind a version. which: its number, or an alias such as "champion".

    The champion is the one that counts (storage/registry/standing.py), wherever somebody has moved the alias in MLflow.

    Raises:
        UserError: there is no such model, version or alias, the version was not made by Draftsmith, or nothing was
            champion before what somebody else has made champion and the gate refuses.
    """
    if not has_database(home):
        raise UserError(f"there is no registered model '{name}' (known: none yet); {RELEASE_FIRST}")
    with _registry(home) as client:
        remark = ""
        if which == "champion":
            require_model(client, name)
            standing = _standing(home, client, name, judge)
            remark = standing.sentence(name)
            if standing.number is None:
                _require_champion(client, name)
                raise UserError(remark)
            which = str(standing.number)
        number = resolve(client, name, which)
        if KEY_TAG not in tags_of(client, name, number):
            raise UserError(f"{name} version {number} has no tag {KEY_TAG}: it was not registered by Draftsmith")
        log = _log_of(home, client, name, number)
        return FoundRelease(*release_of(tags_of(client, name, number), log, f"{name} version {number}"), remark)


def champion_that_counts(home: Path, client: MlflowClient, name: str) -> int | None:
    """The version that was champion before whatever was moved in MLflow itself, if it was; the gate is not asked."""
    return _standing(home, client, name).number


def serving_versions(home: Path, client: MlflowClient, name: str) -> set[int]:
    """The champion that counts, and the one before it where that is the one a rollback goes to."""
    standing = _standing(home, client, name)
    return {number for number in (standing.number, standing.before) if number is not None}


def _standing(home: Path, client: MlflowClient, name: str, judge: Judge | None = None) -> Standing:
    """The champion that counts. judge: without it, the gate lets nothing through that somebody has made champion."""
    alias = aliases_of(client, name).get("champion")
    born = as_time(client.get_registered_model(name).creation_timestamp / 1000)  # moves from before are of another
    log = moves_in_registry(mark_of(home, client), journal.promotions(home))
    moves = [row for row in log if (row.name, row.alias) == (name, "champion") and row.promoted_at >= born]

    def refusal(version: int, champion: int | None) -> str:
        if judge is None:
            return "the gate was not asked"
        try:
            decision = _decide(home, client, name, version, champion, judge)
        except UserError as error:  # a version that Draftsmith has not made, or whose evidence is gone
            return str(error)
        return "" if decision.passed else f"the gate refuses it: {decision.in_brief()}"

    def unfit(version: int) -> str:
        said = tags_of(client, name, version).get(FILES)
        return f"its files were {said}" if said else ""

    standing = standing_of(moves, alias, refusal, unfit)
    is_gone = standing.is_deleted and standing.number not in alias_moves.version_numbers(client, name)
    return Standing(None) if is_gone else standing  # of a version that was deleted, the alias went with it


def _require_files(client: MlflowClient, name: str, number: int, what: str) -> None:
    """Raise UserError for a version whose files `gc` has let go: it cannot serve."""
    tags = tags_of(client, name, number)
    if FILES in tags:
        run = f"`draftsmith run {tags.get('draftsmith.pipeline', 'PIPELINE')}`"
        raise UserError(
            f"{what} {name}: version {number} cannot serve: its files were {tags[FILES]}; it has them again once a run "
            f"makes or finds its release {tags.get(KEY_TAG, '')[:12]}, as {run} does with the settings and data of then"
        )


def _again(name: str, version: int) -> str:
    return f"`draftsmith remeasure {name}@{version}` measures it again and asks the gate anew"


def _require_champion(client: MlflowClient, name: str) -> None:
    """Raise UserError where no version is champion: what the newest one lacks, and first the commands that help."""
    aliases = aliases_of(client, name)
    numbers = alias_moves.version_numbers(client, name)
    if "champion" in aliases or not numbers:
        return
    number = aliases.get("challenger", max(numbers))
    tags = tags_of(client, name, number)
    answer = tags.get(_ANSWERS[1])
    overrides = f"`draftsmith promote {name} --version {number} --force --why ...` overrides that"
    if answer == "passed":
        reason = f"version {number} passed the gate and waits for a yes; `draftsmith promote {name} --why ...` gives it"
    elif answer is not None:
        reason = f"the gate refused version {number}; {_again(name, number)}, {overrides}; it said: {answer}"
    else:
        pipeline, verdict = tags.get("draftsmith.pipeline", "PIPELINE"), tags.get("draftsmith.verdict", "not known")
        better = f"`draftsmith run {pipeline}` with more data or steps (-p) makes a better one"
        reason = f"version {number} is not worth using ({verdict.replace('_', ' ')}); {better}, {overrides}"
    raise UserError(f"{name} has no champion: {reason}")


def versions_of(home: Path, name: str) -> list[tuple[int, list[str], dict[str, str]]]:
    """(number, aliases, tags) of every version of a model, oldest first."""
    client = open_client(home)
    with translated_errors(home):
        require_model(client, name)
        aliases = aliases_of(client, name)
        numbers = alias_moves.version_numbers(client, name)
        names = {n: sorted(alias for alias, at in aliases.items() if at == n) for n in sorted(numbers)}
        return [(n, at, tags_of(client, name, n)) for n, at in names.items()]


def moves_to_restore(home: Path) -> list[PromotionRow]:
    """The moves made in the registry that this home had before its own database was made anew, if it had a champion.

    [] where many homes share the log: then nothing tells which moves were made here, and the gate decides.
    """
    if not uses_home_database(home) or shared_store() is not None:
        return []
    log = [(json.loads(row.numbers).get(MARK), row) for row in journal.promotions(home)]
    mark = mark_of(home, open_client(home))
    before = [made_at for made_at, _ in log if made_at not in (None, mark)]
    if not before or any(made_at == mark and row.alias == "champion" for made_at, row in log):
        return []
    rows = [row for made_at, row in log if made_at == before[-1] and _is_of_target(row)]
    return rows if "champion" in alias_moves.aliases_after(rows) else []


def _is_of_target(row: PromotionRow) -> bool:
    """Whether a move is of a model as models are named now: by their target, where they once had the method too."""
    return row.name == model_name(json.loads(row.numbers).get("draftsmith.target", row.name))


def restore_aliases(home: Path, rows: list[PromotionRow]) -> None:
    """Put the aliases of versions that were registered anew to where they were. rows: the moves before."""
    with _registry(home) as client:
        for name in dict.fromkeys(row.name for row in rows):
            moves = [row for row in rows if row.name == name]
            keys = {row.to_version: json.loads(row.numbers).get(KEY_TAG, "") for row in moves}
            for alias, number in alias_moves.aliases_after(moves).items():
                registered = versions_of_release(client, name, keys.get(number, ""))
                if registered and aliases_of(client, name).get(alias) != registered[-1]:
                    reason = f"it was there before the registry was made anew (as version {number})"
                    _move(home, client, name, alias, registered[-1], "restore", reason)


def changed_facts(home: Path, name: str) -> list[str]:
    """Facts of the versions of a model that MLflow has and that differ from what was sealed, a line each."""
    client, lines = open_client(home), []
    for number, _, tags in versions_of(home, name):
        title = f"{name} version {number}"
        try:
            sealed = _sealed_facts(home, client, name, number)
        except UserError as error:
            lines.append(str(error))
            continue
        if FACTS_TAG in tags:
            lines.append(f"{title}: MLflow's tag {FACTS_TAG} is no JSON object any more; `draftsmith resync` mends it")
        for tag in sorted(tag for tag, value in sealed.items() if tags.get(tag, value) != value):
            lines.append(f"{title}: MLflow says {tag} {tags[tag][:40]!r}, and {sealed[tag][:40]!r} was sealed")
    return lines


@contextmanager
def _registry(home: Path) -> Iterator[MlflowClient]:
    """Hold the registry's lock, after finishing interrupted moves and logging external ones."""
    client = open_client(home)
    with mlflow_lock(home, "registry"), translated_errors(home):
        _catch_up(home, client)
        yield client


def _catch_up(home: Path, client: MlflowClient) -> list[PromotionRow]:
    catch_up_promotions(home)
    alias_moves.finish_interrupted(home, client)
    return alias_moves.log_external_moves(home, client)


def _deleted_version(home: Path, client: MlflowClient, facts: ReleaseFacts, release: Path) -> int | None:
    """The version that this session of a release was, where somebody has deleted it in MLflow and left its model.

    0 where the whole model was deleted (storage/registry/removal.py) after the release was made.
    """
    models = client.search_registered_models(f"name = '{facts.name}'")
    mark, log = mark_of(home, client), journal.promotions(home)
    shared = shared_store() is not None  # else a deletion in a registry that was lost since counts too
    if (deletion := last_deletion(facts.name, moves_in_registry(mark, log) if shared else log)) is not None:
        content = read_record(release)
        if content is not None and as_time(content["finished_at"]) < deletion.promoted_at:
            return 0
    if not models:
        return None
    born = as_time(models[0].creation_timestamp / 1000)  # moves from before are of a model that was lost as a whole
    present = alias_moves.version_numbers(client, facts.name)
    for row in reversed(log):
        is_of_model = row.name == facts.name and row.to_version is not None and row.promoted_at >= born
        numbers = json.loads(row.numbers) if is_of_model else {}
        logged = [numbers.get(name) for name in (MARK, KEY_TAG, SESSION_TAG)]
        if logged == [mark, facts.release_key, facts.session] and row.to_version not in present:
            return row.to_version
    return None


def _is_release(client: MlflowClient, version: int, facts: ReleaseFacts) -> bool:
    """Whether this version is of the release, in this session or another."""
    tags = tags_of(client, facts.name, version)
    return tags.get(SESSION_TAG, "") == facts.session or evidence.serves_the_same(tags, facts)


def _renew_evidence(
    home: Path,
    client: MlflowClient,
    facts: ReleaseFacts,
    version: int,
    judge: Judge,
    champion: int | None,
    may_promote: bool,
) -> Decision | None:
    """Give a version its newest evidence and decide by it. It can be repeated: the session is noted last of all."""
    row = evidence.log_evidence(home, client, facts, facts.name, version, user_name())
    evidence.renew_tags(client, facts, version)
    decision = _publish(home, client, facts, version, judge, champion, may_promote, since=row.promoted_at)
    evidence.settle_session(client, facts, version)
    return decision


def _publish(
    home: Path,
    client: MlflowClient,
    facts: ReleaseFacts,
    version: int,
    judge: Judge,
    champion: int | None,
    may_promote: bool,
    since: datetime | None = None,
) -> Decision | None:
    """Give a version its aliases. What a killed publication has done is in the log and not done again.

    champion: the one that counts. since: when it got newer evidence, by which the gate decides anew whether it becomes
    champion.
    """
    moves = _log_of(home, client, facts.name, version)
    done = {row.alias for row in moves if row.alias != "champion" or since is None or row.promoted_at >= since}
    for alias in ("candidate", "challenger") if facts.worth_using else ("candidate",):
        if alias not in done:
            _move(home, client, facts.name, alias, version, "publish", "published")
    decision = None
    if facts.worth_using:
        decision = _decide(home, client, facts.name, version, champion, judge, facts.tags)
    is_champion = aliases_of(client, facts.name).get("champion") == version
    if decision is None:
        model_versions.describe(client, facts.name, version, None)
    elif decision.passed and may_promote and "champion" not in done and not is_champion:
        _move(home, client, facts.name, "champion", version, "promote", decision.justification(), decision=decision)
    client.set_model_version_tag(facts.name, str(version), PUBLISHED, "yes")
    return decision


def _log_of(home: Path, client: MlflowClient, name: str, version: int) -> list[PromotionRow]:
    """The moves of a version in this registry, oldest first.

    Moves from before the version was made were of another that had its number: numbers start again in a database that
    is made anew, and in a model that was deleted.
    """
    born = as_time(client.get_model_version(name, str(version)).creation_timestamp / 1000)
    log = moves_in_registry(mark_of(home, client), journal.promotions(home))
    return [row for row in log if row.name == name and row.to_version == version and row.promoted_at >= born]


def _sealed_facts(home: Path, client: MlflowClient, name: str, version: int) -> dict[str, str]:
    """The facts of a version that decisions are made by."""
    log = _log_of(home, client, name, version)
    return sealed_tags(home, tags_of(client, name, version), log, f"{name} version {version}")


def _decide(
    home: Path,
    client: MlflowClient,
    name: str,
    version: int,
    champion: int | None,
    judge: Judge,
    facts: Mapping[str, str] | None = None,
) -> Decision:
    """Let the gate decide about a version, and write the decision among the version's facts.

    champion: the version that it is held against, unless it is that one. facts: those of the release that the version
    is just being given.
    """
    opponent = champion if champion != version else None
    opponent_facts = _sealed_facts(home, client, name, opponent) if opponent is not None else None
    tags = facts if facts is not None else _sealed_facts(home, client, name, version)
    decision = decide(home, tags, opponent_facts, opponent, judge)
    decision = Decision((*evidence.newest_evidence_checks(client, tags), *decision.checks), decision.against)
    answer = "passed" if decision.passed else decision.refusal()
    answers = dict(zip(_ANSWERS, (str(opponent or ""), answer, decision.as_json()), strict=True))
    present = client.get_model_version(name, str(version)).tags
    write_facts(client, name, version, facts_in(present) | answers, present)
    model_versions.describe(client, name, version, decision)
    return decision


def _add_facts(client: MlflowClient, facts: ReleaseFacts, version: int, present: Mapping[str, str]) -> None:
    """Add the facts that a version lacks, if they are of the session that it has."""
    if present.get(SESSION_TAG, "") == facts.session:
        write_facts(client, facts.name, version, {**facts.tags, **present})


def _move(
    home: Path,
    client: MlflowClient,
    name: str,
    alias: str,
    version: int,
    action: str,
    reason: str,
    *,
    decision: Decision | None = None,
    before: int | None = None,
) -> None:
    """Move an alias and log it with the version's facts. decision: that of the gate on this move, if it decided.

    before: the version that the alias had, if it was moved in MLflow since.
    """
    numbers = {tag: value for tag, value in tags_of(client, name, version).items() if tag not in _ANSWERS}
    numbers[MARK] = mark_of(home, client)
    if decision is not None:
        numbers["gate.comparison"] = decision.as_json()
    before = before if before is not None else aliases_of(client, name).get(alias)
    alias_moves.move_alias(
        home, client, new_promotion(name, alias, action, before, version, user_name(), reason, numbers)
    )


def user_name() -> str:
    """Who the log names for a move."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user entry
        return f"uid {os.getuid()}"
