"""A card claims no more than the gate let pass, and gives commands only to engines that serve what was measured."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_drafts import saved_draft
from tiny_formats import KEYS

from components.contract import Context, DepthPolicy, Draft
from components.drafts import quantise_draft
from components.drafts.storage.files import build_draft
from components.engines.launch import not_served
from components.policy import read_policy
from components.publish import export_release
from components.publish.card.card import Evidence, measured_limits, write_card
from components.publish.card.lineage import ArtifactRecord
from components.publish.formats.interface import facts_of
from components.rows import Request, read_rows, write_rows
from components.targets import load_target
from components.targets.load import open_target

Export = Callable[..., Any]


def card_of(release: Any) -> str:
    return str((release.path / "README.md").read_text())


def test_what_the_gate_refused_stands_beside_the_speedup(
    export: Export, evidence: dict[str, Any], changed: Callable[..., DepthPolicy]
) -> None:
    raw = json.loads((evidence["policy"].path / "policy.json").read_text())
    checks = [{**c, "passed": c["name"] != "prediction_gap"} for c in raw["gate"]["checks"]]
    card = card_of(export(policy=changed(gate={"passed": False, "checks": checks})))
    head = card.partition("## What it is")[0]
    assert "**The promotion gate refused it**: gap between predicted and measured speedup" in head
    assert head.index("refused") > head.index("as fast as")


def test_a_gate_that_passed_and_one_that_was_never_asked_refuse_nothing(
    export: Export, evidence: dict[str, Any], tmp_path: Path
) -> None:
    release = export()
    assert "gate refused" not in card_of(release)
    release.path.rename(tmp_path / "first")
    assert "gate refused" not in card_of(export(policy=evidence["chosen"]))


def test_of_wrong_output_no_speed_is_claimed(export: Export, changed: Callable[..., DepthPolicy]) -> None:
    card = card_of(export(policy=changed(verdict="invalid", reasons=["eagle3 identity: 3 outputs differ"])))
    head = card.partition("## What it is")[0]
    assert "its output or its numbers were found to be wrong" in head and "3 outputs differ" in head
    assert "as fast" not in head and "not reliably slower" not in head


def test_a_workload_that_measured_slower_is_served_without_drafting(
    export: Export, evidence: dict[str, Any], changed: Callable[..., DepthPolicy], tmp_path: Path
) -> None:
    """Its depth was chosen by prediction; what was measured since has the last word, and the gate before it."""
    raw = json.loads((evidence["policy"].path / "policy.json").read_text())
    mine = [c for c in raw["choices"] if c["draft_key"] == raw["winner"]["draft_key"]]
    slow = next(c for c in mine if c["workload"] != "all" and c["depth_k"])
    choices = [{**c, "verdict": "do_not_speculate"} if c == slow else c for c in raw["choices"]]
    told = json.loads((export(policy=changed(choices=choices)).path / "draftsmith" / "serve.json").read_text())
    wanted = {c["workload"]: 0 if c == slow else c["depth_k"] for c in mine}
    assert told["depth_by_workload"] == wanted and told["depth_k"] > 0
    for folder in ("changed", "release"):
        (tmp_path / folder).rename(tmp_path / f"{folder}-before")
    told = json.loads((export(policy=changed(verdict="invalid")).path / "draftsmith" / "serve.json").read_text())
    assert told["depth_k"] == 0 and not any(told["depth_by_workload"].values())


def test_an_engine_that_drops_a_part_of_the_drafter_gets_no_command(
    export: Export, saved: Callable[..., Draft]
) -> None:
    """No engine was promised it; the command would load, and accept less than was measured."""
    release = export(only=[saved("eagle3", fc_norm=True)])
    card = card_of(release)
    assert "vllm serve" in card
    assert "sglang.launch_server" not in card and "convert_hf_to_gguf" not in card
    assert "Not in SGLang: SGLang drops fc_norm (EAGLE-3.1) without a word.\n" in card
    record = json.loads((release.path / "release.json").read_text())
    assert set(record["launch"]) == {"vLLM"} and set(record["not_served"]) == {"SGLang", "llama.cpp"}


def test_an_engine_that_drafts_less_than_the_chosen_depth_is_said_to(
    export: Export, policy_for: Callable[[str], DepthPolicy], saved: Callable[..., Draft]
) -> None:
    """vLLM is exact for the first guess of a new module; the speeds on the card were measured deeper."""
    draft = replace(saved("mtp", mtp_modules=1, intermediate_size=0), key=KEYS["mtp"])
    release = export(policy=policy_for("mtp"), only=[draft], engines=["vllm"])
    record, card = json.loads((release.path / "release.json").read_text()), card_of(release)
    depth, command = record["serve"]["depth_k"], shlex.split(record["launch"]["vLLM"])
    assert json.loads(command[-1])["num_speculative_tokens"] == 1 < depth
    assert f"\nvLLM drafts 1 token a round here; the speeds above are at depth {depth}.\n" in card


def test_a_tokenizer_that_llama_cpps_converter_does_not_know_gets_no_command(
    evidence: dict[str, Any], tmp_path: Path
) -> None:
    """The built-in target's: the converter refuses it unless it is told, which no command line does."""
    contexts = [Context(key=KEYS["eagle3"], out=tmp_path / n, scratch=tmp_path, num_threads=1) for n in ("t", "d", "r")]
    for ctx in contexts:
        ctx.out.mkdir()
    target = load_target(model="builtin", ctx=contexts[0])
    opened = open_target(target, dtype="float32", kernel="plain")
    network = build_draft("eagle3", opened, {"intermediate_size": 64}, torch.arange(64))
    keys = {"key": KEYS["eagle3"], "target_key": target.key}
    draft = saved_draft(tmp_path / "d", network, {"intermediate_size": 64}, opened, **keys)
    parts = (evidence["policy"], evidence["acceptance"], evidence["end_to_end"])
    card = card_of(export_release(target, [draft], *parts, ctx=contexts[2]))
    assert "convert_hf_to_gguf" not in card and "vllm serve builtin" in card
    told = "Not in llama.cpp: llama.cpp's converter does not know this target's tokenizer; export with llama.cpp"
    assert f"{told} among the engines and DRAFTSMITH_LLAMA_CPP set, which answers for it.\n" in card
    shape = facts_of(opened.shape)
    for formats, refused in ((["gguf"], False), (["eagle3", "gguf"], False), (["eagle3"], True), ([], False)):
        found = not_served("eagle3", {}, shape, None, formats, unknown_tokenizer=True)
        assert ("llama.cpp" in found) == refused, "a GGUF was made with it told; without files there is no command"


