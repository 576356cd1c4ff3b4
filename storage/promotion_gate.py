"""May a challenger take the champion's place? Checks in SQL (promotion_gate.sql) over measured rows of one machine.

The champion's place is taken on evidence that anybody can ask for again: prompts that both decoded, paired. The
challenger need not be shown to be faster, only not slower (by more than `max_slowdown`) with 95 % confidence; its text
must be that of plain decoding; no workload's acceptance may fall for sure; its weights may not grow beyond measure.
Without a champion the release's own gate (speedup.confirm_depth) decides alone, and it is asked for in any case; so are
the engines that served the drafter, where there are such (speedup.compare_engines, engine_gate.sql).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SQL = Path(__file__).with_name("promotion_gate.sql")
_ENGINES = Path(__file__).with_name("engine_gate.sql")


@dataclass(frozen=True)
class Limits:
    """What the gate lets through.

    max_slowdown, max_acceptance_loss, max_growth: shares of the champion's speed, acceptance length and bytes.
    min_prompts: prompts that both must have decoded. least_prompts: below it a workload's acceptance shows nothing, and
    is not asked for (LEAST_PROMPTS of components/speedup). num_draws: resamples of prompts behind each confidence.
    """

    max_slowdown: float = 0.02
    max_acceptance_loss: float = 0.05
    max_growth: float = 0.5
    min_prompts: int = 8
    least_prompts: int = 4
    confidence: float = 0.95
    num_draws: int = 2000


@dataclass(frozen=True)
class Check:
    """One condition. value, with its 95 % interval where it has one; asked: the limit, in words."""

    name: str
    passed: bool
    value: float | None
    lo: float | None
    hi: float | None
    asked: str

    def measured(self) -> str:
        """The value with its interval."""
        interval = "" if self.lo is None or self.hi is None else f" [{self.lo:.3f}, {self.hi:.3f}]"
        return "not measured" if self.value is None else f"{self.value:.4g}{interval}"

    def said(self) -> str:
        """The check in a few words."""
        return f"{self.name} is {self.measured()}, asked {self.asked}"


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
    limits: Limits | None = None,
) -> Decision:
    """Ask whether a version may become champion.

    challenger, champion: tags of the two versions, as storage/release_facts.py makes them.
    """
    failed = [check["name"] for check in json.loads(challenger.get("gate.checks", "[]")) if not check["passed"]]
    passed = challenger.get("gate.status") == "passed"
    asked = "no check of the release itself fails" + (f" ({', '.join(failed)})" if failed else "")
    own = Check("own_gate", passed, float(len(failed)), None, None, asked)
    checks: Sequence[Check] = (own, *compare_engines(home, challenger))
    if champion is not None:
        checks = (*checks, *compare(home, challenger, champion, limits or Limits()))
    return Decision(tuple(checks), against)


def compare(home: Path, challenger: Mapping[str, str], champion: Mapping[str, str], limits: Limits) -> list[Check]:
    """Every check against the champion."""
    revisions = [tags.get("draftsmith.target_revision") for tags in (challenger, champion)]
    parameters: dict[str, Any] = {
        **_side("challenger", challenger),
        **_side("champion", champion),
        **dataclasses.asdict(limits),
        "same_target": revisions[0] is not None and revisions[0] == revisions[1],
    }
    return _checks(home, _SQL, parameters)


def compare_engines(home: Path, challenger: Mapping[str, str]) -> list[Check]:
    """Whether serving engines kept the drafter's tokens and acceptance; [] where none was compared."""
    return _checks(home, _ENGINES, {"draft_key": challenger.get("draftsmith.draft_key", "")})


def _checks(home: Path, sql: Path, parameters: Mapping[str, Any]) -> list[Check]:
    from storage.results import query

    names, rows = query(sql.read_text(encoding="utf-8"), home, parameters)
    found = [dict(zip(names, row, strict=True)) for row in rows]
    return [Check(**{field.name: row[field.name] for field in dataclasses.fields(Check)}) for row in found]


def _side(side: str, tags: Mapping[str, str]) -> dict[str, Any]:
    size = tags.get("draftsmith.drafter_bytes")
    return {
        side: tags.get("draftsmith.draft_key", ""),
        f"{side}_depth": int(tags.get("draftsmith.depth_k", 0)),
        f"{side}_bytes": int(size) if size else None,
    }
