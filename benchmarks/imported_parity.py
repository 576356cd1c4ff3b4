"""Do imported drafters say what the project that wrote them says?

Each project's own classes write checkpoints with random weights for the built-in target, and say their logits over a
real text (imported_worker.py). Each checkpoint is imported here as a user would import it. Logits of all positions must
agree within 1e-4, and the greedy draft tokens after every position must be the same; else the exit code is 1.

    python -m benchmarks.imported_parity [--eagle DIR] [--specforge DIR] [--medusa DIR] [--angelslim DIR]
                                          [--mimo DIR]

The folders are checkouts of SafeAILab/EAGLE, sgl-project/SpecForge, FasterDecoding/Medusa and Tencent/AngelSlim, and
the modelling code that MiMo-7B was published with; what is not given is not compared, and the record says so.
transformers is the installed one; speculators comes in its own environment (speculators_environment.py).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
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
from components.drafts.interface import Batch
from components.drafts.methods.one_block import OneBlockDraft
from components.drafts.methods.training_time_test import Unrolled
from components.drafts.network.layers import shift_left
from components.drafts.storage.files import open_draft
from components.methods import MethodName
from components.targets import load_target
from components.targets.interface import AbstractTarget
from components.targets.load import open_target, open_tokenizer

WORKER = Path(__file__).with_name("imported_worker.py")
TOLERANCE = 1e-4
METHODS: dict[str, MethodName] = {"eagle1": "eagle1", "medusa": "medusa", "peagle": "p-eagle", "mtp": "mtp"}
"""Part of a case's name -> its method; eagle3 for the others."""
CHECKOUTS = {
    "eagle": "checkout of SafeAILab/EAGLE",
    "specforge": "checkout of sgl-project/SpecForge",
    "medusa": "checkout of FasterDecoding/Medusa",
    "angelslim": "checkout of Tencent/AngelSlim",
    "mimo": "folder of modeling_mimo.py, which MiMo-7B was published with",
}
DEPTH = 3
MODEL = ROOT / "components" / "targets" / "builtin"


def context(folder: Path) -> Context:
    """A step's folders."""
    folder.mkdir(parents=True)
    return Context(key="i" * 64, out=folder, scratch=folder, num_threads=1)


def text_of(target: AbstractTarget, ids: Tensor) -> dict[str, Tensor]:
    """A text [T] with its features, and what drafters share of the target."""
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


def differences(draft: Draft, target: AbstractTarget, sample: Mapping[str, Tensor], theirs: Path) -> dict[str, Any]:
    """Largest differences of the imported drafter from what its project says."""
    said = load_file(theirs)
    network: Any = open_draft(draft, target, kernel="plain")
    found: dict[str, Any] = {"remarks": draft.info["import_remarks"]}
    with torch.no_grad():
        for name, ours in steps_of(network, sample):
            if (other := said.get(name)) is not None:
                kind, step = name.split(".")
                rows = said.get(f"rows.{step}", torch.arange(len(ours)))
                found[f"{kind}_{step}"] = float((ours[rows] - other).abs().max())
                found[f"largest_{kind}"] = float(other.abs().max())
    with torch.no_grad():
        drafted = network.propose_at_every_position(sample["ids"], sample["taps"], sample["last"], DEPTH).tokens
        drafted = drafted[said.get("rows.chains", torch.arange(len(drafted)))]
        found |= {"draft_tokens": drafted.numel(), "chains_equal": float((drafted == said["chains"]).float().mean())}
    return found


