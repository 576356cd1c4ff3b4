"""Check a stranger's checkpoint or a whole release, for `draftsmith validate FOLDER`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from components.contract import UserError
from components.drafts.settings import read_window
from components.drafts.storage.quantisation import parse_storage
from components.engines.profiles import ENGINES, NORM_FLAGS, profile_of, refusals, remark_on
from components.methods import METHODS
from components.publish.card.provenance import FILE, check_provenance
from components.publish.formats.checkpoint import Checkpoint, read_json
from components.publish.formats.eagle3 import misread
from components.publish.formats.gguf import check_gguf
from components.publish.formats.interface import facts_of
from components.publish.formats.llama_block import has_qk_norm
from components.publish.formats.registry import count_weights, layout_of, read_folder
from components.publish.release.checksums import check_sums
from components.release_record import RELEASE, ReleaseRecord
from components.targets.config import read_config
from components.targets.shape import TargetShape, rope_scaling_of, shape_of
from components.targets.source import local_folder


def validate_folder(folder: Path, target: str = "") -> list[str]:
    """Check a folder and return its description in lines. Raises UserError, one line, for the first fault.

    folder: a drafter's checkpoint, a release (its checksums and every format are checked), or a GGUF file.
    target: "builtin" or a folder in Hugging Face format to compare with; "" checks the drafter by itself.
    """
    if folder.suffix == ".gguf":
        count = check_gguf(folder, folder.parent.name)
        return [f"{folder}: a GGUF file of {count} tensors; llama.cpp checks the rest when it loads it"]
    if (folder / RELEASE).is_file():
        return _validate_release(folder, target)
    shape = _target_shape(target) if target else None
    format, checkpoint = read_folder(folder, shape)
    num_params, dtype = count_weights(checkpoint)
    lines = [
        f"{folder}: a sound {format} checkpoint ({', '.join(layout_of(format).methods)}):"
        f" {len(checkpoint.tensors)} tensors, {num_params:,} parameters, {dtype}"
    ]
    block = checkpoint.config.get("transformer_layer_config", checkpoint.config)
    if shape is None:
        lines.append("not compared with its target: give it as --target")
        return lines
    for name in ("rope_theta", "rms_norm_eps"):
        if name in block and block[name] != getattr(shape, name):
            lines.append(f"note: its {name} is {block[name]:g}, the target's is {getattr(shape, name):g}; intended?")
    rope = block.get("rope_parameters") or block.get("rope_scaling") or {}
    if scaling := rope_scaling_of(rope, block.get("partial_rotary_factor")):
        lines.append(f"note: its positions are scaled ({scaling}), where ours are rotated plainly; intended?")
    return [*lines, *_engine_lines(format, checkpoint, shape)]


def _validate_release(folder: Path, target: str) -> list[str]:
    """Check the checksums of a release, its provenance and each of its formats."""
    sums = check_sums(folder)
    record: ReleaseRecord = read_json(folder / RELEASE, folder.name)  # type: ignore[assignment]  # checked here
    try:
        files = {str(file["path"]): str(file["sha256"]) for file in record["files"]}
        formats = {str(name): str(facts.get("format", "")) for name, facts in record["formats"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder.name}/release.json: no list of files and formats ({error!r:.80})") from error
    listed = {name: digest for name, digest in sums.items() if name != RELEASE}
    if differs := sorted(name for name in listed.keys() | files.keys() if listed.get(name) != files.get(name)):
        raise UserError(f"{folder.name}/release.json: says otherwise than SHA256SUMS of {differs[0]}; copy both again")
    artifacts, packages = check_provenance(read_json(folder / FILE, folder.name), record, folder.name)
    lines = [f"{folder}: a release, {len(sums)} files as they were released"]
    lines.append(f"{folder}/{FILE}: names {artifacts} artifacts and {packages} packages")
    for name, format in formats.items():
        if format not in ("stitched", ""):
            inside = folder / name / "draft.gguf" if format == "gguf" else folder / name
            lines += validate_folder(inside, target)
    return lines


def _engine_lines(format: str, checkpoint: Checkpoint, shape: TargetShape) -> list[str]:
    """One line an engine: that it reads such a checkpoint for this target, or why it does not."""
    config = checkpoint.config
    storage = parse_storage(config, "")
    method = layout_of(format).methods[-1 if config.get("speculators_model_type") == "peagle" else 0]
    block = config.get("transformer_layer_config", config)
    settings = {name: config.get(name, False) for name in NORM_FLAGS}
    settings |= {"qk_norm": has_qk_norm(block), "window": read_window(block)[0]}
    settings |= {"num_layers": block.get("num_hidden_layers", 1)} if method != "mtp" else {}
    bias = checkpoint.tensors.get("fc.bias")
    settings |= {"mtp_modules": config.get("num_nextn_predict_layers"), "first_hidden": "post_norm"}
    # The layouts of MTP modules have already compared the width with the target's.
    settings |= {"intermediate_size": 0, "fc_bias": bias is not None and bool(bias.count_nonzero())}
    lines = []
    for engine in ENGINES:
        profile = profile_of(engine)
        served = profile.methods.get(method)
        if served is None or (format not in served.formats and not ("gguf" in served.formats and format != "mimo")):
            continue
        fixed, theta = profile.fixed_rope_theta, block.get("rope_theta", shape.rope_theta)
        # An existing drafter is rotated as its own config says, whatever the target's says.
        facts = facts_of(shape) if fixed is None else dataclasses.replace(facts_of(shape), rope_theta=fixed)
        reason = next(refusals(engine, method, settings, facts, storage), "")
        if not reason and METHODS[method].reads_taps:
            reason = misread(profile, checkpoint, shape)
        if fixed is not None and theta != fixed:
            reason = f"{profile.title} rotates every drafter by rope_theta {fixed:g}, and this one's is {theta:g}"
        tried = f"tried with {served.tried}" if served.tried else f"by its source or manual, {profile.version}"
        tried = remark_on(engine, storage) or tried
        lines.append(f"{profile.title}: {reason}" if reason else f"{profile.title}: reads it ({tried})")
    return lines


def _target_shape(target: str) -> TargetShape:

    folder = local_folder(target)
    if folder is None:
        raise UserError(f"target: {target}: no such folder; give 'builtin' or a folder with config.json")
    return shape_of(read_config(folder, location=target, trust_remote_code=False), target)
