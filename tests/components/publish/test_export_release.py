"""A release holds what it says: files with checksums, the evidence, a card with every number, a depth to serve."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.contract import DepthPolicy, Draft, UserError
from components.engines.depth_settings import settings_for
from components.engines.launch import launch_lines
from components.publish.card.card import Evidence, write_card
from components.publish.names import public_settings


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


def test_card_shows_the_numbers_of_the_policy(export: Callable[..., Any], evidence: dict[str, Any]) -> None:
    release = export()
    card = (release.path / "README.md").read_text()
    policy = json.loads((evidence["policy"].path / "policy.json").read_text())
    depth = policy["winner"]["depth_k"]
    assert card.startswith("---\nlicense: other\n")
    assert "# eagle3 drafter for tiny-llama\n" in card, "a folder is named, its place on this machine is not"
    for e in policy["evals"]:
        if e["method"] == "eagle3" and e["workload"] == "all":
            assert f"{e['speedup_pred']:.2f}x [{e['pred_lo']:.2f}, {e['pred_hi']:.2f}]" in card
            if e["speedup_meas"] is not None:
                assert f"{e['speedup_meas']:.2f}x [{e['meas_lo']:.2f}, {e['meas_hi']:.2f}]" in card
    for a in policy["acceptance"]:
        if a["method"] == "eagle3" and a["depth_k"] == depth:
            assert f"| {a['workload']} | {a['al']:.2f} [" in card
    assert f'"num_speculative_tokens": {depth}' in card
    assert f"--speculative-num-steps {depth} " in card
    assert f"--spec-draft-n-max {depth} " in card
    assert "ngram" in card
    for check in policy["gate"]["checks"]:
        assert check["name"] in card
    assert "None" not in card


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


def test_a_card_says_that_a_stitched_release_holds_a_copy_of_the_target(
    export: Callable[..., Any], evidence: dict[str, Any], tmp_path: Path
) -> None:
    release = export()
    policy = json.loads((evidence["policy"].path / "policy.json").read_text())
    record = json.loads((release.path / "release.json").read_text())
    assert "`draftsmith/target.json`, not copied |" in (release.path / "README.md").read_text()
    record["formats"] = {"stitched": {**record["formats"]["eagle3"], "format": "stitched"}}
    write_card(tmp_path / "card.md", record, Evidence(policy, {}, evidence["end_to_end"].path, 256))
    assert "copied to `stitched` with its MTP module exchanged |" in (tmp_path / "card.md").read_text()


def test_a_folder_of_this_machine_is_named_by_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "acme-secret").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given in ("models/acme-secret", str(tmp_path / "models" / "acme-secret"), "/nowhere/acme-secret"):
        assert public_settings({"model": given, "num_layers": 1}) == {"model": "acme-secret", "num_layers": 1}
    for given in ("builtin", "org/name", ""):
        assert public_settings({"model": given}) == {"model": given}
    assert public_settings({"ttt_steps": 3}) == {"ttt_steps": 3}


def test_vllms_medusa_is_told_one_depth_whatever_the_batch() -> None:
    told = settings_for("medusa", {1: 3, 8: 1})
    assert told["vllm"]["speculative_config"] == {"method": "medusa", "num_speculative_tokens": 3}
    older = settings_for("eagle3", {1: 2, 8: 4})
    (line, *_) = launch_lines("medusa", 2, older, "target", {"medusa": "medusa"})
    assert "per_batch" not in line[1] and "per_batch" in str(older)
    assert '"num_speculative_tokens": 2' in line[1], "the chosen depth, not the deepest of any batch"


def test_vllms_medusa_is_told_the_chosen_depth_though_a_larger_batch_has_a_deeper_one() -> None:
    assert settings_for("medusa", {1: 2, 8: 4})["vllm"]["speculative_config"]["num_speculative_tokens"] == 2
    assert settings_for("medusa", {1: 0, 8: 4})["vllm"]["speculative_config"]["num_speculative_tokens"] == 4
    assert settings_for("eagle3", {1: 2, 8: 4})["vllm"]["speculative_config"]["num_speculative_tokens"] == 4


@pytest.mark.parametrize(
    ("method", "folders", "settings", "words"),
    [
        (
            "ngram",
            {},
            {"min_ngram": 2, "max_ngram": 4},
            ['"prompt_lookup_max": 4', "NGRAM", "prompt_lookup_num_tokens=3"],
        ),
        ("lookahead", {}, {}, ["draftsmith generate"]),
        ("p-eagle", {"speculators": "speculators"}, {}, ['"parallel_drafting": true', '"method": "eagle3"']),
        (
            "mtp",
            {"mimo": "mimo"},
            {},
            ['"num_speculative_tokens": 1', "./mimo", "--hf-overrides '{\"num_nextn_predict_layers\": 1}'"],
        ),
        ("mtp", {"stitched": "stitched"}, {}, ["vllm serve ./stitched", "--model-path ./stitched"]),
        ("draft-model", {"gguf": "gguf"}, {}, ["./gguf/draft.gguf", "--spec-type draft-simple"]),
        ("draft-model", {}, {"model": "a/b"}, ['"model": "a/b"', "--speculative-draft-model-path a/b"]),
        ("medusa", {"medusa": "medusa"}, {}, ['"method": "medusa"']),
        ("mtp-parallel", {}, {}, []),
    ],
)
def test_every_method_has_the_launch_lines_of_the_engines_that_serve_it(
    method: str, folders: dict[str, str], settings: dict[str, Any], words: list[str]
) -> None:
    lines = launch_lines(method, 3, settings_for(method, {1: 3}), "target", folders, settings)
    said = "\n".join(command for _, command in lines)
    assert all(word in said for word in words), said
    assert bool(lines) == bool(words)
    assert launch_lines(method, 0, settings_for(method, {1: 3}), "target", folders, settings) == []


def test_who_may_read_the_card_may_read_the_weights(export: Callable[..., Any]) -> None:
    """Engines often run as another user, in a container for one."""
    release = export(include="all")
    modes = {file.stat().st_mode & 0o777 for file in release.path.rglob("*") if file.is_file()}
    assert len(modes) == 1
