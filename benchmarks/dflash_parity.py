"""Do our DFlash and DSpark say and learn what `speculators` does, on the same random weights and the same text?

At three block widths, drafting from the anchor and not, and with a window: logits of every drafting slot of a block
after every position of an answer, DSpark's with its Markov bias and confidence; the loss over all these blocks and its
gradients; and, after some steps on that text, so that drafts are right at all, the draft tokens of our decoding at
every position and how many would be accepted. Losses are KL, DSpark's with total variation and confidence; theirs is
divided by the number of slots and ours by the sum of their weights, which is a constant factor. DFlash has a draft
vocabulary, DSpark the whole one: our total variation counts what a draft vocabulary lacks, theirs does not. Ends with
exit code 1 beyond 1e-4, or if a count of accepted tokens differs.

    python -m benchmarks.dflash_parity [--tokens 96] [--train-steps 60]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks import record
from benchmarks.block_sample import draw_weights, write_cases
from benchmarks.record import ROOT, write_record
from benchmarks.speculators_environment import VERSION, python
from components.drafts.interface import Batch, CommittedPositions, Roots, Sampling
from components.drafts.network.layers import head_rows
from components.drafts.storage.files import build_draft
from components.drafts.training.optimizer import Optimizer
from components.targets.interface import AbstractTarget
from components.targets.load import open_target, open_tokenizer

TOLERANCE = 1e-4
PROMPT_TOKENS = 32
GAMMA = 4.0  # of the decay by slot
MODEL = ROOT / "components" / "targets" / "builtin"
WORKER = Path(__file__).with_name("dflash_worker.py")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{method}-{width}{'-from-anchor' if from_anchor else ''}": (
        method,
        {"block_size": width, "sample_from_anchor": from_anchor, "num_layers": 3, "loss": "kl"},
    )
    for method in ("dflash", "dspark")
    for width in (4, 8, 16)
    for from_anchor in (False, True)
}
CASES |= {
    f"{method}-8-window": (method, {"block_size": 8, "num_layers": 3, "loss": "kl", "window": 24})
    for method in ("dflash", "dspark")
}
CASES["dflash-8-dpace"] = ("dflash", {"block_size": 8, "num_layers": 3, "loss": "kl", "slot_weights": "dpace"})


@torch.no_grad()
def answer(target: AbstractTarget, ids: Tensor, length: int) -> Tensor:
    """A prompt [1, T] with the target's greedy answer, `length` tokens together."""
    cache, new = target.new_cache(1, length), ids
    while ids.shape[1] < length:
        logits = target.forward(new, cache, logits="last").logits
        assert logits is not None
        new = logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, new), 1)
    return ids


def drafters(target: AbstractTarget, batch: Batch) -> dict[str, Any]:
    """One drafter a case, with random weights."""
    every = torch.arange(target.shape.vocab_size)
    with torch.no_grad():
        best = target.unembed(target.final_norm(batch.last))[0].argmax(-1)
    pruned = torch.cat((every[::4], best)).unique()  # both sides train the same slots where it holds every best token
    built = {}
    for name, (method, settings) in CASES.items():
        decay = {"step_decay": math.exp(-1 / GAMMA)}
        draft = build_draft(method, target, settings | decay, pruned if method == "dflash" else every)
        draw_weights(draft)
        built[name] = draft
    return built


def answers_of(file: Path, folder: Path) -> None:
    """Let the other side answer every case of a file."""
    command = [str(python()), str(WORKER), "compare", str(file), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"dflash_parity: their side failed: {done.stderr.strip().splitlines()[-1:]}")


def differences(draft: Any, batch: Batch, theirs: dict[str, Tensor]) -> dict[str, float]:
    """The largest differences over all blocks, and of gradients relative to the largest of the same tensor."""
    rows = (theirs["anchors"] - 1)[None]
    their_logits, num_steps = theirs["logits"][:, -draft.num_steps :], draft.num_steps
    found: dict[str, float] = {"blocks": rows.numel(), "largest_logit": float(their_logits.abs().max())}
    draft.eval()
    with torch.no_grad():
        if "confidence" in theirs:
            logits, confidence = (torch.stack(parts, 2)[0] for parts in zip(*draft.slots(batch, rows), strict=True))
            found["confidence"] = float((confidence - theirs["confidence"][:, -num_steps:]).abs().max())
        else:
            logits = torch.stack(draft.teacher_forced(batch, rows), 2)[0]
        found["logits"] = float((logits - their_logits).abs().max())
    draft.train()
    with patch.object(draft, "training_roots", return_value=Roots(rows, torch.ones_like(rows, dtype=torch.bool))):
        loss = draft.losses(batch).loss
    loss.backward()
    weights = torch.exp(-torch.arange(num_steps) / GAMMA)
    scale = 1.0 if draft.settings.slot_weights == "dpace" else float(num_steps / weights.sum())
    found["loss"] = float(loss.detach())
    found["loss_difference"] = abs(float(loss.detach() - scale * theirs["loss"]))
    found["gradients"] = 0.0
    for name, weight in draft.named_parameters():
        of_theirs = scale * theirs[f"gradient.{name}"]
        difference = float((weight.grad - of_theirs).abs().max() / of_theirs.abs().max())
        found["gradients"] = max(found["gradients"], difference)
    return found


