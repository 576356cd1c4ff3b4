"""The commands that serve a release in each engine, at the chosen depth, with the folder that the engine reads.

Methods without files (prompt lookup) have commands as well. The depth is passed by each engine's own settings
(depth_settings.py). The commands are for POSIX shells.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from components.engines.depth_settings import ENGINE_OF_SETTING
from components.engines.profiles import Engine, Settings, TargetFacts, kind_of, profile_of, refusals
from components.methods import METHODS, gguf_base_of
from components.outside_json import JsonObject
from components.weight_format import Storage

LAUNCHED: Mapping[str, Engine] = {"vLLM": "vllm", "SGLang": "sglang", "llama.cpp": "llama.cpp"}
"""Title of each engine that has a command here -> the engine."""
FOLDER_OF_TARGET = "TARGET"
"""Placeholder in commands for a folder that only the reader knows."""
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
    engines: JsonObject,
    target: str,
    folders: Mapping[str, str] | None = None,
    settings: Settings | None = None,
) -> list[tuple[str, str]]:
    """(engine title, command) for serving at a depth; [] where nothing is to be drafted or no engine serves the method.

    engines: settings by engine; one without settings gets no command. folders: format -> its folder in the release;
    None: the method's own format. settings: the method's own, from draft.json.
    """
    if depth == 0 or not engines:
        return []
    target = " ".join(target.split())  # users copy it into a shell
    name, revision = at_revision(target)
    model = shlex.quote(name) + (f" --revision {shlex.quote(revision)}" if revision else "")
    format_folders = {"eagle3": "eagle3"} if folders is None else dict(folders)
    drafter = _Drafter(method, depth, engines, model, format_folders, dict(settings or {}))
    lines = [
        ("vLLM", drafter.vllm()),
        ("SGLang", drafter.sglang()),
        # llama.cpp's converter takes a folder; the other two engines accept a hub id.
        ("llama.cpp", drafter.llama_cpp(FOLDER_OF_TARGET if HUB_ID.fullmatch(name) else model)),
    ]
    if method == "ngram":
        lines.append(("transformers", f"model.generate(**inputs, prompt_lookup_num_tokens={depth})"))
    if method == "lookahead":
        lines.append(("Draftsmith, whose loop it needs", "draftsmith generate PROMPT"))
    return [(engine, command) for engine, command in lines if command]


def at_revision(model: str) -> tuple[str, str]:
    """(owner/name, revision) of a hub id, which engines take as two options; for anything else (model, "")."""
    name, _, revision = model.partition("@")
    return (name, revision) if HUB_ID.fullmatch(name) else (model, "")


def shallower_than(depth: int, method: str, settings: Settings) -> dict[str, int]:
    """Engine -> draft tokens a round in its command, where these are fewer than the chosen depth."""
    kind = kind_of(method, settings)
    served = {title: profile_of(engine).methods.get(kind) for title, engine in LAUNCHED.items()}
    limits = {title: one.max_depth for title, one in served.items() if one is not None}
    return {title: limit for title, limit in limits.items() if limit is not None and limit < depth}


def not_served(
    method: str,
    settings: Settings,
    target: TargetFacts,
    storage: Storage | None,
    formats: Collection[str],
    taps: Sequence[int] = (),
    *,
    unknown_tokenizer: bool = False,
) -> dict[str, str]:
    """Engine -> why it would not serve this drafter as it was measured, in one clause. Such engines get no command.

    This covers engines that the release does not name, since one that silently drops a norm or a bias would serve it
    badly. formats: those in the release. unknown_tokenizer: whether llama.cpp's converter does not know the target's
    tokenizer, which no command line can change.
    """
    reasons: dict[str, str] = {}
    for title, engine in LAUNCHED.items():
        for refusal in refusals(engine, method, settings, target, storage, taps):
            clause = refusal.partition(": ")[0]  # without the remedy, which is for training
            reasons.setdefault(title, clause + ")" * (clause.count("(") - clause.count(")")))
    if storage is not None and storage.bits is not None and "gguf" not in formats:
        reasons.setdefault(
            "llama.cpp", "llama.cpp reads packed weights from the GGUF file that its own converter makes"
        )
    if method == "dflash" and "gguf" not in formats:
        reasons.setdefault("llama.cpp", "llama.cpp reads DFlash from the GGUF file that a release makes of it alone")
    if unknown_tokenizer and "gguf" not in formats and {entry.gguf_base for entry in METHODS.values()} & {*formats}:
        advice = (
            "llama.cpp's converter does not know this target's tokenizer; export with llama.cpp among the engines and"
        )
        reasons.setdefault("llama.cpp", f"{advice} DRAFTSMITH_LLAMA_CPP set, which answers for it")
    return reasons


def cannot_load(
    method: str,
    settings: Settings,
    target: TargetFacts,
    storage: Storage | None,
    formats: Collection[str],
    not_served: Mapping[str, str],
    taps: Sequence[int] = (),
) -> set[Engine]:
    """Engines that get no settings: they refuse such a drafter, or read none of its formats.

    formats: those in the release. not_served: the result of `not_served`.
    """
    without: set[Engine] = {LAUNCHED[title] for title in not_served}
    for engine in set(ENGINE_OF_SETTING.values()) - without:
        served = profile_of(engine).methods.get(kind_of(method, settings))
        read = {*served.formats, *({gguf_base_of(method)} if "gguf" in served.formats else ())} if served else set()
        unread = served is not None and served.formats and not read & {*formats}
        if unread or any(refusals(engine, method, settings, target, storage, taps)):
            without.add(engine)
    return without


@dataclass(frozen=True)
class _Drafter:
    """What goes into a command; each method gives "" where the engine serves no such drafter.

    engines: settings by engine. model: the target as a shell word, with its revision. folders: format -> folder.
    """

    method: str
    depth: int
    engines: JsonObject
    model: str
    folders: Mapping[str, str]
    settings: Settings

    @property
    def given_model(self) -> str:
        """The draft model that was given instead of trained; "" for none."""
        return str(self.settings.get("model") or "") if self.method == "draft-model" else ""

    def vllm(self) -> str:
        if "vllm" not in self.engines:
            return ""
        model, config, overrides = self.model, dict(self.engines["vllm"]["speculative_config"]), ""
        if self.method == "ngram":
            lengths = (self.settings.get("min_ngram", 1), self.settings.get("max_ngram", 3))
            config |= dict(zip(("prompt_lookup_min", "prompt_lookup_max"), lengths, strict=True))
        elif self.method == "suffix":
            config |= self._suffix_decoding()
        elif "stitched" in self.folders:
            model = f"./{self.folders['stitched']}"
        elif self.given_model:
            name, revision = at_revision(self.given_model)
            config |= {"method": "draft_model", "model": name} | ({"revision": revision} if revision else {})
        else:
            draft = self._folder_for("vllm")
            if not draft:
                return ""
            config = {"model": draft, **config, "method": VLLM_METHODS.get(self.method, self.method)}
            if self.method == "medusa":  # vLLM's Medusa asserts that the depth never changes
                config = {**_without_batch_sizes(config), "num_speculative_tokens": self.depth}
            if self.method == "p-eagle":
                config["parallel_drafting"] = True
            if self.method == "mtp":
                # One new module is exact for the first draft token only; vLLM counts modules in the target's config.
                overrides = f"--hf-overrides {shlex.quote(json.dumps({'num_nextn_predict_layers': 1}))} "
                config = {**_without_batch_sizes(config), "num_speculative_tokens": 1}
        return f"vllm serve {model} {overrides}--speculative-config {shlex.quote(json.dumps(config))}"

    def _suffix_decoding(self) -> JsonObject:
        """Its settings under vLLM's names; what is left out here is left to vLLM's defaults."""
        names = ("max_tree_depth", "max_spec_factor", "min_token_prob")
        config = {f"suffix_decoding_{name}": self.settings[name] for name in names if name in self.settings}
        if not self.settings.get("cached_tokens"):
            config["suffix_decoding_max_cached_requests"] = 0  # as it was measured: the request's own text alone
        return config

    def sglang(self) -> str:
        if "sglang" not in self.engines:
            return ""
        flags = shlex.join(self.engines["sglang"]["flags"])
        start = "python -m sglang.launch_server --model-path"
        if "stitched" in self.folders:
            return f"{start} ./{self.folders['stitched']} {flags}"
        if self.method == "ngram":
            return f"{start} {self.model} {flags}"
        name, revision = at_revision(self.given_model)
        draft = shlex.quote(name) if self.given_model else self._folder_for("sglang")
        if revision:
            draft += f" --speculative-draft-model-revision {shlex.quote(revision)}"
        return f"{start} {self.model} --speculative-draft-model-path {draft} {flags}" if draft else ""

    def llama_cpp(self, model: str) -> str:
        """model: the folder of the target, for the converter."""
        if "llama_cpp" not in self.engines:
            return ""
        flags, folders = shlex.join(self.engines["llama_cpp"]["flags"]), self.folders
        serve, convert = "llama-server --model target.gguf --model-draft", "python convert_hf_to_gguf.py"
        if "gguf" in folders:
            return f"{serve} ./{folders['gguf']}/draft.gguf {flags}"
        base = folders.get(gguf_base_of(self.method) or "")
        if self.method in ("eagle3", "dspark") and base:
            conversion = f"{convert} ./{base} --target-model-dir {model} --outfile {self.method}.gguf"
            return f"{conversion}\n{serve} {self.method}.gguf {flags}"
        if self.method == "draft-model" and "causal-lm" in folders:
            return f"{convert} ./{folders['causal-lm']} --outfile draft.gguf\n{serve} draft.gguf {flags}"
        return ""

    def _folder_for(self, engine: Engine) -> str:
        """The folder of the best format that an engine reads of this drafter; "" where the release has none."""
        served = profile_of(engine).methods.get(kind_of(self.method, self.settings))
        formats = served.formats if served else ()
        return next((f"./{self.folders[name]}" for name in formats if name in self.folders), "")


def _without_batch_sizes(config: JsonObject) -> JsonObject:
    return {name: value for name, value in config.items() if "per_batch" not in name}
