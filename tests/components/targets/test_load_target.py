"""What load_target accepts, what it refuses in one line, and that a changed file is noticed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import make_tiny_target

from components.contract import Context, Target, UserError
from components.targets import load_target
from components.targets.load import open_target, open_tokenizer, target_facts
from components.targets.source import load_target_fingerprint


def context(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(key="k" * 64, out=folder, scratch=folder, num_threads=1)


@pytest.fixture
def copied(tmp_path: Path, tiny_targets: dict[str, Path]) -> Path:
    return Path(shutil.copytree(tiny_targets["qwen3"], tmp_path / "model"))


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
        assert target.info["num_params"] == sum(weight.numel() for weight in model.state_dict().values())
        assert target.info["architecture"] == type(model).__name__


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


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


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
        (changed_config(num_hidden_layers=6, layer_types=["full_attention"] * 6, max_window_layers=6), "at least 7"),
        (changed_config(layer_types=["sliding_attention"] * 8), "full attention"),
        (changed_config(use_sliding_window=True, sliding_window=64, max_window_layers=2), "full attention"),
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


@pytest.mark.parametrize("model", ["./no/such/folder", "nowhere", "/no/such/folder"])
def test_a_wrong_path_is_not_looked_up_on_the_hub(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_target(model=model, ctx=context(tmp_path))


def test_a_hub_id_without_a_network_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError) as refused:
        load_target(model="nobody/nothing", ctx=context(tmp_path / "out"))
    assert "\n" not in str(refused.value)
    assert "nobody/nothing" in str(refused.value)


def test_a_file_changed_after_loading_is_noticed(copied: Path, tmp_path: Path) -> None:
    target = load_target(model=str(copied), ctx=context(tmp_path / "out"))
    weights = load_file(copied / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, copied / "model.safetensors")
    with pytest.raises(UserError, match="changed since"):
        open_target(target)
    (copied / "model.safetensors").unlink()
    with pytest.raises(UserError, match="gone since"):
        open_tokenizer(target)


def test_the_key_follows_the_weights_not_the_place_or_the_time(copied: Path, tmp_path: Path) -> None:
    before = load_target_fingerprint({"model": str(copied)})
    (copied / "README.md").write_text("notes")  # not part of the model
    (copied / "model.safetensors").touch()
    moved = copied.rename(tmp_path / "moved")
    assert load_target_fingerprint({"model": str(moved)}) == before
    make_tiny_target("qwen3", moved, seed=1)
    after = load_target_fingerprint({"model": str(moved)})
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}


def test_tied_and_bf16_checkpoints_open_like_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_target("llama", tmp_path / "tied")
    weights = {name: weight.bfloat16() for name, weight in load_file(folder / "model.safetensors").items()}
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    changed_config(tie_word_embeddings=True, dtype="bfloat16")(folder)
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for parameters in (rope, {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}):
        changed_config(rope_parameters=parameters)(folder)
        ids = torch.arange(1, 120)[None]
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            expected = model(ids).logits
        target = open_target(folder, kernel="plain")
        assert (target.kernel, target.dtype) == ("plain", torch.float32)
        torch.testing.assert_close(target.forward(ids, target.new_cache(1, 119)).logits, expected, rtol=1e-3, atol=1e-3)
        half = open_target(folder, kernel="plain", dtype="bfloat16")
        logits = half.forward(ids, half.new_cache(1, 119)).logits
        assert logits is not None
        assert float((logits - expected).abs().max() / expected.std()) < 0.25  # bf16 keeps eight bits
        assert float((logits.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.9


def spoilt_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights[name] = change(weights[name]).contiguous()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def without_tensor(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def odd_metadata(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps({**json.loads(data[8 : 8 + length]), "__metadata__": {"format": 1}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def weights_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "/etc/passwd"}}))


GATE, NORM = "model.layers.0.mlp.gate_proj.weight", "model.layers.2.input_layernorm.weight"


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoilt_tensor(GATE, lambda tensor: tensor.index_fill(0, torch.tensor([1]), torch.nan)), "NaN or infinity"),
        (spoilt_tensor(NORM, lambda tensor: tensor * torch.inf), "NaN or infinity"),
        (spoilt_tensor(NORM, lambda tensor: tensor.repeat(2)), "model"),
        (without_tensor(NORM), f"lack 1 of the tensors that config.json asks for, first {NORM}"),
        (odd_metadata, "no table of texts"),
        (weights_elsewhere, "first '/etc/passwd'"),
        (changed_config(vocab_size=400), "model"),
        (changed_config(num_hidden_layers=9, layer_types=None), "hold 8"),
        (changed_config(rms_norm_eps=-1.0), "give no numbers"),
        (changed_config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}), "NaN or infinity"),
    ],
)
def test_what_would_give_no_numbers_or_random_ones_is_refused_when_opened(
    family: str, tmp_path: Path, tiny_targets: dict[str, Path], spoil: Callable[[Path], None], said: str
) -> None:
    folder = Path(shutil.copytree(tiny_targets[family], tmp_path / "model"))
    spoil(folder)
    with pytest.raises(UserError) as refused:
        open_target(folder, kernel="plain")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_bias_that_its_neighbours_have_is_missed(tmp_path: Path, tiny_targets: dict[str, Path]) -> None:
    folder = Path(shutil.copytree(tiny_targets["llama"], tmp_path / "model"))
    without_tensor("model.layers.1.self_attn.v_proj.bias")(folder)
    with pytest.raises(UserError, match=r"lack 1 of the tensors .* model\.layers\.1\.self_attn\.v_proj\.bias"):
        open_target(folder, kernel="plain")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_tied_checkpoint_without_a_head_lacks_nothing(
    family: str, tmp_path: Path, tiny_targets: dict[str, Path]
) -> None:
    folder = Path(shutil.copytree(tiny_targets[family], tmp_path / "model"))
    without_tensor("lm_head.weight")(folder)
    changed_config(tie_word_embeddings=True)(folder)
    opened = open_target(folder, kernel="transformers")
    torch.testing.assert_close(opened.unembed(torch.eye(64)).T, opened.embedding)


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}},
    ],
)
def test_a_tokenizer_that_fails_on_its_first_text_is_refused(copied: Path, part: dict[str, Any]) -> None:
    file = copied / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **part}))
    with pytest.raises(UserError, match="its tokenizer cannot be loaded"):
        open_tokenizer(copied)


def test_yarn_falls_back_to_transformers(copied: Path) -> None:
    changed_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})(copied)
    assert open_target(copied, kernel="plain").kernel == "transformers"
