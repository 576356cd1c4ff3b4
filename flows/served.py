"""Checks in pipelines.yaml, before anything is trained, that the engines a release names can serve its drafters.

A step with a setting `engines` promises them its drafters: those wired into `drafts`, or those it names in `methods`
(the dry run). What an engine honours is data (components/publish/profiles.py). Limits that depend on the target are
checked here if its config.json is on this machine, else by the dry run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.contract import UserError
from components.drafts.storage import Storage
from components.outside_json import read_object
from components.publish.profiles import UNKNOWN, TargetFacts, packing_refusals, refusals

if TYPE_CHECKING:
    from flows.wiring import WiredStep

TRAINS, ROUNDS, LOADS = "drafts.train_draft", "drafts.quantise_draft", "targets.load_target"
RELEASES = "publish.export_release"
LLAMA_BLOCKS = ("eagle1", "hass", "eagle3", "p-eagle", "mtp")
"""Methods whose layers read the target's hidden size, or a multiple, or the width of their own MLP."""


def check_engine_compatibility(wired: Sequence[WiredStep]) -> Iterator[tuple[str, str]]:
    """(step, reason) for each engine that could not serve a drafter of that step.

    A step that rounds weights is looked at as well: groups that divide no layer, a format that cannot hold them.
    """
    steps = {step.name: step for step in wired}
    for step in wired:
        if step.function.address == ROUNDS:
            yield from ((step.base, reason) for reason in _undivided_layers(step, steps))
        engines = step.settings.get("engines")
        if step.function.address == RELEASES and not engines:
            for name, method, settings, storage in _promised_drafters(step, steps):
                yield from ((step.base, f"{name}: {reason}") for reason in packing_refusals(method, settings, storage))
        if not isinstance(engines, list) or not engines:
            continue
        target = target_facts(step, steps)
        for name, method, settings, storage in _promised_drafters(step, steps):
            for engine in engines:
                for reason in refusals(str(engine), method, settings, target, storage):
                    yield step.base, f"{name}: {reason}"


Promised = tuple[str, str, Mapping[str, Any], Storage | None]


def _promised_drafters(step: WiredStep, steps: Mapping[str, WiredStep]) -> Iterator[Promised]:
    """(name for a reader, method, the method's own settings, how it is stored) of every drafter that is promised."""
    drafts = step.inputs.get("drafts", [])
    for name in drafts if isinstance(drafts, list) else [drafts]:
        trained, storage = steps.get(name), None
        if trained is not None and trained.function.address == ROUNDS:
            storage = Storage.from_settings(trained.settings)
            trained = steps.get(str(trained.inputs.get("draft")))
        if trained is not None and trained.function.address == TRAINS:
            method = str(trained.settings.get("method", ""))
            yield name, method, trained.settings.get("settings", {}).get(method, {}), storage
    for method in step.settings.get("methods", []):
        yield method, str(method), step.settings.get("settings", {}).get(method, {}), None


def _undivided_layers(step: WiredStep, steps: Mapping[str, WiredStep]) -> Iterator[str]:
    """Why a step's group size does not fit the drafter that it rounds, where its target is on this machine."""
    trained, storage = steps.get(str(step.inputs.get("draft"))), Storage.from_settings(step.settings)
    if trained is None or trained.function.address != TRAINS or not storage.group_size:
        return
    method = str(trained.settings.get("method", ""))
    config = _target_config(trained, steps)
    if method not in LLAMA_BLOCKS or not isinstance(config, dict):
        return
    config, method_settings = config.get("text_config", config), trained.settings.get("settings", {}).get(method, {})
    inner = method_settings.get("intermediate_size") or config.get("intermediate_size")
    for width, layer in ((config.get("hidden_size"), "q_proj"), (inner, "down_proj")):
        if isinstance(width, int) and width % storage.group_size and layer not in storage.keep:
            yield (
                f"groups of {storage.group_size} do not divide the {width} inputs of {layer}: take another group_size,"
                " or 0 for a scale each output channel"
            )


def target_facts(step: WiredStep, steps: Mapping[str, WiredStep]) -> TargetFacts | None:
    """The facts of the step's target, where a step loads it from a folder of this machine."""
    config = _target_config(step, steps)
    return None if config is None else _facts(config)


def _target_config(step: WiredStep, steps: Mapping[str, WiredStep]) -> Any:
    """config.json of the step's target, where a step loads it from a folder of this machine; else None."""
    loaded = steps.get(str(step.inputs.get("target")))
    if loaded is None or loaded.function.address != LOADS:
        return None
    from components.targets.source import local_folder

    try:
        folder = local_folder(str(loaded.settings.get("model", "")))
        if folder is None or not (folder / "config.json").is_file():
            return None
        return read_object(folder / "config.json")
    except (ValueError, UserError):
        return None  # loading the target says what is wrong with it


def _facts(config: Any) -> TargetFacts | None:
    """The facts in a config.json; None where it does not say them."""
    from components.targets.rope_scaling import rope_scaling_of

    whole = config if isinstance(config, dict) else {}
    config = whole.get("text_config", whole)  # sizes; the architecture often stands at top level alone
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    try:
        heads = int(config["num_attention_heads"])
        head_dim = config.get("v_head_dim") or config.get("head_dim") or int(config["hidden_size"]) // heads
        return TargetFacts(
            architecture=str((whole.get("architectures") or config.get("architectures") or [UNKNOWN])[0]),
            num_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            rope_scaling=rope_scaling_of(rope, config.get("partial_rotary_factor")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None
