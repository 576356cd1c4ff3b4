"""Step `publish.export_release`: a drafter in the formats that engines load, with the evidence for it.

    release/
      README.md        the model card
      release.json     the release as data: formats, policy, launch lines, keys, versions, every file
      policy.json      the depth policy with every number behind it; policy.md is the same as text
      provenance.json  a CycloneDX bill of materials (provenance.py)
      SHA256SUMS       every file, for `sha256sum -c SHA256SUMS`
      draftsmith/      what MLflow serves: draft.json and model.safetensors as trained, target.json, serve.json
      kubernetes/      manifests for KServe and LLMKube (manifests.py), where the card has vLLM's or llama.cpp's command
      eagle3/ ...      one folder a format (registry.py), checked before it is written and again after; a method that no
                       engine loads from a file has no folder, only launch lines in the card

The target and its tokenizer are referenced, not copied: target.json names them with the sha256 of every file. The
exception is `stitched`, a copy of the target's checkpoint with its MTP module replaced.

Folders of this machine are named by their last part, and the target by `target_name`. Only draftsmith/ keeps paths:
target.json and draft.json load a local target and a local draft model from them. An upload removes them
(public_copy.py).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import yaml

from components.contract import Context, DepthPolicy, Draft, Measurements, Release, Target, UserError
from components.drafts.network.layers import BlockShape
from components.drafts.storage.files import DraftRecord, read_record
from components.engines.depth_settings import engine_settings, setting_files
from components.engines.launch import cannot_load, not_served
from components.engines.profiles import CUT_VOCABULARY, Engine, Format, formats_for, refusals, remark_on
from components.methods import METHODS
from components.outside_json import JsonObject, read_object
from components.policy import Policy, judged_choice, read_policy, served_choices
from components.publish.card.card import Evidence, launch_commands, write_card
from components.publish.card.lineage import lineage_of
from components.publish.card.provenance import provenance, write_provenance
from components.publish.formats.gguf import unknown_pre_tokenizer, write_gguf
from components.publish.formats.interface import Source, facts_of
from components.publish.formats.mtp import stitch
from components.publish.formats.registry import TOKENIZER, read_drafter_state, write_format
from components.publish.names import public_name, public_settings, public_value
from components.publish.release.checksums import file_records, files_of, write_sums
from components.publish.release.manifests import write_manifests
from components.publish.release.public_copy import holds_target
from components.release_record import (
    RELEASE,
    EngineRecords,
    FormatRecord,
    ReleaseKeys,
    ReleaseRecord,
    ServeRecord,
    WeightCounts,
    write_json,
)
from components.rows import ALL, DepthChoice
from components.source_code import code_state
from components.targets.config import read_config
from components.targets.remembered import sha256_of
from components.targets.shape import shape_of
from components.targets.source import BUILTIN, list_files, local_folder, open_record
from components.weight_format import Storage


def export_release(
    target: Target,
    drafts: list[Draft],
    policy: DepthPolicy,
    acceptance: list[Measurements],
    end_to_end: Measurements,
    *,
    engines: list[Engine],
    include: Literal["winner", "all"],
    license: str,
    target_name: str,
    llama_cpp: str,
    ctx: Context,
) -> Release:
    """The step `publish.export_release`; its settings are explained in components/publish/steps.py."""
    decision = read_policy(policy.path)
    winner = _select_winner(decision, drafts)
    exported = [winner, *(d for d in drafts if d is not winner)] if include == "all" else [winner]
    source = source_of(target)
    if target_name:
        source = dataclasses.replace(source, name=target_name)
    written: dict[str, FormatRecord] = {}
    for done, draft in enumerate(exported):
        formats = promised_formats(draft, source, engines)
        if not formats:
            destination = "goes out in draftsmith/ alone" if draft is winner else "stays here"
            ctx.note(f"{draft.info['method']} ({draft.key[:12]}) needs no file that engines load: it {destination}")
        for engine in engines:
            if remark := remark_on(engine, Storage.from_record(read_record(draft.path))):
                ctx.note(remark)
        written |= _export_drafter(draft, source, formats, ctx, used_names=set(written), llama_cpp=llama_cpp)
        ctx.progress(done + 1, len(exported), "drafters")
    serve = write_draftsmith_folder(ctx.out / "draftsmith", target, winner, decision, end_to_end)
    keys: ReleaseKeys = {
        "policy": policy.key,
        "acceptance": [m.key for m in acceptance],
        "end_to_end": end_to_end.key,
        "release": ctx.key,
    }
    policy_parts = dataclasses.asdict(decision)
    # A local path says nothing elsewhere: only draftsmith/ keeps it, where it is needed to load.
    public_target_name = target_name or public_name(str(target.info.get("model", "")))
    record: ReleaseRecord = {
        "target": {"key": target.key, **public_value(_scalar_facts(target.info)), "model": public_target_name},
        "draft": {"key": winner.key, **public_value(_scalar_facts(winner.info))},
        **_served_by_engines(winner, decision, source, written),
        "policy": {name: policy_parts[name] for name in POLICY_PARTS},
        "serve": serve,
        "license": license,
        "keys": keys,
        "versions": versions(),
    }
    lineage = lineage_of([target, *exported, policy, *acceptance, end_to_end])
    evidence = Evidence(
        decision, lineage, end_to_end.path, source.shape.max_position_embeddings, read_licence(source.folder)
    )
    write_documents(ctx.out, record, evidence, policy)
    ctx.note(f"released {serve['method']} at depth {serve['depth_k']} as {', '.join([*written, 'draftsmith'])}")
    return Release.of_step(ctx, _release_info(record, decision))


def _served_by_engines(
    winner: Draft, policy: Policy, source: Source, written: dict[str, FormatRecord]
) -> EngineRecords:
    """release.json's entries about settings, formats and engines, with public names only."""
    draft_record = read_record(winner.path)
    method, facts = str(draft_record["method"]), facts_of(source.shape)
    settings = _told_to_engines(draft_record, source)
    storage, taps = Storage.from_record(draft_record), draft_record.get("tap_layers", [])
    formats = [one["format"] for one in written.values() if one["draft_key"] == winner.key]
    refused = not_served(
        *(method, settings, facts, storage, formats, taps), unknown_tokenizer=bool(unknown_pre_tokenizer(source))
    )
    return {
        "settings": public_settings(draft_record["settings"]),
        "formats": written,
        "not_served": refused,
        "engines": engine_settings(
            policy, cannot_load(method, settings, facts, storage, formats, refused, taps), settings
        ),
    }


