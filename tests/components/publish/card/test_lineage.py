"""A lineage is everything that an artifact was made from, each once; of training data it claims what records say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recorded_lineage import put

from components.contract import Artifact, Draft
from components.publish.card.lineage import Lineage, TrainingData, ancestors, lineage_of, training_data

INPUTS: dict[str, dict[str, object]] = {
    "draft": {"target": "target", "features": ["features"]},
    "features": {"target": "target", "prompts": ["train", "lost"]},
    "train": {},
    "target": {},
}


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    for key, inputs in INPUTS.items():
        (tmp_path / key).mkdir()
        record = {"inputs": inputs, "uses": f"room.make_{key}", "git_commit": None}
        content = {"kind": "Draft", "info": {"name": key}, "record": record}
        (tmp_path / key / "artifact.json").write_text(json.dumps(content))
    return lineage_of([Draft(key="draft", path=tmp_path / "draft")])


def test_each_artifact_stands_once_and_sources_last(lineage: Lineage) -> None:
    assert list(lineage) == ["draft", "target", "features", "train", "lost"]
    assert lineage["features"].inputs == {"target": ("target",), "prompts": ("train", "lost")}
    assert lineage["train"].uses == "room.make_train" and lineage["train"].info == {"name": "train"}


def test_an_artifact_without_a_record_is_known_by_its_key_alone(lineage: Lineage) -> None:
    assert not lineage["lost"].has_record and lineage["lost"].uses == "" and lineage["lost"].inputs == {}


def test_ancestors_do_not_follow_inputs_that_are_left_out(lineage: Lineage) -> None:
    assert [one.key for one in ancestors(lineage, "draft")] == ["draft", "target", "features", "train", "lost"]
    assert [one.key for one in ancestors(lineage, "draft", without=("features",))] == ["draft", "target"]
    assert ancestors(lineage, "unknown") == []


class Store:
    """Artifacts by one letter, in a store of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[Artifact] = []

    def put(
        self, letter: str, kind: str, uses: str, info: dict[str, Any], settings: Any = None, **inputs: Any
    ) -> Artifact:
        keys = {name: [one * 64 for one in given] for name, given in inputs.items()}
        self.made.append(put(self.folder, letter * 64, kind, uses, info, settings=settings or {}, inputs=keys))
        return self.made[-1]

    def chats(self, letter: str, name: str) -> None:
        self.put(
            letter, "Chats", "data.collect_chats", {"by_source": {name: {"read": 90, "kept": 80, "licence": name[:3]}}}
        )

    def benchmark(self, letter: str, name: str) -> None:
        self.put(letter, "Prompts", "data.collect_workloads", {"sources": {name: 9}}, {"source": name})

    def trained(self, letter: str, prompts: str, answers: str, features: str, tokens: int, **inputs: str) -> None:
        facts = {"num_rows": {"train": tokens // 10}, "num_tokens": 2 * tokens, "num_answer_tokens": tokens}
        facts |= {"languages": {"en": tokens}}
        self.put(answers, "Conversations", "data.write_answers", facts, prompts=prompts, target="t")
        self.put(features, "Features", "data.record_features", {}, answers=answers, target="t")
        self.put(letter, "Draft", "drafts.train_draft", {"method": "eagle3"}, features=features, target="t", **inputs)

    def told(self) -> TrainingData:
        return training_data(lineage_of(self.made), "d" * 64)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def clean(store: Store, letter: str, chats: str, keep_out: str, contaminated: int = 3) -> None:
    facts = {"dropped": {"contaminated": contaminated}}
    store.put(letter, "Chats", "data.deduplicate", facts, chats=chats, keep_out=keep_out)


def test_what_is_kept_out_of_training_is_no_source_of_it(store: Store) -> None:
    store.chats("a", "chatter")
    store.benchmark("b", "the-benchmark")
    clean(store, "c", "a", "b")
    store.put("p", "Prompts", "data.mix_chats", {"num_train": 8}, chats="c")
    store.trained("d", "p", "w", "f", 100)
    store.put("m", "Measurements", "bench.measure_acceptance", {}, prompts="b", draft="d")
    told = store.told()
    assert [source.name for source in told.sources] == ["chatter"], "the benchmark is not what it learned from"
    assert told.checked_for_benchmarks and told.checked_for_measured and not told.unchecked_sources


def test_a_look_for_other_benchmarks_is_no_look_for_what_was_measured(store: Store) -> None:
    store.chats("a", "chatter")
    store.benchmark("b", "the-benchmark")
    store.benchmark("e", "another")
    clean(store, "c", "a", "e")
    store.put("p", "Prompts", "data.mix_chats", {"num_train": 8}, chats="c")
    store.trained("d", "p", "w", "f", 100)
    assert store.told().checked_for_measured is None, "no record of what it was measured on"
    store.put("m", "Measurements", "bench.compare_end_to_end", {}, prompts="b", drafts="d")
    assert store.told().checked_for_measured is False


def test_a_source_that_went_past_the_look_is_named(store: Store) -> None:
    store.chats("a", "chatter")
    store.chats("g", "gossip")
    store.benchmark("b", "the-benchmark")
    clean(store, "c", "a", "b")
    store.put("p", "Prompts", "data.mix_chats", {"num_train": 8}, chats="cg")
    store.trained("d", "p", "w", "f", 100)
    told = store.told()
    assert {source.name for source in told.sources} == {"chatter", "gossip"}
    assert list(told.unchecked_sources) == ["gossip"]


def test_a_drafter_that_was_continued_learned_from_both_trainings(store: Store) -> None:
    store.chats("a", "chatter")
    store.put("p", "Prompts", "data.mix_chats", {"num_train": 8}, chats="a")
    store.trained("e", "p", "w", "f", 100)
    store.trained("d", "p", "x", "g", 20, start_from="e")
    told = store.told()
    assert (told.num_answers, told.num_answer_tokens, told.num_tokens) == (12, 120, 240)
    assert told.languages == {"en": 120} and len(told.answers) == 2


def test_prompts_that_one_step_dealt_are_looked_for_by_it(store: Store) -> None:
    facts = {"num_train": 9, "num_test": 3, "kept_out": 2, "found": 20, "source": "rows.jsonl"}
    store.put("p", "Prompts", "data.collect_prompts", facts, {"source": "rows.jsonl", "keep_out": "hf:exam"})
    store.trained("d", "p", "w", "f", 100)
    store.put("m", "Measurements", "bench.measure_acceptance", {}, prompts="p", draft="d")
    assert store.told().checked_for_measured is True
    store.put("n", "Measurements", "bench.measure_acceptance", {}, prompts="b", draft="d")
    store.put("b", "Prompts", "data.collect_prompts", {"num_test": 3}, {"source": "hf:exam"})
    assert store.told().checked_for_measured is True
    store.put("b", "Prompts", "data.collect_prompts", {"num_test": 3}, {"source": "hf:other"})
    assert store.told().checked_for_measured is False


def two_sources(store: Store, dropped: dict[str, int], *, keep_out: str = "b", other: str = "") -> TrainingData:
    """A looked through for the benchmark b, B not or for another one; both mixed, measured on b."""
    store.chats("a", "A")
    store.chats("g", "B")
    store.benchmark("b", "gsm8k")
    store.benchmark("e", "another")
    clean(store, "c", "a", keep_out)
    if other:
        clean(store, "h", "g", other)
    store.put("p", "Prompts", "data.mix_chats", {"num_train": 8, "dropped": dropped}, chats="ch" if other else "cg")
    store.trained("d", "p", "w", "f", 100)
    store.put("m", "Measurements", "bench.measure_acceptance", {}, prompts="b", draft="d")
    return store.told()


@pytest.mark.parametrize("dropped", [{}, {"asks_what_is_judged_on": 1}])
def test_a_mix_that_checks_its_own_split_has_not_looked_for_a_benchmark(store: Store, dropped: dict[str, int]) -> None:
    told = two_sources(store, dropped)
    assert told.checked_for_measured and list(told.unchecked_sources) == ["B"]


def test_a_look_for_another_benchmark_leaves_a_source_not_looked_in(store: Store) -> None:
    assert list(two_sources(store, {}, other="e").unchecked_sources) == ["B"]


def test_of_several_measured_benchmarks_each_is_looked_for_by_itself(store: Store) -> None:
    two_sources(store, {}, keep_out="be", other="b")
    store.put("n", "Measurements", "bench.measure_acceptance", {}, prompts="e", draft="d")
    told = store.told()
    assert (told.num_measured, told.checked_for_measured, list(told.unchecked_sources)) == (2, True, ["B"])


def test_a_split_keeps_apart_only_what_it_dealt_itself(store: Store) -> None:
    """gsm8k and a mix of chats share no split; prompts of one collection do."""
    store.chats("a", "A")
    store.benchmark("b", "gsm8k")
    facts = {"num_train": 8, "dropped": {"asks_what_is_judged_on": 1}}
    store.put("p", "Prompts", "data.mix_chats", facts, chats="a")
    store.trained("d", "p", "w", "f", 100)
    assert not store.told().apart_by_split, "nobody knows what it was measured on"
    store.put("m", "Measurements", "bench.measure_acceptance", {}, prompts="b", draft="d")
    told = store.told()
    assert (told.checked_for_benchmarks, told.apart_by_split, list(told.unchecked_sources)) == (False, False, ["A"])


def test_prompts_of_one_collection_are_apart_by_their_split_alone(store: Store) -> None:
    facts = {"num_train": 9, "num_test": 3, "kept_out": 0, "found": 20, "source": "python-stdlib"}
    store.put("p", "Prompts", "data.collect_prompts", facts, {"source": "python-stdlib", "keep_out": ""})
    store.trained("d", "p", "w", "f", 100)
    store.put("m", "Measurements", "bench.measure_acceptance", {}, prompts="p", draft="d")
    told = store.told()
    assert (told.checked_for_benchmarks, told.apart_by_split, list(told.unchecked_sources)) == (False, True, [])


def test_what_a_mix_of_prompts_leaves_out_is_what_it_is_judged_on_itself(store: Store) -> None:
    store.put("p", "Prompts", "data.mix_prompts", {"num_train": 9, "num_test": 3, "kept_out": 2})
    store.trained("d", "p", "w", "f", 100)
    (left_out,) = store.told().excluded
    assert left_out.counts == {"asks_what_is_judged_on": 2} and not store.told().checked_for_benchmarks
    store.put("m", "Measurements", "bench.measure_acceptance", {}, prompts="p", draft="d")
    assert store.told().checked_for_benchmarks and store.told().checked_for_measured
