"""Pipeline `eaglechat-mini` as pipelines.yaml has it, at tiny size: a drafter without Chinese guesses no Chinese."""

from __future__ import annotations

import csv
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_pipeline import draftsmith

from components.contract import UserError
from components.rows import AcceptanceByLanguage, read_rows
from flows.execution.local_run import RunOutcome, execute
from flows.planning.plan import RunOptions, plan_run
from storage.history.query import run_named_query

ROOT = Path(__file__).resolve().parents[1]
CHATS = Path(os.environ.get("DRAFTSMITH_DEV_DATA", ROOT.parent / "shared" / "data")) / "chat"
TINY: dict[str, dict[str, Any]] = {
    "target": {
        "vocab_size": 512,
        "num_heads": 4,
        "intermediate_size": 96,
        "decay_steps": 30,
        "tokens_per_step": 512,
        "sequence_length": 64,
        "decay_sequence_length": 128,
        "num_processes": 1,
        "matrix_lr": 0.03,
    },
    "test_prompts": {"num_warm_up": 2},
    "mix": {"num_validation": 8},
    "answers": {"max_new_tokens": 24, "batch_size": 16},
    "trial": {"draft_vocab_size": 56, "methods": ["eagle3"]},
    "draft": {"draft_vocab_size": 56, "batch_tokens": 512, "settings": {"eagle3": {"ttt_steps": 2}}, "eval_every": 20},
    "acceptance": {"max_new_tokens": 24},
}
ENGLISH = (
    ("What grows in the {}?", "In the {0} there grow green trees, and in the {0} there grow red flowers."),
    ("Who lives near the {}?", "Near the {0} there lives an old man with his dog and his two black cats."),
    (
        "When do people visit the {}?",
        "People visit the {0} in the morning, when the sun is bright and the air is cold.",
    ),
)
CHINESE = (
    ("{}里长着什么？", "在{0}里长着绿色的树木，在{0}里也长着红色的花朵。"),
    ("谁住在{}附近？", "在{0}附近住着一位老人，他有一条狗和两只黑色的猫。"),
    ("人们什么时候去{}？", "人们在早晨去{0}，那时候阳光明亮，空气很冷。"),
)
PLACES = (
    ("garden", "花园"), ("forest", "森林"), ("valley", "山谷"), ("village", "村庄"), ("harbour", "港口"),
    ("market", "市场"), ("castle", "城堡"), ("desert", "沙漠"), ("island", "海岛"), ("school", "学校"),
)  # fmt: skip
WHICH = (
    ("old", "古老的"),
    ("quiet", "安静的"),
    ("large", "巨大的"),
    ("small", "小小的"),
    ("white", "白色的"),
    ("new", "新建的"),
)


def write_chats(folder: Path) -> tuple[Path, Path]:
    """180 short chats in each language, the same ones, in two shapes."""
    folder.mkdir()
    english, chinese = [], []
    for (place, ort), (which, wie) in ((p, w) for p in PLACES for w in WHICH):
        for (ask, answer), (frage, antwort) in zip(ENGLISH, CHINESE, strict=True):
            name, namen = f"{which} {place}", f"{wie}{ort}"
            english.append({"instruction": ask.format(name), "input": "", "output": answer.format(name)})
            asked, told = {"role": "user", "content": frage.format(namen)}, antwort.format(namen)
            chinese.append({"messages": [asked, {"role": "assistant", "content": told}]})
    for rows in (english, chinese):
        random.Random(0).shuffle(rows)
    (folder / "english.json").write_text(json.dumps(english), encoding="utf-8")
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in chinese)
    (folder / "chinese.jsonl").write_text(lines + "\n", encoding="utf-8")
    return folder / "english.json", folder / "chinese.jsonl"


def write_tiny(folder: Path) -> Path:
    """pipelines.yaml with this pipeline alone, its settings cut down and nothing timed; returns the file."""
    written = yaml.safe_load((ROOT / "pipelines.yaml").read_text(encoding="utf-8"))["pipelines"]["eaglechat-mini"]
    for step in ("tuning", "step_cost", "depth", "end_to_end", "verdict", "release", "details"):
        del written["steps"][step]
    del written["steps"]["report"]["in"]["policy"]
    for step, settings in TINY.items():
        written["steps"][step]["with"] = {**written["steps"][step].get("with", {}), **settings}
    file = folder / "pipelines.yaml"
    file.write_text(yaml.safe_dump({"pipelines": {"eaglechat-mini": written}}, sort_keys=False), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunOutcome, Path]:
    """The outcome of a tiny run, and its home."""
    folder = tmp_path_factory.mktemp("mini")
    (folder / "m").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "m"))  # no waiting for what else this machine measures
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # down: it is not what this test is about
        english, chinese = write_chats(folder / "chats")
        params = {
            "english": str(english),
            "chinese": str(chinese),
            "target_steps": 120,
            "target_width": 48,
            "num_prompts": 48,
            "num_test_prompts": 24,
            "train_steps": 40,
        }
        options = RunOptions(file=write_tiny(folder), home=folder / "home", device="cpu")
        return execute(*plan_run("eaglechat-mini", params, options), how="direct"), folder / "home"


