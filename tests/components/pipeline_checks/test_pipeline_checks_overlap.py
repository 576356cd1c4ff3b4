"""A pipeline that trains on what it benchmarks is refused before anything runs; one that splits its rows is not.

Two origins share rows when they name the same files, or the same split of the same data set.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.contract import UserError
from components.pipeline_checks.overlap import Origin, after_split, origins_of, same_rows, share_questions
from flows.planning.wiring import check_spec
from flows.spec.schema import load_spec

ROOT = Path(__file__).parents[3]

PIPELINE = """
pipelines:
  p:
    steps:
      target: {{uses: targets.load_target, with: {{model: builtin}}}}
{train}
{bench}
      answers: {{uses: data.write_answers, in: {{target: target, prompts: {trained}}}}}
      features: {{uses: data.record_features, in: {{target: target, answers: answers}}}}
      draft: {{uses: drafts.train_draft, in: {{target: target, features: features}}}}
      judged: {{uses: bench.measure_acceptance, in: {{target: target, draft: draft, prompts: {judged}}}}}
"""

Check = Callable[..., None]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks a pipeline whose training rows and benchmark come from these steps."""
    monkeypatch.chdir(tmp_path)

    def run(train: str, bench: str = "", trained: str = "train", judged: str = "bench") -> None:
        indented = ["\n".join(f"      {line}" for line in text.strip().splitlines()) for text in (train, bench)]
        file = tmp_path / "pipelines.yaml"
        file.write_text(PIPELINE.format(train=indented[0], bench=indented[1], trained=trained, judged=judged))
        check_spec(load_spec(file), outside=lambda name: "Prompts")

    return run


def prompts(name: str, source: str, more: str = "") -> str:
    return f'{name}: {{uses: data.collect_prompts, with: {{source: "{source}"{more}}}}}'


def workloads(source: str) -> str:
    return f"bench: {{uses: data.collect_workloads, with: {{sources: [{source}]}}}}"


def chats(source: str, more: str = "") -> str:
    return (
        f"chats: {{uses: data.collect_chats, with: {{sources: [{source}]}}}}\n"
        f"train: {{uses: data.mix_chats, in: {{chats: chats}}{more}}}"
    )


OWN = "{path: %s, workload: exam, language: en}"


@pytest.mark.parametrize(
    ("train", "bench"),
    [
        (prompts("train", "gsm8k.jsonl"), workloads(OWN % "gsm8k.jsonl")),
        (prompts("train", "./x/../gsm8k.jsonl"), workloads(OWN % "gsm8k.jsonl")),
        (prompts("train", "data"), workloads(OWN % "data/gsm8k.jsonl")),
        (prompts("train", "data/*.jsonl"), workloads(OWN % "data/gsm8k.jsonl")),
        (prompts("train", "data/gsm8k.jsonl"), workloads('{path: "data/*.jsonl", workload: exam, language: en}')),
        (prompts("train", "hf:openai/gsm8k/main:test"), workloads("gsm8k")),
        (prompts("train", "hf:OpenAI/gsm8k:test"), workloads("gsm8k")),
        (prompts("train", "hf:openai/gsm8k/main@abc123:test"), workloads("gsm8k")),
        (chats('"hf:openai/gsm8k/main:test"'), workloads("gsm8k")),
        (chats("data/chats.jsonl"), workloads(OWN % "data/chats.jsonl")),
        (chats('"file:///in/chats.jsonl"'), workloads(OWN % "/in/chats.jsonl")),
        (chats('"hf://datasets/openai/gsm8k/main/test-00000-of-00001.parquet"'), workloads("gsm8k")),
        (chats('"hf://datasets/OpenAI/gsm8k@main/main/*.parquet"'), workloads("gsm8k")),
        (chats("data/deep"), prompts("bench", "data/deep/er/chats.jsonl", ", num_train: 0, evaluation_percent: 100")),
        (
            chats("sharegpt"),
            workloads('{path: "hf:Aeala/ShareGPT_Vicuna_unfiltered:train", workload: x, language: en}'),
        ),
        (
            prompts("train", "a.jsonl", ", evaluation_percent: 10"),
            prompts("bench", "a.jsonl", ", evaluation_percent: 30"),
        ),
    ],
)
def test_the_same_rows_on_both_sides_are_refused(check: Check, train: str, bench: str) -> None:
    with pytest.raises(UserError) as caught:
        check(train, bench)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("pipelines.yaml:6: step '") and ": trains on " in line
    assert "'bench' (line " in line and "benchmarks: " in line


