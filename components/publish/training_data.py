"""What a drafter learned from, told from its lineage: sources with counts and licences, and what was kept out of it.

The model card shows it and provenance.json holds it. What no record tells is said to be unknown; a pipeline without a
step that looks for benchmark texts is said to have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from components.publish.lineage import Lineage, Made, ancestors
from components.publish.public_names import public_name

NOT_LEARNED_FROM = ("target", "champion", "policy", "keep_out", "seen")
"""Inputs whose rows a drafter does not learn from: what is kept out of training is the benchmark itself."""
LOOK_THROUGH = ("data.mix_chats", "data.mix_prompts")
"""Steps that look through what they train on, later turns and all, for what they deal to be judged on."""
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
"""What steps call rows that they leave out so that nothing is twice and nothing benchmarked: "rows that ..."."""


@dataclass(frozen=True)
class DataSource:
    """Where rows came from. read, kept: rows, None where no record tells. used: rows by split, {} where not told."""

    name: str
    step: str
    licence: str = ""
    read: int | None = None
    kept: int | None = None
    used: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptOut:
    """What one step left out: reason -> rows, and how it looked, in a clause."""

    step: str
    counts: Mapping[str, int]
    how: str = ""


@dataclass(frozen=True)
class TrainingData:
    """All of it.

    answers: facts of every Conversations that it, or a drafter it was continued from, learned from. given: how many of
    these the sources already had. looked_for_benchmarks: whether any step looked. num_measured: sets of prompts that
    something was measured on; None where no record tells. looked_for_measured: whether all of these are among what was
    looked for; None likewise. not_looked_in: sources whose rows reached training past every step that looks for one of
    these, or deals it apart from what it trains on. apart_by_split: whether the steps that dealt these keep all sources
    apart from them. unknown: keys without a record.
    """

    sources: Sequence[DataSource]
    kept_out: Sequence[KeptOut]
    looked_for_benchmarks: bool
    split: str
    num_measured: int | None = None
    looked_for_measured: bool | None = None
    not_looked_in: Sequence[str] = ()
    apart_by_split: bool = False
    answers: Sequence[Mapping[str, Any]] = ()
    given: int = 0
    unknown: Sequence[str] = ()

    @property
    def num_answers(self) -> object:
        """Answers in training, or "an unknown number of"."""
        found = [(one.get("num_rows") or {}).get("train") for one in self.answers]
        known = [int(number) for number in found if number is not None]
        return sum(known) if len(known) == len(found) else "an unknown number of"

    @property
    def num_answer_tokens(self) -> object:
        """Tokens that were learned from, validation included."""
        return self._sum("num_answer_tokens")

    @property
    def num_tokens(self) -> object:
        """Tokens of prompts and answers."""
        return self._sum("num_tokens")

    @property
    def languages(self) -> Mapping[str, int]:
        """Answer tokens by language, {} where not told."""
        if not all(one.get("languages") for one in self.answers):
            return {}
        return dict(sum((Counter(one["languages"]) for one in self.answers), Counter()))

    def _sum(self, name: str) -> object:
        found = [one[name] for one in self.answers if one.get(name) is not None]
        return sum(map(int, found)) if len(found) == len(self.answers) else "?"


def training_data(lineage: Lineage, draft_key: str) -> TrainingData:
    """What the drafter of this key learned from; the target's own training data is not followed."""
    made = ancestors(lineage, draft_key, without=NOT_LEARNED_FROM)
    answers = [one for one in made if one.kind == "Conversations"]
    left_out = [found for one in made for found in _kept_out(one)]
    sources = [found for one in made for found in sources_of(one)]
    measured = _measured(lineage)
    keys = {prompts.key for prompts in measured or ()}
    looking = [one for one in made if _looks(one, keys)]
    not_looked_in = _not_looked_in(lineage, draft_key, measured)
    split = "by what is asked: a question is on one side of the split only" if sources else ""
    by_file = any(one.uses == "data.collect_prompts" and one.info.get("source") == STDLIB for one in made)
    return TrainingData(
        sources=sources,
        kept_out=left_out,
        looked_for_benchmarks=bool(looking),
        split=BY_FILE if by_file else split,
        num_measured=None if measured is None else len(measured),
        looked_for_measured=_looked_for_measured(measured, looking),
        not_looked_in=not_looked_in,
        apart_by_split=bool(keys) and not not_looked_in and keys <= {one.key for one in made},
        answers=[one.info for one in answers],
        given=sum(one.uses == "data.write_given_answers" for one in answers),
        unknown=[one.key for one in made if not one.known],
    )


def _measured(lineage: Lineage) -> list[Made] | None:
    """All prompts that something was measured on; None where no record tells of any."""
    keys = {key for one in lineage.values() if one.kind == "Measurements" for key in one.inputs.get("prompts", ())}
    found = [lineage.get(key, Made(key)) for key in sorted(keys)]
    return found if found and all(one.known for one in found) else None


