"""Export a drafter as something others can load, with the evidence for it.

    release/
      README.md        the model card
      release.json     every file with its sha256, the policy, keys and versions
      draftsmith/      what MLflow serves: draft.json and model.safetensors as trained, target.json, serve.json
      eagle3/ ...      one folder a format (formats.py), checked exactly before it is written and again after; no folder
                       for a method that no engine loads from a file of its own: its launch lines stand in the card

The target and its tokenizer are referenced, not copied: target.json names them with the sha256 of every file. One
format is the exception: `stitched` is a copy of the target's checkpoint with its own MTP module exchanged.

Folders of this machine are named by their last part everywhere but in draftsmith/: target.json and draft.json keep the
path of a local target and of a given local draft model, because they load them from there.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from components.contract import Context, DepthPolicy, Draft, Measurements, Release, Target, UserError
from components.publish.profiles import Engine, Format, formats_for

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
        llama_cpp: the folder with llama.cpp's convert_hf_to_gguf.py, which makes the GGUF for llama.cpp; empty looks at
            $DRAFTSMITH_LLAMA_CPP and on the PATH; without it the folder that the converter reads goes out instead, and
            the card says how to convert it.
    """
    from components.drafts.files import read_record
    from components.publish.card import write_card

    found = _read_policy(policy)
    winner = _winner(found, drafts)
    chosen = [winner, *(d for d in drafts if d is not winner)] if include == "all" else [winner]
    source = source_of(target)
    written: dict[str, dict[str, Any]] = {}
    for done, draft in enumerate(chosen):
        formats = promised_formats(draft, source, engines)
        if not formats:
            where = "goes out in draftsmith/ alone" if draft is winner else "stays here"
            ctx.note(f"{draft.info['method']} ({draft.key[:12]}) needs no file that engines load: it {where}")
        written |= _export(draft, target, source, formats, ctx, taken=set(written), llama_cpp=llama_cpp)
        ctx.progress(done + 1, len(chosen), "drafters")
    serve = _own_folder(ctx.out / "draftsmith", target, winner, found)
    record: dict[str, Any] = {
        # A local path says nothing elsewhere: only draftsmith/ keeps it, where it is needed to load.
        "target": {"key": target.key, **_small(target.info), "model": _public_name(str(target.info.get("model", "")))},
        "draft": {"key": winner.key, **_small(winner.info)},
        "settings": _public_settings(read_record(winner.path)["settings"]),
        "serve": serve,
        "formats": written,
        "license": license,
        "policy": {k: found[k] for k in ("verdict", "reasons", "winner", "gate", "rule", "choices", "flags")},
        "keys": {
            "policy": policy.key,
            "acceptance": [m.key for m in acceptance],
            "end_to_end": end_to_end.key,
            "release": ctx.key,
        },
        "versions": _versions(),
    }
    write_card(ctx.out / "README.md", record, found)
    record["files"] = _checksums(ctx.out)
    (ctx.out / "release.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    ctx.note(f"released {serve['method']} at depth {serve['depth_k']} as {', '.join([*written, 'draftsmith'])}")
    return Release.made(ctx, _facts(record, found))


def _read_policy(policy: DepthPolicy) -> dict[str, Any]:
    """policy.json as written by speedup.confirm_depth (or choose_depth)."""
    file = policy.path / "policy.json"
    if not file.is_file():
        raise UserError(f"policy ({policy.key[:12]}): no policy.json; wire speedup.confirm_depth into `policy`")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


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
    refuse_unserved(method, settings, source, engines, f"{method} ({draft.key[:12]})")
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
    return Source(dataclasses.replace(shape, head_dim=head_dim), _public_name(where) or "target", folder)


def _export(
    draft: Draft,
    target: Target,
    source: Source,
    formats: tuple[Format, ...],
    ctx: Context,
    *,
    taken: set[str],
    llama_cpp: str = "",
) -> dict[str, dict[str, Any]]:
    """One drafter in its formats: folder name -> facts. Nothing is written in a format unless its check passes."""
    from components.drafts.files import read_draft
    from components.publish.formats import own_form_of, write_format
    from components.publish.gguf_file import BASES, write_gguf
    from components.publish.mtp_stitch import stitch

    record, tensors = read_draft(draft.path)
    own = own_form_of(record, tensors)
    written: dict[str, dict[str, Any]] = {}
    for format in formats:
        name = format if format not in taken else f"{format}-{draft.key[:8]}"
        made: dict[str, Any] | None
        folder, facts = ctx.out / name, {"draft_key": draft.key, "method": own.method, "format": format}
        if format == "stitched":
            assert source.folder is not None
            made = stitch(source.folder, folder, tensors, source.shape.num_layers)
        elif format == "gguf":
            made = write_gguf(own, source, folder, llama_cpp, ctx)
            base = BASES[own.method]
            if made is None and base not in formats:  # what the converter reads, for whoever has one
                name = base if base not in taken else f"{base}-{draft.key[:8]}"
                facts["format"] = base
                made = write_format(base, own, source, ctx.out / name)
        else:
            made = write_format(format, own, source, folder)
        if made:
            written[name] = {**facts, **made}
    return written


def refuse_unserved(method: str, settings: dict[str, Any], source: Source, engines: list[Engine], where: str) -> None:
    """Raises UserError, one line, for the first reason why one of the engines could not serve such a drafter."""
    from components.publish.layout import facts_of
    from components.publish.profiles import refusals

    for engine in engines:
        for why in refusals(engine, method, settings, facts_of(source.shape)):
            raise UserError(f"engines: {where}: {why}")


def _own_folder(folder: Path, target: Target, draft: Draft, policy: dict[str, Any]) -> dict[str, Any]:
    """`draftsmith/`: what mlflow_model.py serves from; byte copies and the chosen depth."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (draft.path / "draft.json", draft.path / "model.safetensors"):
        if source.is_file():  # what learns nothing has no weights
            shutil.copyfile(source, folder / source.name)
    if (target.path / "target.json").is_file():
        shutil.copyfile(target.path / "target.json", folder / "target.json")
    winner = policy["winner"] if policy["verdict"] in ("use", "undecided") else None
    serve = {
        "method": str(draft.info["method"]),
        "draft_key": draft.key,
        "target_key": target.key,
        "depth_k": int(winner["depth_k"]) if winner else 0,
        "depth_by_workload": _depth_by_workload(policy["choices"], draft.key),
        "verdict": policy["verdict"],
    }
    (folder / "serve.json").write_text(json.dumps(serve, indent=1) + "\n", encoding="utf-8")
    return serve


def _depth_by_workload(choices: list[dict[str, Any]], draft_key: str) -> dict[str, int]:
    """The depths chosen for one drafter at the smallest batch size."""
    mine = [c for c in choices if c["draft_key"] == draft_key]
    smallest = min(c["batch_size"] for c in mine)
    return {c["workload"]: c["depth_k"] for c in mine if c["batch_size"] == smallest}


def _public_name(model: str) -> str:
    """A hub id or "builtin" as it is, a folder by its last part."""
    here = model not in ("", "builtin") and Path(model).expanduser().is_dir()
    return Path(model).name if here or Path(model).is_absolute() or model.startswith((".", "~")) else model


def _public_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """A drafter's settings as anybody may read them: a given draft model by its public name."""
    return settings | ({"model": _public_name(str(settings["model"]))} if settings.get("model") else {})


def _small(info: Any) -> dict[str, Any]:
    """The plain facts of an artifact's info."""
    return {k: v for k, v in info.items() if isinstance(v, str | int | float | bool) or v is None}


def _versions() -> dict[str, str]:
    """Versions of what wrote the release."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("draftsmith", "torch", "transformers", "safetensors", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _checksums(folder: Path) -> list[dict[str, Any]]:
    """Every file written so far with size and sha256."""
    import hashlib

    files = []
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        name = file.relative_to(folder).as_posix()
        files.append({"path": name, "bytes": file.stat().st_size, "sha256": digest})
    return files


def _facts(record: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    """The release's info: what a registry tags a version with."""
    serve = record["serve"]
    pooled = [c for c in policy["choices"] if c["workload"] == "all" and c["draft_key"] == serve["draft_key"]]
    best = min(pooled, key=lambda c: c["batch_size"])
    numbers = {k: best[k] for k in ("speedup_pred", "speedup_meas", "meas_lo", "meas_hi", "pred_error")}
    at = (serve["draft_key"], "all", best["batch_size"], serve["depth_k"])
    for e in policy["evals"]:
        if (e["draft_key"], e["workload"], e["batch_size"], e["depth_k"]) == at:
            numbers |= {k: e[k] for k in ("al", "al_lo", "al_hi", "al_meas")}
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
