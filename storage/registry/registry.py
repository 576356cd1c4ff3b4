"""Releases in MLflow's model registry: versions, their aliases, and the log of the aliases' moves.

One registered model for each target, whose versions may be of any method: what serves a target is one drafter, so it
has one champion, and a better method takes its place by the same gate. Every version gets `candidate`; one worth using
`challenger`; one that the promotion gate lets through (storage/registry/promotion_gate.py) `champion`, and `previous`
is where a rollback goes. The pipeline, `draftsmith promote` and an approval in the UI go through the same steps: take
the lock, finish an interrupted move, log moves made in MLflow itself, re-read the champion, let the gate decide, move,
log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from components.contract import UserError
from components.promotion import Judge
from storage import journal
from storage.artifacts.remote import shared_store
from storage.artifacts.sync import catch_up_promotions
from storage.history.records import PromotionRow
from storage.home import MARK
from storage.registry import aliases as alias_moves
from storage.registry import versions as model_versions
from storage.registry.aliases import aliases_of, mark_of
from storage.registry.evidence import release_of
from storage.registry.fact_tags import FACTS_TAG, tags_of
from storage.registry.model import Model, RegisteredVersion
from storage.registry.publication import Publication
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
    facts_of,
    model_name,
    require_model,
    resolve,
    versions_of_release,
)


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
    (components/speedup/comparison/promotion_rule.py). source_run: the MLflow run it is logged under; None starts one.
    code: the model file, MODEL_CODE unless given. may_promote: False leaves `champion` alone even if the gate passes;
    so does the journal of a run that wants an approval.
    """
    facts = facts_of(home, release)
    with _registry(home) as client:
        model, may_promote = Model(home, client, facts.name), may_promote and facts.may_promote
        return Publication(
            model, facts, release, judge, code or model_versions.MODEL_CODE, source_run, may_promote
        ).publish()


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
        model = Model(home, client, name)
        model.require_files(number, "promote")
        standing = model.standing(judge)
        before = standing.before if standing.number == number else standing.number
        if standing.number == number and standing.is_settled and before is None:
            return RegisteredVersion(
                name, number, False, ("champion",), f"{name} version {number} is the champion already"
            )
        decision = model.decide(number, before, judge)
        if not decision.passed and not force:
            raise UserError(
                f"promote {name} version {number}: the gate refuses: {decision.refusal()}; {model.remeasure(number)}, "
                "--force --why overrides it"
            )
        forced_reason = f"{reason}; the gate refused: {decision.refusal()}" if not decision.passed else ""
        logged_reason = forced_reason or "; ".join(part for part in (reason.strip(), decision.justification()) if part)
        action = "force" if forced_reason else "promote"
        model.move("champion", number, action, logged_reason, decision=decision, before=before)
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
        model = Model(home, client, name)
        aliases, standing = model.aliases(), model.standing()
        undone = standing.before if standing.is_settled else standing.number
        number = undone if undone is not None else aliases.get("previous")
        if number is None:
            why = f"version {aliases['champion']} is the first" if "champion" in aliases else "there was none yet"
            raise UserError(f"rollback {name}: there is no earlier champion to go back to: {why}")
        model.require_files(number, "rollback")
        model.move("champion", number, "rollback", reason, before=undone)
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
        model, remark = Model(home, client, name), ""
        if which == "champion":
            require_model(client, name)
            standing = model.standing(judge)
            remark = standing.sentence(name)
            if standing.number is None:
                model.require_champion()
                raise UserError(remark)
            which = str(standing.number)
        number = resolve(client, name, which)
        if KEY_TAG not in (tags := model.tags(number)):
            raise UserError(f"{name} version {number} has no tag {KEY_TAG}: it was not registered by Draftsmith")
        return FoundRelease(*release_of(tags, model.log_of(number), f"{name} version {number}"), remark)


def champion_that_counts(home: Path, client: MlflowClient, name: str) -> int | None:
    """The version that was champion before whatever was moved in MLflow itself, if it was; the gate is not asked."""
    return Model(home, client, name).standing().number


def serving_versions(home: Path, client: MlflowClient, name: str) -> set[int]:
    """The champion that counts, and the one before it where that is the one a rollback goes to."""
    standing = Model(home, client, name).standing()
    return {number for number in (standing.number, standing.before) if number is not None}


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
            model, moves = Model(home, client, name), [row for row in rows if row.name == name]
            keys = {row.to_version: json.loads(row.numbers).get(KEY_TAG, "") for row in moves}
            for alias, number in alias_moves.aliases_after(moves).items():
                registered = versions_of_release(client, name, keys.get(number, ""))
                if registered and model.aliases().get(alias) != registered[-1]:
                    reason = f"it was there before the registry was made anew (as version {number})"
                    model.move(alias, registered[-1], "restore", reason)


def changed_facts(home: Path, name: str) -> list[str]:
    """Facts of the versions of a model that MLflow has and that differ from what was sealed, a line each."""
    model, lines = Model(home, open_client(home), name), []
    for number, _, tags in versions_of(home, name):
        title = f"{name} version {number}"
        try:
            sealed = model.sealed_facts(number)
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
