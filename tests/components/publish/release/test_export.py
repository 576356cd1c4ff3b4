"""A release holds what it says: files with checksums, the evidence, a card with every number, a depth to serve."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_formats import SETTINGS

from components.contract import DepthPolicy, Draft, UserError
from components.drafts.settings import SuffixBeside, SuffixSettings
from components.engines.depth_settings import ENGINE_OF_SETTING, settings_for
from components.engines.launch import LAUNCHED, cannot_load, not_served
from components.engines.profiles import kind_of, profile_of, refusals
from components.methods import METHODS
from components.policy import read_policy
from components.publish.formats.interface import Source, facts_of
from components.publish.release.export import rounding_remark
from components.weight_format import Storage

Export = Callable[..., Any]


WORDS = (
    "num_speculative_tokens",
    "--speculative-num-steps",
    "max_draft_len",
    "--spec-draft-n-max",
    "draft_predict_length",
)


def test_a_policy_gives_no_command_for_any_engine(evidence: dict[str, Any]) -> None:
    policy = evidence["policy"].path
    said = (policy / "policy.json").read_text() + (policy / "policy.md").read_text()
    assert json.loads((policy / "policy.json").read_text())["winner"] is not None
    assert [word for word in WORDS if word in said] == []


def test_the_policy_of_a_release_names_the_target_as_the_release_does(
    export: Export, changed: Callable[..., DepthPolicy]
) -> None:
    release = export(policy=changed(target_model="Secret-LLM"), target_name="ours")
    assert read_policy(release.path).target_model == "ours"


@pytest.mark.parametrize("method", SETTINGS)
def test_a_release_tells_engines_exactly_what_its_card_says_they_can_load(
    method: str,
    export: Export,
    saved: Callable[..., Draft],
    changed: Callable[..., DepthPolicy],
    evidence: dict[str, Any],
    source: Source,
) -> None:
    """A drafter of each method stands in for the winner: who cannot load it is told nothing."""
    winner = json.loads((evidence["policy"].path / "policy.json").read_text())["winner"]
    release = export(only=[saved(method)], policy=changed(winner={**winner, "method": method}))
    record = json.loads((release.path / "release.json").read_text())
    told = {ENGINE_OF_SETTING[name] for name in record["engines"] if name in ENGINE_OF_SETTING}
    formats = {facts["format"] for facts in record["formats"].values()}
    for engine in set(ENGINE_OF_SETTING.values()):
        served = profile_of(engine).methods.get(kind_of(method, record["settings"]))
        refused = any(refusals(engine, method, record["settings"], facts_of(source.shape)))
        base = {METHODS[method].gguf_base} if engine == "llama.cpp" else set()
        readable = served is not None and bool(formats & ({*served.formats} | base))
        assert (engine in told) is (readable and not refused), (method, engine)
    card = (release.path / "README.md").read_text()
    for title, engine in LAUNCHED.items():
        assert (title in record["launch"]) is (engine in told), (method, title)
        assert (f"Not in {title}: " in card) <= (engine not in told)
    words = {"sglang": "--speculative-num-steps", "llama.cpp": "--spec-draft-n-max", "vllm": "num_speculative_tokens"}
    for engine, word in words.items():
        assert (word in card) is (engine in told), (method, engine)


def test_a_format_that_is_not_in_the_release_is_loaded_by_nobody(source: Source) -> None:
    target = facts_of(source.shape)
    settings = {**SETTINGS["medusa"]}
    with_it = cannot_load("medusa", settings, target, None, METHODS["medusa"].default_formats, {})
    without = cannot_load("medusa", settings, target, None, (), {})
    assert "vllm" not in with_it and without == {*ENGINE_OF_SETTING.values()}
    refused = not_served("medusa", settings, target, None, METHODS["medusa"].default_formats)
    assert {"SGLang", "llama.cpp"} <= refused.keys() and {"sglang", "llama.cpp"} <= with_it
    told = settings_for("medusa", {1: 2})
    assert set(told) - {"measured_batch_sizes"} <= set(ENGINE_OF_SETTING)


def test_release_lists_every_file_with_its_checksum(export: Callable[..., Any], drafts: dict[str, Draft]) -> None:
    release = export(include="all")
    record = json.loads((release.path / "release.json").read_text())
    on_disk = {p.relative_to(release.path).as_posix() for p in release.path.rglob("*") if p.is_file()}
    assert {f["path"] for f in record["files"]} == on_disk - {"release.json", "SHA256SUMS"}
    for file in record["files"]:
        content = (release.path / file["path"]).read_bytes()
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert file["bytes"] == len(content)
    assert set(record["formats"]) == {"eagle3", "mtp"}
    assert record["serve"]["draft_key"] == drafts["eagle3"].key
    assert not any(f["path"].startswith("tokenizer") for f in record["files"]), "the target is referenced, not copied"


def test_only_the_winner_goes_out_unless_asked(export: Callable[..., Any], evidence: dict[str, Any]) -> None:
    release = export()
    assert release.info["formats"] == ["eagle3"]
    assert not (release.path / "mtp").exists()
    policy = json.loads((evidence["policy"].path / "policy.json").read_text())
    assert release.info["depth_k"] == policy["winner"]["depth_k"] > 0
    assert release.info["gate_passed"] is True
    assert {"target_key", "draft_key", "method", "speedup_meas", "meas_lo", "al"} <= set(release.info)


def test_a_card_tells_of_the_smallest_batch_and_engines_of_all(
    export: Callable[..., Any], evidence: dict[str, Any], tmp_path: Path
) -> None:
    raw = json.loads((evidence["policy"].path / "policy.json").read_text())
    chosen = {c["workload"]: c["depth_k"] for c in raw["choices"] if c["draft_key"] == raw["winner"]["draft_key"]}
    for rows in (raw["choices"], raw["evals"]):
        rows += [{**row, "batch_size": 8} for row in rows]
    for choice in raw["choices"]:
        choice["depth_k"] = 1 if choice["batch_size"] == 8 else choice["depth_k"]
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "policy.json").write_text(json.dumps(raw))
    release = export(policy=DepthPolicy(key="b" * 64, path=tmp_path / "batches"))
    assert json.loads((release.path / "draftsmith" / "serve.json").read_text())["depth_by_workload"] == chosen
    card = (release.path / "README.md").read_text()
    assert sum(line.startswith(("| 2 |", "| 2 (chosen) |")) for line in card.splitlines()) == 1
    assert f"[[1, 1, {chosen['all']}], [2, 8, 1]]" in card


def test_the_facts_of_a_release_are_those_of_the_smallest_batch(
    export: Callable[..., Any], evidence: dict[str, Any], tmp_path: Path
) -> None:
    raw = json.loads((evidence["policy"].path / "policy.json").read_text())
    won = next(c for c in raw["choices"] if c["draft_key"] == raw["winner"]["draft_key"] and c["workload"] == "all")
    larger = {"speedup_meas": 9.0, "batch_size": 8}
    raw["choices"] = [{**c, **larger} for c in raw["choices"]] + raw["choices"]
    raw["evals"] += [{**e, "al": 99.0, "batch_size": 8} for e in raw["evals"]]
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "policy.json").write_text(json.dumps(raw))
    info = export(policy=DepthPolicy(key="b" * 64, path=tmp_path / "two")).info
    assert info["speedup_meas"] == won["speedup_meas"]
    assert info["al"] == evidence["policy"].info["al"]


def test_without_a_winner_the_card_says_do_not(
    export: Callable[..., Any], evidence: dict[str, Any], tmp_path: Path
) -> None:
    raw = json.loads((evidence["policy"].path / "policy.json").read_text())
    raw |= {"winner": None, "verdict": "do_not_speculate", "reasons": ["too slow"], "gate": None, "arms": []}
    for choice in raw["choices"]:
        choice |= {"depth_k": 0, "verdict": "do_not_speculate", "speedup_meas": None, "meas_lo": None, "meas_hi": None}
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "policy.json").write_text(json.dumps(raw))
    release = export(policy=DepthPolicy(key="n" * 64, path=tmp_path / "none"))
    card = (release.path / "README.md").read_text()
    assert "**Do not draft with this model" in card
    assert "num_speculative_tokens" not in card
    assert release.info["depth_k"] == 0
    assert release.info["gate_passed"] is False
    assert json.loads((release.path / "draftsmith" / "serve.json").read_text())["depth_k"] == 0


def test_an_unconfirmed_policy_is_released_as_such(export: Callable[..., Any], evidence: dict[str, Any]) -> None:
    release = export(policy=evidence["chosen"])
    assert release.info["gate_passed"] is False
    assert "was not measured end to end" in (release.path / "README.md").read_text()


def test_wrong_wiring_is_one_line(export: Callable[..., Any], drafts: dict[str, Draft], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="winner eeeeeeeeeeee is not among them"):
        export(only=[drafts["mtp"]])
    with pytest.raises(UserError, match=r"engines: eagle3 .*: transformers does not serve eagle3"):
        (tmp_path / "release").rmdir()
        export(engines=["vllm", "transformers"])
    beside = tmp_path / "beside"
    shutil.copytree(drafts["eagle3"].path, beside)
    record = json.loads((beside / "draft.json").read_text())
    copies = SuffixBeside(settings=SuffixSettings(), depth=2, drafter="e" * 64).model_dump(mode="json")
    (beside / "draft.json").write_text(json.dumps(record | {"with_suffix": copies}))
    with pytest.raises(UserError, match="has suffix decoding beside it, which no format holds"):
        (tmp_path / "release").rmdir()
        export(only=[dataclasses.replace(drafts["eagle3"], path=beside)])
    with pytest.raises(UserError, match=r"no policy\.json"):
        (tmp_path / "release").rmdir()
        export(policy=DepthPolicy(key="x", path=tmp_path))


def test_a_release_holds_what_the_named_engines_read_and_how_to_launch_it(
    export: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTSMITH_LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    release = export(engines=["vllm", "speculators", "llama.cpp"])
    assert release.info["formats"] == ["eagle3", "speculators"]  # no converter here, and a note that says so
    record = json.loads((release.path / "release.json").read_text())
    assert {facts["format"] for facts in record["formats"].values()} == {"eagle3", "speculators"}
    card = (release.path / "README.md").read_text()
    assert "vllm serve tiny-llama --speculative-config" in card and '"model": "./eagle3"' in card
    assert "convert_hf_to_gguf.py ./eagle3" in card


def test_without_a_converter_llama_cpp_gets_what_its_converter_reads(
    export: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTSMITH_LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    release = export(engines=["llama.cpp"])
    assert release.info["formats"] == ["eagle3"] and (release.path / "eagle3" / "config.json").is_file()
    assert json.loads((release.path / "release.json").read_text())["formats"]["eagle3"]["format"] == "eagle3"
    assert "convert_hf_to_gguf.py ./eagle3" in (release.path / "README.md").read_text()


def test_who_may_read_the_card_may_read_the_weights(export: Callable[..., Any]) -> None:
    """Engines often run as another user, in a container for one."""
    release = export(include="all")
    modes = {file.stat().st_mode & 0o777 for file in release.path.rglob("*") if file.is_file()}
    assert len(modes) == 1


@pytest.mark.parametrize(
    ("format", "weights", "dtype", "said"),
    [
        ("eagle1", "int8", "int8", "fc holds the embedding's norm as well"),
        ("eagle1", "", "float32", ""),
        ("stitched", "", "float32", ""),
        ("stitched", "", "bfloat16", "rounded to the target's bfloat16, and was measured in float32; drafts.quantise"),
        ("stitched", "bf16", "bfloat16", ""),
        ("stitched", "bf16", "float16", "rounded to the target's float16, and was measured in bfloat16"),
        ("eagle3", "int8", "int8", ""),
    ],
)
def test_weights_that_go_out_otherwise_than_they_were_measured_are_told(
    format: Any, weights: Any, dtype: str, said: str
) -> None:
    found = rounding_remark(format, Storage(weights) if weights else None, dtype)
    assert said in found and bool(said) == bool(found)
