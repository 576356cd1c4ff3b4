"""Every family decodes with every method, alone, in a ragged batch and as a tree, as its own `generate` does.

Every method that learns weights learns them of every family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_decoding import LENGTH, PROMPTS, said_alone, trained_on_own_text
from forked import recorded
from tiny_families import FAMILIES, MULTIMODAL, REFUSED, make_family

from components.contract import UserError
from components.decoding.batch import decode_batch
from components.decoding.chain import decode
from components.decoding.tree_shapes import DynamicShape
from components.drafts.interface import TreeProposer
from components.drafts.storage.files import build_draft
from components.methods import METHODS, decoding_loop_of, is_trained
from components.targets.interface import AbstractTarget
from components.targets.load import open_target
from components.targets.shape import layer_kinds

TRAINED = [method for method in METHODS if is_trained(method)]
STEPS = 20
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * 3600)]


def answers_of(target: AbstractTarget, method: str) -> dict[str, list[list[int]] | str]:
    """What a drafter of this method, untrained, makes the target say, by way of decoding; or why it is refused."""
    draft = build_draft(method, target, {}, torch.arange(0, target.shape.vocab_size, 2))
    if isinstance(draft, torch.nn.Module):
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for weight in draft.parameters():
                if weight.ndim > 1:  # wide enough that guesses depend on the text
                    weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        draft.prepare_decoding()  # type: ignore[operator]
    depth = min(3, draft.max_depth)
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "ignore_eos": True}

    def batched(**shape: Any) -> list[list[int]]:
        return [one.tokens for one in decode_batch(target, draft, PROMPTS, **shape, **options)]

    ways: dict[str, Any] = {"chain": lambda: [decode(target, draft, p, depth=depth, **options).tokens for p in PROMPTS]}
    if not decoding_loop_of(method):
        ways["batch"] = lambda: batched(depth=depth)
    if isinstance(draft, TreeProposer):
        ways["tree"] = lambda: batched(shape=DynamicShape(depth, 3, 8))
    answers: dict[str, list[list[int]] | str] = {}
    for way, decoded in ways.items():
        try:
            answers[way] = decoded()
        except UserError as refused:
            answers[way] = str(refused)
    return answers


def every_family(folder: Path) -> dict[str, Any]:
    """The whole matrix: for each family its kinds of layers, and the methods that decode as it does by itself.

    kernel: the pass that decodes, ours ("plain") where it runs the family; what is said alone is transformers' own.
    """
    families: dict[str, Any] = {}
    faults: list[str] = []
    decodings = 0
    for family in (*FAMILIES, *MULTIMODAL):
        alone = said_alone(family, folder / family)
        target = open_target(folder / family, kernel="plain")
        ways: dict[str, list[str]] = {"chain": [], "batch": [], "tree": [], "refused": []}
        for method in METHODS:
            for way, answers in answers_of(target, method).items():
                decodings += 1
                if isinstance(answers, str):
                    ways["refused"].append(f"{method} {way}")
                    if target.verifies_trees:
                        faults.append(f"{family}: {method} {way} is refused: {answers}")
                elif fault := alone.first_fault(answers):
                    faults.append(f"{fault} ({method}, {way})")
                else:
                    ways[way].append(method)
        families[family] = {
            "architecture": alone.target.shape.architecture,
            "layers": layer_kinds(alone.target.model.config),
            "kernel": target.kernel,
            **ways,
        }
    refused = {}
    for family in REFUSED:
        with pytest.raises(UserError) as why:
            open_target(make_family(family, folder / family), kernel="transformers")
        refused[family] = str(why.value).split(": ", 1)[1]
    return {"families": families, "refused": refused, "decodings": decodings, "faults": faults}


def test_every_family_decodes_with_every_method_as_it_does_alone(tmp_path: Path) -> None:
    found = recorded("families", lambda: every_family(tmp_path))
    assert not found["faults"] and found["decodings"] > 1000


def training_of(family: str, folder: Path) -> dict[str, Any]:
    """The methods whose loss falls on the family's own text, what went wrong with the others, and who runs its pass."""
    alone = said_alone(family, folder)
    trained, faults = [], []
    for method in TRAINED:
        try:
            trained_on_own_text(alone, method, {}, STEPS)
        except (AssertionError, UserError) as failed:
            faults.append(f"{family}: {method}: {failed}")
        else:
            trained.append(method)
    return {"trained": trained, "kernel": open_target(folder, kernel="plain").kernel, "faults": faults}


def every_training(folder: Path) -> dict[str, Any]:
    """`training_of` each family."""
    families = {family: training_of(family, folder / family) for family in (*FAMILIES, *MULTIMODAL)}
    return {"methods": TRAINED, "steps": STEPS, "families": families}


def test_every_method_trains_for_every_family(tmp_path: Path) -> None:
    found = recorded("family-training", lambda: every_training(tmp_path))
    for family in found["families"].values():
        assert (family["trained"], family["faults"]) == (TRAINED, [])
