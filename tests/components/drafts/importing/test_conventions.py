"""A drafter that loads and was meant by another convention is measured, and the convention that fits is named.

Power: the drafter is trained on the very answers that it is held against and is right at four of five positions or
more, so of about 140 positions a convention that costs it one in seven moves 20 more one way than the other, where 4
sqrt(20) = 18 are needed. Chance passes that once in 30,000 comparisons, and there are fewer than 30 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_drafts import WHOLE, Pair, change, make_pair
from tiny_drafts import train_on
from torch import Tensor

from components.drafts.importing.conventions import greedy_answer, known_changes, measure_agreement, prompts_of
from components.drafts.interface import AbstractDraft, Batch
from components.drafts.storage.files import build_draft
from components.publish.formats.eagle3 import TAPS

Tensors = Callable[[dict[str, Tensor]], object]
LAYER = "midlayer."
SIZES = {"input_layernorm.weight": 0.4, "hidden_norm.weight": 2.5, "post_attention_layernorm.weight": 3.0}
SIZES |= {"enorm.weight": 0.4, "hnorm.weight": 2.5}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    return make_pair(tmp_path_factory.mktemp("pair"))


def trained(pair: Pair, method: str, **settings: Any) -> AbstractDraft:
    """A drafter that has learnt the target's answers to the prompts by which imports are measured."""
    answers = [greedy_answer(pair.opened, ids) for ids in prompts_of(pair.artifact)]
    length = min(len(answer.ids) for answer in answers)
    ids, taps, last = (
        torch.stack([getattr(answer, name)[:length] for answer in answers]) for name in ("ids", "taps", "last")
    )
    mask = torch.arange(length) >= min(answer.first for answer in answers)
    lengths = torch.full((len(answers),), length)
    network: AbstractDraft = build_draft(method, pair.opened, settings, WHOLE)
    network.scale_to_target_features(taps.flatten(0, 1))
    with torch.no_grad():  # norms of different sizes, and an MLP that counts, as after a long training
        for name, weight in network.named_parameters():
            for norm, size in SIZES.items():
                if name.endswith(norm):
                    weight.mul_(size)
    train_on(network, Batch(ids, mask.expand(len(answers), -1), taps, last, lengths), 150)
    return network.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def drafter(pair: Pair) -> AbstractDraft:
    return trained(pair, "eagle3", ttt_steps=1)


def swap(first: str, second: str) -> Tensors:
    return lambda tensors: tensors.update({first: tensors[second].clone(), second: tensors[first].clone()})


def hidden_first(tensors: dict[str, Tensor]) -> None:
    for name in ("q", "k", "v"):
        tensors[f"{LAYER}self_attn.{name}_proj.weight"] = tensors[f"{LAYER}self_attn.{name}_proj.weight"].roll(32, 1)


def turned_pairs(layer: str) -> Tensors:
    def turn(tensors: dict[str, Tensor]) -> None:
        for name in (f"{layer}self_attn.{part}_proj.weight" for part in "qk"):
            tensors[name] = tensors[name].view(-1, 2, 4, 64).transpose(1, 2).reshape(tensors[name].shape)

    return turn


def from_zero(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name].sub_(1.0)


def rolled(*names: str) -> Tensors:
    """Weights whose inputs are moved on by one hidden state."""
    return lambda tensors: tensors.update({name: tensors[name].roll(32, 1) for name in names})


def doubled(name: str) -> Tensors:
    return lambda tensors: tensors[name].mul_(2.0)


def heads_exchanged(tensors: dict[str, Tensor]) -> None:
    for rest in ("0.linear.weight", "0.linear.bias", "1.weight"):
        swap(f"0.{rest}", f"1.{rest}")(tensors)


