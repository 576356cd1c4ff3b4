"""A stranger's checkpoint, or a whole release, recognised and checked: what `draftsmith validate FOLDER` says."""

from __future__ import annotations

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
    from components.publish.formats import layout_of, read_folder
    from components.publish.gguf_file import check_gguf

    if folder.suffix == ".gguf":
        count = check_gguf(folder, folder.parent.name)
        return [f"{folder}: a GGUF file of {count} tensors; llama.cpp checks the rest when it loads it"]
    if (folder / "release.json").is_file():
        return _release(folder, target)
    shape = _shape(target) if target else None
    format, laid_out = read_folder(folder, shape)
    weights = [tensor for tensor in laid_out.tensors.values() if tensor.is_floating_point()]
    dtype = str(weights[0].dtype).removeprefix("torch.")
    said = [
        f"{folder}: a sound {format} checkpoint ({', '.join(layout_of(format).methods)}):"
        f" {len(laid_out.tensors)} tensors, {sum(t.numel() for t in weights):,} parameters, {dtype}"
    ]
    block = laid_out.config.get("transformer_layer_config", laid_out.config)
    if shape is None:
        said.append("not compared with its target: give it as --target")
        return said
    for name in ("rope_theta", "rms_norm_eps"):
        if name in block and block[name] != getattr(shape, name):
            said.append(f"note: its {name} is {block[name]:g}, the target's is {getattr(shape, name):g}; intended?")
    return [*said, *_engines(format, laid_out, shape)]


def _release(folder: Path, target: str) -> list[str]:
    """Every file of a release is the one that was released, and every format in it is sound."""
    from components.publish.checkpoint_files import read_json, require_plain
    from components.targets.file_digests import sha256_of

    record = read_json(folder / "release.json", folder.name)
    try:
        files = {str(file["path"]): (int(file["bytes"]), str(file["sha256"])) for file in record["files"]}
        formats = {str(name): str(facts.get("format", "")) for name, facts in record["formats"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder.name}/release.json: no list of files and formats ({error!r:.80})") from error
    there = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir()}
    if strange := sorted(there - {*files, "release.json"}):
        raise UserError(f"{folder.name}/{strange[0]}: not part of this release; remove it")
    for name, (size, digest) in files.items():
        file = folder / name
        require_plain(file, f"{folder.name}/{name}")
        if file.stat().st_size != size or sha256_of(file) != digest:
            raise UserError(f"{folder.name}/{name}: not what was released (its sha256 differs); copy it again")
    said = [f"{folder}: a release, {len(files)} files as they were released"]
    for name, format in formats.items():
        if format not in ("stitched", ""):
            inside = folder / name / "draft.gguf" if format == "gguf" else folder / name
            said += validate_folder(inside, target)
    return said


def _engines(format: str, laid_out: LaidOut, shape: TargetShape) -> list[str]:
    """Which engines read such a checkpoint for this target, and why the others do not."""
    from components.publish.formats import layout_of
    from components.publish.layout import facts_of
    from components.publish.profiles import ENGINES, profile_of, refusals

    config = laid_out.config
    method = layout_of(format).methods[-1 if config.get("speculators_model_type") == "peagle" else 0]
    block = config.get("transformer_layer_config", config)
    settings = {name: config.get(name, False) for name in ("fc_norm", "norm_output")}
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
        why = next(refusals(engine, method, settings, facts_of(shape)), "")
        tried = f"tried with {served.tried}" if served.tried else f"by its source or manual, {profile.version}"
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