def _looks(made: Made, measured: Collection[str]) -> bool:
    """Whether a step looked for what is benchmarked: what it was told to keep out, or what it dealt and was measured.

    A mix that was not measured looked for its own split's questions only, which are no benchmark's.
    """
    told = made.inputs.get("keep_out") or made.settings.get("keep_out")
    return bool(told) or (made.uses in LOOK_THROUGH and made.key in measured)


def _not_looked_in(lineage: Lineage, draft_key: str, measured: Sequence[Made] | None) -> list[str]:
    """The names of sources from which a way leads to the drafter past every look for one of the measured prompts.

    A look for one benchmark is none for another. measured: None asks for a look of any kind.
    """
    if measured is None:
        return _unlooked(lineage, draft_key, lambda made: _looks(made, ()))
    found: dict[str, None] = {}
    for prompts in measured:
        found |= dict.fromkeys(_unlooked(lineage, draft_key, partial(_looked_for, prompts=prompts)))
    return list(found)


def _unlooked(lineage: Lineage, draft_key: str, looked: Callable[[Made], bool]) -> list[str]:
    """The names of sources from which a way leads to the drafter that passes no step of which `looked` is true."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    waiting = [draft_key]
    while waiting:
        key = waiting.pop(0)
        if key in seen or key not in lineage or looked(lineage[key]):
            continue
        seen.add(key)
        made = lineage[key]
        found |= dict.fromkeys(source.name for source in sources_of(made))
        waiting += [one for name, keys in made.inputs.items() if name not in NOT_LEARNED_FROM for one in keys]
    return list(found)


def _looked_for_measured(measured: Sequence[Made] | None, looking: Sequence[Made]) -> bool | None:
    """Whether all prompts that something was measured on were looked for; None where no record tells of any."""
    if measured is None:
        return None
    return all(any(_looked_for(one, prompts) for one in looking) for prompts in measured)


def _looked_for(made: Made, prompts: Made) -> bool:
    """Whether a step that looks looked for these prompts, or dealt them itself, apart from what it trains on."""
    if made.key == prompts.key or prompts.key in made.inputs.get("keep_out", ()):
        return True
    source = str(made.settings.get("keep_out") or "")
    return bool(source) and source == str(prompts.settings.get("source", ""))


def sources_of(made: Made) -> Iterator[DataSource]:
    """The sources that a step read, where it reads any."""
    info = made.info
    used = {split: int(info[f"num_{split}"]) for split in SPLITS if info.get(f"num_{split}")}
    if made.uses == "data.collect_chats":
        for name, counts in info.get("by_source", {}).items():
            yield DataSource(public_name(name), made.uses, counts.get("licence", ""), counts["read"], counts["kept"])
    elif made.uses in ("data.collect_prompts", "data.collect_traffic"):
        name = str(info.get("source", ""))
        licence = STDLIB_LICENCE if name == STDLIB else ""
        yield DataSource(public_name(name), made.uses, licence, info.get("found"), sum(used.values()), used)
    elif made.uses == "data.collect_workloads":
        licences = info.get("licences", {})
        for name, count in info.get("sources", {}).items():
            licence = str(licences.get(name, "")) if isinstance(licences, Mapping) else ""
            yield DataSource(public_name(name), made.uses, licence, None, int(count))
    elif made.kind == "Features" and not made.inputs:
        yield DataSource(made.key[:12], made.uses)


def _kept_out(made: Made) -> Iterator[KeptOut]:
    """What a step left out so that nothing is twice and nothing benchmarked; zeros count: it has looked."""
    info, settings = made.info, made.settings
    if made.uses == "data.deduplicate":
        counts = {name: int(info.get("dropped", {}).get(name, 0)) for name in ("exact_duplicate", "near_duplicate")}
        how = f"near duplicates share {info['similarity']:g} of their n-grams" if "similarity" in info else ""
        if made.inputs.get("keep_out"):
            counts = {"contaminated": int(info.get("dropped", {}).get("contaminated", 0)), **counts}
            length, share = settings.get("benchmark_ngram", "?"), settings.get("benchmark_overlap", "?")
            looked = f"{info.get('num_benchmark_texts', '?')} benchmark texts looked for by n-grams of {length} units"
            how = f"{looked}, {share} of them shared; {how}"
        yield KeptOut(made.uses, counts, how)
    elif made.uses == "data.mix_chats":
        dropped = info.get("dropped", {})
        counts = {name: int(dropped[name]) for name in REASONS if name in dropped}
        if counts:
            yield KeptOut(made.uses, counts)
    elif made.uses in ("data.collect_prompts", "data.collect_traffic", "data.mix_prompts"):
        asked = made.uses == "data.mix_prompts" or bool(settings.get("keep_out"))
        names = [name for name in REASONS if name in info and (name != "kept_out" or asked)]
        own = {"kept_out": "asks_what_is_judged_on"} if made.uses == "data.mix_prompts" else {}
        if names:
            yield KeptOut(made.uses, {own.get(name, name): int(info[name]) for name in names})
