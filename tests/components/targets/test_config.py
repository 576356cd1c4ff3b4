"""What `load_target` describes, and what it refuses in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from changed_folders import changed_config, context
from safetensors.torch import load_file, save_file

from components.contract import Target, UserError
from components.targets import load_target
from components.targets.load import open_target, open_tokenizer, target_facts


def test_a_folder_is_described_without_copying_its_weights(copied: Path, tmp_path: Path) -> None:
    target = load_target(model=str(copied), ctx=context(tmp_path / "out"))
    assert {file.name for file in target.path.iterdir()} == {"target.json"}
    weights = load_file(copied / "model.safetensors")
    assert target.info["num_params"] == sum(weight.numel() for weight in weights.values())
    assert target.info["architecture"] == "Qwen3ForCausalLM"
    assert (target.info["dtype"], target.info["stored_dtype"]) == ("float32", "F32")
    opened = open_target(target, kernel="plain")
    assert opened.shape.tap_layers == (2, 4, 5)
    assert opened.new_cache(1, 4).bytes_per_token() == target.info["kv_bytes_per_token"]
    assert open_tokenizer(target).decode(open_tokenizer(target)("if x: y\n")["input_ids"]) == "if x: y\n"
    assert target_facts(target) == target_facts(Target(key="", path=copied))  # as if another step had made it


def test_facts_agree_with_transformers(tiny_targets: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for family, folder in tiny_targets.items():
        target = load_target(model=str(folder), ctx=context(tmp_path / family))
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        sizes = {weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}  # a tied one once
        assert target.info["num_params"] == sum(sizes.values())
        assert target.info["architecture"] == type(model).__name__


def test_an_answer_ends_at_the_end_tokens_of_both_files(copied: Path, tmp_path: Path) -> None:
    """Chat models name the end of a turn in generation_config.json alone; engines heed it."""
    changed_config(eos_token_id=7)(copied)
    generation = {"eos_token_id": [9, 7], "repetition_penalty": 1.1, "num_beams": 1, "temperature": 0.6}
    generation |= {"suppress_tokens": [3, 10**6], "bad_words_ids": [[4], [9], [5, 6]]}
    (copied / "generation_config.json").write_text(json.dumps(generation))
    events: list[dict[str, Any]] = []
    target = load_target(model=str(copied), ctx=replace(context(tmp_path / "out"), send=events.append))
    notes = [str(event["message"]) for event in events if event["event"] == "note"]
    assert list(target.info["shape"]["eos_token_ids"]) == [7, 9]
    assert target.info["suppressed_tokens"] == [3, 4]  # an end token is no bad word, and others are none of its own
    remark = target.info["generation_remark"]
    assert any(remark in note for note in notes) and "suppresses 2 tokens" in remark
    assert "asks for repetition_penalty 1.1, bad_words_ids [[5, 6]], which is not done" in remark
    opened = open_target(copied, kernel="plain", dtype="float32")
    assert opened.shape.eos_token_ids == (7, 9)


@pytest.mark.parametrize(("dtype", "told"), [("auto", 1), ("bfloat16", 0), ("float32", 0)])
def test_a_bfloat16_checkpoint_that_a_cpu_computes_in_float32_says_so_in_one_line(
    dtype: Any, told: int, copied: Path, tmp_path: Path
) -> None:
    file = copied / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    events: list[dict[str, Any]] = []
    target = load_target(model=str(copied), dtype=dtype, ctx=replace(context(tmp_path / "out"), send=events.append))
    assert target.info["dtype"] == ("bfloat16" if dtype == "bfloat16" else "float32")
    notes = [str(event["message"]) for event in events if event["event"] == "note"]
    assert len([note for note in notes if "stored in bfloat16, computed in float32" in note]) == told


@pytest.mark.parametrize("ends", ["7", [1.5], 10**6, [-1]])
def test_an_end_token_that_is_none_is_refused(ends: object, copied: Path, tmp_path: Path) -> None:
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(UserError, match=r"generation_config.json says eos_token_id"):
        load_target(model=str(copied), ctx=context(tmp_path / "out"))


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ({"suppress_tokens": ["3"]}, "no lists of token ids"),
        ({"bad_words_ids": [3]}, "no lists of token ids"),
        ({"suppress_tokens": list(range(10**4))}, "suppresses every token"),
    ],
)
def test_what_cannot_be_suppressed_is_refused(
    generation: dict[str, object], said: str, copied: Path, tmp_path: Path
) -> None:
    (copied / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(UserError, match=rf"generation_config.json.*{said}"):
        load_target(model=str(copied), ctx=context(tmp_path / "out"))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def not_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>")


def missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_config, "no config.json"),
        (no_weights, "no *.safetensors"),
        (pickled_weights, "pickled"),
        (no_tokenizer, "no tokenizer"),
        (cut_short, "cut short"),
        (not_safetensors, "safetensors"),
        (missing_shard, "model-00002.safetensors"),
        (broken_config, "config.json: is not JSON"),
        (changed_config(model_type="no_such_model"), "config.json cannot be used"),
        (changed_config(model_type="vit"), "not a causal LM"),
        (changed_config(num_hidden_layers=3, layer_types=["full_attention"] * 3, max_window_layers=3), "at least 4"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    copied: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(copied)
    with pytest.raises(UserError) as refused:
        load_target(model=str(copied), ctx=context(tmp_path / "out"))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
