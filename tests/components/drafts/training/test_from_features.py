"""Going on from a trained drafter: its weights are where training starts, and nothing else fits."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_drafts import ODD_TAPS, READING, TRAINED, new_context, write_features

from components.contract import Draft, Features, Target, UserError
from components.decoding.chain import decode
from components.drafts import train_draft
from components.drafts.settings import train_draft_settings
from components.drafts.storage.files import open_draft
from components.targets.interface import AbstractTarget, tapping
from components.targets.shape import TapLayers

SETTINGS: dict[str, Any] = {
    "num_steps": 6,
    "batch_tokens": 96,
    "draft_vocab_size": 128,
    "settings": {"eagle3": {"ttt_steps": 3}},
    "eval_every": 2,
}
Folder = Callable[[str], Path]
MakeTarget = Callable[[str], AbstractTarget]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory, tiny_target: MakeTarget) -> Features:
    return write_features(tiny_target("llama"), tmp_path_factory.mktemp("features") / "f")


@pytest.fixture(scope="module")
def champions(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Folder, features: Features) -> dict[str, Draft]:
    """A trained drafter of each method."""
    target, made = Target(key="", path=tiny_folder("llama")), {}
    for method in TRAINED:
        ctx = new_context(tmp_path_factory.mktemp(method), key=f"champion-{method}")
        made[method] = train_draft(target, features, method=method, **SETTINGS, ctx=ctx)  # type: ignore[arg-type]
    return made


def go_on(
    root: Path, folder: Folder, features: Features, champion: Draft | None, **changed: Any
) -> tuple[Draft, list[Mapping[str, Any]]]:
    ctx = new_context(root, key="challenger")
    events: list[Mapping[str, Any]] = []
    ctx.send = events.append
    target = Target(key="", path=folder("llama"))
    return train_draft(target, features, champion, **{**SETTINGS, **changed}, ctx=ctx), events


@pytest.mark.parametrize("method", TRAINED)
def test_training_goes_on_from_the_champion_and_says_so(
    method: str,
    tmp_path: Path,
    tiny_folder: Folder,
    tiny_target: MakeTarget,
    features: Features,
    champions: dict[str, Draft],
) -> None:
    champion = champions[method]
    made, _ = go_on(tmp_path / "on", tiny_folder, features, champion, method="auto", num_steps=12)
    fresh, _ = go_on(tmp_path / "fresh", tiny_folder, features, None, method=method, num_steps=12)

    def losses(draft: Draft) -> list[float]:
        rows = map(json.loads, (draft.path / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    assert losses(made)[0] < losses(fresh)[0]
    record = json.loads((made.path / "draft.json").read_text())
    assert (record["continued_from"], record["method"]) == (champion.key, method)
    assert (record["optimiser_steps"], record["optimiser_steps_before"]) == (12, 6)
    assert made.info["held_out_al"] >= champion.info["held_out_al"]
    open_draft(made, tiny_target("llama"))
    then, now = (load_file(draft.path / "model.safetensors") for draft in (champion, made))
    assert torch.equal(then["d2t"], now["d2t"])
    third, _ = go_on(tmp_path / "third", tiny_folder, features, made, method=method)
    assert third.info["optimiser_steps_before"] == 18


def test_the_method_of_no_drafter_is_none(tmp_path: Path, tiny_folder: Folder, features: Features) -> None:
    with pytest.raises(UserError, match="method: auto is the method of start_from: give that, or name a method"):
        go_on(tmp_path, tiny_folder, features, None, method="auto")
    settings = {"method": "auto", "settings": {"mtp": {"mtp_modules": 2}, "eagle3": {"ttt_step": 4}}}
    assert train_draft_settings(settings)[0] == settings
    assert [place for place, _ in train_draft_settings(settings)[1]] == [("settings", "eagle3", "ttt_step")]


def test_the_champions_weights_stay_when_no_step_improves_on_them(
    tmp_path: Path, tiny_folder: Folder, features: Features, champions: dict[str, Draft]
) -> None:
    made, events = go_on(tmp_path, tiny_folder, features, champions["mtp"], method="mtp", peak_lr=1e-12)
    assert made.info["best_step"] == 0
    then, now = (load_file(draft.path / "model.safetensors") for draft in (champions["mtp"], made))
    assert all(torch.equal(then[name], now[name]) for name in then)
    assert any("its weights stay" in str(event.get("message")) for event in events)
    first = json.loads((made.path / "metrics.jsonl").read_text().splitlines()[0])
    assert (first["step"], first["held_out_al"]) == (0, made.info["held_out_al"])


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.mark.parametrize("dies_at", [1, 3])
def test_a_killed_continuation_ends_with_the_same_bits(
    dies_at: int, tmp_path: Path, tiny_folder: Folder, features: Features, champions: dict[str, Draft]
) -> None:
    target = Target(key="", path=tiny_folder("llama"))

    def run(name: str, die: bool) -> Path:
        ctx = new_context(tmp_path / name)

        def listen(event: Mapping[str, Any]) -> None:
            if die and event["event"] == "metrics" and event["step"] == dies_at:  # in no checkpoint yet
                raise Killed

        ctx.send = listen
        train_draft(target, features, champions["mtp"], method="mtp", checkpoint_minutes=1e-9, **SETTINGS, ctx=ctx)
        return ctx.out

    undisturbed = run("undisturbed", die=False)
    with pytest.raises(Killed):
        run("killed", die=True)
    resumed = run("killed", die=False)
    for file in ("model.safetensors", "draft.json", "metrics.jsonl"):
        assert (undisturbed / file).read_bytes() == (resumed / file).read_bytes(), file


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"method": "eagle3"}, "is of method mtp, not eagle3; set method: mtp"),
        ({"draft_vocab_size": 64}, "has a draft vocabulary of 128, not 64; draft_vocab_size: 0 keeps it"),
        (
            {"settings": {"mtp": {"mtp_modules": 2}}},
            r"another shape: .* absent here and \d+ tensors more; .*\(mtp_modules: 3 there, 2 here\)",
        ),
        (
            {"settings": {"mtp": {"intermediate_size": 40}}},
            r"is \[\d+, \d+\] there and .*\(intermediate_size: 0 there, 40 here\)",
        ),
        (
            {"settings": {"mtp": {"first_hidden": "pre_norm"}}},
            "was trained with first_hidden: 'post_norm', not 'pre_norm'; give it the same",
        ),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(
    changed: dict[str, Any],
    said: str,
    tmp_path: Path,
    tiny_folder: Folder,
    features: Features,
    champions: dict[str, Draft],
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        go_on(tmp_path, tiny_folder, features, champions["mtp"], **{"method": "mtp", **changed})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("method", "taps"), list(itertools.product(READING, ODD_TAPS)))
def test_a_drafter_of_other_layers_is_trained_on_its_features_and_only_on_them(
    method: str,
    taps: TapLayers,
    tmp_path: Path,
    tiny_folder: Folder,
    tiny_target: MakeTarget,
    features: Features,
) -> None:
    """What it was trained on is written down, another list is refused by name, and it changes no text."""
    target = tiny_target("llama")
    own = write_features(tapping(target, taps), tmp_path / "features")
    made, _ = go_on(tmp_path / "made", tiny_folder, own, None, method=method)
    assert made.info["tap_layers"] == list(taps) == json.loads((made.path / "draft.json").read_text())["tap_layers"]
    again, _ = go_on(tmp_path / "again", tiny_folder, own, made, method=method)
    assert again.info["tap_layers"] == list(taps)
    usual, _ = go_on(tmp_path / "usual", tiny_folder, features, None, method=method)
    assert "tap_layers" not in usual.info
    listed = [list(taps), list(target.tap_layers)]
    for start, given, (there, here) in ((made, features, listed), (usual, own, listed[::-1])):
        with pytest.raises(UserError, match=re.escape(f"hidden_states{there}, and these features hold {here}")):
            go_on(tmp_path / "refused", tiny_folder, given, start, method=method)
    drafter = open_draft(made, target)
    assert drafter.needs_features == taps
    plain = decode(target, None, [5, 9, 2], max_new_tokens=20, ignore_eos=True)
    assert decode(target, drafter, [5, 9, 2], max_new_tokens=20, depth=3, ignore_eos=True).tokens == plain.tokens


def test_what_reads_no_taps_does_not_write_them_down(
    tmp_path: Path, tiny_folder: Folder, tiny_target: MakeTarget, features: Features
) -> None:
    """And goes on with features of any taps."""
    own = write_features(tapping(tiny_target("llama"), (1, 7)), tmp_path / "features")
    made, _ = go_on(tmp_path / "made", tiny_folder, features, None, method="medusa")
    again, _ = go_on(tmp_path / "again", tiny_folder, own, made, method="medusa")
    assert "tap_layers" not in made.info and "tap_layers" not in again.info


def test_the_vocabulary_of_the_champion_is_kept_when_none_is_asked_for(
    tmp_path: Path, tiny_folder: Folder, features: Features, champions: dict[str, Draft]
) -> None:
    made, _ = go_on(tmp_path, tiny_folder, features, champions["mtp"], method="mtp", draft_vocab_size=0)
    assert made.info["draft_vocab_size"] == 128
