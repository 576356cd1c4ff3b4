"""The training data of a drafter, from its lineage: sources with counts and licences, and the rows left out of it.

The model card shows it and provenance.json holds it. Facts without a record are reported as unknown, and a pipeline
without a step that searches for benchmark texts as having none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from components.publish.card.lineage import ArtifactRecord, Lineage, ancestors
from components.publish.names import public_name

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
    names: dict[str, None] = {}
    visited: set[str] = set()
    waiting = [draft_key]
    while waiting:
        key = waiting.pop(0)
        if key in visited or key not in lineage or stops(lineage[key]):
            continue
        visited.add(key)
        artifact = lineage[key]
        names |= dict.fromkeys(source.name for source in sources_of(artifact))
        waiting += [one for name, keys in artifact.inputs.items() if name not in NOT_LEARNED_FROM for one in keys]
    return list(names)


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
