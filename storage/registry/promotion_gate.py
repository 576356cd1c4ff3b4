"""The promotion gate: decides from measured rows whether a challenger may take the champion's place, with reasons.

The evidence is prompts that both decoded, paired; anybody can query it again. The measured rows of both are selected
here and passed to a rule (`judge`): components/speedup/comparison/promotion_rule.py, the one comparison that
confirm_depth and
`draftsmith compare` use too. The release's own gate (speedup.confirm_depth) must pass in any case, and decides alone
where there is no champion; so must the comparison with serving engines, where there was one (speedup.compare_engines,
engine_gate.sql).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.promotion import Check, Evidence, Judge, ServingSetup
from components.refusals import quantity, remedy
from storage.history.query import as_records, measured_of, query

NAMED = 3
"""Failed checks that a sentence names; a version's page in MLflow names all."""
_ENGINES = Path(__file__).with_name("engine_gate.sql")


@dataclass(frozen=True)
class Decision:
    """The decision of the gate. against: the champion's version, None when there is none."""

    checks: tuple[Check, ...]
    against: int | None

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def refusal(self) -> str:
        """The first checks that failed, in one line: of each what was measured and asked; what to do is said once."""
        failed, said, clauses = [check for check in self.checks if not check.passed], set[str](), list[str]()
        for check in failed[:NAMED]:
            advice = remedy(check.name)
            clauses.append(check.summary() if advice in said else check.refusal())
            said.add(advice)
        more = len(failed) - len(clauses)
        return "; ".join([*clauses, *[f"and {more} more, on the version's page in MLflow"] * bool(more)])

    def in_brief(self) -> str:
        """The first check that failed, and how many more did."""
        first, *more = [check.summary() for check in self.checks if not check.passed]
        return first + (f", and {len(more)} more" if more else "")

    def justification(self) -> str:
        """Why the gate passed, in one line."""
        if self.against is None:
            return "the promotion gate passed, and there was no champion"
        speed = next((check for check in self.checks if check.name == "speed_against_champion"), None)
        return f"the promotion gate passed against version {self.against}" + (f": {speed.summary()}" if speed else "")

    def as_json(self) -> str:
        """All checks, for the promotion log and the version's tags."""
        return json.dumps([dataclasses.asdict(check) for check in self.checks])


def decide(
    home: Path,
    challenger: Mapping[str, str],
    champion: Mapping[str, str] | None,
    against: int | None,
    judge: Judge,
) -> Decision:
    """Decide whether a version may become champion.

    challenger, champion: tags of the two versions, as storage/registry/versions.py makes them. judge: the rule.
    """
    own_checks = json.loads(challenger.get("gate.checks", "[]"))
    failed = [Check(c["name"], False, c.get("value"), None, None, c["limit"]) for c in own_checks if not c["passed"]]
    if not failed:
        passed = challenger.get("gate.status") == "passed"
        failed = [Check("own_gate", passed, float(not passed), None, None, "0")]
    compared = [] if champion is None else judge(evidence_of(home, challenger, champion))
    # What the rule refuses too, by all measurements there are, would stand in a sentence twice, with two numbers.
    refused = {quantity(check.name) for check in compared if not check.passed}
    failed = [check for check in failed if quantity(check.name) not in refused]
    return Decision((*failed, *compare_engines(home, challenger), *compared), against)


def evidence_of(home: Path, challenger: Mapping[str, str], champion: Mapping[str, str]) -> Evidence:
    """The measured rows of two versions, each as it is served: its drafter at its depth."""
    new, old = _serving_setup("challenger", challenger), _serving_setup("champion", champion)
    revisions, methods = (
        [tags.get(f"draftsmith.{name}") for tags in (challenger, champion)] for name in ("target_revision", "method")
    )
    return Evidence(
        new,
        old,
        measured_of(home, new.draft_key, old.draft_key),
        same_target=revisions[0] is not None and revisions[0] == revisions[1],
        same_method=methods[0] == methods[1],
        challenger_bytes=_drafter_bytes(challenger),
        champion_bytes=_drafter_bytes(champion),
    )


def compare_engines(home: Path, challenger: Mapping[str, str]) -> list[Check]:
    """Checks that serving engines kept the drafter's tokens and acceptance; [] where none was compared."""
    draft_key = challenger.get("draftsmith.draft_key", "")
    answer = query(_ENGINES.read_text(encoding="utf-8"), home, {"draft_key": draft_key})
    return [Check(**row) for row in as_records(answer)]


def _serving_setup(name: str, tags: Mapping[str, str]) -> ServingSetup:
    return ServingSetup(name, tags.get("draftsmith.draft_key", ""), int(tags.get("draftsmith.depth_k", 0)))


def _drafter_bytes(tags: Mapping[str, str]) -> int | None:
    size = tags.get("draftsmith.drafter_bytes")
    return int(size) if size else None
