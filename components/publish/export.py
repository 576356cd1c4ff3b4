"""Export a drafter as something others can load, with the evidence for it.

    release/
      README.md        the model card
      release.json     what it is for programs: formats, policy, launch lines, keys, versions, every file
      policy.json      the depth policy with every number behind it; policy.md is the same for people
      provenance.json  where it comes from, a CycloneDX bill of materials (provenance.py)
      SHA256SUMS       every file, for `sha256sum -c SHA256SUMS`
      draftsmith/      what MLflow serves: draft.json and model.safetensors as trained, target.json, serve.json
      eagle3/ ...      one folder a format (formats.py), checked exactly before it is written and again after; no folder
                       for a method that no engine loads from a file of its own: its launch lines stand in the card

The target and its tokenizer are referenced, not copied: target.json names them with the sha256 of every file. One
format is the exception: `stitched` is a copy of the target's checkpoint with its own MTP module exchanged.

Folders of this machine are named by their last part, the target as `target_name` says, everywhere but in draftsmith/:
target.json and draft.json keep the path of a local target and of a given local draft model, to load them from there.
What leaves this machine leaves without them (public_copy.py).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from components.contract import Context, DepthPolicy, Draft, Measurements, Release, Target, UserError
from components.drafts.storage import Storage
from components.outside_json import read_object
from components.publish.profiles import GGUF_BASES, Engine, Format, formats_for, remark_on
from components.publish.public_names import public_name, public_settings, public_value

if TYPE_CHECKING:
    from components.publish.layout import Source


def export_release(
    target: Target,
    drafts: list[Draft],
    policy: DepthPolicy,
    acceptance: list[Measurements],
    end_to_end: Measurements,
    *,
    engines: list[Engine] = [],  # noqa: B006 - read, never changed
    include: Literal["winner", "all"] = "winner",
    license: Annotated[str, Field(min_length=1)] = "other",
    target_name: str = "",
    llama_cpp: str = "",
    ctx: Context,
) -> Release:
    """Export the winning drafter, checked exactly, with a model card that holds the evidence.

    Args:
        target: the model that the drafters serve; referenced by the release, copied only by `stitched`.
        drafts: the trained drafters.
        policy: chosen depths with their measurements and the promotion gate.
        acceptance: acceptance maps of the drafters; their keys go into the record.
        end_to_end: the timed comparison; its key goes into the record.
        engines: who will serve it: vllm, sglang, llama.cpp, mnn, tensorrt-llm, transformers, openvino, speculators. A
            drafter goes out in the formats they read, and what one of them could not serve is refused, before
            training by `draftsmith check`. Empty promises nothing and writes the format of the drafter's own method.
        include: "winner" exports the drafter with the best measured lower bound, "all" the others beside it.
        license: SPDX name of the drafter's licence, as model hubs write it; "other" means: see the target's licence.
        target_name: what the target is called in all that others may read; empty: a hub id as it is, a folder by its
            last part. For a private target say something that tells nothing.
        llama_cpp: the folder with llama.cpp's convert_hf_to_gguf.py, which makes the GGUF for llama.cpp; empty looks at
            $DRAFTSMITH_LLAMA_CPP and on the PATH; without it the folder that the converter reads goes out instead, and
            the card says how to convert it.
    """
    from components.drafts.files import read_record
    from components.publish.card import Evidence
    from components.publish.lineage import lineage_of
    from components.publish.release_folder import licence_of, versions, write_own_folder, write_papers

    found = _read_policy(policy)
    winner = _winner(found, drafts)
    chosen = [winner, *(d for d in drafts if d is not winner)] if include == "all" else [winner]
    source = source_of(target)
    if target_name:
        source = dataclasses.replace(source, name=target_name)
    written: dict[str, dict[str, Any]] = {}
    for done, draft in enumerate(chosen):
        formats = promised_formats(draft, source, engines)
        if not formats:
            where = "goes out in draftsmith/ alone" if draft is winner else "stays here"
            ctx.note(f"{draft.info['method']} ({draft.key[:12]}) needs no file that engines load: it {where}")
        for engine in engines:
            if remark := remark_on(engine, Storage.of(read_record(draft.path))):
                ctx.note(remark)
        written |= _export(draft, source, formats, ctx, taken=set(written), llama_cpp=llama_cpp)
        ctx.progress(done + 1, len(chosen), "drafters")
    serve = write_own_folder(ctx.out / "draftsmith", target, winner, found)
    record = {
        **_record(target, winner, found, source, written, target_name),
        "serve": serve,
        "license": license,
        "keys": {
            "policy": policy.key,
            "acceptance": [m.key for m in acceptance],
            "end_to_end": end_to_end.key,
            "release": ctx.key,
        },
        "versions": versions(),
    }
    lineage = lineage_of([target, *chosen, policy, *acceptance, end_to_end])
    evidence = Evidence(
        found, lineage, end_to_end.path, source.shape.max_position_embeddings, licence_of(source.folder)
    )
    write_papers(ctx.out, record, evidence, policy)
    ctx.note(f"released {serve['method']} at depth {serve['depth_k']} as {', '.join([*written, 'draftsmith'])}")
    return Release.made(ctx, _facts(record, found))


def _record(
    target: Target,
    winner: Draft,
    policy: dict[str, Any],
    source: Source,
    written: dict[str, dict[str, Any]],
    target_name: str,
) -> dict[str, Any]:
    """What release.json says of the models and their formats, in names that anybody may read."""
    from components.drafts.files import read_record
    from components.publish.engine_settings import engine_settings
    from components.publish.gguf_file import unknown_pre_tokenizer
    from components.publish.launch import cannot_load, not_served
    from components.publish.layout import facts_of

    own = read_record(winner.path)
    method, settings, facts = str(own["method"]), own["settings"], facts_of(source.shape)
    formats = [str(one["format"]) for one in written.values() if one["draft_key"] == winner.key]
    refused = not_served(
        *(method, settings, facts, Storage.of(own), formats), unknown_tokenizer=bool(unknown_pre_tokenizer(source))
    )
    without = cannot_load(method, settings, facts, Storage.of(own), formats, refused)
    # A local path says nothing elsewhere: only draftsmith/ keeps it, where it is needed to load.
    named = target_name or public_name(str(target.info.get("model", "")))
    return {
        "target": {"key": target.key, **public_value(_small(target.info)), "model": named},
        "draft": {"key": winner.key, **public_value(_small(winner.info))},
        "settings": public_settings(settings),
        "formats": written,
        "not_served": refused,
        "engines": engine_settings(policy, without),
        "policy": {k: policy[k] for k in ("verdict", "reasons", "winner", "gate", "rule", "choices", "flags")},
    }


def _read_policy(policy: DepthPolicy) -> dict[str, Any]:
    """policy.json as written by speedup.confirm_depth (or choose_depth)."""
    file = policy.path / "policy.json"
    if not file.is_file():
        raise UserError(f"policy ({policy.key[:12]}): no policy.json; wire speedup.confirm_depth into `policy`")
    return read_object(file)


def _winner(policy: dict[str, Any], drafts: list[Draft]) -> Draft:
    """The drafter that won; without a winner the best predicted one, released with depth 0 ("do not speculate")."""
    by_key = {d.key: d for d in drafts}
    if policy["winner"]:
        key = policy["winner"]["draft_key"]
        if key not in by_key:
            raise UserError(
                f"drafts: the policy's winner {key[:12]} is not among them; wire the drafters it was chosen from"
            )
        return by_key[key]
    known = [c for c in policy["choices"] if c["workload"] == "all" and c["draft_key"] in by_key]
    if not known:
        raise UserError("drafts: the policy says nothing about any of them; wire the drafters it was chosen from")
    smallest = min(c["batch_size"] for c in known)
    known = [c for c in known if c["batch_size"] == smallest]
    return by_key[max(known, key=lambda c: (c["pred_lo"], c["draft_key"]))["draft_key"]]


def promised_formats(draft: Draft, source: Source, engines: list[Engine]) -> tuple[Format, ...]:
    """The formats of a drafter for these engines; raises UserError, one line, where one could not serve it."""
    from components.drafts.files import read_record

    record = read_record(draft.path)
    method, settings = str(record["method"]), dict(record["settings"])
    refuse_unserved(method, settings, source, engines, f"{method} ({draft.key[:12]})", Storage.of(record))
    return formats_for(method, settings, engines)


def source_of(target: Target) -> Source:
    """The target as layouts see it, with the head size that drafters use where the target's own is odd."""
    from types import SimpleNamespace

    from components.drafts.layers import BlockShape
    from components.publish.layout import Source
    from components.targets.inspect_files import read_config
    from components.targets.shape import shape_of
    from components.targets.source import open_record

    folder, record = open_record(target.path)
    where = str(record["model"])
    config = read_config(folder, where=where, trust_remote_code=bool(record["trust_remote_code"]))
    shape = shape_of(config, where)
    head_dim = BlockShape.of(SimpleNamespace(shape=shape), 0).head_dim
    return Source(dataclasses.replace(shape, head_dim=head_dim), public_name(where) or "target", folder)


