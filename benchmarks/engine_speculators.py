"""speculators converts and loads our export: are its first-step logits ours?

Both layouts are tried: `midlayer.*`, which its own converter takes, and its own layout as we write it. The text is
real, the features are the target's; what is compared is every logit of the first drafting step at every column.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.engine_cases import EngineCases, Served
from benchmarks.engine_llama_cpp import last_line
from benchmarks.speculators_environment import VERSION, environment
from components.bench.prompts import open_drafter
from components.contract import UserError
from components.drafts.interface import Batch

WORKER = Path(__file__).with_name("speculators_load_worker.py")
TOLERANCE = 1e-4


def largest_difference(cases: EngineCases, checkpoint: Path, *, convert: bool) -> tuple[float, float]:
    """(largest difference of any first-step logit, largest logit). Raises UserError with what speculators said."""
    drafter = open_drafter(cases.draft("eagle3"), cases.opened)
    ids = torch.tensor([max(cases.encoded.values(), key=len)])
    target = cases.opened
    with torch.no_grad():
        out = target.forward(ids, target.new_cache(1, ids.shape[1]), logits="none", features=True)
        assert out.taps is not None and out.last is not None
        batch = Batch(
            ids,
            torch.ones_like(ids, dtype=torch.bool),
            out.taps.clone(),
            out.last.clone(),
            torch.tensor([ids.shape[1]]),
        )
        columns = torch.arange(ids.shape[1] - 1)[None]
        ours = next(iter(drafter.teacher_forced(batch, columns)))[0]  # type: ignore[union-attr]
    name = f"{checkpoint.name}-{'converted' if convert else 'read'}"
    sample, found = cases.work / f"{name}-sample.safetensors", cases.work / f"{name}-logits.safetensors"
    save_file({"ids": ids, "taps": batch.taps.contiguous(), "last": batch.last.contiguous()}, sample)
    command = [str(environment() / "bin" / "python"), str(WORKER), str(checkpoint), str(cases.target_folder)]
    command += [str(sample), str(found), *(["convert"] if convert else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"speculators: {last_line(done.stderr)}")
    assert json.loads(done.stdout.splitlines()[-1])["kind"] == "Eagle3DraftModel"
    theirs = load_file(found)["logits"]
    return float((ours - theirs).abs().max()), float(ours.abs().max())


def serve(cases: EngineCases, layout: str, checkpoint: Path, *, convert: bool) -> Served:
    """The line of the table; it decodes nothing, so it has no rounds."""
    difference, largest = largest_difference(cases, checkpoint, convert=convert)
    how = "its converter takes it" if convert else "it reads it as it is"
    note = f"{how}; first-step logits differ by at most {difference:.1e} (largest {largest:.1f})"
    state = "tried" if difference <= TOLERANCE else "differs"
    return Served(format=layout, engine="speculators", version=VERSION, method="eagle3", state=state, note=note)
