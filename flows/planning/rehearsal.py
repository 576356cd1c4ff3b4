"""A rehearsal: a pipeline with the same steps, wires and formats, whose target and numbers are small.

Every large target becomes a stand-in of random weights (components/targets/stand_in.py), every server one that speaks
its protocol (components/engines/stand_in_server.py), and settings that say how much is done are cut to what shows that
the step works: two optimiser steps, a few tokens for a benchmark, no timing of kernels and threads (Context.rehearsed).
What decides whether something fits (methods, formats, engines, taps, templates, data sources) stays. A release holds
every drafter, not the winner alone, and a step after it opens all of it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.data.sources.addresses import PREFIX, parse_hub_source
from components.outside_json import JsonObject
from components.targets.source import local_folder
from flows.planning.step_signature import resolve
from flows.planning.wiring import WiredStep, Wiring

_DECODED: Mapping[str, float] = {
    "num_prompts": 4,
    "max_new_tokens": 6,
    "batch_sizes": 2,
    "seconds": 0.1,
    "num_processes": 1,
    "num_warm_up": 1,
}
"""Of steps that decode end to end."""
AT_MOST: Mapping[str, Mapping[str, float]] = {
    "bench.autotune": {"seconds": 0},
    "bench.compare_end_to_end": _DECODED,
    "bench.compare_stop": {name: most for name, most in _DECODED.items() if name != "batch_sizes"},
    "bench.measure_acceptance": {"max_new_tokens": 6},
    "bench.measure_llama_cpp": {"num_prompts": 2, "max_new_tokens": 12, "reps": 1, "num_warm_up": 0},
    "bench.measure_server": {"num_prompts": 2, "max_new_tokens": 12, "reps": 1, "num_warm_up": 0, "num_compared": 0},
    "bench.measure_step_cost": {
        "seconds": 0.1,
        "num_processes": 1,
        "tokens_per_block": 16,
        "batch_sizes": 2,
        "kv_lengths": 32,
    },
    "data.collect_prompts": {"num_train": 24, "num_validation": 4, "num_test": 4, "num_warm_up": 1, "max_rows": 2000},
    "data.collect_traffic": {"num_train": 24, "num_validation": 4, "num_test": 4, "num_warm_up": 1, "max_new": 2000},
    "data.collect_workloads": {"num_prompts": 4, "num_warm_up": 1, "max_answer_tokens": 12, "max_rows": 2000},
    "data.mix_chats": {"num_validation": 4, "num_test": 4, "num_warm_up": 1},
    "data.mix_prompts": {"num_validation": 4, "num_test": 4, "num_warm_up": 1},
    "data.write_answers": {"max_new_tokens": 24},
    "data.write_answers_by_server": {"max_new_tokens": 24},
    "drafts.train_draft": {
        "num_steps": 2,
        "eval_every": 2,
        "eval_rows": 4,
        "processes": 2,
        "nodes": 1,
        "batch_tokens": 512,
        "micro_batch_tokens": 256,
    },
    "speedup.choose_depth": {"num_draws": 200},
    "speedup.choose_stop": {"num_draws": 200},
    "speedup.confirm_stop": {"num_draws": 200},
    "speedup.confirm_depth": {"num_draws": 200},
    "speedup.measure_drift": {"num_draws": 200},
    "speedup.measure_languages": {"num_draws": 200},
    "speedup.measure_tuning": {"num_draws": 200},
    "targets.fine_tune_target": {"num_steps": 2, "tokens_per_step": 512, "sequence_length": 128},
    "targets.pretrain_target": {
        "num_steps": 4,
        "decay_steps": 2,
        "tokens_per_step": 512,
        "num_layers": 8,
        "unlikelihood_every": 2,
        "sequence_length": 128,
        "decay_sequence_length": 256,
        "num_processes": 1,
    },
}
"""Address of a step -> settings that say how much it does -> the most that a rehearsal does."""
_MIXED: Mapping[str, int] = {"tokens": 8_000, "rows": 40}
"""The most that a rehearsal mixes, by the unit of the shares."""
INSTEAD: Mapping[str, JsonObject] = {
    "bench.compare_end_to_end": {"precision": 0.5},
    "bench.compare_stop": {"precision": 0.5},
    "bench.measure_step_cost": {"precision": 0.5, "max_depth": 2},
    "data.collect_traffic": {"min_new": 1},
    # Random states are followed by no token in particular, and the stand-in server hands out files.
    "data.features_from_server": {"num_checked": 0, "mooncake": None},
    # Any of them may win in the end.
    "publish.export_release": {"include": "all"},
}
"""Address of a step -> settings that a rehearsal has other values of."""
LEFT_OUT: Mapping[str, str] = {"publish.upload_release": "it would upload"}
"""Address of a step that a rehearsal does not run -> the reason."""


@dataclass(frozen=True)
class StandIns:
    """What takes the place of what is elsewhere.

    server: starts the stand-in server of an engine, or finds it, and says its address.
    chats: a file of conversations for sources on the hub; None where the hub itself is read.
    configs: a folder with OWNER--NAME/config.json, and a tokenizer where there is one, of models on the hub; None where
        the hub itself is read.
    states: the folder that the stand-in of vLLM writes hidden states to.
    """

    server: Callable[[str], str]
    chats: Path | None = None
    configs: Path | None = None
    states: Path | None = None

    def model(self, name: str) -> str:
        """Where the configuration of a model is read from: a folder of `configs`, else what the pipeline says."""
        if self.configs is None or local_folder(name) is not None:
            return name
        folder = self.configs / name.partition("@")[0].replace("/", "--")
        return str(folder) if (folder / "config.json").is_file() else name


def rehearsed(wiring: Wiring, packages: Sequence[str], stand_ins: StandIns) -> Wiring:
    """The pipeline as a rehearsal runs it; steps that cannot be rehearsed are skipped, with all that need them."""
    skipped = dict(wiring.skipped)
    steps: list[WiredStep] = []
    for step in wiring.steps:
        lost = next((name for name in step.input_names() if name in skipped), None)
        if lost is not None:
            skipped[step.name] = f"it needs '{lost}', which a rehearsal leaves out"
        elif reason := LEFT_OUT.get(step.address):
            skipped[step.name] = f"not rehearsed: {reason}"
        else:
            steps.append(_small(step, tuple(packages), stand_ins))
            if step.address == "publish.export_release":
                steps.append(_reopening(step, tuple(packages)))
    return Wiring(tuple(steps), tuple(skipped.items()))


def _small(step: WiredStep, packages: tuple[str, ...], stand_ins: StandIns) -> WiredStep:
    """A step that does little; a target that is loaded, servers and data elsewhere become their stand-ins."""
    if step.address == "targets.load_target" and step.settings["model"] != "builtin":
        stand_in = resolve("targets.make_stand_in", packages)
        return dataclasses.replace(step, function=stand_in, settings={"model": stand_ins.model(step.settings["model"])})
    if step.address == "data.collect_traffic":  # what has been read is rehearsed on as well: no night waits for it
        step = dataclasses.replace(step, inputs={name: given for name, given in step.inputs.items() if name != "seen"})
    if stand_ins.chats is not None:
        step = _with_chats_here(step, packages, str(stand_ins.chats))
    most = AT_MOST.get(step.address, {})
    small = {name: _cut(step.settings[name], most[name]) for name in most}
    values: JsonObject = {**step.settings, **small, **INSTEAD.get(step.address, {})}
    if step.address == "data.mix_chats":
        limit = f"limit_{values['by']}"
        values[limit] = _cut(values[limit], _MIXED[values["by"]])
    if step.address == "data.collect_chats":
        values["sources"] = [{**one, "max_rows": _cut(one["max_rows"], 500)} for one in values["sources"]]
    if "base_url" in values:
        values |= _stand_in_address(values, stand_ins)
    if step.address == "data.features_from_server":
        values["folder"] = str(stand_ins.states)
    if "servers" in values:
        values["servers"] = [{**server, **_stand_in_address(server, stand_ins)} for server in values["servers"]]
    settings, faults = step.function.settings(values)
    assert not faults, f"{step.address}: the settings of its rehearsal are refused: {faults}"
    # Its times are worth nothing, so it need not have the machine to itself.
    function = dataclasses.replace(step.function, measures=False)
    return dataclasses.replace(step, function=function, settings=settings, retries=0)


def _reopening(release: WiredStep, packages: tuple[str, ...]) -> WiredStep:
    """The step that opens every format of a release again; no step of a pipeline has a dot in its name."""
    inputs = {"release": release.name, "target": release.inputs["target"], "drafts": release.inputs["drafts"]}
    function = resolve("publish.reopen_release", packages)
    return dataclasses.replace(
        release, name=f"{release.name}.reopened", function=function, settings={}, inputs=inputs, retries=0
    )


def _with_chats_here(step: WiredStep, packages: tuple[str, ...], chats: str) -> WiredStep:
    """The step with the conversations in the file `chats` in the place of all that it would read from elsewhere."""
    settings = step.settings
    if step.address == "data.collect_chats":
        here: JsonObject = {"preset": None, "path": chats, "fields": {}}
        sources = [
            {**source, **(here if _far(source) else {}), "name": source["name"] or f"source-{number}"}
            for number, source in enumerate(settings["sources"])
        ]
        return dataclasses.replace(step, settings={**settings, "sources": sources})
    if step.address == "data.collect_prompts":
        source = chats if _far({"path": settings["source"]}) else settings["source"]
        keep_out = "" if settings["keep_out"] and _far({"path": settings["keep_out"]}) else settings["keep_out"]
        return dataclasses.replace(step, settings={**settings, "source": source, "keep_out": keep_out})
    if step.address == "data.collect_workloads":
        if all(isinstance(source, dict) and not _far(source) for source in settings["sources"]):
            return step
        prompts = resolve("data.collect_prompts", packages)
        values, _ = prompts.settings({"source": chats, "num_train": 0, "num_validation": 0, "evaluation_percent": 100})
        return dataclasses.replace(step, function=prompts, inputs={}, settings=values)
    return step


def _far(source: JsonObject) -> bool:
    """Whether a source of rows is not on this machine: a preset without a copy, a hub id, a URL."""
    path = str(source.get("path") or "")
    if not path or "://" in path:
        return True
    return path.startswith(PREFIX) and parse_hub_source(path).folder is None


def _cut(value: Any, most: float) -> Any:
    """A number of at most `most`, or a list of such; None, which means all, becomes that number."""
    if isinstance(value, list):
        return sorted({min(each, most) for each in value})
    return most if value is None or value > most else value


def _stand_in_address(server: JsonObject, stand_ins: StandIns) -> JsonObject:
    """The settings that lead to the stand-in of a server; `auto` may be any engine, and vLLM is the usual one."""
    engine = "vllm" if server["engine"] == "auto" else str(server["engine"])
    return {"base_url": stand_ins.server(engine), "engine": engine, "model": ""}
