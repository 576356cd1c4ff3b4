"""Does our EAGLE-3 say what `speculators` says, on the same weights and the same batch?

Logits of every training step, and the loss of the first with its gradients, of an untrained drafter for the built-in
target over real text. The two trainers mask differently: theirs trains column t at step k where m_{t+1+k} holds, ours
where the whole chain lies in the answer (layers.py) and the teacher's argmax can be said; so theirs is given our
first-step mask, and the loss under its own mask stands beside. Ends with exit code 1 beyond 1e-4.

    python -m benchmarks.speculators_parity [--steps 5] [--tokens 256]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks import record
from benchmarks.eagle3_sample import Sample, new_drafter, write_sample
from benchmarks.record import ROOT, write_record
from benchmarks.speculators_environment import VERSION, WORKER, python
from components.drafts.interface import Batch
from components.drafts.network.layers import reachable
from components.drafts.training.losses import teacher_distributions
from components.targets.load import open_target, open_tokenizer

TOLERANCE = 1e-4
MODEL = ROOT / "components" / "targets" / "builtin"


def theirs(file: Path, out: Path) -> tuple[float, dict[str, Tensor]]:
    """Their first-step loss, and tensors `logits.{k}` [T - 1, N] and `gradient.{name}`."""
    request = json.dumps({"do": "compare", "out": str(out)}) + "\n"
    command = [str(python()), str(WORKER), str(file), "cpu", "1"]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"speculators_parity: their side failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["loss"]), load_file(out)


def ours(sample: Sample) -> tuple[float, dict[str, Tensor]]:
    """The same of ours."""
    draft, batch = sample
    columns = torch.arange(batch.ids.shape[1] - 1)[None]
    with torch.no_grad():
        found = {f"logits.{k}": logits[0] for k, logits in enumerate(draft.teacher_forced(batch, columns))}
    draft.zero_grad()
    draft.num_steps, num_steps = 1, draft.num_steps
    result = draft.losses(batch)
    draft.num_steps = num_steps
    result.loss.backward()
    found |= {f"gradient.{name}": p.grad for name, p in draft.named_parameters() if p.grad is not None}
    return float(result.loss.detach()), found


def trained_columns(sample: Sample) -> Tensor:
    """Our first-step mask, told as a mask of tokens: bool [1, T], True at t + 1 where column t is trained."""
    draft, batch = sample
    teacher = teacher_distributions(draft.target, batch.last, draft.draft_ids)
    at_column = reachable(batch.mask, 1)[0][:, :-1] & (teacher.best[:, 1:] >= 0)
    return torch.nn.functional.pad(at_column, (1, 0))


def main() -> None:
    """Compare, print, write the record."""
    parser = argparse.ArgumentParser(description="EAGLE-3 logits and loss against speculators")
    parser.add_argument("--steps", type=int, default=5, help="training steps whose logits are compared")
    parser.add_argument("--tokens", type=int, default=256, help="length of the text")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    target = open_target(MODEL, dtype="float32", kernel="plain")
    text = Path(record.__file__).read_text(encoding="utf-8")
    ids = torch.tensor(open_tokenizer(MODEL)(text)["input_ids"][: asked.tokens])
    draft_ids = torch.arange(0, target.shape.vocab_size, 4)
    out = target.forward(ids[None], target.new_cache(1, len(ids)), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    mask = torch.arange(len(ids))[None] >= len(ids) // 4
    batch = Batch(ids[None], mask, out.taps.clone(), out.last.clone(), torch.tensor([len(ids)]))
    drafter = new_drafter(target, draft_ids, batch.taps[0], {"ttt_steps": asked.steps, "loss": "kl"})
    sample = Sample(drafter, batch)
    numbers: dict[str, Any] = {"speculators": VERSION, "num_tokens": len(ids), "tolerance": TOLERANCE}
    with tempfile.TemporaryDirectory() as folder:
        file, their_file = Path(folder) / "sample.safetensors", Path(folder) / "theirs.safetensors"
        write_sample(file, sample, trained_columns(sample))
        their_loss, their = theirs(file, their_file)
        write_sample(file, sample, sample.batch.mask)
        own_mask_loss, _ = theirs(file, their_file)
    our_loss, our = ours(sample)
    worst = {name: float((our[name] - their[name]).abs().max()) for name in sorted(their) if name in our}
    numbers |= {
        "loss": {"ours": our_loss, "theirs": their_loss, "theirs_under_its_own_mask": own_mask_loss},
        "loss_difference": abs(our_loss - their_loss),
        "logits_difference": [worst[f"logits.{k}"] for k in range(asked.steps)],
        "gradient_difference": {n.removeprefix("gradient."): d for n, d in worst.items() if n.startswith("gradient.")},
        "trained_here_and_frozen_there": sorted(
            name.removeprefix("gradient.") for name in our if name.startswith("gradient.") and name not in their
        ),
        "largest_logit": float(our["logits.0"].abs().max()),
    }
    print(json.dumps(numbers, indent=1))
    print(f"written: {write_record('speculators-parity', numbers).relative_to(ROOT)}")
    if max(numbers["loss_difference"], *worst.values()) > TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