MEANT_OTHERWISE: dict[str, tuple[Tensors, str]] = {
    "norms from zero": (from_zero, "with one added to the weights of norms"),
    "order of taps": (rolled("fc.weight"), "with the tapped layers in the order (1, 2, 0)"),
    "gate and up": (swap(f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"), "with gate and up exchanged"),
    "norms exchanged": (
        swap(f"{LAYER}hidden_norm.weight", f"{LAYER}input_layernorm.weight"),
        "with norms exchanged",
    ),
    "doubled norm": (
        lambda tensors: tensors[f"{LAYER}post_attention_layernorm.weight"].mul_(2.0),
        "with half of midlayer.post_attention_layernorm.weight",
    ),
    "rotary pairs": (turned_pairs(LAYER), "with rotary pairs side by side"),
    "hidden state first": (hidden_first, "with the hidden state before the embedding"),
}


MTP, LAYERS = "model.layers.8.", "layers.0."
OTHER_METHODS: dict[str, tuple[str, dict[str, Any], list[tuple[Tensors, str]]]] = {
    "p-eagle": (
        "speculators",
        {"parallel_depth": 3, "num_layers": 1},
        [
            (turned_pairs(LAYERS), "with rotary pairs side by side"),
            (rolled("fc.weight"), "with the tapped layers in the order (1, 2, 0)"),
            (
                rolled(*(f"{LAYERS}self_attn.{one}_proj.weight" for one in "qkv")),
                "with the hidden state before the embedding",
            ),
            (doubled(f"{LAYERS}hidden_norm.weight"), f"with half of {LAYERS}hidden_norm.weight"),
            (swap(f"{LAYERS}hidden_norm.weight", f"{LAYERS}input_layernorm.weight"), "with norms exchanged"),
            (swap(f"{LAYERS}mlp.gate_proj.weight", f"{LAYERS}mlp.up_proj.weight"), "with gate and up exchanged"),
            (from_zero, "with one added to the weights of norms"),
        ],
    ),
    "mtp": (
        "mtp",
        {"mtp_modules": 1},
        [
            (rolled(f"{MTP}eh_proj.weight"), "with the hidden state before the embedding"),
            (swap(f"{MTP}enorm.weight", f"{MTP}hnorm.weight"), "with norms exchanged"),
            (doubled(f"{MTP}hnorm.weight"), f"with half of {MTP}hnorm.weight"),
            (doubled(f"{MTP}enorm.weight"), f"with half of {MTP}enorm.weight"),
            (swap(f"{MTP}mlp.gate_proj.weight", f"{MTP}mlp.up_proj.weight"), "with gate and up exchanged"),
            (from_zero, "with one added to the weights of norms"),
        ],
    ),
    "medusa": (
        "medusa",
        {"num_heads": 2},
        [
            (heads_exchanged, "with head 1 first"),
            (swap("0.1.weight", "1.1.weight"), "with the LM head of head 1 first"),
            (
                lambda tensors: tensors.update({"0.0.linear.weight": tensors["0.0.linear.weight"].T}),
                "with 0.0.linear.weight transposed",
            ),
        ],
    ),
}


def adopted(pair: Pair, drafter: AbstractDraft, tensors: Tensors | None, root: Path, **said: Any) -> dict[str, Any]:
    folder = pair.write("eagle3", drafter, {"ttt_steps": 1}, root / "out")
    return dict(pair.adopt(change(folder, lambda config: config.update(said), tensors), root / "draft").info)


def test_a_drafter_as_it_is_meant_draws_no_warning(pair: Pair, drafter: AbstractDraft, tmp_path: Path) -> None:
    info = adopted(pair, drafter, None, tmp_path)
    found = info["import_agreement"]
    assert found["agreement"] > 0.8 and found["num_positions"] > 120 and found["chance"] < 0.5, "the test's power"
    assert info["import_warning"] == "" and found["better"] == ""


@pytest.mark.parametrize("name", MEANT_OTHERWISE)
def test_the_convention_that_fits_better_is_named_and_nothing_is_changed(
    name: str, pair: Pair, drafter: AbstractDraft, tmp_path: Path
) -> None:
    tensors, meant = MEANT_OTHERWISE[name]
    info = adopted(pair, drafter, tensors, tmp_path)
    found = info["import_agreement"]
    assert found["better"] == meant, found
    assert found["better_agreement"] - found["before"] > 0.14, "the test's power: it costs a position in seven"
    assert f"wrong conventions? {meant} " in info["import_warning"] and "\n" not in info["import_warning"]
    draft = pair.opens(pair.adopt(tmp_path / "out", tmp_path / "again"))
    changed = draft.state_dict()
    assert any(not torch.equal(weight, changed[key]) for key, weight in drafter.state_dict().items())


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_drafters_of_other_methods_are_held_against_the_target_too(method: str, pair: Pair, tmp_path: Path) -> None:
    form, settings, otherwise = OTHER_METHODS[method]
    drafter = trained(pair, method, **settings)
    as_meant = pair.adopt(pair.write(form, drafter, settings, tmp_path / "out"), tmp_path / "draft").info
    assert as_meant["import_agreement"]["agreement"] > 0.8 and as_meant["import_warning"] == "", "the test's power"
    for number, (tensors, meant) in enumerate(otherwise):
        folder = change(pair.write(form, drafter, settings, tmp_path / f"out-{number}"), None, tensors)
        found = pair.adopt(folder, tmp_path / f"draft-{number}").info["import_agreement"]
        assert found["better"] == meant, found


@pytest.mark.parametrize(
    ("method", "settings", "flag", "depth"),
    [
        ("eagle3", {"ttt_steps": 3}, "norm_output", 3),
        ("dflash", {"num_layers": 1, "block_size": 4, "sample_from_anchor": True}, "sample_from_anchor", 1),
    ],
)
def test_a_flag_of_config_json_that_is_wrong_is_named(
    method: str, settings: dict[str, Any], flag: str, depth: int, pair: Pair, tmp_path: Path
) -> None:
    drafter, is_on = trained(pair, method, **settings), bool(settings.get(flag))
    for number, said in enumerate((is_on, not is_on)):
        folder = change(
            pair.write(method, drafter, settings, tmp_path / f"out-{number}"), lambda c, on=said: c.update({flag: on})
        )
        info = pair.adopt(folder, tmp_path / f"draft-{number}").info
        meant = "" if said == is_on else f"with {flag} {'on' if is_on else 'off'}"
        assert info["import_agreement"]["better"] == meant and meant in info["import_warning"], info
    assert info["import_agreement"]["depth"] == depth


def test_layers_that_are_counted_otherwise_are_named(pair: Pair, drafter: AbstractDraft, tmp_path: Path) -> None:
    said: dict[str, Any] = {"eagle_config": {}, TAPS: [3, 5, 6]}
    info = adopted(pair, drafter, None, tmp_path, **said)
    assert info["tap_layers"] == [3, 5, 6], "it is imported as what it says"
    assert info["import_agreement"]["better"] == "with hidden_states[2, 4, 5]", info["import_agreement"]


def test_a_drafter_that_knows_nothing_of_the_target_is_said_to(pair: Pair, tmp_path: Path) -> None:
    info = adopted(pair, pair.network("eagle3", {}, WHOLE), None, tmp_path)
    assert info["import_agreement"]["better"] == ""
    assert "made for another target, or by conventions that are not known here" in info["import_warning"]


@pytest.mark.parametrize(
    ("method", "settings", "least"),
    [("eagle3", {"fc_norm": True, "rope_theta": 500.0}, 15), ("p-eagle", {}, 12), ("eagle1", {}, 7), ("mtp", {}, 6)],
)
def test_trying_conventions_leaves_the_drafter_as_it_was(
    method: str, settings: dict[str, Any], least: int, pair: Pair
) -> None:
    network = pair.network(method, settings, WHOLE)
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    guesses = pair.guesses(network)[0]
    changes = list(known_changes(network))
    assert len({one.name for one in changes}) == len(changes) >= least
    measure_agreement(network, pair.opened, prompts_of(pair.artifact))
    assert all(torch.equal(weight, network.state_dict()[name]) for name, weight in before.items())
    assert torch.equal(pair.guesses(network)[0], guesses)
