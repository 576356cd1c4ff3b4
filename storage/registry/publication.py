"""A release becomes a version of its model, once; one that was measured again gives its version newer evidence.

What a killed publication has done is in MLflow and in the log, and is not done again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from components.promotion import Judge
from storage import journal
from storage.artifacts.remote import shared_store
from storage.artifacts.sessions import read_record
from storage.history.records import as_time
from storage.home import MARK
from storage.registry import evidence
from storage.registry import versions as model_versions
from storage.registry.aliases import last_deletion, mark_of, moves_in_registry, version_numbers
from storage.registry.fact_tags import FILES, PUBLISHED, SESSION_TAG, write_facts
from storage.registry.model import ANSWER, Model, RegisteredVersion, user_name
from storage.registry.promotion_gate import Decision
from storage.registry.standing import Standing
from storage.registry.tracking import KEY_TAG
from storage.registry.versions import ReleaseFacts, versions_of_release


@dataclass(frozen=True)
class Publication:
    """A release that is to be a version. It needs the registry's lock.

    model: the one that it becomes a version of. facts: what the release says of itself. release: its directory. judge:
    the rule of the gate. code: the model file that MLflow serves it by. source_run: the MLflow run that it is logged
    under; None starts one. may_promote: False leaves `champion` alone even if the gate passes.
    """

    model: Model
    facts: ReleaseFacts
    release: Path
    judge: Judge
    code: Path
    source_run: str | None
    may_promote: bool

    def publish(self) -> RegisteredVersion:
        """Make the version or find it, give it its evidence and its aliases."""
        model, facts = self.model, self.facts
        invalid = evidence.log_invalid_measurement(model.home, model.client, facts, user_name())
        if invalid is not None:
            name, version = invalid
            note = f"{name} version {version} was measured again, but that is invalid and does not count"
            aliases = Model(model.home, model.client, name).aliases_at(version)
            return RegisteredVersion(name, version, False, aliases, note)
        found = self._version()
        if found is None and (gone := self._deleted_version()) is not None:
            what = f"{facts.name} version {gone} was deleted in MLflow" if gone else f"{facts.name} was deleted"
            note = f"{what} and stays so; made anew, its release is another"
            return RegisteredVersion(facts.name, gone, False, (), note)
        version = self._with_files(found)
        tags = model.tags(version)
        standing = model.standing(self.judge)
        renewed = evidence.is_newer(facts, tags)
        decision = None
        if renewed:
            decision = self._renew_evidence(version, standing)
        else:
            if tags.get(SESSION_TAG, "") == facts.session:  # facts that the version lacks, of the session that it has
                write_facts(model.client, facts.name, version, {**facts.tags, **tags})
            if PUBLISHED not in tags:
                decision = self._give_aliases(version, standing)
        self._tell_older_versions(version)
        return self._outcome(version, standing, decision, is_new=found is None, renewed=renewed)

    def _version(self) -> int | None:
        """The newest version of this release, in this session or another; None: it has none."""
        for version in reversed(versions_of_release(self.model.client, self.facts.name, self.facts.release_key)):
            tags = self.model.tags(version)
            if tags.get(SESSION_TAG, "") == self.facts.session or evidence.serves_the_same(tags, self.facts):
                return version
        return None

    def _with_files(self, version: int | None) -> int:
        """A version with the files that MLflow serves it from: a new one, or the one there is, whose files `gc` may
        have let go.
        """
        home, client, facts = self.model.home, self.model.client, self.facts
        if version is None:
            return model_versions.log_version(home, self.release, facts, self.source_run, self.code)
        if (folder := model_versions.missing_files(client, home, facts.name, version)) is not None:
            model_versions.log_version(home, self.release, facts, self.source_run, self.code, restore_to=folder)
            if FILES in self.model.tags(version):
                client.delete_model_version_tag(facts.name, str(version), FILES)
        return version

    def _deleted_version(self) -> int | None:
        """The version that this session of the release was, where somebody has deleted it in MLflow and left its model.

        0 where the whole model was deleted (storage/registry/removal.py) after the release was made.
        """
        home, client, facts = self.model.home, self.model.client, self.facts
        models = client.search_registered_models(f"name = '{facts.name}'")
        mark, log = mark_of(home, client), journal.promotions(home)
        shared = shared_store() is not None  # else a deletion in a registry that was lost since counts too
        if (deletion := last_deletion(facts.name, moves_in_registry(mark, log) if shared else log)) is not None:
            content = read_record(self.release)
            if content is not None and as_time(content["finished_at"]) < deletion.promoted_at:
                return 0
        if not models:
            return None
        born = as_time(models[0].creation_timestamp / 1000)  # moves from before are of a model that was lost as a whole
        present = version_numbers(client, facts.name)
        for row in reversed(log):
            is_of_model = row.name == facts.name and row.to_version is not None and row.promoted_at >= born
            numbers = json.loads(row.numbers) if is_of_model else {}
            logged = [numbers.get(name) for name in (MARK, KEY_TAG, SESSION_TAG)]
            if logged == [mark, facts.release_key, facts.session] and row.to_version not in present:
                return row.to_version
        return None

    def _renew_evidence(self, version: int, standing: Standing) -> Decision | None:
        """Give a version its newest evidence and decide by it. It can be repeated: the session is noted last of all."""
        home, client, facts = self.model.home, self.model.client, self.facts
        row = evidence.log_evidence(home, client, facts, facts.name, version, user_name())
        evidence.renew_tags(client, facts, version)
        decision = self._give_aliases(version, standing, since=row.promoted_at)
        evidence.settle_session(client, facts, version)
        return decision

    def _give_aliases(self, version: int, standing: Standing, since: datetime | None = None) -> Decision | None:
        """Give a version its aliases; the gate's decision where it is worth using.

        since: when it got newer evidence, by which the gate decides anew whether it becomes champion.
        """
        model, facts = self.model, self.facts
        moves = model.log_of(version)
        done = {row.alias for row in moves if row.alias != "champion" or since is None or row.promoted_at >= since}
        for alias in ("candidate", "challenger") if facts.worth_using else ("candidate",):
            if alias not in done:
                model.move(alias, version, "publish", "published")
        decision = None
        if facts.worth_using:
            decision = model.decide(version, standing.number, self.judge, facts.tags)
        is_champion = model.aliases().get("champion") == version
        if decision is None:
            model_versions.describe(model.client, facts.name, version, None)
        elif decision.passed and self._promotes(standing) and "champion" not in done and not is_champion:
            model.move("champion", version, "promote", decision.justification(), decision=decision)
        model.client.set_model_version_tag(facts.name, str(version), PUBLISHED, "yes")
        return decision

    def _promotes(self, standing: Standing) -> bool:
        """Whether a version that the gate passes becomes champion at once."""
        return self.may_promote and standing.is_settled

    def _tell_older_versions(self, version: int) -> None:
        """Log at older versions of the same release what it serves now, and show it on their pages."""
        home, client = self.model.home, self.model.client
        for name, older_version in evidence.older_versions(client, self.facts):
            now = f"what it serves now is {self.facts.name} version {version}"
            evidence.log_evidence(home, client, self.facts, name, older_version, user_name(), now)
            older = Model(home, client, name)
            if ANSWER in older.tags(older_version):
                older.decide(older_version, older.standing(self.judge).number, self.judge)

    def _outcome(
        self, version: int, standing: Standing, decision: Decision | None, *, is_new: bool, renewed: bool
    ) -> RegisteredVersion:
        """What to show of the publication. standing: from before it."""
        name = self.facts.name
        aliases = self.model.aliases_at(version)
        done = "registered" if is_new else "newer evidence for" if renewed else "already registered:"
        note = f"{done} {name} version {version}" + (f" ({', '.join(aliases)})" if aliases else "")
        if decision is not None and not decision.passed:
            outcome = "; it stays champion, but the gate now refuses" if "champion" in aliases else "; not promoted"
            note += f"{outcome}: {decision.refusal()}; {self.model.remeasure(version)}"
        elif decision is None and not self.facts.worth_using:
            note += f"; not promoted: its verdict is {self.facts.tags['draftsmith.verdict'].replace('_', ' ')}"
        if decision is not None and (dispute := standing.sentence(name)):
            note += f"; {dispute}"
        passed = decision is not None and decision.passed
        waits = passed and not self._promotes(standing) and "champion" not in aliases
        return RegisteredVersion(name, version, is_new, aliases, note, waits, decision, renewed)
