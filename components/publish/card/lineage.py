"""The lineage of a drafter: everything that it was made from, and its training data, as the store records them.

A step gets only its inputs, but a release has to state where everything came from. The artifacts of a store lie side by
side under their keys, each with its `artifact.json`; one that is no longer there is listed by its key, without facts.

The training data are sources with counts and licences, and the rows left out of them. The model card shows them and
provenance.json holds them. Facts without a record are reported as unknown, and a pipeline without a step that searches
for benchmark texts as having none.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from components.contract import Artifact
from components.outside_json import JsonObject
from components.publish.names import public_name

RECORD = "artifact.json"


@dataclass(frozen=True)
class ArtifactRecord:
    """How one artifact was made. has_record: False where its record is not on this machine; then only key is set.

    inputs: parameter -> keys. versions: library -> version. code: sha256 of all code that its step reaches, "" in old
    records. commit: of Draftsmith, "" outside a clone. changed: whether files differed from it. files: name -> sha256.
    """

    key: str
    has_record: bool = False
    kind: str = ""
    uses: str = ""
    info: JsonObject = field(default_factory=dict)
    settings: JsonObject = field(default_factory=dict)
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: JsonObject = field(default_factory=dict)
    seed: int | None = None
    code: str = ""
    commit: str = ""
    changed: bool | None = None
    files: Mapping[str, str] = field(default_factory=dict)


Lineage = Mapping[str, ArtifactRecord]
"""Key -> the record of that artifact."""


def lineage_of(artifacts: Iterable[Artifact]) -> dict[str, ArtifactRecord]:
    """The records of these artifacts and of everything that they were made from, each once, sources last."""
    records: dict[str, ArtifactRecord] = {}
    waiting = [(artifact.key, artifact.path) for artifact in artifacts]
    while waiting:
        key, folder = waiting.pop(0)
        if key in records and records[key].has_record:
            continue
        record = records[key] = _read_record(key, folder)
        waiting += [(one, folder.parent / one) for keys in record.inputs.values() for one in keys]
    return records


def ancestors(
    lineage: Lineage,
    key: str,
    *,
    without: Collection[str] = (),
    stop_at: Callable[[ArtifactRecord], bool] = lambda artifact: False,
) -> list[ArtifactRecord]:
    """The records of an artifact and of what it was made from, sources last.

    without: parameters not to follow. stop_at: true for artifacts to leave out, with what they alone were made from.
    """
    records: dict[str, ArtifactRecord] = {}
    waiting = [key]
    while waiting:
        one = waiting.pop(0)
        if one in records or one not in lineage or stop_at(lineage[one]):
            continue
        record = records[one] = lineage[one]
        waiting += [each for name, keys in record.inputs.items() if name not in without for each in keys]
    return list(records.values())


def _read_record(key: str, folder: Path) -> ArtifactRecord:
    file = folder / RECORD
    if not file.is_file():
        return ArtifactRecord(key)
    content = json.loads(file.read_text(encoding="utf-8"))
    record = content["record"]
    code = (record.get("parts") or {}).get("code") or {}
    inputs = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in record["inputs"].items()}
    return ArtifactRecord(
        key=key,
        has_record=True,
        kind=str(content["kind"]),
        uses=str(record.get("uses", "")),
        info=content["info"],
        settings=record.get("settings", {}),
        inputs=inputs,
        versions=record.get("versions", {}),
        machine=record.get("machine", {}),
        seed=record.get("seed"),
        code=hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest() if code else "",
        commit=str(record.get("git_commit") or ""),
        changed=record.get("git_changed"),
        files={name: str(facts["sha256"]) for name, facts in content.get("files", {}).items()},
    )


NOT_LEARNED_FROM = ("target", "champion", "policy", "keep_out", "seen")
"""Inputs whose rows a drafter does not learn from; `keep_out` and `seen` are the benchmarks to leave out."""
CHECKING_MIXES = ("data.mix_chats", "data.mix_prompts")
"""Steps that search their training side, later turns included, for the prompts of their evaluation side."""
SPLITS = ("train", "validation", "test", "warm_up")
STDLIB, STDLIB_LICENCE = "python-stdlib", "PSF-2.0"
BY_FILE = "python-stdlib: by source file, so that no file is both trained on and measured on"
REASONS = {
    "contaminated": "held a benchmark's prompt or reference answer",
    "kept_out": "asked what the benchmarks ask",
    "asks_what_is_judged_on": "asked what the mix itself is judged on",
    "evaluation_side": "asked what fell on the evaluation side",
    "duplicates_across_splits": "stood in two splits",
    "exact_duplicate": "were exact duplicates",
    "near_duplicate": "were near duplicates",
    "duplicates": "were duplicates",
    "duplicates_within_split": "stood twice in a split",
}
"""Steps' names for rows left out as duplicates or as benchmark texts -> the reason, as in "rows that ..."."""


