"""One model of MLflow's registry: what its log says of a version, what the gate decides about it, and its moves."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.contract import UserError
from components.promotion import Judge
from storage import journal
from storage.history.records import PromotionRow, as_time, new_promotion
from storage.home import MARK
from storage.registry import aliases as alias_moves
from storage.registry import evidence
from storage.registry import versions as model_versions
from storage.registry.aliases import mark_of, moves_in_registry
from storage.registry.evidence import sealed_tags
from storage.registry.fact_tags import FILES, facts_in, tags_of, write_facts
from storage.registry.promotion_gate import Decision, decide
from storage.registry.standing import Standing, standing_of
from storage.registry.tracking import KEY_TAG, MlflowClient

ANSWER = "gate.answer"
"""The fact that says what the gate answered last about a version."""
_ANSWERS = ("gate.against", ANSWER, "gate.comparison")  # facts: the gate's last decision about a version


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


@dataclass(frozen=True)
class Model:
    """A registered model that one home reads and moves. Every method but `tags` and `log_of` needs the registry's lock.

    home: whose log and store say what was sealed. name: that of the model, whether it is there yet or not.
    """

    home: Path
    client: MlflowClient
    name: str

    def tags(self, version: int) -> dict[str, str]:
        """The tags and facts that a version has in MLflow now."""
        return tags_of(self.client, self.name, version)

    def aliases(self) -> dict[str, int]:
        """Where each alias of the model is now."""
        return alias_moves.aliases_of(self.client, self.name)

    def aliases_at(self, version: int) -> tuple[str, ...]:
        """The aliases that a version has now."""
        return tuple(alias for alias, at in self.aliases().items() if at == version)

    def log_of(self, version: int) -> list[PromotionRow]:
        """The moves of a version in this registry, oldest first.

        Moves from before the version was made were of another that had its number: numbers start again in a database
        that is made anew, and in a model that was deleted.
        """
        born = as_time(self.client.get_model_version(self.name, str(version)).creation_timestamp / 1000)
        log = moves_in_registry(mark_of(self.home, self.client), journal.promotions(self.home))
        return [row for row in log if row.name == self.name and row.to_version == version and row.promoted_at >= born]

    def sealed_facts(self, version: int) -> dict[str, str]:
        """The facts of a version that decisions are made by, as they were sealed."""
        return sealed_tags(self.home, self.tags(version), self.log_of(version), f"{self.name} version {version}")

    def standing(self, judge: Judge | None = None) -> Standing:
        """The champion that counts.

        judge: without it, the gate lets nothing through that somebody has made champion in MLflow.
        """
        # Moves from before the model was made are of another that had its name.
        born = as_time(self.client.get_registered_model(self.name).creation_timestamp / 1000)
        log = moves_in_registry(mark_of(self.home, self.client), journal.promotions(self.home))
        moves = [row for row in log if (row.name, row.alias) == (self.name, "champion") and row.promoted_at >= born]

        def refusal(version: int, champion: int | None) -> str:
            if judge is None:
                return "the gate was not asked"
            try:
                decision = self.decide(version, champion, judge)
            except UserError as error:  # a version that Draftsmith has not made, or whose evidence is gone
                return str(error)
            return "" if decision.passed else f"the gate refuses it: {decision.in_brief()}"

        def unfit(version: int) -> str:
            state = self.tags(version).get(FILES)
            return f"its files were {state}" if state else ""

        standing = standing_of(moves, self.aliases().get("champion"), refusal, unfit)
        # Of a version that was deleted, the alias went with it.
        is_gone = standing.is_deleted and standing.number not in alias_moves.version_numbers(self.client, self.name)
        return Standing(None) if is_gone else standing

    def decide(
        self, version: int, champion: int | None, judge: Judge, facts: Mapping[str, str] | None = None
    ) -> Decision:
        """Let the gate decide about a version, and write the decision among the version's facts.

        champion: the version that it is held against, unless it is that one. facts: those of the release that the
        version is just being given.
        """
        opponent = champion if champion != version else None
        opponent_facts = self.sealed_facts(opponent) if opponent is not None else None
        tags = facts if facts is not None else self.sealed_facts(version)
        decision = decide(self.home, tags, opponent_facts, opponent, judge)
        decision = Decision((*evidence.newest_evidence_checks(self.client, tags), *decision.checks), decision.against)
        answer = "passed" if decision.passed else decision.refusal()
        answers = dict(zip(_ANSWERS, (str(opponent or ""), answer, decision.as_json()), strict=True))
        present = self.client.get_model_version(self.name, str(version)).tags
        write_facts(self.client, self.name, version, facts_in(present) | answers, present)
        model_versions.describe(self.client, self.name, version, decision)
        return decision

    def move(
        self,
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
        numbers = {tag: value for tag, value in self.tags(version).items() if tag not in _ANSWERS}
        numbers[MARK] = mark_of(self.home, self.client)
        if decision is not None:
            numbers["gate.comparison"] = decision.as_json()
        before = before if before is not None else self.aliases().get(alias)
        row = new_promotion(self.name, alias, action, before, version, user_name(), reason, numbers)
        alias_moves.move_alias(self.home, self.client, row)

    def require_files(self, version: int, what: str) -> None:
        """Raise UserError for a version whose files `gc` has let go: it cannot serve. what: the command that asks."""
        tags = self.tags(version)
        if FILES in tags:
            run = f"`draftsmith run {tags.get('draftsmith.pipeline', 'PIPELINE')}`"
            raise UserError(
                f"{what} {self.name}: version {version} cannot serve: its files were {tags[FILES]}; it has them again "
                f"once a run makes or finds its release {tags.get(KEY_TAG, '')[:12]}, as {run} does with the settings "
                "and data of then"
            )

    def require_champion(self) -> None:
        """Raise UserError where no version is champion: what the newest lacks, and first the commands that help."""
        aliases = self.aliases()
        numbers = alias_moves.version_numbers(self.client, self.name)
        if "champion" in aliases or not numbers:
            return
        number = aliases.get("challenger", max(numbers))
        tags = self.tags(number)
        answer = tags.get(ANSWER)
        overrides = f"`draftsmith promote {self.name} --version {number} --force --why ...` overrides that"
        if answer == "passed":
            yes = f"`draftsmith promote {self.name} --why ...` gives it"
            reason = f"version {number} passed the gate and waits for a yes; {yes}"
        elif answer is not None:
            reason = f"the gate refused version {number}; {self.remeasure(number)}, {overrides}; it said: {answer}"
        else:
            pipeline, verdict = tags.get("draftsmith.pipeline", "PIPELINE"), tags.get("draftsmith.verdict", "not known")
            better = f"`draftsmith run {pipeline}` with more data or steps (-p) makes a better one"
            reason = f"version {number} is not worth using ({verdict.replace('_', ' ')}); {better}, {overrides}"
        raise UserError(f"{self.name} has no champion: {reason}")

    def remeasure(self, version: int) -> str:
        """The command that measures a version again, and what it does."""
        return f"`draftsmith remeasure {self.name}@{version}` measures it again and asks the gate anew"


def user_name() -> str:
    """Who the log names for a move."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user entry
        return f"uid {os.getuid()}"