def steps_of(network: Any, sample: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name in the file of the other side, what our network says: [T - 1, ...]) of teacher-forced steps 0, 1, ..."""
    ids, taps, last = sample["ids"][None], sample["taps"][None], sample["last"][None]
    columns = torch.arange(ids.shape[1] - 1)[None]
    if not isinstance(network, OneBlockDraft):
        batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), taps, last, torch.tensor([ids.shape[1]]))
        for step, logits in enumerate(network.teacher_forced(batch, columns)):
            yield f"logits.{step}", logits[0]
        return
    unrolled = Unrolled(network, network.features(taps[:, :-1], last[:, :-1]), ids[:, 1:], columns)
    for step in range(DEPTH):
        state = unrolled.step(shift_left(ids, 1 + step)[:, :-1])
        yield f"hidden.{step}", state[0]
        yield f"logits.{step}", network.draft_logits(state)[0]


def version_of(source: Path) -> str:
    """A checkout's commit; of a folder that is none, the digest of its Python files."""
    if (source / ".git").exists():
        head = ["git", "-C", str(source), "rev-parse", "--short", "HEAD"]
        return subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    content = b"".join(file.read_bytes() for file in sorted(source.glob("*.py")))
    return f"sha256 {hashlib.sha256(content).hexdigest()[:12]}"


def write_cases(project: str, source: Path, sample: Path, out: Path) -> None:
    """Let a project's own classes write their checkpoints and say their logits."""
    interpreter = python() if project == "speculators" else sys.executable
    out.mkdir()
    command = [str(interpreter), str(WORKER), project, str(source), str(sample), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"imported_parity: {project} failed: {done.stderr.strip().splitlines()[-1:]}")


def own_case(folder: Path, ids: Tensor, out: Path) -> tuple[Target, AbstractTarget, dict[str, Tensor]]:
    """A whole model that is its own target: artifact, opened, its text."""
    artifact: Target = load_target(model=str(folder), ctx=context(out))
    target = open_target(artifact, dtype="float32", kernel="plain")
    return artifact, target, text_of(target, ids)


def main() -> None:
    """Write, import, compare, record."""
    parser = argparse.ArgumentParser(description="imported drafters against the projects that wrote them")
    for name, what in CHECKOUTS.items():
        parser.add_argument(f"--{name}", type=Path, help=what)
    parser.add_argument("--tokens", type=int, default=96, help="length of the text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers: dict[str, Any] = {"tolerance": TOLERANCE, "speculators": VERSION, "not_compared": [], "cases": {}}
    numbers["transformers"] = importlib.metadata.version("transformers")
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        artifact: Target = load_target(model="builtin", ctx=context(root / "target"))
        target = open_target(artifact, dtype="float32", kernel="plain")
        text = open_tokenizer(MODEL)(Path(record.__file__).read_text(encoding="utf-8"))["input_ids"]
        sample, file = text_of(target, torch.tensor(text[: options.tokens])), root / "sample.safetensors"
        save_file(sample, file, metadata={"shape": json.dumps({**asdict(target.shape), "folder": str(MODEL)})})
        checkouts = {name: getattr(options, name) for name in CHECKOUTS}
        for project, source in (checkouts | {"transformers": root, "speculators": root}).items():
            if source is None:
                numbers["not_compared"].append(project)
                continue
            if project in CHECKOUTS:
                numbers[project] = version_of(source)
            write_cases(project, source, file, root / project)
            for theirs in sorted((root / project).glob("*.safetensors")):
                name, folder = theirs.stem, theirs.with_suffix("")
                method = next((METHODS[part] for part in METHODS if part in name), "eagle3")
                case = (artifact, target, sample)
                if (ids := load_file(theirs).get("ids")) is not None:
                    whole = folder / "target" if (folder / "target").is_dir() else folder
                    case = own_case(whole, ids, root / "targets" / name)
                draft = import_draft(
                    case[0], model=str(folder), method=method, layout="auto", ctx=context(root / "drafts" / name)
                )
                numbers["cases"][name] = differences(draft, *case[1:], theirs)
    print(json.dumps(numbers, indent=1))
    print(f"written: {write_record('imported-parity', numbers).relative_to(ROOT)}")
    cases = numbers["cases"].values()
    apart = [value for case in cases for key, value in case.items() if key.startswith(("logits_", "hidden_"))]
    if max(apart) > TOLERANCE or any(case["chains_equal"] < 1.0 for case in cases):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
