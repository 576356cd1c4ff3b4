"""Drafters of every format, written out, mutated and read in again, on one tiny target."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_targets import save_with_words, tiny_llama
from torch import Tensor

from components.contract import Context, Draft, Target
from components.drafts import import_draft
from components.drafts.interface import AbstractDraft
from components.drafts.network.vocabulary import membership_of, offsets_of
from components.drafts.storage.files import build_draft, open_draft
from components.drafts.training.loop import count_accepted
from components.publish.formats.interface import DrafterState, Source
from components.publish.formats.registry import write_format
from components.publish.release.export import source_of
from components.targets import load_target
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

VOCAB = 96
CUT = torch.arange(3, VOCAB, 2)
WHOLE = torch.arange(VOCAB)
FORMS: list[tuple[str, str, dict[str, Any], Tensor]] = [
    ("eagle3", "eagle3", {}, CUT),
    ("eagle3", "eagle3", {"fc_norm": True, "norm_output": True, "intermediate_size": 40}, CUT),
    ("eagle3", "eagle3", {}, WHOLE),
    ("speculators", "eagle3", {"ttt_steps": 4}, CUT),
    ("speculators", "eagle3", {"fc_norm": True}, CUT),
    ("speculators", "p-eagle", {"parallel_depth": 3, "num_layers": 2}, CUT),
    ("eagle1", "eagle1", {"fc_bias": True}, WHOLE),
    ("eagle1", "eagle1", {"fc_bias": False, "intermediate_size": 40}, WHOLE),
    ("medusa", "medusa", {"num_heads": 2, "num_layers": 2}, WHOLE),
    ("mtp", "mtp", {"mtp_modules": 3, "first_hidden": "pre_norm"}, WHOLE),
    ("mimo", "mtp", {"mtp_modules": 1}, WHOLE),
    ("causal-lm", "draft-model", {"num_layers": 1}, WHOLE),
    ("causal-lm", "draft-model", {"num_layers": 2, "hidden_size": 16}, WHOLE),
]
"""(format, method, settings, draft vocabulary)."""
IDS = [f"{form}-{method}-{'-'.join(settings) or 'plain'}-{len(ids)}" for form, method, settings, ids in FORMS]


@dataclass(frozen=True)
class Pair:
    """A tiny target of eight layers: as an artifact, opened, and as releases see it."""

    artifact: Target
    opened: AbstractTarget
    source: Source

    def network(self, method: str, settings: Mapping[str, Any], draft_ids: Tensor = CUT) -> AbstractDraft:
        """A drafter all of whose weights matter."""
        network: AbstractDraft = build_draft(method, self.opened, settings, draft_ids)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for weight in network.parameters():
                if weight.ndim == 1:
                    weight.uniform_(0.6, 1.4, generator=generator)
                else:
                    weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        return network.eval().requires_grad_(False)

    def write(self, form: str, network: AbstractDraft, settings: Mapping[str, Any], folder: Path) -> Path:
        """Export a drafter in a format of ours."""
        ids = network.draft_ids
        vocabulary = {"d2t": offsets_of(ids), "t2d": membership_of(ids, VOCAB)}
        tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        write_format(form, DrafterState(network.method, dict(settings), tensors | vocabulary), self.source, folder)
        return folder

    def adopt(self, folder: Path, out: Path, layout: Any = "auto") -> Draft:
        """Import what lies in a folder."""
        return import_draft(self.artifact, model=str(folder), layout=layout, ctx=context(out))

    def opens(self, draft: Draft) -> Any:
        """The imported drafter, ready to decode."""
        return open_draft(draft, self.opened, kernel="plain")

    def text(self) -> tuple[Tensor, Tensor, Tensor]:
        """A text of the target's own, [T], with its taps and last states."""
        ids = torch.randint(3, VOCAB, (1, 6), generator=torch.Generator().manual_seed(2))
        cache, new = self.opened.new_cache(1, 64), ids
        for _ in range(40):
            logits = self.opened.forward(new, cache, logits="last").logits
            assert logits is not None
            new = logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, new), 1)
        out = self.opened.forward(ids, self.opened.new_cache(1, 64), logits="none", features=True)
        assert out.taps is not None and out.last is not None
        return ids[0], out.taps[0].clone(), out.last[0].clone()

    def guesses(self, draft: Any, depth: int = 3) -> tuple[Tensor, list[int]]:
        """(draft tokens at every position, accepted counts by depth) on that text."""
        ids, taps, last = self.text()
        tokens = draft.propose_at_every_position(ids, taps, last, depth)
        return tokens, count_accepted(tokens, ids, torch.ones(len(ids), dtype=torch.bool))[0]


def make_pair(root: Path) -> Pair:
    """See Pair; the same at every call."""
    model = tiny_llama(VOCAB, lambda name: 4.0, num_layers=8, seed=5, intermediate_size=48, pad_token_id=2)
    save_with_words(model, root / "target", [f"w{i}" for i in range(3, VOCAB)])
    artifact = load_target(model=str(root / "target"), ctx=context(root / "artifact"))
    return Pair(artifact, open_target(artifact, dtype="float32", kernel="plain"), source_of(artifact))


def context(path: Path) -> Context:
    path.mkdir(parents=True)
    return Context(key="i" * 64, out=path, scratch=path, num_threads=1)


def change(
    folder: Path,
    config: Callable[[dict[str, Any]], object] | None = None,
    tensors: Callable[[dict[str, Tensor]], object] | None = None,
) -> Path:
    """Change a checkpoint in its folder, in place."""
    if config is not None:
        content = json.loads((folder / "config.json").read_text())
        config(content)
        (folder / "config.json").write_text(json.dumps(content))
    if tensors is not None:
        (file,) = folder.glob("*.safetensors")
        stored = load_file(file)
        tensors(stored)
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file, metadata={"format": "pt"})
    return folder