@pytest.mark.parametrize(
    ("train", "bench"),
    [
        (prompts("train", "a.jsonl"), workloads(OWN % "b.jsonl")),
        (prompts("train", "data"), workloads(OWN % "database/gsm8k.jsonl")),
        (prompts("train", "data/*.jsonl"), workloads(OWN % "data/gsm8k.parquet")),
        (prompts("train", "hf:openai/gsm8k/main:train"), workloads("gsm8k")),
        (chats('"hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet"'), workloads("gsm8k")),
        (prompts("train", "hf:openai/gsm8k/socratic:test"), workloads("gsm8k")),
        (prompts("train", "hf:other/gsm8k/main:test"), workloads("gsm8k")),
        (chats("sharegpt"), workloads("mt-bench, gsm8k")),
        (prompts("train", "python-stdlib"), prompts("bench", "python-stdlib", ", num_train: 0")),
        (prompts("train", "a.jsonl"), prompts("bench", "a.jsonl", ", num_test: 99")),  # one hash splits both
        (prompts("train", "data", ', keep_out: "data/b.jsonl"'), workloads(OWN % "data/b.jsonl")),
    ],
)
def test_other_rows_other_splits_and_agreeing_splits_pass(check: Check, train: str, bench: str) -> None:
    check(train, bench)


def test_one_step_that_splits_its_rows_serves_both_sides(check: Check) -> None:
    check(prompts("train", "a.jsonl"), judged="train")
    check(chats("./data"), judged="train")


def test_what_is_only_kept_out_is_not_trained_on(check: Check) -> None:
    train = """
chats: {uses: data.collect_chats, with: {sources: [chats.jsonl]}}
clean: {uses: data.deduplicate, in: {chats: [chats], keep_out: [bench]}}
train: {uses: data.mix_chats, in: {chats: [clean]}}
"""
    check(train, workloads(OWN % "exam.jsonl"))


def test_part_of_the_training_rows_may_be_judged_on_where_it_is_taken_out_of_them(check: Check) -> None:
    bench = prompts("bench", "chats.jsonl", ", num_train: 0")
    train = """
chats: {uses: data.collect_chats, with: {sources: [chats.jsonl]}}
clean: {uses: data.deduplicate, in: {chats: [chats]%s}}
train: {uses: data.mix_chats, in: {chats: [clean]}}
"""
    check(train % ", keep_out: [bench]", bench)
    with pytest.raises(UserError, match=r"or wire 'bench' into `keep_out` of data\.deduplicate"):
        check(train % "", bench)
    with pytest.raises(UserError, match="it is a benchmark as a whole"):  # nothing but the benchmark would be left out
        check(train % ", keep_out: [bench]", workloads(OWN % "chats.jsonl"))


def test_two_mixes_of_the_same_chats_share_no_question_where_their_splits_agree(check: Check) -> None:
    other = "bench: {uses: data.mix_chats, in: {chats: [chats]}, with: {evaluation_percent: %d}}"
    check(chats("./data"), other % 5)
    with pytest.raises(UserError, match=r"step 'chats': trains on \./data, which 'bench'"):
        check(chats("./data"), other % 20)


