"""Do imported drafters say what the project that wrote them says?

Each project's own classes write checkpoints with random weights for the built-in target, and say their logits over a
real text (imported_worker.py). Each checkpoint is imported here as a user would import it. Logits of all positions must
agree within 1e-4, and so must the greedy draft tokens where the project drafts them; else the exit code is 1.

    python -m benchmarks.imported_parity [--eagle FOLDER] [--specforge FOLDER]

The folders are checkouts of SafeAILab/EAGLE and sgl-project/SpecForge; what is not given is not compared, and the
record says so. speculators comes in its own environment (speculators_environment.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import record
from benchmarks.record import ROOT, write_record
from benchmarks.speculators_environment import VERSION, python
from components.contract import Context, Draft, Target
from components.drafts import import_draft
from components.drafts.methods.training_time_test import Unrolled
from components.drafts.storage.files import open_draft
from components.methods import MethodName
from components.targets import load_target
from components.targets.interface import AbstractTarget
from components.targets.load import open_target, open_tokenizer

WORKER = Path(__file__).with_name("imported_worker.py")
TOLERANCE = 1e-4
DEPTH = 3
MODEL = ROOT / "components" / "targets" / "builtin"


def context(folder: Path) -> Context:
    """A step's folders."""
    folder.mkdir(parents=True)
    return Context(key="i" * 64, out=folder, scratch=folder, num_threads=1)


def text_of(target: AbstractTarget, num_tokens: int) -> dict[str, Tensor]:
    """A real text with its features, and what drafters share of the target."""
    text = Path(record.__file__).read_text(encoding="utf-8")
    ids = torch.tensor(open_tokenizer(MODEL)(text)["input_ids"][:num_tokens])
    out = target.forward(ids[None], target.new_cache(1, len(ids)), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    width = target.shape.hidden_size
    return {
        "ids": ids,
        "taps": out.taps[0].clone(),
        "last": out.last[0].clone(),
        "normed": target.final_norm(out.last[0]).clone(),
        "embed": target.embedding.clone(),
        "head": target.unembed(torch.eye(width)).T.contiguous(),
        "draft_ids": torch.arange(0, target.shape.vocab_size, 4),
        "tap_layers": torch.tensor(target.shape.tap_layers),
    }


def differences(draft: Draft, target: AbstractTarget, sample: dict[str, Tensor], theirs: Path) -> dict[str, Any]:
    """Largest differences of the imported drafter from what its project says."""
    said = load_file(theirs)
    network: Any = open_draft(draft, target, kernel="plain")
    ids, taps, last = sample["ids"], sample["taps"], sample["last"]
    columns = torch.arange(len(ids) - 1)[None]
    found: dict[str, Any] = {"remarks": draft.info["import_remarks"]}
    with torch.no_grad():
        unrolled = Unrolled(network, network.features(taps[None, :-1], last[None, :-1]), ids[None, 1:], columns)
        for step in range(DEPTH):
            state = unrolled.step(torch.cat((ids[1 + step :], ids.new_zeros(step)))[None])
            for name, ours in (("logits", lambda s: network.draft_logits(s)[0]), ("hidden", lambda s: s[0])):
                if (other := said.get(f"{name}.{step}")) is not None:
                    found[f"{name}_{step}"] = float((ours(state) - other).abs().max())
                    found[f"largest_{name}"] = float(other.abs().max())
    if "chains" in said:
        drafted = network.propose_at_every_position(ids, taps, last, DEPTH)
        found["chains_equal"] = float((drafted == said["chains"]).float().mean())
    return found


def main() -> None:
    """Write, import, compare, record."""
    parser = argparse.ArgumentParser(description="imported drafters against the projects that wrote them")
    parser.add_argument("--eagle", type=Path, help="checkout of SafeAILab/EAGLE")
    parser.add_argument("--specforge", type=Path, help="checkout of sgl-project/SpecForge")
    parser.add_argument("--tokens", type=int, default=96, help="length of the text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers: dict[str, Any] = {"tolerance": TOLERANCE, "speculators": VERSION, "not_compared": [], "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        artifact: Target = load_target(model="builtin", ctx=context(root / "target"))
        target = open_target(artifact, dtype="float32", kernel="plain")
        sample, file = text_of(target, options.tokens), root / "sample.safetensors"
        save_file(sample, file, metadata={"shape": json.dumps(asdict(target.shape))})
        for project, source in (("eagle", options.eagle), ("specforge", options.specforge), ("speculators", root)):
            if source is None:
                numbers["not_compared"].append(project)
                continue
            if project != "speculators":
                head = ["git", "-C", str(source), "rev-parse", "--short", "HEAD"]
                numbers[project] = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
            interpreter = python() if project == "speculators" else sys.executable
            (root / project).mkdir()
            command = [str(interpreter), str(WORKER), project, str(source), str(file), str(root / project)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"imported_parity: {project} failed: {done.stderr.strip().splitlines()[-1:]}")
            for theirs in sorted((root / project).glob("*.safetensors")):
                name = theirs.stem
                method: MethodName = "eagle1" if name == "eagle1" else "eagle3"
                draft = import_draft(
                    artifact, model=str(root / project / name), method=method, ctx=context(root / "drafts" / name)
                )
                numbers["cases"][name] = differences(draft, target, sample, theirs)
    print(json.dumps(numbers, indent=1))
    print(f"written: {write_record('imported-parity', numbers).relative_to(ROOT)}")
    cases = numbers["cases"].values()
    apart = [value for case in cases for key, value in case.items() if key.startswith(("logits_", "hidden_"))]
    if max(apart) > TOLERANCE or any(case.get("chains_equal", 1.0) < 1.0 for case in cases):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