def _select_winner(policy: Policy, drafts: list[Draft]) -> Draft:
    """The drafter that won; without a winner the one that the verdict is about, released with depth 0."""
    by_key = {d.key: d for d in drafts}
    if policy.winner is not None:
        key = policy.winner.draft_key
        if key not in by_key:
            raise UserError(
                f"drafts: the policy's winner {key[:12]} is not among them; wire the drafters it was chosen from"
            )
        return by_key[key]
    of_drafts = dataclasses.replace(policy, choices=[c for c in policy.choices if c.draft_key in by_key])
    choice = judged_choice(of_drafts)
    if choice is None:
        raise UserError("drafts: the policy says nothing about any of them; wire the drafters it was chosen from")
    return by_key[choice.draft_key]


def promised_formats(draft: Draft, source: Source, engines: list[Engine]) -> tuple[Format, ...]:
    """The formats of a drafter for these engines. Raises UserError, one line, where one of them could not serve it."""
    record = read_record(draft.path)
    method, taps = str(record["method"]), record.get("tap_layers", [])
    label = f"{method} ({draft.key[:12]})"
    if (beside := record.get("with_suffix")) is not None:
        raise UserError(
            f"{label} has suffix decoding beside it, which no format holds: release the drafter that drafts.add_suffix"
            f" was given ({str(beside['drafter'])[:12]})"
        )
    settings = _told_to_engines(record, source)
    refuse_unserved(method, settings, source, engines, label, Storage.from_record(record), taps)
    return formats_for(method, settings, engines)


def _told_to_engines(record: DraftRecord, source: Source) -> JsonObject:
    """The settings of a drafter's record, and whether its vocabulary is a part of the target's."""
    return {**record["settings"], CUT_VOCABULARY: record["draft_vocab_size"] < source.shape.vocab_size}


def source_of(target: Target) -> Source:
    """The target as layouts need it, with the drafters' head size where the target's own is odd."""
    folder, record = open_record(target.path)
    model = str(record["model"])
    config = read_config(folder, location=model, trust_remote_code=bool(record["trust_remote_code"]))
    shape = shape_of(config, model)
    head_dim = BlockShape.of(SimpleNamespace(shape=shape), 0).head_dim  # type: ignore[arg-type]  # it reads the shape only
    return Source(dataclasses.replace(shape, head_dim=head_dim), public_name(model) or "target", folder)