def test_a_drafter_that_is_gone_on_with_brings_its_rows(check: Check) -> None:
    bench = workloads(OWN % "exam.jsonl") + "\n" + prompts("first", "exam.jsonl")
    bench += """
first_answers: {uses: data.write_answers, in: {target: target, prompts: first}}
first_features: {uses: data.record_features, in: {target: target, answers: first_answers}}
first_draft: {uses: drafts.train_draft, in: {target: target, features: first_features}}
"""
    with pytest.raises(UserError, match=r"step 'first': trains on exam\.jsonl"):
        check(prompts("train", "other.jsonl"), bench)


def test_links_are_followed(check: Check, tmp_path: Path) -> None:
    (tmp_path / "exam.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "alias.jsonl").symlink_to("exam.jsonl")
    with pytest.raises(UserError, match=r"trains on alias\.jsonl"):
        check(prompts("train", "alias.jsonl"), workloads(OWN % "exam.jsonl"))


def test_every_pipeline_of_the_house_passes() -> None:
    check_spec(load_spec(ROOT / "pipelines.yaml"), outside=lambda name: name.split("(")[1].rstrip(")"))


def test_files_folders_and_patterns_overlap_by_the_files_in_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/one.jsonl", "a/two.jsonl", "three.jsonl"):
        (tmp_path / name).write_text("{}\n")

    def overlap(one: str, other: str) -> bool:
        origins = [Origin(path, path=str(tmp_path / path)) for path in (one, other)]
        assert same_rows(*origins) == same_rows(*reversed(origins))
        return same_rows(*origins)

    assert overlap("a", "a/one.jsonl") and overlap("a/*.jsonl", "a/two.jsonl") and overlap("a/*.jsonl", "a/t*.jsonl")
    assert not overlap("a", "three.jsonl") and not overlap("a/one.jsonl", "a/two.jsonl") and not overlap("a/o*", "a/t*")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("o/n", "", "train"), ("o/n", "main", "train"), True),
        (("o/n", "", ""), ("o/n", "", "test"), True),
        (("o/n", "", "train"), ("o/n", "", "test"), False),
        (("o/n", "a", "test"), ("o/n", "b", "test"), False),
        (("o/n", "", "test"), ("o/m", "", "test"), False),
    ],
)
def test_splits_of_a_data_set_are_the_same_where_nothing_tells_them_apart(one: Any, other: Any, same: bool) -> None:
    origins = [Origin("x", repository=name, config=config, split=split) for name, config, split in (one, other)]
    assert same_rows(*origins) is same


def test_two_steps_share_no_question_where_their_splits_agree() -> None:
    settings = {"source": "rows.jsonl", "evaluation_percent": 20}
    (origin,) = origins_of("collect_prompts", settings)
    assert not share_questions(origin, origin)
    (larger,) = origins_of("collect_prompts", {**settings, "evaluation_percent": 30})
    assert share_questions(origin, larger) and not share_questions(larger, origin)
    (benchmark,) = origins_of("collect_prompts", {**settings, "num_train": 0, "evaluation_percent": 100})
    assert benchmark.is_benchmark and share_questions(origin, benchmark)
    (kept_out,) = origins_of("collect_prompts", {"source": "rows.jsonl", "keep_out": "rows.jsonl"})
    assert not share_questions(kept_out, benchmark)


def test_a_mix_splits_the_rows_of_chats_and_a_preset_is_its_repository() -> None:
    (chats,) = origins_of("collect_chats", {"sources": ["ultrachat"]})
    assert chats.repository == "huggingfaceh4/ultrachat_200k" and not chats.held_out_percent
    assert after_split(chats, {"evaluation_percent": 5}).held_out_percent == 5
    (workload,) = origins_of("collect_workloads", {"sources": ["gsm8k"]})
    assert not workload.for_training and workload.repository == "openai/gsm8k"
    assert origins_of("collect_prompts", {"source": "python-stdlib"}) == origins_of("mix_chats", {"x": 1}) == []