def test_without_chinese_in_the_mix_chinese_is_hardly_guessed(run: tuple[RunOutcome, Path]) -> None:
    outcome, _ = run
    rows = read_rows(outcome.artifacts["languages"].path, AcceptanceByLanguage)
    both, english = ({row.language: row for row in rows if row.trained_on == mix} for mix in (["en", "zh"], ["en"]))
    assert set(both) == set(english) == {"all", "en", "zh"}
    assert [both[code].num_prompts for code in ("en", "zh")] == [12, 12]
    assert english["zh"].verdict == "lower" and english["zh"].al < both["zh"].al - 0.2
    assert english["zh"].coverage is not None and both["zh"].coverage is not None
    assert english["zh"].coverage < 0.5 < both["zh"].coverage
    assert english["en"].al > 1.2 and english["en"].change is not None and english["zh"].change is not None
    assert english["en"].change > english["zh"].change


def test_the_report_shows_both_languages_with_intervals_and_says_what_fell(run: tuple[RunOutcome, Path]) -> None:
    outcome, home = run
    page = outcome.artifacts["report"]
    assert "Without Chinese in the training mix, acceptance length on Chinese falls from" in page.info["verdict"]
    with (page.path / "tables" / "languages.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert {row["language"] for row in table} == {"English", "Chinese", "all languages"} and len(table) == 6
    assert all("[" in row["acceptance length"] for row in table)
    assert [row["change"] == "-" for row in table] == [True, False] * 3
    columns, found = run_named_query(home, "languages", {"language": "zh"})
    assert [row[columns.index("verdict")] for row in found] == ["baseline", "lower"]


def test_nothing_that_is_benchmarked_was_trained_on(run: tuple[RunOutcome, Path]) -> None:
    artifacts = run[0].artifacts

    def lines(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]

    judged = [row for row in lines(artifacts["test_prompts"].path / "prompts.jsonl") if row["split"] == "test"]
    asked = {row["messages"][0]["content"] for row in judged}
    assert len(asked) == 24 and {row["language"] for row in judged} == {"en", "zh"}
    corpus = "".join(row["text"] for row in lines(artifacts["corpus"].path / "train.jsonl"))
    assert not any(question in corpus for question in asked)
    mixes = [artifacts[name] for name in artifacts if name.startswith("mix[")]
    assert len(mixes) == 2
    for mix in mixes:
        assert not asked & {row["messages"][0]["content"] for row in lines(mix.path / "prompts.jsonl")}


def test_the_target_answers_in_turns_of_its_own(run: tuple[RunOutcome, Path]) -> None:
    """It has learnt to end an answer: hardly any answer of the mix runs into the limit on text this short."""
    answers = [artifact for name, artifact in run[0].artifacts.items() if name.startswith("answers[")]
    info = answers[0].info
    assert info["num_ended"] > 0 and info["num_answer_tokens"] > 0


def test_without_files_it_ends_in_one_clear_line(tmp_path: Path) -> None:
    done = draftsmith(tmp_path / "home", "run", "eaglechat-mini", "--direct", "--file", str(ROOT / "pipelines.yaml"),
                      "-p", f"english={tmp_path}/none*.json")  # fmt: skip
    assert done.returncode == 2
    said = [line for line in done.stderr.strip().split("\n") if line]
    assert len(said) == 1 and "none*.json" in said[0], done.stderr


@pytest.mark.skipif(not CHATS.is_dir(), reason="the development chats are not here")
def test_real_chats_become_a_bilingual_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    params = {"english": f"{CHATS}/alpaca_en.json", "chinese": f"{CHATS}/alpaca_zh.json"}
    options = RunOptions(file=ROOT / "pipelines.yaml", home=tmp_path / "home", device="cpu", to_step="corpus")
    try:
        info = execute(*plan_run("eaglechat-mini", params, options), how="direct").artifacts["corpus"].info
    except UserError as error:
        pytest.fail(str(error))
    assert info["languages"]["train"]["en"] > 600 and info["languages"]["train"]["zh"] > 600