def test_arms_that_draft_trees_are_told_from_chains(
    export: Export, evidence: dict[str, Any], changed: Callable[..., DepthPolicy]
) -> None:
    raw = json.loads((evidence["policy"].path / "policy.json").read_text())
    mine = next(a for a in raw["arms"] if a["draft_key"] == raw["winner"]["draft_key"] and a["workload"] == "all")
    trees = [{**mine, "tree_budget": budget} for budget in (6, 10)]
    lines = card_of(export(policy=changed(arms=[*raw["arms"], *trees]))).splitlines()
    head = f"| eagle3 (this one) | {mine['depth_k']}"
    told = [line.removeprefix(head).partition(" |")[0] for line in lines if line.startswith((f"{head} |", f"{head} ("))]
    assert sorted(told) == ["", " (tree of 10)", " (tree of 6)"]


def test_a_bias_that_vllm_passes_over_is_not_launched_there(export: Export, saved: Callable[..., Draft]) -> None:
    card = card_of(export(only=[saved("eagle1")]))
    assert "vllm serve" not in card
    assert "Not in vLLM: vLLM has no bias in fc and passes over ours without a word, and fc_bias is true.\n" in card


@pytest.mark.parametrize(
    ("settings", "launched"),
    [({}, {"vLLM", "SGLang"}), ({"keep": [], "group_size": 32}, {"vLLM"}), ({"weights": "bf16"}, None)],
)
def test_packed_weights_are_launched_where_they_are_taken(
    settings: dict[str, Any], launched: set[str] | None, export: Export, saved: Callable[..., Draft], tmp_path: Path
) -> None:
    (tmp_path / "packed").mkdir()
    ctx = Context(key=KEYS["eagle3"], out=tmp_path / "packed", scratch=tmp_path / "packed", num_threads=1)
    made = quantise_draft(saved("eagle3", intermediate_size=64), ctx=ctx, **settings)
    release = export(only=[Draft(key=KEYS["eagle3"], path=made.path, info=made.info)])
    record = json.loads((release.path / "release.json").read_text())
    found = set(record["launch"])
    assert "weights: " not in str(record["not_served"]), "remedies are for whoever trains it"
    assert found == (launched or {"vLLM", "SGLang", "llama.cpp"})


def test_only_requests_that_drafted_and_finished_tell_what_was_measured(
    evidence: dict[str, Any], tmp_path: Path
) -> None:
    policy = read_policy(evidence["policy"].path)
    assert policy.winner is not None
    key = policy.winner.draft_key
    rows = [row for row in read_rows(evidence["end_to_end"].path, Request) if row.draft_key == key and row.depth_k]
    facts = rows[0].__dict__
    longest = max(row.prompt_tokens + row.tokens_kept for row in rows)
    failed = Request(**{**facts, "status": "error", "prompt_tokens": 9999, "batch_size": 64})
    idle = Request(**{**facts, "depth_k": 0, "batch_size": 32})
    write_rows(tmp_path, [*rows, failed, idle])
    limits = measured_limits(policy, key, tmp_path, 10_000)
    assert limits.longest_context == longest
    assert limits.largest_timed == max(row.batch_size for row in rows)