def _export_drafter(
    draft: Draft,
    source: Source,
    formats: tuple[Format, ...],
    ctx: Context,
    *,
    used_names: set[str],
    llama_cpp: str = "",
) -> dict[str, FormatRecord]:
    """Write one drafter in its formats, each only if its checks pass. Returns folder name -> facts."""
    drafter = read_drafter_state(draft.path)
    packed = drafter.storage is not None and drafter.storage.bits is not None
    written: dict[str, FormatRecord] = {}
    for format in formats:
        name = format if format not in used_names else f"{format}-{draft.key[:8]}"
        weights: WeightCounts | None
        folder, stored_format = ctx.out / name, format
        if format == "stitched":
            assert source.folder is not None
            if packed:
                raise UserError("stitched: a copy of the target has its dtype: leave drafts.quantise_draft out")
            weights = stitch(source.folder, folder, drafter.tensors, source.shape.num_layers)
        elif format == "gguf":
            weights = write_gguf(drafter, source, folder, llama_cpp, ctx)
            base = METHODS[drafter.method].gguf_base
            assert base is not None, "gguf is written for methods that llama.cpp's converter reads"
            if weights is None and packed:
                raise UserError("gguf: only llama.cpp's converter packs weights: install it, or give bf16")
            if weights is None and base not in formats:  # the folder that the converter reads
                name = base if base not in used_names else f"{base}-{draft.key[:8]}"
                stored_format = base
                weights = write_format(base, drafter, source, ctx.out / name)
        else:
            weights = write_format(format, drafter, source, folder)
        if weights:
            written[name] = {
                "draft_key": draft.key,
                "method": drafter.method,
                "format": stored_format,
                "holds_target": holds_target(stored_format, drafter.method, drafter.settings, source.shape.hidden_size),
                **weights,
            }
            if remark := rounding_remark(format, drafter.storage, weights["dtype"]):
                ctx.note(f"{name}: {remark}")
    return written


def rounding_remark(format: str, storage: Storage | None, dtype: str) -> str:
    """How the weights in a format differ from the measured ones, in one clause; "" where they are equal."""
    if format == "eagle1" and storage is not None:
        return "fc holds the embedding's norm as well, rounded to bf16 again: by 2^-9 of each weight at most"
    measured = "float32" if storage is None else "bfloat16"
    if format == "stitched" and dtype not in (measured, "float32"):
        remedy = "; drafts.quantise_draft with weights: bf16 measures it so" if dtype == "bfloat16" else ""
        return f"the module is rounded to the target's {dtype}, and was measured in {measured}{remedy}"
    return ""


def refuse_unserved(
    method: str,
    settings: JsonObject,
    source: Source,
    engines: list[Engine],
    label: str,
    storage: Storage | None = None,
    taps: Sequence[int] = (),
) -> None:
    """Raises UserError, one line, where one of the engines could not serve such a drafter. label: what it is called."""
    for engine in engines:
        for reason in refusals(engine, method, settings, facts_of(source.shape), storage, taps):
            raise UserError(f"engines: {label}: {reason}")


def _scalar_facts(info: Mapping[str, object]) -> JsonObject:
    """The entries of an artifact's info that are single values."""
    return {k: v for k, v in info.items() if isinstance(v, str | int | float | bool) or v is None}


def _release_info(record: ReleaseRecord, policy: Policy) -> JsonObject:
    """The release's info, with which a registry tags its version."""
    serve = record["serve"]
    best = served_choices(policy, serve["draft_key"])[0]
    numbers = {
        name: getattr(best, name) for name in ("speedup_pred", "speedup_meas", "meas_lo", "meas_hi", "pred_error")
    }
    at = (serve["draft_key"], ALL, best.batch_size, serve["depth_k"])
    for e in policy.evals:
        if (e.draft_key, e.workload, e.batch_size, e.depth_k) == at:
            numbers |= {name: getattr(e, name) for name in ("al", "al_lo", "al_hi", "al_meas", "al_replayed")}
    gate = policy.gate
    return {
        "method": serve["method"],
        "target_key": serve["target_key"],
        "target": record["target"]["model"],
        "draft_key": serve["draft_key"],
        "depth_k": serve["depth_k"],
        "verdict": policy.verdict,
        "gate_passed": gate is not None and gate.passed,
        "gate_checks": [dataclasses.asdict(check) for check in gate.checks] if gate is not None else [],
        "formats": sorted(record["formats"]),
        **numbers,
    }


POLICY_FILES = ("policy.json", "policy.md")
POLICY_PARTS = ("verdict", "reasons", "winner", "gate", "rule", "choices", "flags")
"""Parts of policy.json that release.json repeats."""