@dataclass(frozen=True)
class DataSource:
    """A source of rows. rows_read, rows_kept: None where not recorded; rows_by_split: {} where not recorded."""

    name: str
    step: str
    licence: str = ""
    rows_read: int | None = None
    rows_kept: int | None = None
    rows_by_split: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ExcludedRows:
    """Rows that one step left out. counts: reason -> rows. how: the search method, in a clause."""

    step: str
    counts: Mapping[str, int]
    how: str = ""


@dataclass(frozen=True)
class TrainingData:
    """Everything that is known about the training data of a drafter.

    answers:                facts of every Conversations that it, or the drafter that it started from, learned from.
    num_given:              how many of these have answers that the sources already had.
    checked_for_benchmarks: whether any step searched for benchmark texts.
    num_measured:           sets of prompts that something was measured on; None where not recorded.
    checked_for_measured:   whether all of these sets were searched for; None where not recorded.
    unchecked_sources:      sources with a way into training without a search for one of these sets.
    apart_by_split:         whether these sets and the training rows are sides of the same splits, for all sources.
    unrecorded:             keys without a record.
    """

    sources: Sequence[DataSource]
    excluded: Sequence[ExcludedRows]
    checked_for_benchmarks: bool
    split: str
    num_measured: int | None = None
    checked_for_measured: bool | None = None
    unchecked_sources: Sequence[str] = ()
    apart_by_split: bool = False
    answers: Sequence[Mapping[str, Any]] = ()
    num_given: int = 0
    unrecorded: Sequence[str] = ()

    @property
    def num_answers(self) -> object:
        """Number of training answers, or "an unknown number of"."""
        numbers = [(one.get("num_rows") or {}).get("train") for one in self.answers]
        counts = [int(number) for number in numbers if number is not None]
        return sum(counts) if len(counts) == len(numbers) else "an unknown number of"

    @property
    def num_answer_tokens(self) -> object:
        """Number of answer tokens, validation included; "?" where not recorded."""
        return self._sum_of("num_answer_tokens")

    @property
    def num_tokens(self) -> object:
        """Number of tokens of prompts and answers; "?" where not recorded."""
        return self._sum_of("num_tokens")

    @property
    def languages(self) -> Mapping[str, int]:
        """Language -> answer tokens; {} where not recorded."""
        if not all(one.get("languages") for one in self.answers):
            return {}
        return dict(sum((Counter(one["languages"]) for one in self.answers), Counter()))

    def _sum_of(self, name: str) -> object:
        numbers = [one[name] for one in self.answers if one.get(name) is not None]
        return sum(map(int, numbers)) if len(numbers) == len(self.answers) else "?"


def training_data(lineage: Lineage, draft_key: str) -> TrainingData:
    """The training data of the drafter with this key, without the target's own training data."""
    artifacts = ancestors(lineage, draft_key, without=NOT_LEARNED_FROM)
    answers = [one for one in artifacts if one.kind == "Conversations"]
    excluded = [entry for one in artifacts for entry in _excluded_rows(one)]
    sources = [entry for one in artifacts for entry in sources_of(one)]
    measured = _measured_prompts(lineage)
    keys = {prompts.key for prompts in measured or ()}
    looking = [one for one in artifacts if _checks_for_benchmarks(one, keys)]
    unchecked_sources = _unchecked_sources(lineage, draft_key, measured)
    split = "by what is asked: a question is on one side of the split only" if sources else ""
    by_file = any(one.uses == "data.collect_prompts" and one.info.get("source") == STDLIB for one in artifacts)
    return TrainingData(
        sources=sources,
        excluded=excluded,
        checked_for_benchmarks=bool(looking),
        split=BY_FILE if by_file else split,
        num_measured=None if measured is None else len(measured),
        checked_for_measured=_all_measured_checked(measured, looking),
        unchecked_sources=unchecked_sources,
        apart_by_split=bool(keys) and not unchecked_sources and keys <= {one.key for one in artifacts},
        answers=[one.info for one in answers],
        num_given=sum(one.uses == "data.write_given_answers" for one in answers),
        unrecorded=[one.key for one in artifacts if not one.has_record],
    )


def _measured_prompts(lineage: Lineage) -> list[ArtifactRecord] | None:
    """All sets of prompts that something was measured on; None where not recorded."""
    keys = {key for one in lineage.values() if one.kind == "Measurements" for key in one.inputs.get("prompts", ())}
    prompts = [lineage.get(key, ArtifactRecord(key)) for key in sorted(keys)]
    return prompts if prompts and all(one.has_record for one in prompts) else None


def _checks_for_benchmarks(artifact: ArtifactRecord, measured: Collection[str]) -> bool:
    """Whether a step searched for benchmark texts: by `keep_out`, or as a mix whose own evaluation side was measured.

    A mix that was not measured searched only for the prompts of its own split, which are no benchmark.
    """
    keep_out = artifact.inputs.get("keep_out") or artifact.settings.get("keep_out")
    return bool(keep_out) or (artifact.uses in CHECKING_MIXES and artifact.key in measured)


