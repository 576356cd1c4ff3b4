"""Checks from the settings alone, before anything is read or run, that no pipeline trains on what it benchmarks.

The rows that reach `drafts.train_draft` are followed back to the sources that steps name, and so are the prompts that
reach `bench.*`. One step that gives both has split them itself, so that they share no question. Two steps that name
one file, or one split of one data set, are refused, unless their splits agree (components/data/sources/overlap.py),
or `data.deduplicate` takes the ones out of the others. The same question in two files cannot be seen in
the settings: that step finds it in the rows.

Checks in pipelines.yaml, before anything is trained, that the engines a release names can serve its drafters.

A step with a setting `engines` promises them its drafters: those wired into `drafts`, or those it names in `methods`
(the dry run). What an engine honours is data (components/engines/profiles.py). Limits that depend on the target are
checked here if its config.json is on this machine, else by the dry run.

Checks from the settings, before anything runs, that a measuring step agrees with its tuning input.

The step itself refuses it too (components/bench/calibration.py), but by then a drafter has been trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from components.contract import UserError
from components.data.sources.overlap import Origin, after_split, origins_of, share_questions
from components.engines.profiles import UNKNOWN, TargetFacts, packing_refusals, refusals
from components.outside_json import read_object
from components.targets.rope_scaling import rope_scaling_of
from components.targets.source import local_folder
from components.weight_format import Storage

if TYPE_CHECKING:
    from flows.planning.wiring import WiredStep

_CARRY_ROWS: Final = ("Chats", "Prompts", "Conversations", "Features", "Draft")
"""Kinds through which rows travel to training; a target was trained by others, a corpus is not what drafters learn."""
_ONLY_COMPARED: Final = ("keep_out", "seen")
"""Inputs that a step only compares with: their rows do not reach its output."""


def check_train_eval_overlap(steps: Sequence[WiredStep]) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) for every source that one step trains on and another one benchmarks."""
    by_name = {step.name: step for step in steps}
    trained: dict[str, WiredStep] = {}
    benchmarked: dict[str, WiredStep] = {}
    for step in steps:
        if step.function.address == "drafts.train_draft":
            trained |= {giver.name: giver for giver in _prompt_sources(step, by_name)}
        if step.function.address.startswith("bench."):
            benchmarked |= {above.name: above for above in _input_steps(step, by_name) if _gives_prompts(above)}
    for giver in trained.values():
        for benchmark in benchmarked.values():
            if giver.base != benchmark.base:
                yield from _shared_sources(giver, benchmark, by_name)


def _shared_sources(
    giver: WiredStep, benchmark: WiredStep, by_name: Mapping[str, WiredStep]
) -> Iterator[tuple[int, str]]:

    for reader, read, kept_out in _origins(giver, by_name, frozenset()):
        for _, bench_origin, _ in _origins(benchmark, by_name, frozenset()):
            origin, benchmarked = after_split(read, giver.settings), after_split(bench_origin, benchmark.settings)
            if not share_questions(origin, benchmarked) or (
                benchmark.name in kept_out and not benchmarked.is_benchmark
            ):
                continue
            if not benchmarked.is_benchmark:
                remedy = f"benchmark the prompts of '{giver.base}', which are split by one step, or wire "
                remedy += f"'{benchmark.base}' into `keep_out` of data.deduplicate"
            else:
                remedy = "it is a benchmark as a whole: train on other rows, or on another split"
            location = f"'{benchmark.base}' (line {benchmark.line})"
            yield reader.line, f"step '{reader.base}': trains on {origin.source}, which {location} benchmarks: {remedy}"


def _prompt_sources(step: WiredStep, by_name: Mapping[str, WiredStep]) -> Iterator[WiredStep]:
    """The steps whose Prompts reach a step, the nearest on each way: they split what comes from further up."""
    for above in _input_steps(step, by_name):
        if _gives_prompts(above):
            yield above
        else:
            yield from _prompt_sources(above, by_name)


def _origins(
    step: WiredStep, by_name: Mapping[str, WiredStep], kept_out: frozenset[str]
) -> Iterator[tuple[WiredStep, Origin, frozenset[str]]]:
    """(step, origin, prompts kept out on the way) for every source named by a step or by those whose rows it takes."""

    kept_out = kept_out.union(_names(step.inputs.get("keep_out", [])))
    room, _, name = step.function.address.partition(".")
    if room == "data":
        with contextlib.suppress(UserError):  # a malformed source is told by the step that reads it
            yield from ((step, origin, kept_out) for origin in origins_of(name, step.settings))
    for above in _input_steps(step, by_name):
        yield from _origins(above, by_name, kept_out)


def _input_steps(step: WiredStep, by_name: Mapping[str, WiredStep]) -> Iterator[WiredStep]:
    """The steps whose rows a step takes in; inputs from outside the pipeline are not included."""
    for parameter, references in step.inputs.items():
        if parameter in _ONLY_COMPARED:
            continue
        for name in _names(references):
            source_step = by_name.get(name)
            if source_step is not None and source_step.function.kind.__name__ in _CARRY_ROWS:
                yield source_step


def _gives_prompts(step: WiredStep) -> bool:
    return step.function.kind.__name__ == "Prompts"


def _names(references: str | list[str]) -> list[str]:
    return references if isinstance(references, list) else [references]


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

    try:
        folder = local_folder(str(loaded.settings.get("model", "")))
        if folder is None or not (folder / "config.json").is_file():
            return None
        return read_object(folder / "config.json")
    except (ValueError, UserError):
        return None  # loading the target says what is wrong with it


def _facts(config: Any) -> TargetFacts | None:
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


AUTOTUNE = "bench.autotune"
TUNING = "tuning"


def check_tuning_consistency(steps: Sequence[WiredStep]) -> Iterator[tuple[str, str, str, str]]:
    """(step, fault, section: "with" or "in", name in that section) for every step that contradicts the
    `bench.autotune` it takes."""
    by_name = {step.name: step for step in steps}
    problems: dict[tuple[str, str, str, str], None] = {}
    for step in steps:
        giver = by_name.get(str(step.inputs.get(TUNING)))
        if giver is not None and giver.function.address == AUTOTUNE:
            problems |= dict.fromkeys((step.base, *problem) for problem in _contradictions(step, giver, by_name))
    yield from problems


def _contradictions(step: WiredStep, giver: WiredStep, by_name: Container[object]) -> Iterator[tuple[str, str, str]]:
    if step.settings.get("num_threads"):
        reason = f"'{giver.base}' chooses the threads: leave num_threads out, or the input 'tuning'"
        yield reason, "with", "num_threads"
    dtype, tuned_dtype = (
        step.settings.get("dtype"),
        giver.settings.get("dtype"),
    )  # {} of a step whose settings are wrong
    if None not in (dtype, tuned_dtype) and dtype != tuned_dtype:
        yield f"dtype is {dtype}, and '{giver.base}' chooses for {tuned_dtype}: give both the same", "with", "dtype"
    target, tuned = step.inputs.get("target"), giver.inputs.get("target")
    if target in by_name and tuned in by_name and target != tuned:  # what comes from outside has many names
        yield f"it measures '{target}', and '{giver.base}' chooses for '{tuned}': give each its own", "in", TUNING
