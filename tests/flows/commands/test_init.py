"""`draftsmith init` writes a pipeline that is right, explains itself, and is written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tiny_targets import make_tiny_target
from toy_garden import Cli

from components.engines.profiles import PROFILES
from flows.commands.init import first_pipeline


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps({'prompt': f'Say {n} trees.'})}\n" for n in range(40)), encoding="utf-8")
    return file


def test_what_it_writes_is_right_and_of_this_model_these_prompts_and_engines(
    draftsmith: Cli, home: Path, tmp_path: Path, prompts: Path
) -> None:
    model, folder = make_tiny_target("llama", tmp_path / "model"), tmp_path / "work"
    asked = ("--model", model, "--prompts", prompts, "--engine", "vllm", "--method", "mtp", "--method", "medusa")
    asked += ("--draft-vocab-size", 128)
    code, out, err = draftsmith("init", folder, *asked, "--name", "swift")
    assert code == 0, out + err
    file = folder / "pipelines.yaml"
    assert f"{file}: pipeline swift, 15 steps" in out
    assert "its first run takes about" in out and f"draftsmith run swift -f {file}" in out
    steps = yaml.safe_load(file.read_text(encoding="utf-8"))["pipelines"]["swift"]["steps"]
    assert steps["target"]["with"]["model"] == str(model)
    assert steps["prompts"]["with"]["source"] == str(prompts)
    assert steps["release"]["with"]["engines"] == ["vllm"]
    assert steps["draft"]["with"]["draft_vocab_size"] == 128
    assert steps["draft"]["matrix"] == {"method": ["mtp", "medusa"]}
    assert draftsmith("check", "-f", file)[0] == 0
    assert draftsmith("init", folder)[0] == 2, "what is there stays"
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["pipelines"].keys() == {"swift"}


@pytest.mark.parametrize(
    ("engines", "methods"),
    [
        ((), ["eagle3", "mtp"]),
        (("vllm",), ["eagle3", "mtp"]),
        (("vllm", "sglang"), ["eagle3"]),
        *[((engine,), ["eagle3"]) for engine in sorted(PROFILES.keys() - {"vllm", "transformers"})],
        (("transformers", "llama.cpp"), ["draft-model"]),
    ],
)
def test_methods_that_nobody_names_are_those_that_the_engines_serve(
    draftsmith: Cli, home: Path, tmp_path: Path, engines: tuple[str, ...], methods: list[str]
) -> None:
    code, out, err = draftsmith("init", tmp_path / "work", *(word for name in engines for word in ("--engine", name)))
    assert code == 0, out + err
    file = yaml.safe_load((tmp_path / "work" / "pipelines.yaml").read_text(encoding="utf-8"))
    assert file["pipelines"]["mine"]["steps"]["draft"]["matrix"] == {"method": methods}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--engine", "vllmm"), "vllm"),
        (("--method", "eagle33"), "eagle3"),
        (("--model", "no/such/folder"), "no hub id"),
        (("--model", "."), "no config.json"),
        (("--prompts", "absent.jsonl"), "no such file"),
        (("--name", "My Pipeline"), "small letters"),
        (("--method", "medusa", "--engine", "llama.cpp"), "medusa"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_nothing_is_written(
    draftsmith: Cli, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = draftsmith("init", "work", *asked)
    assert code == 2 and said in out + err
    assert "pipelines.yaml:" not in out + err, "a line of a file that is not written"
    assert not (tmp_path / "work").exists()


def test_what_it_writes_fits_a_target_of_few_positions(
    draftsmith: Cli, home: Path, tmp_path: Path, prompts: Path
) -> None:
    model, positions = make_tiny_target("llama", tmp_path / "model"), 113  # the fewest that can be measured
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}), encoding="utf-8")
    code, out, err = draftsmith("init", tmp_path / "work", "--model", model, "--prompts", prompts)
    assert code == 0, out + err
    text = (tmp_path / "work" / "pipelines.yaml").read_text(encoding="utf-8")
    steps = yaml.safe_load(text)["pipelines"]["mine"]["steps"]
    room = (positions - 65) // 3
    assert steps["step_cost"]["with"]["kv_lengths"] == [room] and "few positions" in text
    assert steps["prompts"]["with"]["max_prompt_characters"] == 3 * (positions - 65 - room)
    assert {steps[name]["with"]["max_new_tokens"] for name in ("acceptance", "end_to_end")} == {room}


def test_the_dtype_that_is_asked_for_is_the_target_s_too_unless_it_is_quantised(
    draftsmith: Cli, home: Path, tmp_path: Path, prompts: Path
) -> None:
    model = make_tiny_target("llama", tmp_path / "model")
    assert draftsmith("init", tmp_path / "work", "--model", model, "--prompts", prompts)[0] == 0
    file = tmp_path / "work" / "pipelines.yaml"
    for asked in ("bfloat16", "float32"):
        code, out, err = draftsmith("plan", "mine", "-f", file, "-p", f"dtype={asked}", "--json")
        assert code == 0, out + err
        settings = {step["name"]: step["settings"] for step in json.loads(out)}
        measured = ("target", "acceptance[eagle3]", "tuning", "step_cost", "end_to_end")
        assert {name: settings[name]["dtype"] for name in measured} == dict.fromkeys(measured, asked)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    quantised = first_pipeline(
        "mine", "model", {**config, "quantization_config": {"quant_method": "gptq"}}, "python-stdlib", [], ["mtp"], 0
    )
    assert "dtype" not in yaml.safe_load(quantised)["pipelines"]["mine"]["steps"]["target"]["with"]
