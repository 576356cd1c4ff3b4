"""Everything that is wrong with the input, all at once: one line each, with the line of the file and a suggestion."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from components.contract import UserError
from components.text import shorten
from storage.redaction import without_secrets

MOST_LINES_NAMED = 5  # of the further lines with the same cause


@dataclass
class Problems:
    """Collects lines `FILE:LINE: what is wrong`; `stop()` raises them together."""

    file: str
    entries: list[tuple[int, str]] = field(default_factory=list)
    again: dict[Hashable, tuple[tuple[int, str], list[int]]] = field(default_factory=dict)

    def add(self, line: int, message: str, *, cause: Hashable = None) -> None:
        """Note one problem; a repeated one is reported once. Of several with one `cause` only the first is reported,
        with the other lines on which it occurs."""
        if cause is not None:
            first, others = self.again.setdefault(cause, ((line, message), []))
            if line not in (first[0], *others):
                others.append(line)
            line, message = first
        if (line, message) not in self.entries:
            self.entries.append((line, message))

    def stop(self) -> None:
        """Raise one UserError that holds a line for each problem, in the order of the file, if there is any."""
        if self.entries:
            others = {first: sorted(lines) for first, lines in self.again.values() if lines}
            messages = (
                f"{self.file}:{line}: {shorten(what)}{_also(others.get((line, what), []))}"
                for line, what in sorted(self.entries)
            )
            raise UserError("\n".join(messages))


def _also(lines: list[int]) -> str:
    """The other lines on which a problem occurs, as text."""
    if not lines:
        return ""
    more = f" and {len(lines) - MOST_LINES_NAMED} more" if len(lines) > MOST_LINES_NAMED else ""
    named = ", ".join(map(str, lines[:MOST_LINES_NAMED]))
    return f" (again on line{'s' if len(lines) > 1 else ''} {named}{more})"


def show(value: object) -> str:
    """A value as a person would write it in YAML, short; never the password of an address."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f"'{shorten(without_secrets(value), 60)}'"
    if isinstance(value, dict):
        return "a mapping"
    return shorten(value, 60)
