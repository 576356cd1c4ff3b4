"""The rule that no pipeline trains on what it benchmarks, checked from the settings before anything is read or run.

The rows that reach `drafts.train_draft` are followed back to the sources that steps name, and so are the prompts that
reach `bench.*`. One step that gives both has split them itself, so that they share no question. Two steps that name
one file, or one split of one data set, are refused, unless their splits agree, or `data.deduplicate` takes the ones out
of the others. The same question in two files cannot be seen in the settings: that step finds it in the rows.

An origin is a place (a file, folder, pattern or split of a hub data set) and the share of its questions that the step
uses for evaluation. All steps split rows by one hash of the question (components/data/collect/prompts.py). So two steps
that read the same place share no question if the evaluation percentage of one is at most the held-out percentage of the
other.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from components.contract import UserError
from components.data.settings import ChatSource, WorkloadSource, workload_source
from components.data.sources.addresses import PREFIX, HubSource, parse_hub_source
from components.outside_json import JsonObject
from components.pipeline_checks.step_view import Fault, StepView, names_in

_CARRY_ROWS: Final = ("Chats", "Prompts", "Conversations", "Features", "Draft")
"""Kinds through which rows travel to training; a target was trained by others, a corpus is not what drafters learn."""
_ONLY_COMPARED: Final = ("keep_out", "seen")
"""Inputs that a step only compares with: their rows do not reach its output."""


def check_train_eval_overlap(steps: Sequence[StepView]) -> Iterator[Fault]:
    """A fault for every source that one step trains on and another one benchmarks."""
    by_name = {step.name: step for step in steps}
    trained: dict[str, StepView] = {}
    benchmarked: dict[str, StepView] = {}
    for step in steps:
        if step.address == "drafts.train_draft":
            trained |= {giver.name: giver for giver in _prompt_sources(step, by_name)}
        if step.address.startswith("bench."):
            benchmarked |= {above.name: above for above in _input_steps(step, by_name) if above.kind == "Prompts"}
    for giver in trained.values():
        for benchmark in benchmarked.values():
            if giver.base != benchmark.base:
                yield from _shared_sources(giver, benchmark, by_name)


def _shared_sources(giver: StepView, benchmark: StepView, by_name: Mapping[str, StepView]) -> Iterator[Fault]:
    for reader, read, kept_out in _origins(giver, by_name, frozenset()):
        for _, bench_origin, _ in _origins(benchmark, by_name, frozenset()):
            origin, benchmarked = after_split(read, giver.settings), after_split(bench_origin, benchmark.settings)
            if not share_questions(origin, benchmarked) or (
                benchmark.name in kept_out and not benchmarked.is_benchmark
            ):
                continue
            if not benchmarked.is_benchmark:
                remedy = f"benchmark the prompts of '{giver.base}', which are split by one step, or wire "
                remedy += f"'{benchmark.base}' into `keep_out` of data.deduplicate"
            else:
                remedy = "it is a benchmark as a whole: train on other rows, or on another split"
            location = f"'{benchmark.base}' (line {benchmark.line})"
            yield Fault(reader.base, f"trains on {origin.source}, which {location} benchmarks: {remedy}")


def _prompt_sources(step: StepView, by_name: Mapping[str, StepView]) -> Iterator[StepView]:
    """The steps whose Prompts reach a step, the nearest on each way: they split what comes from further up."""
    for above in _input_steps(step, by_name):
        if above.kind == "Prompts":
            yield above
        else:
            yield from _prompt_sources(above, by_name)


def _origins(
    step: StepView, by_name: Mapping[str, StepView], kept_out: frozenset[str]
) -> Iterator[tuple[StepView, Origin, frozenset[str]]]:
    """(step, origin, prompts kept out on the way) for every source named by a step or by those whose rows it takes."""
    kept_out = kept_out.union(names_in(step.inputs.get("keep_out", [])))
    room, _, name = step.address.partition(".")
    if room == "data":
        with contextlib.suppress(UserError):  # a malformed source is told by the step that reads it
            yield from ((step, origin, kept_out) for origin in origins_of(name, step.settings))
    for above in _input_steps(step, by_name):
        yield from _origins(above, by_name, kept_out)


def _input_steps(step: StepView, by_name: Mapping[str, StepView]) -> Iterator[StepView]:
    """The steps whose rows a step takes in; inputs from outside the pipeline are not included."""
    for parameter, references in step.inputs.items():
        if parameter in _ONLY_COMPARED:
            continue
        for name in names_in(references):
            source_step = by_name.get(name)
            if source_step is not None and source_step.kind in _CARRY_ROWS:
                yield source_step


_STDLIB: Final = "python-stdlib"
_MAX_LISTED: Final = 10_000
"""At most so many files of a pattern are listed; `check` must answer at once."""


@dataclass(frozen=True)
class Origin:
    """Rows that a step reads.

    source: the source as the user wrote it. path: a local file, folder or pattern, absolute; "" for a hub data set.
    repository, config, split: of a hub data set ("" where not named); a local data set folder has a split too.
    for_training, for_evaluation: whether the step produces prompts of either kind.
    evaluation_percent: percentage of questions for evaluation. held_out_percent: of questions never trained on.
    excluded: sources whose questions this step drops.
    """

    source: str
    path: str = ""
    repository: str = ""
    config: str = ""
    split: str = ""
    for_training: bool = True
    for_evaluation: bool = True
    evaluation_percent: int = 100
    held_out_percent: int = 0
    excluded: tuple[Origin, ...] = ()

    @property
    def is_benchmark(self) -> bool:
        """Whether all its rows are for evaluation only."""
        return not self.for_training and self.evaluation_percent == 100


def origins_of(step: str, settings: JsonObject) -> list[Origin]:
    """The origins in the resolved settings of a step of data/; none where it reads artifacts only.

    Raises:
        UserError: a source is malformed.
    """
    if not settings:  # faulty settings, reported by the code that checks them
        return []
    if step in ("collect_prompts", "collect_traffic"):
        source = str(settings.get("source", _STDLIB))
        if source == _STDLIB:  # split by file in every step: no file is ever on both sides
            return []
        keep_out = str(settings.get("keep_out", ""))
        origin = replace(
            _origin_of_source(source),
            for_training=settings.get("num_train") != 0,
            for_evaluation=any(settings.get(f"num_{split}") != 0 for split in ("test", "warm_up")),
            evaluation_percent=int(settings.get("evaluation_percent", 100)),
            held_out_percent=int(settings.get("evaluation_percent", 0)),
            excluded=(_origin_of_source(keep_out),) if keep_out else (),
        )
        return [origin]
    if step == "collect_workloads":
        return [one for item in settings["sources"] for one in _origins_of_workload(workload_source(item))]
    if step == "collect_chats":
        return [_origin_of_chats(ChatSource.model_validate(item)) for item in settings["sources"]]
    return []


def after_split(origin: Origin, settings: JsonObject) -> Origin:
    """The origin after a step with these settings, which may split its rows by the hash of their questions."""
    percent = settings.get("evaluation_percent")
    if percent is None or not origin.for_training or origin.held_out_percent:
        return origin
    return replace(origin, evaluation_percent=int(percent), held_out_percent=int(percent))


def share_questions(training: Origin, evaluation: Origin) -> bool:
    """Whether one step may train on questions that another step evaluates on."""
    if not (training.for_training and evaluation.for_evaluation) or not same_rows(training, evaluation):
        return False
    if any(same_rows(excluded, evaluation) for excluded in training.excluded):
        return False
    return evaluation.evaluation_percent > training.held_out_percent


def same_rows(one: Origin, other: Origin) -> bool:
    """Whether two origins may hold the same rows: the same files, or the same split of the same data set."""
    if one.path and other.path:
        splits = {one.split, other.split} - {""}
        return len(splits) < 2 and _overlap(one.path, other.path)
    if not one.repository or one.repository != other.repository:
        return False
    pairs = ((one.config, other.config), (one.split, other.split))
    return all(not first or not second or first == second for first, second in pairs)


def _origin_of_source(source: str) -> Origin:
    if source.startswith(PREFIX):
        return _origin_of_hub(parse_hub_source(source))
    return Origin(source, path=_absolute(source))


def _origin_of_hub(hub: HubSource) -> Origin:
    if hub.folder is not None:
        return Origin(hub.source, path=_absolute(str(hub.folder)), split=hub.split)
    return Origin(hub.source, repository=str(hub.name).lower(), config=hub.config or "", split=hub.split)


def _origins_of_workload(source: WorkloadSource) -> Iterator[Origin]:
    """All rows of a workload are for evaluation."""
    preset = source.resolved_preset
    if source.path:
        yield replace(_origin_of_source(source.path), for_training=False)
    elif preset is not None:
        repository = preset.repository.lower()
        for config in preset.configs or ("",):
            yield Origin(preset.name, repository=repository, config=config, split=preset.split, for_training=False)


def _origin_of_chats(source: ChatSource) -> Origin:
    """Any chat may be trained or evaluated on, as the mix splits them."""
    if source.hub is not None:
        origin = _origin_of_hub(source.hub)
        return Origin(source.preset or origin.source, origin.path, origin.repository, origin.config, origin.split)
    if on_hub := re.match(r"hf://datasets/([^/@]+/[^/@]+)", source.path):
        # the hub names files by their split: test-00000-of-00001.parquet; of other names any split may be in them
        split = re.search(r"/(train|validation|test)[-.][^/]*$", source.path)
        return Origin(source.path, repository=on_hub[1].lower(), split=split[1] if split else "")
    return Origin(source.path, path=_absolute(source.path))


def _absolute(path: str) -> str:
    """The path without links, "~" and "."; a URL stays as it is."""
    if re.match(r"[a-z0-9]+://", path):
        return path.rstrip("/")
    return os.path.realpath(os.path.expanduser(path))


def _overlap(one: str, other: str) -> bool:
    """Whether two paths (files, folders or patterns) have a file in common."""
    if one == other or _within(one, other) or _within(other, one):
        return True
    if not (_is_pattern(one) and _is_pattern(other)):
        return False
    return not _files_of_pattern(one).isdisjoint(_files_of_pattern(other))


def _within(path: str, container: str) -> bool:
    """Whether a path (or pattern) names something in a folder or pattern."""
    if _is_pattern(container):
        return fnmatch.fnmatchcase(path, container) or path in _files_of_pattern(container)
    if _is_pattern(path):
        return any(name == container or name.startswith(container + os.sep) for name in _files_of_pattern(path))
    return path.startswith(container.rstrip("/") + "/") and not Path(container).is_file()


def _is_pattern(path: str) -> bool:
    return any(sign in path for sign in "*?[") and not os.path.exists(path)


def _files_of_pattern(pattern: str) -> set[str]:
    files: set[str] = set()
    for name in glob.iglob(pattern, recursive=True):
        files.add(os.path.realpath(name))
        if len(files) == _MAX_LISTED:
            break
    return files
