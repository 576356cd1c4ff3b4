"""May a challenger take the champion's place? Asked of the measured rows of one machine, and answered with reasons.

The champion's place is taken on evidence that anybody can ask for again: prompts that both decoded, paired. What was
measured of both is selected here and handed to a rule (`judge`), which is components/speedup/promotion_rule.py: the one
comparison that confirm_depth and `draftsmith compare` use too. Without a champion the release's own gate
(speedup.confirm_depth) decides alone, and it is asked for in any case; so are the engines that served the drafter,
where there are such (speedup.compare_engines, engine_gate.sql).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.promotion import Check, Evidence, Judge, Way
from storage.pairs import measured_of

_ENGINES = Path(__file__).with_name("engine_gate.sql")


@dataclass(frozen=True)
class Decision:
    """The gate's answer. against: the champion's version, None when there is none."""

    checks: tuple[Check, ...]
    against: int | None

    @property
    def passed(self) -> bool:
        """Every check is."""
        return all(check.passed for check in self.checks)

    def why_not(self) -> str:
        """The checks that failed, in one line."""
        return "; ".join(check.said() for check in self.checks if not check.passed)

    def why(self) -> str:
        """What speaks for the move, in one line."""
        if self.against is None:
            return "the promotion gate passed, and there was no champion"
        speed = next((check for check in self.checks if check.name == "speed_against_champion"), None)
        return f"the promotion gate passed against version {self.against}" + (f": {speed.said()}" if speed else "")

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
    """Ask whether a version may become champion.

    challenger, champion: tags of the two versions, as storage/release_facts.py makes them. judge: the rule.
    """
    failed = [check["name"] for check in json.loads(challenger.get("gate.checks", "[]")) if not check["passed"]]
    passed = challenger.get("gate.status") == "passed"
    asked = "no check of the release itself fails" + (f" ({', '.join(failed)})" if failed else "")
    own = Check("own_gate", passed, float(len(failed)), None, None, asked)
    checks: Sequence[Check] = (own, *compare_engines(home, challenger))
    if champion is not None:
        checks = (*checks, *judge(evidence_of(home, challenger, champion)))
    return Decision(tuple(checks), against)


def evidence_of(home: Path, challenger: Mapping[str, str], champion: Mapping[str, str]) -> Evidence:
    """What was measured of two versions, each as it is served: its drafter at its depth."""
    new, old = _way("challenger", challenger), _way("champion", champion)
    revisions = [tags.get("draftsmith.target_revision") for tags in (challenger, champion)]
    return Evidence(
        new,
        old,
        measured_of(home, new.draft_key, old.draft_key),
        same_target=revisions[0] is not None and revisions[0] == revisions[1],
        challenger_bytes=_bytes(challenger),
        champion_bytes=_bytes(champion),
    )


def compare_engines(home: Path, challenger: Mapping[str, str]) -> list[Check]:
    """Whether serving engines kept the drafter's tokens and acceptance; [] where none was compared."""
    from storage.results import query

    draft_key = challenger.get("draftsmith.draft_key", "")
    names, rows = query(_ENGINES.read_text(encoding="utf-8"), home, {"draft_key": draft_key})
    return [Check(**dict(zip(names, row, strict=True))) for row in rows]


def _way(name: str, tags: Mapping[str, str]) -> Way:
    return Way(name, tags.get("draftsmith.draft_key", ""), int(tags.get("draftsmith.depth_k", 0)))


def _bytes(tags: Mapping[str, str]) -> int | None:
    size = tags.get("draftsmith.drafter_bytes")
    return int(size) if size else None
