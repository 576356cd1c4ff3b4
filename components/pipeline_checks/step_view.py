"""What a check of a whole pipeline sees of its steps, and the fault that it reports.

The checks know addresses, settings and what is wired to what. How a step was expanded, where it runs and how its key
is made stay in flows/planning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class StepView(Protocol):
    """One step of a pipeline, its matrix expanded and its settings resolved.

    name: "draft[eagle3]"; base: its name in the file, "draft". address: the step function, "drafts.train_draft".
    kind: the kind of artifact it makes. inputs: parameter -> name(s) of the steps or outside inputs that fill it.
    """

    @property
    def name(self) -> str: ...
    @property
    def base(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def inputs(self) -> Mapping[str, str | list[str]]: ...


@dataclass(frozen=True)
class Fault:
    """A rule that a step breaks. place: where in the step it says so, ("with", "engines"); () is the step itself."""

    base: str
    message: str
    place: tuple[str, ...] = ()


def names_in(references: str | list[str]) -> list[str]:
    """The names that fill one input."""
    return references if isinstance(references, list) else [references]
