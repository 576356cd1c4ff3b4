"""Which rows a step's settings name, before any of them is read: to see whether two steps name the same ones.

An origin is a place (a file, a folder, a pattern, a split of a hub data set) and the share of its questions that the
step keeps for judging. Steps that split rows do it by one hash of the question (choosing.py), so two of them that read
the same place share no question where the one judges on no more of a hundred than the other leaves out of training.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from components.data.chat_sources import ChatSource
from components.data.hub_rows import PREFIX, HubSource, parse_hub_source
from components.data.workload_rows import WorkloadSource
from components.data.workload_rows import source_of as workload_source_of

_STDLIB: Final = "python-stdlib"
_MAX_LISTED: Final = 10_000
"""Files of a folder or pattern that are looked at; `check` must answer at once."""


@dataclass(frozen=True)
class Origin:
    """Rows that a step reads.

    said: the source as the user wrote it. path: a local file, folder or pattern, absolute; "" for a hub data set.
    repository, config, split: of a hub data set ("" where not named); split also of a local folder in its format.
    trains, judges: whether the step gives prompts to train on, and to judge on.
    judged_percent: of a hundred questions, those that may be judged on. spared_percent: those never trained on.
    left_out: what is asked there never comes out of this step.
    """

    said: str
    path: str = ""
    repository: str = ""
    config: str = ""
    split: str = ""
    trains: bool = True
    judges: bool = True
    judged_percent: int = 100
    spared_percent: int = 0
    left_out: tuple[Origin, ...] = ()

    @property
    def is_benchmark(self) -> bool:
        """Whether all of it is there to judge on."""
        return not self.trains and self.judged_percent == 100


def origins_of(step: str, settings: Mapping[str, Any]) -> list[Origin]:
    """The origins that a step of this room names in its (resolved) settings; none where it reads only artifacts.

    Raises:
        UserError: a source is malformed.
    """
    if not settings:  # faulty ones, told by whoever checks them
        return []
    if step in ("collect_prompts", "collect_traffic"):
        source = str(settings.get("source", _STDLIB))
        if source == _STDLIB:  # split by file, whoever asks: nothing of it is ever on both sides
            return []
        keep_out = str(settings.get("keep_out", ""))
        facts = {
            "trains": settings.get("num_train") != 0,
            "judges": any(settings.get(f"num_{split}") != 0 for split in ("test", "warm_up")),
            "judged_percent": int(settings.get("evaluation_percent", 100)),
            "spared_percent": int(settings.get("evaluation_percent", 0)),
            "left_out": (_placed(keep_out),) if keep_out else (),
        }
        return [_placed(source, **facts)]
    if step == "collect_workloads":
        given = [item if isinstance(item, str) else WorkloadSource.model_validate(item) for item in settings["sources"]]
        return [one for item in given for one in _of_workload(workload_source_of(item))]
    if step == "collect_chats":
        return [_of_chats(ChatSource.model_validate(item)) for item in settings["sources"]]
    return []


def dealt(origin: Origin, settings: Mapping[str, Any]) -> Origin:
    """The origin after a step with these settings has split its rows by the hash of what they ask, if it does."""
    percent = settings.get("evaluation_percent")
    if percent is None or not origin.trains or origin.spared_percent:
        return origin
    return replace(origin, judged_percent=int(percent), spared_percent=int(percent))


def share_questions(trained: Origin, judged: Origin) -> bool:
    """Whether what one step trains on may be what another judges on."""
    if not (trained.trains and judged.judges) or not same_rows(trained, judged):
        return False
    if any(same_rows(left_out, judged) for left_out in trained.left_out):
        return False
    return judged.judged_percent > trained.spared_percent


def same_rows(one: Origin, other: Origin) -> bool:
    """Whether two origins may hold the same rows: the same files, or the same split of the same data set."""
    if one.path and other.path:
        splits = {one.split, other.split} - {""}
        return len(splits) < 2 and _overlap(one.path, other.path)
    if not one.repository or one.repository != other.repository:
        return False
    pairs = ((one.config, other.config), (one.split, other.split))
    return all(not left or not right or left == right for left, right in pairs)


def _placed(source: str, **facts: Any) -> Origin:
    if not source.startswith(PREFIX):
        return Origin(source, path=_absolute(source), **facts)
    return _of_hub(parse_hub_source(source), **facts)


def _of_hub(found: HubSource, **facts: Any) -> Origin:
    if found.folder is not None:
        return Origin(found.source, path=_absolute(str(found.folder)), split=found.split, **facts)
    name = str(found.name).lower()
    return Origin(found.source, repository=name, config=found.config or "", split=found.split, **facts)


def _of_workload(source: WorkloadSource) -> Iterator[Origin]:
    """All rows of a workload are judged on."""
    facts: dict[str, Any] = {"trains": False}
    if source.path:
        yield _placed(source.path, **facts)
    elif source.known is not None:
        preset = source.known
        for config in preset.configs or ("",):
            repository = preset.repository.lower()
            yield Origin(preset.name, repository=repository, config=config, split=preset.split, **facts)


def _of_chats(source: ChatSource) -> Origin:
    """Any of the chats may be trained on, and any be judged on, as the mix deals them."""
    if source.hub is not None:
        found = _of_hub(source.hub)
        return Origin(source.preset or found.said, found.path, found.repository, found.config, found.split)
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
    """Whether two paths, each a file, a folder or a pattern, name a file in common."""
    if one == other or _within(one, other) or _within(other, one):
        return True
    if not (_is_pattern(one) and _is_pattern(other)):
        return False
    return not _listed(one).isdisjoint(_listed(other))


def _within(path: str, place: str) -> bool:
    """Whether a file or folder lies in a folder, or fits a pattern."""
    if _is_pattern(place):
        return fnmatch.fnmatchcase(path, place) or path in _listed(place)
    if _is_pattern(path):
        return any(found == place or found.startswith(place + os.sep) for found in _listed(path))
    return path.startswith(place.rstrip("/") + "/") and not Path(place).is_file()


def _is_pattern(path: str) -> bool:
    return any(sign in path for sign in "*?[") and not os.path.exists(path)


def _listed(pattern: str) -> set[str]:
    found: set[str] = set()
    for name in glob.iglob(pattern, recursive=True):
        found.add(os.path.realpath(name))
        if len(found) == _MAX_LISTED:
            break
    return found