def _export(
    draft: Draft,
    source: Source,
    formats: tuple[Format, ...],
    ctx: Context,
    *,
    taken: set[str],
    llama_cpp: str = "",
) -> dict[str, dict[str, Any]]:
    """One drafter in its formats: folder name -> facts. Nothing is written in a format unless its check passes."""
    from components.publish.formats import own_form_at, write_format
    from components.publish.gguf_file import write_gguf
    from components.publish.mtp_stitch import stitch
    from components.publish.target_copies import FACT, holds_target

    own = own_form_at(draft.path)
    packed = own.storage is not None and own.storage.bits is not None
    written: dict[str, dict[str, Any]] = {}
    for format in formats:
        name = format if format not in taken else f"{format}-{draft.key[:8]}"
        made: dict[str, Any] | None
        folder, facts = ctx.out / name, {"draft_key": draft.key, "method": own.method, "format": format}
        if format == "stitched":
            assert source.folder is not None
            if packed:
                raise UserError("stitched: a copy of the target has its dtype: leave drafts.quantise_draft out")
            made = stitch(source.folder, folder, own.tensors, source.shape.num_layers)
        elif format == "gguf":
            made = write_gguf(own, source, folder, llama_cpp, ctx)
            base = GGUF_BASES[own.method]
            if made is None and packed:
                raise UserError("gguf: only llama.cpp's converter packs weights: install it, or give bf16")
            if made is None and base not in formats:  # what the converter reads, for whoever has one
                name = base if base not in taken else f"{base}-{draft.key[:8]}"
                facts["format"] = base
                made = write_format(base, own, source, ctx.out / name)
        else:
            made = write_format(format, own, source, folder)
        if made:
            held = holds_target(facts["format"], own.method, own.settings, source.shape.hidden_size)
            written[name] = {**facts, FACT: held, **made}
            if remark := rounded_again(format, own.storage, str(made["dtype"])):
                ctx.note(f"{name}: {remark}")
    return written


