"""A model's own MTP module: read as stored, computed as its family does, fine-tuned, and put back where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_checkpoints import LAYERS, LAYOUTS, PARTS, make_own_checkpoint, own_tensors, stored_tensors
from safetensors.torch import save_file
from tiny_drafts import batch_of, new_context, write_features
from torch import Tensor

from components.contract import Target
from components.drafts import train_draft
from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.methods.mtp import Mtp
from components.drafts.methods.mtp_native import MtpNative
from components.drafts.settings import MtpSettings
from components.drafts.storage.files import open_draft, read_draft
from components.drafts.training.optimizer import Optimizer
from components.publish.formats.mtp import stitch
from components.targets.interface import AbstractTarget
from components.targets.load import open_target
from components.targets.stand_in import make_stand_in

SETTINGS = {"mtp": {"start": "own", "recursive_steps": 3}}
Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root, made = tmp_path_factory.mktemp("own"), dict[str, Path]()

    def folder(layout: str) -> Path:
        torch.set_num_threads(1)
        if layout not in made:
            made[layout] = make_own_checkpoint(layout, root / layout)
        return made[layout]

    return folder


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> Callable[[str], AbstractTarget]:
    found: dict[str, AbstractTarget] = {}

    def target(layout: str) -> AbstractTarget:
        if layout not in found:
            found[layout] = open_target(checkpoint(layout), dtype="float32", kernel="plain")
        return found[layout]

    return target


def own_drafter(target: AbstractTarget) -> MtpNative:
    draft = Mtp.build(target, MtpSettings.model_validate(SETTINGS["mtp"]), torch.arange(0, target.shape.vocab_size, 2))
    assert isinstance(draft, MtpNative)
    return draft


def columns(batch: Any, start: int, stop: int) -> CommittedPositions:
    return CommittedPositions(batch.ids[0, start + 1 : stop + 1], batch.taps[0, start:stop], batch.last[0, start:stop])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_guess_is_that_of_the_layouts_formula(
    layout: str, checkpoint: Checkpoint, opened: Callable[[str], AbstractTarget]
) -> None:
    """The module's block in place of the target's last layer, which transformers then runs by its own code."""
    from transformers import AutoModelForCausalLM

    target, stored = opened(layout), own_tensors(layout, checkpoint(layout))
    prefix, token_norm, hidden_norm, projection, block, last_norm = PARTS[layout]
    batch = batch_of(target, num_rows=1, num_tokens=12)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(layout), dtype=torch.float32)

    def norm(x: Tensor, name: str) -> Tensor:
        weight = stored[f"{prefix}{name}.weight"] + (1.0 if layout == "qwen" else 0.0)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    embedded = target.embedding[batch.ids[0, 1:]].clone()
    if layout not in ("qwen", "ernie"):
        embedded[0] = 0.0
    both = [norm(embedded, token_norm), norm(target.final_norm(batch.last[0, :-1]), hidden_norm)]
    joined = torch.cat(both[::-1] if layout == "mimo" else both, -1) @ stored[f"{prefix}{projection}.weight"].T
    layer, inside = model.model.layers[LAYERS.get(layout, 7)], prefix + block
    drafter = own_drafter(target)
    layer.load_state_dict(drafter.module.block.state_dict())
    for name, weight in layer.named_parameters():  # beside experts, what was read is what is stored
        if f"{inside}{name}" in stored:
            assert torch.equal(weight, stored[f"{inside}{name}"])
    caught: list[Tensor] = []
    layer.register_forward_hook(lambda *call: caught.append(call[2]))
    layer.register_forward_pre_hook(lambda module, given: (joined[None], *given[1:]))
    with torch.no_grad():
        model(input_ids=batch.ids[:, :-1], use_cache=False)
        normed = norm(caught[0][0], last_norm) if last_norm else model.model.norm(caught[0][0])
        expected = normed @ model.lm_head.weight.T
        found = next(iter(drafter.teacher_forced(batch, torch.arange(11)[None])))
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_graph_equals_cached_decoding_at_every_recursive_step(
    layout: str, opened: Callable[[str], AbstractTarget]
) -> None:
    target = opened(layout)
    draft, batch = own_drafter(target), batch_of(target, num_rows=1)
    everywhere = draft.propose_at_every_position(batch.ids[0], batch.taps[0], batch.last[0], 3).tokens
    state, done, rng = draft.new_state(32), 0, torch.Generator().manual_seed(0)
    for size in (5, 1, 3, 2):
        said = draft.propose(state, columns(batch, done, done + size), 3, Sampling(), rng).tokens.tolist()
        done += size
        assert said == everywhere[done - 1].tolist()
    proposal = draft.propose(state, columns(batch, done, done + 1), 3, Sampling(temperature=1.0), rng)
    ids, last = batch.ids.clone(), batch.last.clone()
    ids[0, done + 2 : done + 5] = proposal.tokens
    last[0, done + 1 :] = 0.0
    with torch.no_grad():
        steps = list(draft.teacher_forced(batch._replace(ids=ids, last=last), torch.tensor([[done]])))
    assert proposal.probs is not None
    for found, logits in zip(proposal.probs, steps, strict=True):
        expected = logits[0, 0][draft.draft_ids].log_softmax(-1)
        torch.testing.assert_close(found[draft.draft_ids].log(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fine_tuned_module_is_put_back_and_nothing_else_changes(
    layout: str, tmp_path: Path, checkpoint: Checkpoint, opened: Callable[[str], AbstractTarget]
) -> None:
    folder, target = checkpoint(layout), opened(layout)
    features = write_features(target, tmp_path / "features", num_train=8, num_validation=2)
    made = train_draft(
        Target(key="", path=folder),
        features,
        method="mtp",
        settings=SETTINGS,
        num_steps=6,
        batch_tokens=96,
        draft_vocab_size=128,
        eval_every=6,
        peak_lr=3e-3,
        ctx=new_context(tmp_path),
    )
    losses = [json.loads(line).get("loss") for line in (made.path / "metrics.jsonl").read_text().splitlines()]
    told = [loss for loss in losses if loss is not None]
    assert told[-1] < told[0]
    record, tensors = read_draft(made.path)
    assert record["settings"]["start"] == "own"
    if record["best_step"] == 0:  # no step improved on a module of random weights: as if one had
        moved = {name: weight + 0.01 if weight.is_floating_point() else weight for name, weight in tensors.items()}
        save_file(moved, made.path / "model.safetensors", metadata={"format": "pt"})
    drafter = open_draft(made, target)
    facts = stitch(folder, tmp_path / "mtp", read_draft(made.path)[1], target.shape.num_layers)

    before, after, own = stored_tensors(folder), stored_tensors(tmp_path / "mtp"), own_tensors(layout, folder)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and changed <= own.keys()
    assert not any("embed_tokens" in name for name in changed)
    assert facts["num_tensors"] == len(own) - any("embed_tokens" in name for name in own)
    again = own_drafter(open_target(tmp_path / "mtp", dtype="float32", kernel="plain"))
    for name, tensor in again.module.state_dict().items():
        assert torch.equal(tensor, drafter.module.state_dict()[name]), name  # type: ignore[attr-defined]


def test_kept_experts_are_saved_as_they_were_and_the_rest_learns(opened: Callable[[str], AbstractTarget]) -> None:
    target = opened("deepseek")
    settings = MtpSettings.model_validate({**SETTINGS["mtp"], "train_experts": False})
    draft, before = Mtp.build(target, settings, torch.arange(0, 384, 2)), own_drafter(target).state_dict()
    optimizer = Optimizer(draft, "muon", 0.0, 1.0)
    optimizer.update(draft.losses(batch_of(target)).loss, 1e-2, 1.0)
    after = draft.state_dict()
    assert before.keys() == after.keys(), "they are saved, and read again"
    same = {name for name, weight in before.items() if torch.equal(weight, after[name])}
    assert {name for name in same if ".experts." in name} == {name for name in before if ".experts." in name}
    assert "module.projection.weight" not in same and "module.block.mlp.shared_experts.up_proj.weight" not in same


def test_the_stand_in_of_a_model_with_a_module_of_its_own_has_one(tmp_path: Path, checkpoint: Checkpoint) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((checkpoint("deepseek") / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ctx = new_context(tmp_path)
    made = make_stand_in(model=str(folder), ctx=ctx)
    draft = own_drafter(open_target(made.path, dtype="float32"))
    proposal = draft.propose(
        draft.new_state(8),
        CommittedPositions(torch.tensor([5]), torch.zeros(1, 3), torch.ones(1, draft.target.shape.hidden_size)),
        3,
        Sampling(),
        torch.Generator(),
    )
    assert len(proposal.tokens) == 3
