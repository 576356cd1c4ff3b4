"""Everything that is wrong with the input, all at once: one line each, with the line of the file and a suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from components.contract import UserError
from storage.redaction import without_secrets


@dataclass
class Problems:
    """Collects lines `FILE:LINE: what is wrong`; `stop()` raises them together."""

    file: str
    found: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, message: str) -> None:
        """Note one problem; the same one twice is said once."""
        if (line, message) not in self.found:
            self.found.append((line, message))

    def stop(self) -> None:
        """Raise one UserError that holds a line for each problem, in the order of the file, if there is any."""
        if self.found:
            raise UserError("\n".join(f"{self.file}:{line}: {one_line(what)}" for line, what in sorted(self.found)))


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or the few known words when nothing is near, or ''."""
    names = list(known)
    near = difflib.get_close_matches(str(word), names, n=1, cutoff=0.6)
    if near:
        return f" (did you mean '{near[0]}'?)"
    if 0 < len(names) <= 8:
        return f" (known: {', '.join(names)})"
    return ""


def one_line(text: object, limit: int = 300) -> str:
    """Text without line breaks, shortened."""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def show(value: object) -> str:
    """A value as a person would write it in YAML, short; never the password of an address."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f"'{one_line(without_secrets(value), 60)}'"
    if isinstance(value, dict):
        return "a mapping"
    return one_line(value, 60)
