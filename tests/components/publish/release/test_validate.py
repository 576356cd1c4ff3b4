"""`draftsmith validate`: anybody's checkpoint and whole releases, in a few lines or in one that says what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_formats import drafter_state

from components.contract import UserError
from components.publish.formats.checkpoint import Checkpoint
from components.publish.formats.interface import Source
from components.publish.formats.registry import check_checkpoint, layout_of, write_format
from components.publish.release.validate import validate_folder
from flows.cli import main

Networks = Callable[[str, dict[str, Any]], Any]


@pytest.fixture
def eagle3(networks: Networks, source: Source, tmp_path: Path) -> Path:
    write_format("eagle3", drafter_state(networks("eagle3", {}), {}), source, tmp_path / "draft")
    return tmp_path / "draft"


def test_a_sound_checkpoint_is_named_with_the_engines_that_read_it(eagle3: Path, source: Source) -> None:
    alone = validate_folder(eagle3)
    assert "a sound eagle3 checkpoint" in alone[0] and "give it as --target" in alone[1]
    said = "\n".join(validate_folder(eagle3, str(source.folder)))
    assert "vLLM: reads it (tried with 0.32.0)" in said
    assert "MNN: reads it (by its source or manual" in said, "the tiny target's rotary base is MNN's"
    assert "transformers" not in said


def test_unusual_numbers_are_said_and_not_refused(eagle3: Path, source: Source) -> None:
    """The first EAGLE-3 drafts rotate by 10000 whatever their targets do."""
    config = json.loads((eagle3 / "config.json").read_text())
    (eagle3 / "config.json").write_text(json.dumps({**config, "rope_theta": 500000.0}))
    assert any("note: its rope_theta is 500000, the target's is 10000" in line for line in said_of(eagle3, source))


def test_positions_that_are_scaled_are_said(eagle3: Path, source: Source) -> None:
    config = json.loads((eagle3 / "config.json").read_text())
    (eagle3 / "config.json").write_text(json.dumps({**config, "rope_scaling": {"type": "yarn", "factor": 4.0}}))
    assert any("note: its positions are scaled (yarn)" in line for line in said_of(eagle3, source))


def test_an_engine_that_fixes_the_rotary_base_is_asked_about_the_drafters_own(eagle3: Path, source: Source) -> None:
    config = json.loads((eagle3 / "config.json").read_text())
    (eagle3 / "config.json").write_text(json.dumps({**config, "rope_theta": 500000.0}))
    said = said_of(eagle3, source)
    assert "MNN: MNN rotates every drafter by rope_theta 10000, and this one's is 500000" in said


def said_of(folder: Path, source: Source) -> list[str]:
    return validate_folder(folder, str(source.folder))


def test_the_command_ends_with_0_or_with_2_and_one_line(
    eagle3: Path, source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(eagle3), "--target", str(source.folder)]) == 0
    assert "a sound eagle3 checkpoint" in capsys.readouterr().out
    (eagle3 / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert main(["validate", str(eagle3)]) == 2
    assert capsys.readouterr().err.strip() == (
        "draft/pytorch_model.bin: pickled weights, which run code when opened; convert to safetensors (docs: engines)"
    )
    assert main(["validate", str(eagle3 / "nowhere")]) == 2
    assert main(["validate", str(eagle3), "--target", "nobody/knows"]) == 2


def test_a_release_is_what_was_released(export: Callable[..., Any], source: Source, tmp_path: Path) -> None:
    release = export(include="all")
    said = validate_folder(release.path, str(source.folder))
    assert "files as they were released" in said[0]
    assert {line.split(" a sound ")[1].split()[0] for line in said if " a sound " in line} == {"eagle3", "mtp"}
    for number, (name, spoil) in enumerate(
        {
            "eagle3/config.json": lambda file: file.write_text(file.read_text().replace("1e-06", "2e-06")),
            "README.md": lambda file: file.write_text("another card"),
            "draftsmith/serve.json": lambda file: file.unlink(),
            "extra.txt": lambda file: file.write_text("x"),
        }.items()
    ):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(release.path, copy)
        spoil(copy / name)
        with pytest.raises(UserError, match=f"copy-{number}/{name}: ") as error:
            validate_folder(copy)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("bias", [True, False])
def test_an_engine_that_passes_over_the_bias_of_fc_is_said_to(
    bias: bool, networks: Networks, source: Source, tmp_path: Path
) -> None:
    settings = {"fc_bias": bias}
    write_format("eagle1", drafter_state(networks("eagle1", settings), settings), source, tmp_path / "draft")
    (line,) = (line for line in said_of(tmp_path / "draft", source) if line.startswith("vLLM: "))
    assert ("passes over ours without a word" in line) == bias


def line_of(engine: str, folder: Path, source: Source) -> str:
    (line,) = (line for line in said_of(folder, source) if line.startswith(f"{engine}: "))
    return line


def changed(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


@pytest.mark.parametrize("flag", ["fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"])
def test_an_engine_that_drops_a_norm_does_not_read_it(
    flag: str, eagle3: Path, source: Source, networks: Networks, tmp_path: Path
) -> None:
    """All four are asked about: without the norm it would load, and accept little."""
    if flag == "fc_norm":
        write_format(
            "eagle3", drafter_state(networks("eagle3", {flag: True}), {flag: True}), source, tmp_path / "normed"
        )
        eagle3 = tmp_path / "normed"
    elif flag == "norm_before_fc":
        tensors = load_file(eagle3 / "model.safetensors")
        save_file({**tensors, "input_norm.weight": torch.ones(96)}, eagle3 / "model.safetensors")
    changed(eagle3, **{flag: True})
    assert "reads it" in line_of("vLLM", eagle3, source)
    assert f"SGLang drops {flag} " in line_of("SGLang", eagle3, source)
    assert ("drops" in line_of("llama.cpp", eagle3, source)) == (flag in ("fc_norm", "norm_output"))


@pytest.mark.parametrize(
    ("top", "inner", "reads"),
    [
        (None, None, {"vLLM", "SGLang", "llama.cpp", "MNN"}),
        ([2, 4, 5], None, {"vLLM", "SGLang", "llama.cpp", "MNN"}),  # the defaults of a target of eight layers
        ([1, 3, 6], [0, 2, 5], {"vLLM", "SGLang", "llama.cpp"}),
        ([1, 3, 6], None, {"vLLM", "llama.cpp"}),
        (None, [0, 2, 5], {"SGLang"}),
        (None, [1, 3, 4], {"SGLang", "llama.cpp", "MNN"}),  # the defaults again: vLLM takes outputs for inputs
    ],
)
def test_an_engine_that_would_tap_other_layers_does_not_read_it(
    top: list[int] | None, inner: list[int] | None, reads: set[str], eagle3: Path, source: Source
) -> None:
    name = "eagle_aux_hidden_state_layer_ids"
    changed(eagle3, **{name: top, "eagle_config": {name: inner} if inner else None})
    for engine in ("vLLM", "SGLang", "llama.cpp", "MNN"):
        line = line_of(engine, eagle3, source)
        assert ("reads it" in line) == (engine in reads), line
        assert "reads it" in line or f"was trained on {top or [one + 1 for one in inner or []]}" in line


def test_of_speculators_own_layout_the_top_level_is_read_alone(
    networks: Networks, source: Source, tmp_path: Path
) -> None:
    write_format("speculators", drafter_state(networks("eagle3", {}), {}), source, tmp_path / "draft")
    assert "reads it" in line_of("vLLM", tmp_path / "draft", source)
    name = "eagle_aux_hidden_state_layer_ids"
    changed(tmp_path / "draft", **{name: None, "eagle_config": {name: [0, 2, 5]}})
    for engine in ("vLLM", "speculators"):
        assert "would tap hidden_states[2, 4, 5], and" in line_of(engine, tmp_path / "draft", source)


def test_vllm_refuses_d2t_of_a_whole_vocabulary(eagle3: Path, source: Source) -> None:
    tensors = load_file(eagle3 / "model.safetensors")
    whole = {"d2t": torch.zeros(96, dtype=torch.int64), "t2d": torch.ones(96, dtype=torch.bool)}
    save_file({**tensors, **whole, "lm_head.weight": torch.randn(96, 32)}, eagle3 / "model.safetensors")
    changed(eagle3, draft_vocab_size=96)
    assert "vLLM refuses d2t of a whole vocabulary: leave d2t and t2d out" in line_of("vLLM", eagle3, source)
    assert "reads it" in line_of("SGLang", eagle3, source)


@pytest.mark.parametrize("with_target", [True, False])
def test_a_drafter_that_is_not_as_wide_as_its_target_brings_an_embedding(
    with_target: bool, networks: Networks, source: Source, tmp_path: Path
) -> None:
    """Engines share the target's where the file has none, and it does not fit."""
    narrow = replace(source.shape, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    layout = layout_of("eagle3")
    config = layout.lay_out(drafter_state(networks("eagle3", {}), {}), replace(source, shape=narrow)).config
    config |= {"target_hidden_size": 32}
    tensors = {}
    for name, spec in layout.expected(config).items():
        if not spec.optional or name in ("d2t", "t2d"):
            tensors[name] = torch.randn(spec.shape)
    ids = torch.arange(3, 96, 2)
    tensors |= {"d2t": ids - torch.arange(47), "t2d": torch.zeros(96, dtype=torch.bool).index_fill(0, ids, True)}
    shape = source.shape if with_target else None
    with pytest.raises(UserError, match=r"embed_tokens.weight is missing: .* 32 wide, and hidden_size is 16") as error:
        check_checkpoint(layout, Checkpoint(config, tensors), "draft", shape)
    assert "\n" not in str(error.value)
    check_checkpoint(
        layout, Checkpoint(config, {**tensors, "embed_tokens.weight": torch.randn(96, 16)}), "draft", shape
    )
