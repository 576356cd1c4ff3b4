"""Does our DFlash say what `speculators` says, on the same random weights and the same text?

Logits of every drafting slot of a block after every position of a real text, for three block widths, drafting from the
anchor and not, and with a window; and DSpark's with its Markov bias and confidence. The drafters are for the built-in
target, with all weights drawn wide. Ends with exit code 1 beyond 1e-4.

    python -m benchmarks.dflash_parity [--tokens 96]
"""

from __future__ import annotations

import argparse
import json
import subprocess
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
from components.drafts.interface import Batch
from components.drafts.storage.files import build_draft
from components.targets.interface import AbstractTarget
from components.targets.load import open_target, open_tokenizer

TOLERANCE = 1e-4
MODEL = ROOT / "components" / "targets" / "builtin"
WORKER = Path(__file__).with_name("dflash_worker.py")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{method}-{width}{'-from-anchor' if from_anchor else ''}": (
        method,
        {"block_size": width, "sample_from_anchor": from_anchor, "num_layers": 3},
    )
    for method in ("dflash", "dspark")
    for width in (4, 8, 16)
    for from_anchor in (False, True)
} | {
    f"{method}-8-window": (method, {"block_size": 8, "num_layers": 3, "window": 24}) for method in ("dflash", "dspark")
}


def drafters(target: AbstractTarget, draft_ids: Tensor) -> dict[str, Any]:
    """One drafter a case, every weight drawn, wide enough that each shows."""
    built = {}
    for name, (method, settings) in CASES.items():
        draft, generator = build_draft(method, target, settings, draft_ids), torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in draft.parameters():
                if weight.ndim > 1:
                    weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
                else:
                    weight.uniform_(0.6, 1.4, generator=generator)
        built[name] = draft.eval()
    return built


def differences(draft: Any, sample: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """The largest differences over all anchors that have features before them."""
    ids = sample["ids"][None]
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), sample["taps"][None], sample["last"][None], ids[:, 0])
    seen = theirs["anchors"] > 0
    rows = (theirs["anchors"][seen] - 1)[None]
    their_logits = theirs["logits"][seen][:, -draft.num_steps :]
    with torch.no_grad():
        if "confidence" in theirs:
            logits, confidence = (torch.stack(parts, 2)[0] for parts in zip(*draft.slots(batch, rows), strict=True))
        else:
            logits = torch.stack(draft.teacher_forced(batch, rows), 2)[0]
        found = {"logits": float((logits - their_logits).abs().max()), "largest_logit": float(their_logits.abs().max())}
        if "confidence" in theirs:
            found["confidence"] = float((confidence - theirs["confidence"][seen][:, -draft.num_steps :]).abs().max())
    return {"blocks": int(seen.sum()), **found}


def main() -> None:
    """Compare, print, write the record."""
    parser = argparse.ArgumentParser(description="DFlash and DSpark logits against speculators")
    parser.add_argument("--tokens", type=int, default=96, help="length of the text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = open_target(MODEL, dtype="float32", kernel="plain")
    text = Path(record.__file__).read_text(encoding="utf-8")
    ids = torch.tensor(open_tokenizer(MODEL)(text)["input_ids"][: options.tokens])
    draft_ids = torch.arange(0, target.shape.vocab_size, 4)
    out = target.forward(ids[None], target.new_cache(1, len(ids)), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    built = drafters(target, draft_ids)
    sample = {"ids": ids, "taps": out.taps[0].clone(), "last": out.last[0].clone(), "draft_ids": draft_ids}
    sample |= {"embed": target.embedding.clone(), "head": next(iter(built.values())).lm_head.clone()}
    sample |= {"tap_layers": torch.tensor(target.tap_layers)}
    cases = []
    for name, draft in built.items():
        sample |= {f"{name}.{part}": weight.clone() for part, weight in draft.state_dict().items()}
        settings = draft.settings.model_dump(mode="json")
        cases.append({**settings, "name": name, "method": CASES[name][0], "mask_token_id": draft.mask_token_id})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sample.safetensors"
        save_file(sample, file, {"cases": json.dumps({"cases": cases, "shape": asdict(target.shape)})})
        command = [str(python()), str(WORKER), str(file), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"dflash_parity: their side failed: {done.stderr.strip().splitlines()[-1:]}")
        found = {
            name: differences(draft, sample, load_file(Path(folder) / f"{name}.safetensors"))
            for name, draft in built.items()
        }
    numbers = {"speculators": VERSION, "num_tokens": len(ids), "tolerance": TOLERANCE, "cases": found}
    print(json.dumps(numbers, indent=1))
    print(f"written: {write_record('dflash-parity', numbers).relative_to(ROOT)}")
    if max(one.get(part, 0.0) for one in found.values() for part in ("logits", "confidence")) > TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
