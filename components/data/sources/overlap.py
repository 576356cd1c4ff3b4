"""The sources of rows that a step's settings name, so that planning can tell whether two steps share rows.

An origin is a place (a file, folder, pattern or split of a hub data set) and the share of its questions that the step
uses for evaluation. All steps split rows by one hash of the question (collect/prompts.py). So two steps that read the
same place share no question if the evaluation percentage of one is at most the held-out percentage of the other.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from components.data.settings import ChatSource, WorkloadSource, workload_source
from components.data.sources.addresses import PREFIX, HubSource, parse_hub_source
from components.outside_json import JsonObject

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
