"""The command that serves a release in each engine, at the chosen depth, with the folder that the engine reads.

Methods without files (prompt lookup) have commands as well. The depth is told in each engine's own words
(engine_settings.py); the commands are for POSIX shells.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from components.drafts.storage import Storage
from components.publish.engine_settings import TOLD
from components.publish.profiles import GGUF_BASES, Engine, TargetFacts, kind_of, profile_of, refusals

Engines = Mapping[str, Any]
LAUNCHED: Mapping[str, Engine] = {"vLLM": "vllm", "SGLang": "sglang", "llama.cpp": "llama.cpp"}
"""Engines that have a command here, by the name that people write."""
FOLDER_OF_TARGET = "TARGET"
"""What commands say where only the reader knows the folder."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
VLLM_METHODS = {
    "eagle1": "eagle",
    "hass": "eagle",
    "eagle3": "eagle3",
    "p-eagle": "eagle3",
    "draft-model": "draft_model",
}


def launch_lines(
    method: str,
    depth: int,
    engines: Engines,
    target: str,
    folders: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[tuple[str, str]]:
    """(engine, command) for serving at a depth; empty where no engine serves the method or nothing should be drafted.

    engines: how each engine is told the depth; one that is not there gets no command. folders: format -> the release's
    folder of it; None: the method's own. settings: the method's own, from draft.json.
    """
    if depth == 0 or not engines:
        return []
    target = " ".join(target.split())  # it is copied into a shell
    name, revision = at_revision(target)
    on_hub = HUB_ID.fullmatch(name) is not None
    model = shlex.quote(name) + (f" --revision {shlex.quote(revision)}" if revision else "")
    there = {"eagle3": "eagle3"} if folders is None else dict(folders)
    told = dict(settings or {})
    given = str(told.get("model") or "") if method == "draft-model" else ""
    lines = [
        ("vLLM", _vllm(method, depth, engines, model, there, told, given)),
        ("SGLang", _sglang(method, engines, model, there, told, given)),
        # Its converter takes a folder; the other two know a hub id.
        ("llama.cpp", _llama_cpp(method, engines, FOLDER_OF_TARGET if on_hub else model, there)),
    ]
    if method == "ngram":
        lines.append(("transformers", f"model.generate(**inputs, prompt_lookup_num_tokens={depth})"))
    if method == "lookahead":
        lines.append(("Draftsmith, whose loop it needs", "draftsmith generate PROMPT"))
    return [(engine, command) for engine, command in lines if command]


def at_revision(model: str) -> tuple[str, str]:
    """(owner/name, revision) of a hub id, which engines are told apart; anything else as it is."""
    name, _, revision = model.partition("@")
    return (name, revision) if HUB_ID.fullmatch(name) else (model, "")


def shallower_than(depth: int, method: str, settings: Mapping[str, Any]) -> dict[str, int]:
    """Engine -> guesses a round that its command asks for, where those are fewer than the chosen depth."""
    kind = kind_of(method, settings)
    served = {title: profile_of(engine).methods.get(kind) for title, engine in LAUNCHED.items()}
    limits = {title: one.max_depth for title, one in served.items() if one is not None}
    return {title: limit for title, limit in limits.items() if limit is not None and limit < depth}


def not_served(
    method: str,
    settings: Mapping[str, Any],
    target: TargetFacts,
    storage: Storage | None,
    formats: Collection[str],
    *,
    unknown_tokenizer: bool = False,
) -> dict[str, str]:
    """Engine -> why it would not serve this drafter as it was measured, one clause; they get no command.

    Whether a release names an engine or not: one that drops a norm or a bias without a word would serve it, and badly.
    formats: those in the release. unknown_tokenizer: whether llama.cpp's converter has to be told of the target's,
    which no command line does.
    """
    found: dict[str, str] = {}
    for title, engine in LAUNCHED.items():
        for why in refusals(engine, method, settings, target, storage):
            clause = why.partition(": ")[0]  # without the remedy, which is for whoever trains it
            found.setdefault(title, clause + ")" * (clause.count("(") - clause.count(")")))
    if storage is not None and storage.bits is not None and "gguf" not in formats:
        found.setdefault("llama.cpp", "llama.cpp reads packed weights from the GGUF file that its own converter makes")
    if unknown_tokenizer and "gguf" not in formats and set(GGUF_BASES.values()) & set(formats):
        told = (
            "llama.cpp's converter does not know this target's tokenizer; export with llama.cpp among the engines and"
        )
        found.setdefault("llama.cpp", f"{told} DRAFTSMITH_LLAMA_CPP set, which answers for it")
    return found


def cannot_load(
    method: str,
    settings: Mapping[str, Any],
    target: TargetFacts,
    storage: Storage | None,
    formats: Collection[str],
    not_served: Mapping[str, str],
) -> set[Engine]:
    """Engines that are told nothing: they refuse such a drafter, or read none of the formats that are there.

    formats: those in the release. not_served: what is said of the engines that have commands.
    """
    found: set[Engine] = {LAUNCHED[title] for title in not_served}
    for engine in set(TOLD.values()) - found:
        served = profile_of(engine).methods.get(kind_of(method, settings))
        read = {*served.formats, *({GGUF_BASES.get(method)} if "gguf" in served.formats else ())} if served else set()
        unread = served is not None and served.formats and not read & {*formats}
        if unread or any(refusals(engine, method, settings, target, storage)):
            found.add(engine)
    return found


def _vllm(
    method: str,
    depth: int,
    engines: Engines,
    model: str,
    folders: Mapping[str, str],
    settings: Mapping[str, Any],
    given: str,
) -> str:
    if "vllm" not in engines:
        return ""
    config, told = dict(engines["vllm"]["speculative_config"]), ""
    if method == "ngram":
        config |= {"prompt_lookup_min": settings.get("min_ngram", 1), "prompt_lookup_max": settings.get("max_ngram", 3)}
    elif "stitched" in folders:
        model = f"./{folders['stitched']}"
    elif given:
        name, revision = at_revision(given)
        config = {**config, "method": "draft_model", "model": name} | ({"revision": revision} if revision else {})
    else:
        draft = _read_folder("vllm", method, settings, folders)
        if not draft:
            return ""
        config = {"model": draft, **config, "method": VLLM_METHODS.get(method, method)}
        if method == "medusa":  # it asserts that its depth never changes, whatever an older policy says
            config = {**_one_depth(config), "num_speculative_tokens": depth}
        if method == "p-eagle":
            config["parallel_drafting"] = True
        if method == "mtp":
            # One new module, exact for the first guess alone; vLLM counts modules in the target's config.
            told = f"--hf-overrides {shlex.quote(json.dumps({'num_nextn_predict_layers': 1}))} "
            config = {**_one_depth(config), "num_speculative_tokens": 1}
    return f"vllm serve {model} {told}--speculative-config {shlex.quote(json.dumps(config))}"


def _one_depth(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if "per_batch" not in name}


def _read_folder(engine: Engine, method: str, settings: Mapping[str, Any], folders: Mapping[str, str]) -> str:
    """The folder that an engine reads of a drafter, the best of its formats that are there; "" where none is."""
    served = profile_of(engine).methods.get(kind_of(method, settings))
    return next((f"./{folders[name]}" for name in (served.formats if served else ()) if name in folders), "")


def _sglang(
    method: str,
    engines: Engines,
    model: str,
    folders: Mapping[str, str],
    settings: Mapping[str, Any],
    given: str,
) -> str:
    if "sglang" not in engines:
        return ""
    flags = shlex.join(engines["sglang"]["flags"])
    start = "python -m sglang.launch_server --model-path"
    if "stitched" in folders:
        return f"{start} ./{folders['stitched']} {flags}"
    if method == "ngram":
        return f"{start} {model} {flags}"
    name, revision = at_revision(given)
    draft = shlex.quote(name) if given else _read_folder("sglang", method, settings, folders)
    if revision:
        draft += f" --speculative-draft-model-revision {shlex.quote(revision)}"
    return f"{start} {model} --speculative-draft-model-path {draft} {flags}" if draft else ""


def _llama_cpp(method: str, engines: Engines, model: str, folders: Mapping[str, str]) -> str:
    if "llama_cpp" not in engines:
        return ""
    flags = shlex.join(engines["llama_cpp"]["flags"])
    serve = "llama-server --model target.gguf --model-draft"
    if "gguf" in folders:
        return f"{serve} ./{folders['gguf']}/draft.gguf {flags}"
    if method == "eagle3" and "eagle3" in folders:
        convert = f"python convert_hf_to_gguf.py ./{folders['eagle3']} --target-model-dir {model} --outfile eagle3.gguf"
        return f"{convert}\n{serve} eagle3.gguf {flags}"
    if method == "draft-model" and "causal-lm" in folders:
        return f"python convert_hf_to_gguf.py ./{folders['causal-lm']} --outfile draft.gguf\n{serve} draft.gguf {flags}"
    return ""
