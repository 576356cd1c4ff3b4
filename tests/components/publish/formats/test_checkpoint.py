"""Each kind of corrupted checkpoint is refused in one line before anything is written; a sound one survives bitwise."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.contract import Draft, UserError
from components.publish.formats.checkpoint import checked_header, require_equal

Tensors = dict[str, Tensor]


FIRST = "model.layers.8."


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda t: t.pop(name)


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda t: t.update({name: change(t[name]).contiguous()})


def absolute(t: Tensor) -> Tensor:
    return t + torch.arange(t.numel())


def broken(value: float) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t.view(-1)[-1] = value
        return t

    return change


def flip(t: Tensor) -> Tensor:
    t = t.clone()
    t[4] = ~t[4]
    return t


def far(t: Tensor) -> Tensor:
    t = t.clone()
    t[-1] = 1_000_000
    return t


def swapped(t: Tensor) -> Tensor:
    """Two neighbours trade places: the same ids, no longer ascending."""
    ids = absolute(t).clone()
    ids[[0, 1]] = ids[[1, 0]]
    return ids - torch.arange(ids.numel())


CORRUPTIONS: list[tuple[str, str, Callable[[Tensors], object], str]] = [
    ("eagle3", "missing-norm", drop("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight missing"),
    ("eagle3", "missing-head", drop("lm_head.weight"), "lm_head.weight missing"),
    ("eagle3", "no-d2t", drop("d2t"), "d2t missing"),
    ("eagle3", "no-t2d", drop("t2d"), "t2d missing"),
    ("eagle3", "extra", lambda t: t.update({"layers.0.x": torch.zeros(1)}), "layers.0.x not part of this layout"),
    ("eagle3", "wrong-shape", put("fc.weight", lambda w: w[:, :64]), r"fc.weight is \[32, 64\], must be \[32, 96\]"),
    ("eagle3", "transposed", put("midlayer.mlp.up_proj.weight", lambda w: w.T), "up_proj.weight is"),
    ("eagle3", "integer-weight", put("norm.weight", lambda w: w.long()), "norm.weight is int64"),
    ("eagle3", "mixed-dtypes", put("norm.weight", lambda w: w.bfloat16()), "weights mix bfloat16, float32"),
    ("eagle3", "float64", put("norm.weight", lambda w: w.double()), "norm.weight is float64"),
    ("eagle3", "d2t-int32", put("d2t", lambda w: w.int()), "d2t is int32, must be int64"),
    ("eagle3", "t2d-int", put("t2d", lambda w: w.long()), "t2d is int64, must be bool"),
    ("eagle3", "absolute-d2t", put("d2t", absolute), "d2t holds target ids, must hold offsets"),
    ("eagle3", "d2t-range", put("d2t", far), "leave the target's vocabulary"),
    ("eagle3", "d2t-order", put("d2t", swapped), "do not ascend"),
    ("eagle3", "t2d-other", put("t2d", flip), "t2d and d2t name different tokens"),
    ("eagle3", "nan", put("midlayer.self_attn.q_proj.weight", broken(float("nan"))), "NaN or infinity"),
    ("eagle3", "infinity", put("lm_head.weight", broken(float("inf"))), "NaN or infinity"),
    ("mtp", "missing", drop(f"{FIRST}enorm.weight"), "enorm.weight missing"),
    ("mtp", "missing-module", lambda t: [t.pop(n) for n in list(t) if n.startswith("model.layers.10.")], "missing"),
    ("mtp", "extra", lambda t: t.update({"model.layers.7.x": torch.zeros(1)}), "model.layers.7.x not part"),
    ("mtp", "extra-module", lambda t: t.update({"model.layers.11.enorm.weight": torch.zeros(32)}), "layers.11"),
    ("mtp", "wrong-shape", put(f"{FIRST}eh_proj.weight", lambda w: w[:, :32]), "eh_proj.weight is"),
    ("mtp", "wrong-dtype", put(f"{FIRST}hnorm.weight", lambda w: w.half()), "weights mix"),
    ("mtp", "absolute-d2t", put("d2t", absolute), "must hold offsets"),
    ("mtp", "half-vocabulary", drop("d2t"), "d2t missing"),
    ("mtp", "nan", put(f"{FIRST}eh_proj.weight", broken(float("nan"))), "NaN or infinity"),
]


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [(m, c, s) for m, _, c, s in CORRUPTIONS],
    ids=[f"{m}-{n}" for m, n, _, _ in CORRUPTIONS],
)
def test_a_corrupted_checkpoint_is_refused(
    method: str,
    change: Callable[[Tensors], object],
    message: str,
    drafts: dict[str, Draft],
    policy_for: Callable[[str], Any],
    export: Callable[..., Any],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "corrupted"
    shutil.copytree(drafts[method].path, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    draft = Draft(key=drafts[method].key, path=folder, info=drafts[method].info)
    with pytest.raises(UserError, match=message) as error:
        export(policy=policy_for(method), only=[draft])
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "release").iterdir()), "nothing is written before the check has passed"


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_what_is_exported_is_what_was_trained(
    method: str, drafts: dict[str, Draft], policy_for: Callable[[str], Any], export: Callable[..., Any]
) -> None:
    release = export(policy=policy_for(method))
    trained = load_file(drafts[method].path / "model.safetensors")
    exported = load_file(release.path / method / "model.safetensors")
    require_equal({n: t for n, t in trained.items() if method == "eagle3" or n not in ("d2t", "t2d")}, exported, method)
    require_equal(trained, load_file(release.path / "draftsmith" / "model.safetensors"), "own folder")
    config = json.loads((release.path / method / "config.json").read_text())
    assert config["max_position_embeddings"] == 256
    assert config["rope_theta"] == 10000.0
    assert config["vocab_size"] == 96
    if method == "eagle3":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["draft_vocab_size"] == 47
        assert not any("layer_ids" in key for key in config)
    else:
        assert config["num_nextn_predict_layers"] == 3
        assert config["num_hidden_layers"] == 8


def test_bitwise_comparison_sees_what_values_hide() -> None:
    require_equal({"a": torch.tensor([float("nan")])}, {"a": torch.tensor([float("nan")])}, "nan")
    for other in (torch.tensor([-0.0]), torch.tensor([0.0], dtype=torch.float64), torch.tensor([[0.0]])):
        with pytest.raises(UserError, match="read back differently"):
            require_equal({"a": torch.tensor([0.0])}, {"a": other}, "zero")
    with pytest.raises(UserError, match="read back differently"):
        require_equal({"a": torch.zeros(1)}, {}, "absent")


@pytest.mark.parametrize("setting", ["fc_norm", "norm_output"])
def test_what_engines_would_drop_without_a_word_is_refused(
    setting: str,
    drafts: dict[str, Draft],
    policy_for: Callable[[str], Any],
    export: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """EAGLE-3.1's norms: a loader that does not know them gives a drafter that never hits; vLLM's knows them."""
    folder = tmp_path / "newer"
    shutil.copytree(drafts["eagle3"].path, folder)
    record = json.loads((folder / "draft.json").read_text())
    record["settings"][setting] = True
    (folder / "draft.json").write_text(json.dumps(record))
    draft = Draft(key=drafts["eagle3"].key, path=folder, info=drafts["eagle3"].info)
    with pytest.raises(UserError, match=f"SGLang drops {setting} .EAGLE-3.1"):
        export(policy=policy_for("eagle3"), only=[draft], engines=["vllm", "sglang"])


@pytest.mark.parametrize("length", [0x80, 0x0480, 0x4B50])
def test_a_header_as_long_as_a_pickles_first_bytes_is_no_pickle(length: int, tmp_path: Path) -> None:
    """Its length stands first: 128, 1152, 19280 bytes look like the beginning of a pickle or of a zip."""
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    header = data[8 : 8 + int.from_bytes(data[:8], "little")].ljust(length)
    (tmp_path / "a.safetensors").write_bytes(length.to_bytes(8, "little") + header + data[-4:])
    assert set(checked_header(tmp_path / "a.safetensors", "here")) == {"a"}
    (tmp_path / "b.safetensors").write_bytes(pickle.dumps({"a": [0.0] * 40}, protocol=4))
    with pytest.raises(UserError, match="here: a pickle under a safetensors name"):
        checked_header(tmp_path / "b.safetensors", "here")
