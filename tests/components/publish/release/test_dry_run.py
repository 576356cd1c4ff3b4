"""The dry run goes through every format that the engines read, and stops at the first thing they could not serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from own_checkpoints import LAYOUTS, make_own_checkpoint
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from components.contract import Context, Page, Target, UserError
from components.publish import try_release
from components.publish.release import dry_run
from components.targets import load_target

SETTINGS: dict[str, dict[str, Any]] = {
    "mtp": {"mtp_modules": 1},
    "eagle1": {"fc_bias": False},
    "p-eagle": {"parallel_depth": 3},
}


def tried(target: Target, folder: Path, **settings: Any) -> tuple[Page, list[str]]:
    told: list[str] = []
    out, scratch = folder / "out", folder / "scratch"
    out.mkdir(parents=True)
    scratch.mkdir()
    ctx = Context(key="k", out=out, scratch=scratch, num_threads=1, send=lambda e: told.append(e.get("message", "")))
    return try_release(target, ctx=ctx, **settings), told


def test_every_method_that_an_engine_serves_goes_out_comes_back_and_changes_no_token(
    target: Target, tmp_path: Path
) -> None:
    methods = ["eagle3", "p-eagle", "eagle1", "medusa", "mtp", "draft-model", "ngram", "suffix"]
    made, _ = tried(target, tmp_path, methods=methods, settings=SETTINGS, engines=["vllm"], draft_vocab_size=48)
    assert json.loads((made.path / "tried.json").read_text())["tried"] == {
        "eagle3": ["eagle3"],
        "p-eagle": ["speculators"],
        "eagle1": ["eagle1"],
        "medusa": ["medusa"],
        "mtp": ["mimo"],
        "draft-model": ["causal-lm"],
        "ngram": [],
        "suffix": [],
    }
    assert not any((tmp_path / "scratch").iterdir()), "nothing of it is kept"


def test_without_engines_each_method_goes_out_in_its_own_format(target: Target, tmp_path: Path) -> None:
    made, _ = tried(target, tmp_path, methods=["mtp", "hass", "lookahead"])
    assert made.info["tried"] == {"mtp": ["mtp"], "hass": ["eagle1"], "lookahead": []}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_targets_own_module_goes_back_into_a_copy_of_it_and_decodes_there(layout: str, tmp_path: Path) -> None:
    """DeepSeek's, Qwen's and MiMo's names: the copy is opened as a target, the module is taken out of it again."""
    folder = make_own_checkpoint(layout, tmp_path / "target")
    target_dir = tmp_path / "artifact"
    target_dir.mkdir()
    target = load_target(model=str(folder), ctx=Context(key="t", out=target_dir, scratch=target_dir))
    own = {"mtp": {"start": "own", "recursive_steps": 2}}
    served = ["vllm", "transformers"] if layout == "deepseek" else ["vllm", "sglang"]
    made, _ = tried(target, tmp_path / "run", methods=["mtp"], settings=own, engines=served)
    assert made.info["tried"] == {"mtp": ["stitched"]}
    page = (made.path / "index.html").read_text()
    assert "vLLM" in page and "stitched" in page and ("transformers" in page) == (layout == "deepseek")
    if layout != "deepseek":
        with pytest.raises(UserError, match=r"transformers 5\.23 serves mtp with start: own for Glm4Moe"):
            tried(target, tmp_path / "refused", methods=["mtp"], settings=own, engines=["transformers"])


def test_an_engine_that_fixes_the_rotary_base_is_refused_for_a_target_with_another(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8, "vocab_size": 96}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, rope_parameters=rope, bos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    target_dir = tmp_path / "artifact"
    target_dir.mkdir()
    target = load_target(model=str(folder), ctx=Context(key="t", out=target_dir, scratch=target_dir))
    tried(target, tmp_path / "vllm", engines=["vllm"])
    with pytest.raises(UserError, match="MNN rotates every drafter by rope_theta 10000, and the target's is 500000"):
        tried(target, tmp_path / "mnn", engines=["mnn"])


def test_a_format_that_comes_back_otherwise_is_found(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that loses a norm's values, as a wrong layout would: sound in every check but the last."""
    write = dry_run.write_format

    def loses(*arguments: Any) -> dict[str, Any]:
        facts = write(*arguments)
        file = arguments[-1] / "model.safetensors"
        tensors = load_file(file)
        tensors["midlayer.hidden_norm.weight"] *= -1.0
        save_file(tensors, file)
        return facts

    monkeypatch.setattr(dry_run, "write_format", loses)
    with pytest.raises(UserError, match="eagle3: drafts otherwise after it went through eagle3"):
        tried(target, tmp_path, draft_vocab_size=90)


def test_without_llama_cpp_the_gguf_is_left_out_and_said_to_be(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTSMITH_LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    made, told = tried(target, tmp_path / "run", engines=["llama.cpp"])
    assert made.info["tried"] == {"eagle3": ["eagle3"]}, (
        "what was not made did not go through; its converter's folder did"
    )
    page = (made.path / "index.html").read_text()
    assert "eagle3, to be made gguf by llama.cpp" in page and "not installed here" in page
    assert "<td>gguf</td>" not in page
    assert any("no GGUF" in line and "DRAFTSMITH_LLAMA_CPP" in line for line in told)
    with pytest.raises(UserError, match=r"llama_cpp: .*: no convert_hf_to_gguf\.py in it"):
        tried(target, tmp_path / "named", engines=["llama.cpp"], llama_cpp=str(tmp_path))


def test_the_same_dry_run_has_the_same_key_whatever_other_methods_are_told() -> None:
    from components.publish.steps import try_release_settings

    given = {"methods": ["eagle3"], "settings": {"eagle3": {"ttt_steps": 3}, "medusa": {"num_heads": 2}}}
    resolved, faults = try_release_settings(given)
    assert not faults and set(resolved["settings"]) == {"eagle3"}
    assert resolved["settings"]["eagle3"]["ttt_steps"] == 3
    _, faults = try_release_settings({"methods": ["eagle3"], "settings": {"eagle3": {"ttt_step": 3}}})
    assert "did you mean 'ttt_steps'" in faults[0][1]


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "yarn"),
        ({"rope_type": "linear", "factor": 2.0}, "linear"),
    ],
)
def test_a_target_with_scaled_rope_is_no_place_for_a_new_module_in_vllm(
    rope: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """vLLM rotates it by the target's config, ours are trained plainly; formats with a config still go."""
    folder = tmp_path / "target"
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8, "vocab_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, **heads, rope_parameters={**rope, "rope_theta": 10000.0}, bos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    target_dir = tmp_path / "artifact"
    target_dir.mkdir()
    target = load_target(model=str(folder), ctx=Context(key="t", out=target_dir, scratch=target_dir))
    with pytest.raises(UserError, match=rf"mtp: vLLM 0\.32\.0 rotates mtp by .* scaled \({said}\)") as error:
        tried(target, tmp_path / "mtp", methods=["mtp"], settings=SETTINGS, engines=["vllm"])
    assert "\n" not in str(error.value)
    made, _ = tried(target, tmp_path / "eagle3", methods=["eagle3"], engines=["vllm"], draft_vocab_size=48)
    assert made.info["tried"] == {"eagle3": ["eagle3"]}
