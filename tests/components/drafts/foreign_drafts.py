"""Drafters of every format, written out, mutated and read in again, on one tiny target."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from saved_drafts import draw_wide
from tiny_targets import save_with_words, tiny_llama
from torch import Tensor

from components.contract import Context, Draft, Target, UserError
from components.drafts import import_draft
from components.drafts.interface import AbstractDraft, CommittedPositions, Sampling
from components.drafts.network.vocabulary import membership_of, offsets_of
from components.drafts.storage.files import build_draft, open_draft
from components.drafts.training.loop import count_accepted
from components.methods import METHODS
from components.publish.formats.interface import DrafterState, Source
from components.publish.formats.registry import write_format
from components.publish.release.export import source_of
from components.targets import load_target
from components.targets.interface import AbstractTarget, tapping
from components.targets.load import open_target

VOCAB = 96
CUT = torch.arange(3, VOCAB, 2)
WHOLE = torch.arange(VOCAB)
OWN_BLOCK: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
}
FORMS: list[tuple[str, str, dict[str, Any], Tensor]] = [
    ("eagle3", "eagle3", {}, CUT),
    ("eagle3", "eagle3", {"fc_norm": True, "norm_output": True, "intermediate_size": 40}, CUT),
    ("eagle3", "eagle3", {}, WHOLE),
    ("speculators", "eagle3", {"ttt_steps": 4}, CUT),
    ("speculators", "eagle3", {"fc_norm": True}, CUT),
    ("speculators", "eagle3", {"norm_before_residual": True, "norm_before_fc": True}, CUT),
    ("eagle3", "eagle3", {"norm_before_residual": True, "norm_output": True}, CUT),
    ("speculators", "eagle3", {**OWN_BLOCK, "rope_scaling": LLAMA3}, CUT),
    ("eagle3", "eagle3", {**OWN_BLOCK, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, CUT),
    ("speculators", "p-eagle", {"parallel_depth": 3, "num_layers": 1, **OWN_BLOCK}, CUT),
    ("eagle1", "eagle1", {"rope_theta": 500.0, "rope_scaling": LLAMA3}, WHOLE),
    ("speculators", "p-eagle", {"parallel_depth": 3, "num_layers": 2}, CUT),
    ("eagle3", "eagle3", {"own_embedding": True, "rope_scaling": YARN, "window": 12}, CUT),
    ("speculators", "eagle3", {"own_embedding": True, "qk_norm": True, "window": 12}, CUT),
    ("speculators", "p-eagle", {"parallel_depth": 3, "own_embedding": True, "qk_norm": True, "window": 8}, CUT),
    ("eagle1", "eagle1", {"own_embedding": True}, WHOLE),
    ("eagle1", "eagle1", {"fc_bias": True}, WHOLE),
    ("eagle1", "eagle1", {"fc_bias": False, "intermediate_size": 40}, WHOLE),
    ("medusa", "medusa", {"num_heads": 2, "num_layers": 2}, WHOLE),
    ("mtp", "mtp", {"mtp_modules": 3, "first_hidden": "pre_norm"}, WHOLE),
    ("mimo", "mtp", {"mtp_modules": 1}, WHOLE),
    ("causal-lm", "draft-model", {"num_layers": 1}, WHOLE),
    ("causal-lm", "draft-model", {"num_layers": 2, "hidden_size": 16}, WHOLE),
]
"""(format, method, settings, draft vocabulary)."""
IDS = [f"{number}-{form}-{method}" for number, (form, method, _, _) in enumerate(FORMS)]


ADVICE = "; set method: "


@dataclass(frozen=True)
class Pair:
    """A tiny target of eight layers: as an artifact, opened, and as releases see it."""

    artifact: Target
    opened: AbstractTarget
    source: Source

    def network(self, method: str, settings: Mapping[str, Any], draft_ids: Tensor = CUT, taps: Any = ()) -> Any:
        """A drafter all of whose weights matter. taps: (): the target's usual ones."""
        target = tapping(self.opened, taps or self.opened.tap_layers)
        network: AbstractDraft = build_draft(method, target, settings, draft_ids)
        draw_wide(network)
        own = network.state_dict().get("embed_tokens.weight")
        if own is not None:
            own.add_(torch.randn(own.shape, generator=torch.Generator().manual_seed(8)) * own.std())
        return network.eval().requires_grad_(False)

    def write(self, form: str, network: AbstractDraft, settings: Mapping[str, Any], folder: Path) -> Path:
        """Export a drafter in a format of ours."""
        ids = network.draft_ids
        vocabulary = {"d2t": offsets_of(ids), "t2d": membership_of(ids, VOCAB)}
        tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        taps = network.target.tap_layers if METHODS[network.method].reads_taps else ()
        state = DrafterState(network.method, dict(settings), tensors | vocabulary, tap_layers=taps)
        write_format(form, state, self.source, folder)
        return folder

    def adopt(self, folder: Path, out: Path, layout: Any = "auto") -> Draft:
        """Import what lies in a folder, by the method that a first try names."""
        method: Any = "eagle3"
        try:
            return import_draft(self.artifact, model=str(folder), method=method, layout=layout, ctx=context(out))
        except UserError as refused:
            if ADVICE not in str(refused):
                raise
            method = str(refused).split(ADVICE)[1]
        return import_draft(self.artifact, model=str(folder), method=method, layout=layout, ctx=context(out / method))

    def run(self, draft: Any, text: Tensor, depth: int = 3) -> Tensor:
        """Draft tokens of the cached decoder after every position of a text, committed one by one: [T - 1, depth]."""
        ids, taps, last = text, *self.features(text)
        state, rows = draft.new_state(len(ids) + depth), []
        for t in range(len(ids) - 1):
            committed = CommittedPositions(ids[t + 1 : t + 2], taps[t : t + 1], last[t : t + 1])
            rows.append(draft.propose(state, committed, depth, Sampling(), torch.Generator()).tokens)
        return torch.stack(rows)

    def features(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Taps and last states of a text, [T, ...]."""
        out = self.opened.forward(ids[None], self.opened.new_cache(1, 64), logits="none", features=True)
        assert out.taps is not None and out.last is not None
        return out.taps[0].clone(), out.last[0].clone()

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
        return ids[0], *self.features(ids[0])

    def guesses(self, draft: Any, depth: int = 3) -> tuple[Tensor, list[int]]:
        """(draft tokens at every position, accepted counts by depth) on that text."""
        ids, taps, last = self.text()
        tokens = draft.propose_at_every_position(ids, taps, last, depth).tokens
        return tokens, count_accepted(tokens, ids, torch.ones(len(ids), dtype=torch.bool))[0]


def make_pair(root: Path, num_layers: int = 8) -> Pair:
    """See Pair; the same at every call."""
    model = tiny_llama(VOCAB, lambda name: 4.0, num_layers=num_layers, seed=5, intermediate_size=48, pad_token_id=2)
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