def _unchecked_sources(lineage: Lineage, draft_key: str, measured: Sequence[ArtifactRecord] | None) -> list[str]:
    """Names of sources with a way to the drafter on which no step searched for one of the measured sets of prompts.

    A search for one benchmark does not count for another. measured: None accepts a search for any.
    """
    if measured is None:
        return _sources_past(lineage, draft_key, lambda artifact: _checks_for_benchmarks(artifact, ()))
    names: dict[str, None] = {}
    for prompts in measured:
        names |= dict.fromkeys(_sources_past(lineage, draft_key, partial(_checks_for, prompts=prompts)))
    return list(names)


def _sources_past(lineage: Lineage, draft_key: str, stops: Callable[[ArtifactRecord], bool]) -> list[str]:
    """Names of sources with a way to the drafter on which `stops` is true for no step."""
    learned_from = ancestors(lineage, draft_key, without=NOT_LEARNED_FROM, stop_at=stops)
    return list(dict.fromkeys(source.name for artifact in learned_from for source in sources_of(artifact)))


def _all_measured_checked(measured: Sequence[ArtifactRecord] | None, looking: Sequence[ArtifactRecord]) -> bool | None:
    """Whether all measured sets of prompts were searched for; None where not recorded."""
    if measured is None:
        return None
    return all(any(_checks_for(one, prompts) for one in looking) for prompts in measured)


def _checks_for(artifact: ArtifactRecord, prompts: ArtifactRecord) -> bool:
    """Whether a searching step searched for these prompts, or made them itself as the other side of its split."""
    if artifact.key == prompts.key or prompts.key in artifact.inputs.get("keep_out", ()):
        return True
    source = str(artifact.settings.get("keep_out") or "")
    return bool(source) and source == str(prompts.settings.get("source", ""))


def sources_of(artifact: ArtifactRecord) -> Iterator[DataSource]:
    """The sources of rows that a step read."""
    info = artifact.info
    by_split = {split: int(info[f"num_{split}"]) for split in SPLITS if info.get(f"num_{split}")}
    if artifact.uses == "data.collect_chats":
        for name, counts in info.get("by_source", {}).items():
            yield DataSource(
                public_name(name), artifact.uses, counts.get("licence", ""), counts["read"], counts["kept"]
            )
    elif artifact.uses in ("data.collect_prompts", "data.collect_traffic"):
        name = str(info.get("source", ""))
        licence = STDLIB_LICENCE if name == STDLIB else ""
        yield DataSource(public_name(name), artifact.uses, licence, info.get("found"), sum(by_split.values()), by_split)
    elif artifact.uses == "data.collect_workloads":
        licences = info.get("licences", {})
        for name, count in info.get("sources", {}).items():
            licence = str(licences.get(name, "")) if isinstance(licences, Mapping) else ""
            yield DataSource(public_name(name), artifact.uses, licence, None, int(count))
    elif artifact.kind == "Features" and not artifact.inputs:
        yield DataSource(artifact.key[:12], artifact.uses)


def _excluded_rows(artifact: ArtifactRecord) -> Iterator[ExcludedRows]:
    """Rows that a step left out as duplicates or benchmark texts; counts of 0 are kept, since it searched."""
    info, settings = artifact.info, artifact.settings
    if artifact.uses == "data.deduplicate":
        counts = {name: int(info.get("dropped", {}).get(name, 0)) for name in ("exact_duplicate", "near_duplicate")}
        how = f"near duplicates share {info['similarity']:g} of their n-grams" if "similarity" in info else ""
        if artifact.inputs.get("keep_out"):
            counts = {"contaminated": int(info.get("dropped", {}).get("contaminated", 0)), **counts}
            length, share = settings.get("benchmark_ngram", "?"), settings.get("benchmark_overlap", "?")
            searched = f"{info.get('num_benchmark_texts', '?')} benchmark texts looked for by n-grams of {length} units"
            how = f"{searched}, {share} of them shared; {how}"
        yield ExcludedRows(artifact.uses, counts, how)
    elif artifact.uses == "data.mix_chats":
        dropped = info.get("dropped", {})
        counts = {name: int(dropped[name]) for name in REASONS if name in dropped}
        if counts:
            yield ExcludedRows(artifact.uses, counts)
    elif artifact.uses in ("data.collect_prompts", "data.collect_traffic", "data.mix_prompts"):
        looks = artifact.uses == "data.mix_prompts" or bool(settings.get("keep_out"))
        names = [name for name in REASONS if name in info and (name != "kept_out" or looks)]
        renamed = {"kept_out": "asks_what_is_judged_on"} if artifact.uses == "data.mix_prompts" else {}
        if names:
            yield ExcludedRows(artifact.uses, {renamed.get(name, name): int(info[name]) for name in names})