def write_draftsmith_folder(
    folder: Path, target: Target, draft: Draft, policy: Policy, end_to_end: Measurements
) -> ServeRecord:
    """Write `draftsmith/`, from which mlflow_model.py serves, and return the content of its serve.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (draft.path / "draft.json", draft.path / "model.safetensors"):
        if source.is_file():  # a method without training has no weights
            shutil.copyfile(source, folder / source.name)
    _write_target_record(target, folder / "target.json")
    winner = policy.winner if policy.verdict in ("use", "undecided") else None
    serve: ServeRecord = {
        "method": str(draft.info["method"]),
        "draft_key": draft.key,
        "target_key": target.key,
        "depth_k": winner.depth_k if winner else 0,
        "depth_by_workload": _depth_by_workload(policy.choices, draft.key, drafting=winner is not None),
        "verdict": policy.verdict,
        "prompt_format": policy.prompt_format or "text",
    }
    facts = end_to_end.info
    if draft.key in facts.get("draft_kernels", {}):
        serve["measured_on"] = {
            "machine_id": str(facts["machine_id"]),
            "dtype": facts["dtype"],
            "num_threads": int(facts["num_threads"]),
            "kernel": str(facts["kernel"]),
            "draft_kernel": str(facts["draft_kernels"][draft.key]),
        }
    write_json(folder / "serve.json", serve)
    return serve


def _depth_by_workload(choices: list[DepthChoice], draft_key: str, *, drafting: bool) -> dict[str, int]:
    """Workload -> the depth to serve one drafter with, at the smallest batch size.

    It is 0 for a workload that measured slower, and for all workloads unless `drafting`.
    """
    of_drafter = [c for c in choices if c.draft_key == draft_key]
    smallest = min(c.batch_size for c in of_drafter)
    refused = ("do_not_speculate", "invalid")
    return {
        c.workload: c.depth_k if drafting and c.verdict not in refused else 0
        for c in of_drafter
        if c.batch_size == smallest
    }


def _write_target_record(target: Target, file: Path) -> None:
    """Write target.json: where the target and its tokenizer are, with the size and sha256 of every file."""
    if (target.path / "target.json").is_file():
        shutil.copyfile(target.path / "target.json", file)
        return
    files = list_files(target.path, target.key[:12])  # a target that was trained here: the artifact is the model
    facts = {one.name: {"size": one.stat().st_size, "sha256": sha256_of(one)} for one in files}
    record = {"model": str(target.path), "folder": str(target.path), "trust_remote_code": False, "dtype": None}
    write_json(file, {**record, "files": facts})


def write_documents(folder: Path, record: ReleaseRecord, evidence: Evidence, policy: DepthPolicy) -> None:
    """Write policy, model card, provenance.json and release.json; SHA256SUMS last, over everything else."""
    for name in POLICY_FILES:
        if (policy.path / name).is_file():
            shutil.copyfile(policy.path / name, folder / name)
    content = read_object(folder / "policy.json")
    if content.get("target_model"):  # its name here, which may be private
        write_json(folder / "policy.json", content | {"target_model": record["target"]["model"]})
    for name, content in setting_files(record["engines"]).items():
        write_json(folder / name, content)
    files = read_object(folder / "draftsmith" / "target.json")["files"]
    target_files = {str(name): str(facts["sha256"]) for name, facts in files.items()}
    of_tokenizer = {name for pattern in TOKENIZER for name in fnmatch.filter(target_files, pattern)}
    record["tokenizer"] = {name: digest for name, digest in target_files.items() if name in of_tokenizer}
    record["launch"] = launch_commands(record)
    write_manifests(folder, record)
    code = code_state()
    record["code"] = {"commit": code.commit, "changed": code.changed}
    write_card(folder / "README.md", record, evidence)
    write_provenance(folder, provenance(record, evidence.lineage, target_files, code))
    record["files"] = file_records(folder, files_of(folder))
    write_json(folder / RELEASE, record)
    write_sums(folder)


def versions() -> dict[str, str]:
    """Package -> version of the software that writes the release."""
    by_package = {"python": platform.python_version()}
    for name in ("draftsmith", "torch", "transformers", "safetensors", "tokenizers"):
        try:
            by_package[name] = version(name)
        except PackageNotFoundError:
            by_package[name] = "not installed as a package"
    return by_package


def read_licence(folder: Path | None) -> str:
    """The licence of a model by its README's front matter, else its LICENSE file; "" where it has neither."""
    if folder is None:
        return ""
    if folder == local_folder(BUILTIN):
        return "Apache-2.0, as Draftsmith; its corpus PSF-2.0"
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    match = re.match(r"---\n(.*?)\n---\s*\n", text, re.DOTALL)
    try:
        front_matter = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        front_matter = None
    named = front_matter.get("license") if isinstance(front_matter, dict) else None
    if isinstance(named, str) and named:
        return named
    return "as its LICENSE file says" if (folder / "LICENSE").is_file() else ""