def train(draft: Any, batch: Batch, steps: int) -> None:
    """Some steps on the text itself, so that drafts are right."""
    optimizer = Optimizer(draft, "adamw", weight_decay=0.0, muon_lr_scale=1.0)
    draft.train()
    for _ in range(steps):
        optimizer.update(draft.losses(batch).loss, 3e-3, clip_norm=1.0)
    draft.zero_grad(set_to_none=True)


def accepted(draft: Any, batch: Batch, theirs: dict[str, Tensor]) -> dict[str, int]:
    """Draft by our decoding at every position; how many tokens of either side the text would keep."""
    draft.eval().prepare_decoding()
    state, rng = draft.new_state(batch.ids.shape[1]), torch.Generator()
    ids, chains = batch.ids[0], []
    for column in range(int(theirs["anchors"].max())):
        one = slice(column, column + 1)
        committed = CommittedPositions(ids[column + 1 : column + 2], batch.taps[0, one], batch.last[0, one])
        chains.append(draft.propose(state, committed, draft.num_steps, Sampling(), rng).tokens)
    ours = torch.stack(chains)
    true = ids[theirs["anchors"][:, None] + 1 + torch.arange(draft.num_steps)]
    kept = [int((tokens == true).long().cumprod(1).sum()) for tokens in (ours, theirs["chains"][:, -draft.num_steps :])]
    same = (ours == theirs["chains"][:, -draft.num_steps :]).all(1).sum()
    return {"drafted": ours.numel(), "accepted": kept[0], "accepted_theirs": kept[1], "same_chains": int(same)}


def main() -> None:
    """Compare, print, write the record."""
    parser = argparse.ArgumentParser(description="DFlash and DSpark against speculators")
    parser.add_argument("--tokens", type=int, default=96, help="length of the text")
    parser.add_argument("--train-steps", type=int, default=60, help="steps before acceptance is counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = open_target(MODEL, dtype="float32", kernel="plain")
    text = Path(record.__file__).read_text(encoding="utf-8")
    ids = answer(target, torch.tensor(open_tokenizer(MODEL)(text)["input_ids"][:PROMPT_TOKENS])[None], options.tokens)
    out = target.forward(ids, target.new_cache(1, ids.shape[1]), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = Batch(ids, mask, out.taps.clone(), out.last.clone(), torch.tensor([ids.shape[1]]))
    sample = {"ids": ids[0], "mask": mask[0], "taps": batch.taps[0], "last": batch.last[0]}
    head, built = head_rows(target, torch.arange(target.shape.vocab_size)), drafters(target, batch)
    cases: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "sample.safetensors"
        write_cases(file, target, built, sample, head)
        answers_of(file, folder)
        for case, draft in built.items():
            cases[case] = differences(draft, batch, load_file(folder / f"{case}.safetensors"))
            train(draft, batch, options.train_steps)
        write_cases(file, target, built, sample, head)
        answers_of(file, folder)
        for case, draft in built.items():
            cases[case] |= accepted(draft, batch, load_file(folder / f"{case}.safetensors"))
    numbers = {"speculators": VERSION, "num_tokens": ids.shape[1], "tolerance": TOLERANCE, "cases": cases}
    print(json.dumps(numbers, indent=1))
    print(f"written: {write_record('dflash-parity', numbers).relative_to(ROOT)}")
    parts = ("logits", "confidence", "loss_difference", "gradients")
    beyond = max(one.get(part, 0.0) for one in cases.values() for part in parts) > TOLERANCE
    if beyond or any(one["accepted"] != one["accepted_theirs"] for one in cases.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