def rounded_again(format: Format, storage: Storage | None, dtype: str) -> str:
    """How the weights in a format differ from those that were measured, one clause; "" where they are the same."""
    if format == "eagle1" and storage is not None:
        return "fc holds the embedding's norm as well, rounded to bf16 again: by 2^-9 of each weight at most"
    measured = "float32" if storage is None else "bfloat16"
    if format == "stitched" and dtype not in (measured, "float32"):
        told = "; drafts.quantise_draft with weights: bf16 measures it so" if dtype == "bfloat16" else ""
        return f"the module is rounded to the target's {dtype}, and was measured in {measured}{told}"
    return ""


def refuse_unserved(
    method: str,
    settings: dict[str, Any],
    source: Source,
    engines: list[Engine],
    where: str,
    storage: Storage | None = None,
) -> None:
    """Raises UserError, one line, for the first reason why one of the engines could not serve such a drafter."""
    from components.publish.layout import facts_of
    from components.publish.profiles import refusals

    for engine in engines:
        for why in refusals(engine, method, settings, facts_of(source.shape), storage):
            raise UserError(f"engines: {where}: {why}")


def _small(info: Any) -> dict[str, Any]:
    """The plain facts of an artifact's info."""
    return {k: v for k, v in info.items() if isinstance(v, str | int | float | bool) or v is None}


def _facts(record: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    """The release's info: what a registry tags a version with."""
    serve = record["serve"]
    pooled = [c for c in policy["choices"] if c["workload"] == "all" and c["draft_key"] == serve["draft_key"]]
    best = min(pooled, key=lambda c: c["batch_size"])
    numbers = {k: best[k] for k in ("speedup_pred", "speedup_meas", "meas_lo", "meas_hi", "pred_error")}
    at = (serve["draft_key"], "all", best["batch_size"], serve["depth_k"])
    for e in policy["evals"]:
        if (e["draft_key"], e["workload"], e["batch_size"], e["depth_k"]) == at:
            numbers |= {k: e[k] for k in ("al", "al_lo", "al_hi", "al_meas", "al_replayed")}
    gate = policy["gate"]
    return {
        "method": serve["method"],
        "target_key": serve["target_key"],
        "target": record["target"]["model"],
        "draft_key": serve["draft_key"],
        "depth_k": serve["depth_k"],
        "verdict": policy["verdict"],
        "gate_passed": bool(gate and gate["passed"]),
        "gate_checks": gate["checks"] if gate else [],
        "formats": sorted(record["formats"]),
        **numbers,
    }
