"""The rule that the engines a release names can serve its drafters, checked before anything is trained.

A step with a setting `engines` promises them its drafters: those wired into `drafts`, or those it names in `methods`
(the dry run). What an engine honours is data (components/engines/profiles.py). Limits that depend on the target are
checked here if its config.json is on this machine, else by the dry run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from components.contract import UserError
from components.engines.profiles import CUT_VOCABULARY, UNKNOWN, TargetFacts, packing_refusals, refusals
from components.methods import AUTO, METHODS
from components.outside_json import read_object
from components.pipeline_checks.step_view import Fault, StepView, names_in
from components.targets.shape import rope_scaling_of, taps_of
from components.targets.source import local_folder
from components.weight_format import Storage

TRAINS: Final = "drafts.train_draft"
ROUNDS: Final = "drafts.quantise_draft"
LOADS: Final = "targets.load_target"
RELEASES: Final = "publish.export_release"
USUAL_TAPS: Final = 3


def check_engine_compatibility(wired: Sequence[StepView]) -> Iterator[Fault]:
    """A fault for each engine that could not serve a drafter of a step.

    A step that rounds weights is looked at as well: groups that divide no layer, a format that cannot hold them.
    """
    steps = {step.name: step for step in wired}
    for step in wired:
        yield from (Fault(step.base, reason, ("with", "engines")) for reason in _refusals(step, steps))


def _refusals(step: StepView, steps: Mapping[str, StepView]) -> Iterator[str]:
    """Why a step's promises cannot be kept, a line each."""
    if step.address == ROUNDS:
        yield from _undivided_layers(step, steps)
    engines = step.settings.get("engines")
    if step.address == RELEASES and not engines:
        for name, method, settings, storage in _promised_drafters(step, steps):
            yield from (f"{name}: {reason}" for reason in packing_refusals(method, settings, storage))
    if not isinstance(engines, list) or not engines:
        return
    config = target_config(step, steps)
    target = None if config is None else target_facts(config)
    for name, method, settings, storage in _promised_drafters(step, steps):
        taps = _own_taps(steps.get(name), steps, target)
        for engine in engines:
            faults = refusals(str(engine), method, settings, target, storage, taps)
            yield from (f"{name}: {reason}" for reason in faults)


Promised = tuple[str, str, Mapping[str, Any], Storage | None]


def _own_taps(drafter: StepView | None, steps: Mapping[str, StepView], target: TargetFacts | None) -> list[int]:
    """The layers that a step's drafter reads by its features; [] for the target's usual ones, or what may be these."""
    if drafter is not None and drafter.address == ROUNDS:
        drafter = steps.get(str(drafter.inputs.get("draft")))
    features = steps.get(str(drafter.inputs.get("features"))) if drafter is not None else None
    taps = features.settings.get("tap_layers") if features is not None else None
    if not isinstance(taps, list):
        return []
    usual = len(taps) == USUAL_TAPS if target is None else tuple(taps) == taps_of(target.num_layers)
    return [] if usual else taps


def _promised_drafters(step: StepView, steps: Mapping[str, StepView]) -> Iterator[Promised]:
    """(name for a reader, method, the method's own settings, how it is stored) of every drafter that is promised."""
    for name in names_in(step.inputs.get("drafts", [])):
        trained, storage = steps.get(name), None
        if trained is not None and trained.address == ROUNDS:
            storage = Storage.from_settings(trained.settings)
            trained = steps.get(str(trained.inputs.get("draft")))
        if trained is not None and trained.address == TRAINS:
            method = str(trained.settings.get("method", ""))
            if method == AUTO:  # the step that exports it knows, and refuses what an engine cannot serve
                continue
            yield name, method, _told_to_engines(trained, method, steps), storage
    for method in step.settings.get("methods", []):
        yield method, str(method), _told_to_engines(step, method, steps), None


def _undivided_layers(step: StepView, steps: Mapping[str, StepView]) -> Iterator[str]:
    """Why a step's group size does not fit the drafter that it rounds, where its target is on this machine."""
    trained, storage = steps.get(str(step.inputs.get("draft"))), Storage.from_settings(step.settings)
    if trained is None or trained.address != TRAINS or not storage.group_size:
        return
    method = str(trained.settings.get("method", ""))
    config = target_config(trained, steps)
    if method not in METHODS or METHODS[method].llama_block is None or not isinstance(config, dict):
        return
    config, method_settings = config.get("text_config", config), trained.settings.get("settings", {}).get(method, {})
    inner = method_settings.get("intermediate_size") or config.get("intermediate_size")
    for width, layer in ((config.get("hidden_size"), "q_proj"), (inner, "down_proj")):
        if isinstance(width, int) and width % storage.group_size and layer not in storage.keep:
            yield (
                f"groups of {storage.group_size} do not divide the {width} inputs of {layer}: take another group_size,"
                " or 0 for a scale each output channel"
            )


def target_config(step: StepView, steps: Mapping[str, StepView]) -> Any:
    """config.json of the step's target, where a step loads it from a folder of this machine; else None."""
    loaded = steps.get(str(step.inputs.get("target")))
    if loaded is None or loaded.address != LOADS:
        return None
    try:
        folder = local_folder(str(loaded.settings.get("model", "")))
        if folder is None or not (folder / "config.json").is_file():
            return None
        return read_object(folder / "config.json")
    except (ValueError, UserError):
        return None  # loading the target says what is wrong with it


def _told_to_engines(step: StepView, method: str, steps: Mapping[str, StepView]) -> dict[str, Any]:
    """The settings of a step's drafter, and whether it guesses a part of the vocabulary."""
    drafted, config = step.settings.get("draft_vocab_size", 0), target_config(step, steps)
    whole = config if isinstance(config, dict) else {}
    size = (whole.get("text_config") or whole).get("vocab_size")
    is_cut = not drafted or (isinstance(size, int) and drafted < size)
    return {**step.settings.get("settings", {}).get(method, {}), CUT_VOCABULARY: is_cut}


def target_facts(config: Any) -> TargetFacts | None:
    """The facts in a config.json; None where it does not say them."""
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
