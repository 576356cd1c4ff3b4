"""Faults that would come up after hours, each planted in a sound pipeline: a rehearsal finds all of them, in a line.

`check` finds some as well, `plan --on` others; those that only a run of the steps shows are planted in
commands/test_rehearse.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline_builder import Pipeline, step
from toy_garden import Cli
from usual_pipeline import usual

pytestmark = pytest.mark.usefixtures("fresh_fork_server")  # which loads what steps import, once for them all
MODEL = Path(__file__).resolve().parents[2] / "recipes" / "configs" / "meta-llama--Llama-3.1-8B-Instruct"
ONE_STEP = {
    "eagle3": {"ttt_steps": 1}
}  # a plan counts a training step: of seven drafted tokens it takes seven times as long
SERVED = {"base_url": "http://127.0.0.1:8000", "engine": "vllm"}


def sound(to: str = "release") -> Pipeline:
    """A pipeline without a fault, over an 8B."""
    return (
        usual("night", MODEL)
        .with_setting("target", dtype="bfloat16")
        .with_setting("prompts", source="prompts.jsonl", num_train=20_000)
        .with_setting("answers", max_new_tokens=512)
        .up_to(to)
    )


CHECKED: dict[str, tuple[Callable[[], Pipeline], str]] = {
    "a format that cannot take the drafter": (
        lambda: sound().with_setting("draft", method="medusa").with_setting("release", engines=["tensorrt-llm"]),
        "TensorRT-LLM does not serve medusa",
    ),
    "a limit of an engine": (
        lambda: (
            sound()
            .with_setting("draft", settings={"eagle3": {"fc_norm": True}})
            .with_setting("release", engines=["sglang"])
        ),
        "SGLang drops fc_norm",
    ),
    "an engine that nobody knows": (
        lambda: sound().with_setting("release", engines=["vlm"]),
        "did you mean 'vllm'?",
    ),
    "an unknown setting of an engine's server": (
        lambda: sound("draft").with_steps(
            served=step("bench.measure_server", "target", "prompts", servers=[{**SERVED, "modl": "m"}])
        ),
        "modl",
    ),
    "a draft vocabulary above the target's": (
        lambda: sound().with_setting("draft", draft_vocab_size=200_000),
        "the target has 128256 tokens: give 128256 at most",
    ),
    "a window too short": (
        lambda: sound().with_setting("acceptance", max_new_tokens=131_072),
        "leave no room for a prompt in the target's 131072 positions",
    ),
    "groups that divide no layer": (
        lambda: sound("draft").with_steps(
            small=step("drafts.quantise_draft", "draft", weights="int4", group_size=96),
        ),
        "groups of 96 do not divide the 4096 inputs of q_proj",
    ),
    "a piece that does not fit": (
        lambda: sound().with_inputs("acceptance", draft="features"),
        "'draft'",
    ),
    "a source that no mix has": (
        lambda: sound("prompts").with_steps(
            chats=step("data.collect_chats", sources=[{"path": "chats.jsonl", "name": "mine"}]),
            mixed=step("data.mix_chats", "chats", strata="source", weights={"mien": 1}),
        ),
        "no source is called 'mien' (did you mean 'mine'?)",
    ),
    "a method with another's settings": (
        lambda: sound().with_setting("draft", settings={"eagle3": {"num_heads": 3}}),
        "num_heads",
    ),
}

PLANNED: dict[str, tuple[Callable[[], Pipeline], str, str]] = {
    "a disk too small": (lambda: sound("features"), "small", "on a disk of 100.0 GB"),
    "a target that one GPU does not hold": (lambda: sound("answers"), "small", "of it target"),
    "more processes than GPUs": (
        lambda: sound("draft").with_setting("draft", processes=16, settings=ONE_STEP),
        "h100x8",
        "needs 16 GPUs, and h100x8 has 8: set processes: 8 and nodes: 2",
    ),
    "heads that tp_size does not divide": (
        lambda: sound("answers").with_setting("target", tp_size=16),
        "h100x16",
        "tp_size: 16 does not divide its 32 and 8 heads: set tp_size: 8",
    ),
    "layers spread over GPUs that are not there": (
        lambda: sound("answers").with_setting("target", device_map="auto"),
        "epyc9654",
        "device_map: auto spreads layers over GPUs, and this machine has none",
    ),
}
SMALL = (
    "machines: {small: {about: s, kind: gpu, tflops: {float32: 1, bfloat16: 2}, memory_gb: 12, bandwidth_gb_s: 100,"
    " host: {cores: 1, memory_gb: 8, disk_gb: 100}}}"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, where they are, with prompts, chats and a machine of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machines.yaml").write_text(SMALL)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Say something about trees."}\n')
    turns = [{"role": "user", "content": "Say trees."}, {"role": "assistant", "content": "Trees."}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n")
    return tmp_path


def told(draftsmith: Cli, command: str, made: Pipeline, folder: Path, *options: Any) -> tuple[int, list[str]]:
    """The exit code and all lines of a command."""
    file = folder / "pipelines.yaml"
    file.write_text(made.text, encoding="utf-8")
    named = [] if command == "check" else [made.name]
    code, out, err = draftsmith(command, *named, "--file", file, *options)
    return code, (out + err).splitlines()


def test_the_pipeline_that_faults_are_planted_in_is_sound(draftsmith: Cli, home: Path, folder: Path) -> None:
    code, lines = told(draftsmith, "check", sound(), folder)
    assert code == 0, lines
    planned = sound("draft").with_setting("draft", settings=ONE_STEP)
    code, lines = told(draftsmith, "plan", planned, folder, "--on", "h100")
    assert code == 0, lines


@pytest.mark.parametrize("command", ["check", "rehearse"])
@pytest.mark.parametrize("fault", CHECKED)
def test_check_and_a_rehearsal_find_it_in_one_line(
    fault: str, command: str, draftsmith: Cli, home: Path, folder: Path
) -> None:
    plant, words = CHECKED[fault]
    code, lines = told(draftsmith, command, plant(), folder)
    assert code != 0
    assert len([line for line in lines if words in line]) == 1, lines


@pytest.mark.parametrize("fault", PLANNED)
def test_plan_finds_it_in_one_line(fault: str, draftsmith: Cli, home: Path, folder: Path) -> None:
    plant, machine, words = PLANNED[fault]
    code, lines = told(draftsmith, "plan", plant(), folder, "--on", machine)
    assert code == 1
    assert [line for line in lines if line.startswith("does not fit") and words in line], lines


@pytest.mark.parametrize("fault", PLANNED)
def test_a_rehearsal_lists_it_with_what_fails_in_it(fault: str, draftsmith: Cli, home: Path, folder: Path) -> None:
    """Beside it the prompts' column is misnamed, so that the rest of the rehearsal ends at once."""
    plant, machine, words = PLANNED[fault]
    (folder / "prompts.jsonl").write_text('{"promt": "Say something about trees."}\n')
    code, lines = told(draftsmith, "rehearse", plant(), folder, "--on", machine)
    assert code == 1
    before, listed = f"does not fit {machine}: ", f"{machine} "
    assert [line for line in lines if line.startswith(before) and words in line], lines
    assert [line for line in lines if line.startswith(listed) and "failed" in line and words in line], lines
    assert [line for line in lines if line.startswith("prompts ") and "failed" in line and "promt" in line], lines


def test_a_rehearsal_says_what_does_not_fit_here_and_does_not_fail_by_it(
    draftsmith: Cli, home: Path, folder: Path
) -> None:
    made = usual("night", to="features").with_setting("prompts", num_train=20_000_000)
    code, lines = told(draftsmith, "rehearse", made, folder)
    assert code == 0, lines
    said = [line for line in lines if line.startswith("the real run does not fit this machine: the run leaves")]
    assert len(said) == 1 and "--on MACHINE" in said[0], lines


def test_a_pool_that_goes_by_a_machines_name_is_that_machine(draftsmith: Cli, home: Path, folder: Path) -> None:
    (folder / "prompts.jsonl").write_text('{"promt": "Say something about trees."}\n')
    code, lines = told(draftsmith, "rehearse", sound("answers").with_keys(runs_on="small"), folder)
    assert code == 1 and lines[-1].endswith("; the real run does not fit small"), lines
