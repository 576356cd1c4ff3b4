"""The rule that there is what settings name: the sources of a mix, and as many tokens as a draft vocabulary has.

The steps find out too, but by then conversations have been collected and features recorded. What is known from outside
of the pipeline alone, such as the sources of chats that a step of the user's own makes, is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from components.data.settings import ChatSource
from components.outside_json import read_object
from components.pipeline_checks.step_view import Fault, StepView, names_in
from components.targets.source import local_folder
from components.text import did_you_mean

_BY_STRATUM: Final = ("weights", "evaluation_weights", "caps")
_KEEP_SOURCES: Final = ("data.deduplicate",)
"""Steps that hand on chats under the names of their sources."""


def check_names_and_sizes(steps: Sequence[StepView]) -> Iterator[Fault]:
    """A fault for every source without rows that a mix names, and for every draft vocabulary above the target's."""
    by_name = {step.name: step for step in steps}
    faults: dict[Fault, None] = {}  # a matrix repeats them
    for step in steps:
        if step.address == "data.mix_chats" and step.settings.get("strata") == "source":
            faults |= dict.fromkeys(_unknown_sources(step, by_name))
        if step.address == "drafts.train_draft" and step.settings.get("draft_vocab_size"):
            faults |= dict.fromkeys(_too_large_vocabulary(step, by_name))
    yield from faults


def _unknown_sources(step: StepView, by_name: Mapping[str, StepView]) -> Iterator[Fault]:
    sources = _sources_of(step.inputs.get("chats", []), by_name)
    if sources is None:
        return
    for setting in _BY_STRATUM:
        given = step.settings.get(setting) or {}
        for name in given:
            if name not in sources:
                hint = did_you_mean(name, sources, most_named=20)
                yield Fault(step.base, f"{setting}: no source is called '{name}'{hint}", ("with", setting))
        if setting != "caps" and given and (unnamed := [name for name in sources if name not in given]):
            reason = f"{setting}: no weight for '{unnamed[0]}'; give one (0 leaves it out)"
            yield Fault(step.base, reason, ("with", setting))


def _sources_of(references: str | list[str], by_name: Mapping[str, StepView]) -> list[str] | None:
    """The names of the sources of chats; None where a step may give them other names."""
    sources: list[str] = []
    for name in names_in(references):
        step = by_name.get(name)
        if step is not None and step.address == "data.collect_chats" and step.settings:
            sources += [ChatSource.model_validate(source).label for source in step.settings["sources"]]
        elif step is not None and step.address in _KEEP_SOURCES:
            above = _sources_of(step.inputs.get("chats", []), by_name)
            if above is None:
                return None
            sources += above
        else:
            return None
    return list(dict.fromkeys(sources))


def _too_large_vocabulary(step: StepView, by_name: Mapping[str, StepView]) -> Iterator[Fault]:
    target = by_name.get(str(step.inputs.get("target")))
    if target is None or target.address != "targets.load_target" or "model" not in target.settings:
        return
    folder = local_folder(str(target.settings["model"]))
    if folder is None or not (folder / "config.json").is_file():
        return
    config = read_object(folder / "config.json")
    largest = (config.get("text_config") or config).get("vocab_size")
    size = step.settings["draft_vocab_size"]
    if isinstance(largest, int) and size > largest:
        reason = f"draft_vocab_size is {size}, and the target has {largest} tokens: give {largest} at most, 0 chooses"
        yield Fault(step.base, reason, ("with", "draft_vocab_size"))
