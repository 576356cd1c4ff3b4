"""`draftsmith show NAME`: a registered model, its versions with aliases and evidence, and who moved what, and why."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from components.contract import UserError
from flows.answer import print_answer
from storage import journal
from storage.records import PromotionRow

VERSIONS = ("version", "aliases", "speedup", "95 %", "depth", "verdict", "gate", "release")
LOG = ("when (UTC)", "alias", "what", "from", "to", "who", "why")


def is_model(home: Path, name: str) -> bool:
    """Whether the promotion log knows a registered model of this name."""
    return any(row.name == name for row in journal.promotions(home))


def print_model(home: Path, name: str, console: Console) -> None:
    """The versions of a model and its promotion log; what was moved by hand in MLflow is noticed first."""
    from storage.registry import changed_facts, notice_moves, versions_of

    notice_moves(home)
    versions = [_version(*version) for version in versions_of(home, name)]
    console.print(Text(name, style="bold"))
    print_answer(console, VERSIONS, versions)
    console.print()
    print_answer(console, LOG, [_move(row) for row in journal.promotions(home) if row.name == name])
    if changed := changed_facts(home, name):
        raise UserError("\n".join(changed))
    if damaged := journal.damaged_promotions(home):
        raise UserError(
            f"{journal.promotions_file(home)}: {len(damaged)} lines cannot be read, and are left out above; "
            "`draftsmith doctor --repair` sets them aside, and takes them from the history"
        )


def _version(number: int, aliases: list[str], tags: dict[str, str]) -> list[str]:
    facts = {fact: tags.get(f"draftsmith.{fact}", "") for fact in ("speedup_meas", "meas_lo", "meas_hi", "depth_k")}
    interval = f"[{_short(facts['meas_lo'])}, {_short(facts['meas_hi'])}]" if facts["meas_lo"] else ""
    cells = [str(number), ", ".join(aliases), _short(facts["speedup_meas"]), interval, facts["depth_k"]]
    gate = tags.get("gate.answer") or tags.get("gate.status", "")
    return [*cells, tags.get("draftsmith.verdict", ""), gate, tags.get("draftsmith.key", "")[:12]]


def _move(row: PromotionRow) -> list[str]:
    places = ["" if version is None else str(version) for version in (row.from_version, row.to_version)]
    return [f"{row.promoted_at:%Y-%m-%d %H:%M:%S}", row.alias, row.action, *places, row.who, row.why]


def _short(number: str) -> str:
    return f"{float(number):.2f}" if number else ""