def test_a_target_at_a_revision_is_named_as_each_engine_is_told_it(export: Export) -> None:
    release = export(target_name="acme/Big-7B@v2.1")
    launch = json.loads((release.path / "release.json").read_text())["launch"]
    assert launch["vLLM"].startswith("vllm serve acme/Big-7B --revision v2.1 --speculative-config ")
    assert "--model-path acme/Big-7B --revision v2.1 --speculative-draft-model-path ./eagle3" in launch["SGLang"]
    assert "--target-model-dir TARGET --outfile" in launch["llama.cpp"], "its converter takes a folder alone"
    assert "`TARGET` in them stands for the folder of the target." in card_of(release)
    assert 'base_model: "acme/Big-7B"' in card_of(release)


@pytest.mark.parametrize(
    ("named", "word"), [("our own model", "TARGET"), ("tiny", "tiny"), ("a\n| `name`", "TARGET"), ("", "tiny-llama")]
)
def test_what_stands_for_the_targets_folder_is_the_word_in_the_commands(export: Export, named: str, word: str) -> None:
    card = card_of(export(target_name=named))
    assert f"`{word}` in them stands for the folder of the target." in card
    assert f"vllm serve {word} --spec" in card and f"--target-model-dir {word} --outfile" in card


def made(key: str, uses: str, kind: str = "Chats", **facts: Any) -> ArtifactRecord:
    """A record of the lineage; facts: info, settings, inputs."""
    inputs = {name: tuple(keys) for name, keys in facts.pop("inputs", {}).items()}
    return ArtifactRecord(key, has_record=True, kind=kind, uses=uses, inputs=inputs, **facts)


@pytest.mark.parametrize(
    ("looked", "measured", "said"),
    [
        ([], ["b"], "no step looked for benchmark texts in the training data, and nothing else keeps what is measured"
         " here out of gossip."),
        ([], ["p"], "no step looked for benchmark texts in the training data; training and benchmark prompts are kept"
         " apart by their split alone."),
        ([], [], "no step looked for benchmark texts in the training data."),
        (["b"], [], "rows that hold benchmark texts were looked for and left out."),
        (["b"], ["b"], "rows that hold what is measured here were looked for and left out."),
        (["b"], ["x"], "rows that hold texts of benchmarks were looked for and left out, but what is measured here was"
         " not looked for in gossip."),
        (["b"], ["p"], "rows that hold texts of benchmarks, other than the prompts measured here, were looked for and"
         " left out; those are kept apart by their split alone."),
        (["b"], ["b", "x"], "rows that hold texts of benchmarks were looked for and left out, but not all of what is"
         " measured here was looked for in gossip."),
    ],
)  # fmt: skip
def test_a_card_says_of_decontamination_what_the_steps_looked_for(
    looked: list[str], measured: list[str], said: str, export: Export, evidence: dict[str, Any], tmp_path: Path
) -> None:
    """b and x are benchmarks, p what one step read, split and trained on."""
    info = {"source": "gossip", "num_train": 9, "num_test": 2}
    lineage = {one.key: one for one in (
        made("b", "data.collect_workloads", "Prompts", settings={"source": "b"}),
        made("x", "data.collect_workloads", "Prompts", settings={"source": "x"}),
        made("p", "data.collect_prompts", "Prompts", info=info),
        made("c", "data.deduplicate", info={"dropped": {}}, inputs={"chats": ["p"], "keep_out": looked}),
        made(KEYS["eagle3"], "drafts.train_draft", "Draft", inputs={"features": ["c"]}),
        *(made(f"m{one}", "bench.measure_acceptance", "Measurements", inputs={"prompts": [one]}) for one in measured),
    )}  # fmt: skip
    record = json.loads((export().path / "release.json").read_text())
    policy = read_policy(evidence["policy"].path)
    write_card(tmp_path / "card.md", record, Evidence(policy, lineage, evidence["end_to_end"].path, 256))
    assert f"\nDecontamination: {said}\n" in (tmp_path / "card.md").read_text()


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


def test_a_card_says_that_a_stitched_release_holds_a_copy_of_the_target(
    export: Callable[..., Any], evidence: dict[str, Any], tmp_path: Path
) -> None:
    release = export()
    policy = read_policy(evidence["policy"].path)
    record = json.loads((release.path / "release.json").read_text())
    assert "`draftsmith/target.json`, not copied |" in (release.path / "README.md").read_text()
    record["formats"] = {"stitched": {**record["formats"]["eagle3"], "format": "stitched"}}
    write_card(tmp_path / "card.md", record, Evidence(policy, {}, evidence["end_to_end"].path, 256))
    assert "copied to `stitched` with its MTP module exchanged |" in (tmp_path / "card.md").read_text()
