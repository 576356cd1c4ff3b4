"""Everything that is wrong with the input, all at once: one line each, with the line of the file and a suggestion.

Each line has a page of docs/ that helps, which the command line names at its end; a page is chosen here by topic and
nowhere else: a step's by the room of its function.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from components.contract import UserError
from components.text import shorten
from storage.redaction import without_secrets

MOST_LINES_NAMED = 5  # of the further lines with the same cause
PAGE = "first-pipeline"
"""The page on what pipelines.yaml may say."""
PAGE_OF_PLACEMENT = "scale"
PAGE_OF_STEPS = {
    "targets": "my-model",
    "data": "my-data",
    "drafts": "methods",
    "bench": "depth",
    "speedup": "depth",
    "publish": "engines",
    "speedup.measure_tuning": "methods",
    **dict.fromkeys(("bench.measure_llama_cpp", "bench.measure_server", "speedup.compare_engines"), "engines"),
    **dict.fromkeys(("data.collect_traffic", "speedup.measure_drift"), "nightly"),
}
"""Pages on the settings and the input of a step, or of all other steps of its room."""
PAGE_OF_CHECK = {
    "check_train_eval_overlap": "my-data",
    "check_engine_compatibility": "engines",
    "check_tuning_consistency": "depth",
    "check_names_and_sizes": "my-data",
    "check_target_positions": "my-model",
    "check_method_known": "methods",
    "check_verdict_prompts": "my-data",
}
"""Pages on the rules of components/pipeline_checks."""


class InputError(UserError):
    """Faults of the input, a line each. pages: names of the pages of docs/ that help with them, line by line."""

    def __init__(self, lines: Sequence[str], pages: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.pages = tuple(pages)


def page_of_step(address: str) -> str:
    """The page on the settings and the input of a step."""
    return PAGE_OF_STEPS.get(address) or PAGE_OF_STEPS.get(address.partition(".")[0], PAGE)


def with_pages(error: UserError, page: str) -> str:
    """The lines of an error; the last of those that one page explains names it. page: of a line without its own."""
    lines = str(error).splitlines() or [""]
    pages = error.pages if isinstance(error, InputError) else (page,) * len(lines)
    following = (*pages[1:], "")
    return "\n".join(
        f"{line} (docs: {page})" if page != after else line
        for line, page, after in zip(lines, pages, following, strict=True)
    )


@dataclass
class Problems:
    """Collects lines `FILE:LINE: what is wrong`; `stop()` raises them together."""

    file: str
    entries: dict[tuple[int, str], str] = field(default_factory=dict)  # (line, message) -> page
    again: dict[Hashable, tuple[tuple[int, str], list[int]]] = field(default_factory=dict)

    def add(self, line: int, message: str, *, cause: Hashable = None, page: str = PAGE) -> None:
        """Note one problem; a repeated one is reported once. Of several with one `cause` only the first is reported,
        with the other lines on which it occurs. page: of docs/, which helps with it."""
        if cause is not None:
            first, others = self.again.setdefault(cause, ((line, message), []))
            if line not in (first[0], *others):
                others.append(line)
            line, message = first
        self.entries.setdefault((line, message), page)

    def stop(self) -> None:
        """Raise one InputError that holds a line for each problem, in the order of the file, if there is any."""
        if self.entries:
            others = {first: sorted(lines) for first, lines in self.again.values() if lines}
            messages = [
                f"{self.file}:{line}: {shorten(what)}{_also(others.get((line, what), []))}"
                for line, what in sorted(self.entries)
            ]
            raise InputError(messages, [self.entries[entry] for entry in sorted(self.entries)])


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
