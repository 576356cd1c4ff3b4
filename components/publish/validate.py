"""A stranger's checkpoint, or a whole release, recognised and checked: what `draftsmith validate FOLDER` says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from components.contract import UserError

if TYPE_CHECKING:
    from components.publish.exact_check import LaidOut
    from components.targets.model import TargetShape


def validate_folder(folder: Path, target: str = "") -> list[str]:
    """What was found and what is worth knowing, in lines; raises UserError, one line, for the first fault.

    folder: a drafter's, a release (every file by its sha256, every format), or a file in GGUF.
    target: "builtin" or a folder in Hugging Face format, compared with it; "" checks the drafter by itself.
    """
    from components.publish.formats import layout_of, read_folder, weights_in
    from components.publish.gguf_file import check_gguf
    from components.targets.rope_scaling import rope_scaling_of

    if folder.suffix == ".gguf":
        count = check_gguf(folder, folder.parent.name)
        return [f"{folder}: a GGUF file of {count} tensors; llama.cpp checks the rest when it loads it"]
    if (folder / "release.json").is_file():
        return _release(folder, target)
    shape = _shape(target) if target else None
    format, laid_out = read_folder(folder, shape)
    num_params, dtype = weights_in(laid_out)
    said = [
        f"{folder}: a sound {format} checkpoint ({', '.join(layout_of(format).methods)}):"
        f" {len(laid_out.tensors)} tensors, {num_params:,} parameters, {dtype}"
    ]
    block = laid_out.config.get("transformer_layer_config", laid_out.config)
    if shape is None:
        said.append("not compared with its target: give it as --target")
        return said
    for name in ("rope_theta", "rms_norm_eps"):
        if name in block and block[name] != getattr(shape, name):
            said.append(f"note: its {name} is {block[name]:g}, the target's is {getattr(shape, name):g}; intended?")
    rope = block.get("rope_parameters") or block.get("rope_scaling") or {}
    if scaling := rope_scaling_of(rope, block.get("partial_rotary_factor")):
        said.append(f"note: its positions are scaled ({scaling}), where ours are rotated plainly; intended?")
    return [*said, *_engines(format, laid_out, shape)]


def _release(folder: Path, target: str) -> list[str]:
    """Every file of a release is the one that was released, and every format in it is sound."""
    from components.publish.checkpoint_files import read_json
    from components.publish.checksums import check_sums
    from components.publish.provenance import FILE, check_provenance

    sums = check_sums(folder)
    record = read_json(folder / "release.json", folder.name)
    try:
        files = {str(file["path"]): str(file["sha256"]) for file in record["files"]}
        formats = {str(name): str(facts.get("format", "")) for name, facts in record["formats"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder.name}/release.json: no list of files and formats ({error!r:.80})") from error
    told = {name: digest for name, digest in sums.items() if name != "release.json"}
    if differs := sorted(name for name in told.keys() | files.keys() if told.get(name) != files.get(name)):
        raise UserError(f"{folder.name}/release.json: says otherwise than SHA256SUMS of {differs[0]}; copy both again")
    artifacts, packages = check_provenance(read_json(folder / FILE, folder.name), record, folder.name)
    said = [f"{folder}: a release, {len(sums)} files as they were released"]
    said.append(f"{folder}/{FILE}: names {artifacts} artifacts and {packages} packages")
    for name, format in formats.items():
        if format not in ("stitched", ""):
            inside = folder / name / "draft.gguf" if format == "gguf" else folder / name
            said += validate_folder(inside, target)
    return said


def _engines(format: str, laid_out: LaidOut, shape: TargetShape) -> list[str]:
    """Which engines read such a checkpoint for this target, and why the others do not."""
    from components.publish.eagle3_layout import misread
    from components.publish.formats import layout_of
    from components.publish.layout import facts_of
    from components.publish.profiles import ENGINES, NORM_FLAGS, TAPPED, profile_of, refusals, remark_on
    from components.publish.quantised_layout import storage_in

    config = laid_out.config
    storage = storage_in(config, "")
    method = layout_of(format).methods[-1 if config.get("speculators_model_type") == "peagle" else 0]
    block = config.get("transformer_layer_config", config)
    settings = {name: config.get(name, False) for name in NORM_FLAGS}
    settings |= {"num_layers": block.get("num_hidden_layers", 1)} if method != "mtp" else {}
    bias = laid_out.tensors.get("fc.bias")
    settings |= {"mtp_modules": config.get("num_nextn_predict_layers"), "first_hidden": "post_norm"}
    # The layouts that hold a module have compared its width with the target's already.
    settings |= {"intermediate_size": 0, "fc_bias": bias is not None and bool(bias.count_nonzero())}
    lines = []
    for engine in ENGINES:
        profile = profile_of(engine)
        served = profile.methods.get(method)
        if served is None or (format not in served.formats and not ("gguf" in served.formats and format != "mimo")):
            continue
        fixed, theta = profile.fixed_rope_theta, block.get("rope_theta", shape.rope_theta)
        # A drafter that is there already is rotated as its own config says, whatever its target's does.
        facts = facts_of(shape) if fixed is None else dataclasses.replace(facts_of(shape), rope_theta=fixed)
        why = next(refusals(engine, method, settings, facts, storage), "")
        if not why and method in TAPPED:
            why = misread(profile, laid_out, shape)
        if fixed is not None and theta != fixed:
            why = f"{profile.title} rotates every drafter by rope_theta {fixed:g}, and this one's is {theta:g}"
        tried = f"tried with {served.tried}" if served.tried else f"by its source or manual, {profile.version}"
        tried = remark_on(engine, storage) or tried
        lines.append(f"{profile.title}: {why}" if why else f"{profile.title}: reads it ({tried})")
    return lines


def _shape(target: str) -> TargetShape:
    from components.targets.inspect_files import read_config
    from components.targets.shape import shape_of
    from components.targets.source import local_folder

    folder = local_folder(target)
    if folder is None:
        raise UserError(f"target: {target}: no such folder; give 'builtin' or a folder with config.json")
    return shape_of(read_config(folder, where=target, trust_remote_code=False), target)
