"""check tells which files are not there yet, with the line that names them, and refuses nothing for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_builder import pipeline, step

from flows.cli import main


def test_check_tells_missing_files_until_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    named = pipeline(
        "p",
        target=step("targets.load_target", model="my-model"),
        hub=step("targets.load_target", model="owner/name"),
        chats=step("data.collect_chats", sources=["chats/*.jsonl", "s3://bucket/more.jsonl", "ultrachat"]),
        prompts=step("data.collect_prompts", source="prompts.jsonl"),
        tasks=step("data.collect_workloads", sources=["gsm8k", {"path": "t.csv", "workload": "w", "language": "en"}]),
        more=step("data.collect_prompts", source="python-stdlib"),
    )
    (tmp_path / "pipelines.yaml").write_text(named.text)
    assert main(["check"]) == 0
    first, *lines = capfd.readouterr().out.splitlines()
    assert first == "pipelines.yaml is right: p (6 steps)"
    assert [line.split("step ")[1].split(":")[0] for line in lines] == ["'target'", "'chats'", "'prompts'", "'tasks'"]
    number = next(i for i, line in enumerate(named.text.splitlines(), 1) if "prompts.jsonl" in line)
    assert (
        f"not there yet: pipelines.yaml:{number}: step 'prompts': source: prompts.jsonl: there is no such file"
        in lines[2]
    )
    (tmp_path / "my-model").mkdir()
    (tmp_path / "chats").mkdir()
    for name in ("chats/one.jsonl", "prompts.jsonl", "t.csv"):
        (tmp_path / name).write_text("{}\n")
    assert main(["check"]) == 0
    assert capfd.readouterr().out == first + "\n"
