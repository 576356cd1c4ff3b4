"""The settings that give each serving engine the chosen depth, by batch size where the engine supports that.

Engines meet batch sizes that were not measured. The choice for a measured size holds from just above the measured size
before it: the depth chosen for a larger batch is the shallower one, and loses less where it is wrong.

A release states these settings (release.json: engines) for the engines that can load it, and `draftsmith choose-depth`
prints them; a depth policy holds depths only.

A block drafter (DFlash, DSpark) is measured at the width it was trained at, and vLLM, SGLang and llama.cpp denoise as
many rows as they are to draft tokens: below the trained width some draft tokens differ from what was measured.

Forms, read in the engines' own documents and sources (November 2026):
  vLLM          speculative_config: `num_speculative_tokens` is the largest of all; with it
                `num_speculative_tokens_per_batch_size` is [[first, last, K], ...] from 1 on, K = 0 drafts nothing, past
                the end the last K holds. A pull request (48944, not in 0.32.0) adds [first, last, first_context,
                last_context, K] rows, a full grid: `vllm_by_context`. Its Medusa asserts that the depth never changes:
                it gets neither, and the depth of the smallest batch, as engines that know one depth alone. Adaptive
                verification (`enable_adaptive_verification`, DSpark on GPUs) takes no table: vLLM times itself as it
                starts.
  SGLang        --speculative-num-steps, --speculative-eagle-topk 1 (a chain), --speculative-num-draft-tokens: one more
                than the steps. DFLASH takes the last of these alone, DSPARK with it --speculative-dspark-block-size,
                the draft tokens. EAGLE and EAGLE3 also choose by batch size: `sglang_by_batch_size`, whose file holds
                {first batch size: {"candidate_steps": [K]}}, 0 drafting nothing; a slot holds up to the next one's. One
                candidate a slot is our table; its moving average would choose among several by accepted tokens alone.
                DSPARK's budget of tokens to verify reads steps a second by tokens in a batch: `sglang_costs`, the
                rounds of our own loop on the machine of the policy; SGLang's profiler makes one of the server itself.
  TensorRT-LLM  `decoding_type`, `max_draft_len`, and `draft_len_schedule` {last batch size: drafts}, which drafts
                nothing above the last key, and whose smallest key must have max_draft_len: larger batches get no more
                than that. Nothing for the smallest cannot be said. (Older versions read keys as first batch sizes.)
  llama.cpp     --spec-type, without which it loads a draft and decodes plainly; --spec-draft-n-max, with
                --spec-draft-p-min 0 so that every draft is of that length; where ending drafts before the first one
                below a threshold was measured to be faster, that threshold, with the depth that suits it. llama.cpp
                takes probabilities over its ten likeliest tokens, so that they are a little above ours; of DSpark it
                takes the confidence head, as we do.
  MNN           `draft_predict_length` in config.json; EAGLE also takes `eagle_depth`, and `eagle_topk` 1 for a chain.
                Its DFlash always drafts the whole block, which is part of the exported model.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from components.engines.profiles import GIVEN_MODEL, OWN_MTP, Engine, Settings, kind_of, profile_of
from components.methods import METHODS
from components.outside_json import JsonObject
from components.policy import Policy
from components.rows import ALL, DepthChoice

ENGINE_OF_SETTING: Final[dict[str, Engine]] = {
    "vllm": "vllm",
    "vllm_by_context": "vllm",
    "sglang": "sglang",
    "sglang_by_batch_size": "sglang",
    "sglang_costs": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "llama_cpp": "llama.cpp",
    "mnn": "mnn",
}
"""Key of engine settings -> the engine that they are for."""
_VLLM = {"eagle1": "eagle", "hass": "eagle", "draft-model": "draft_model"} | {
    name: name for name in ("dflash", "dspark", "eagle3", "mtp", "medusa", "ngram", "suffix")
}
_SGLANG = {"eagle1": "EAGLE", "hass": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "draft-model": "STANDALONE"} | {
    name: name.upper() for name in ("dflash", "dspark", "ngram")
}
_SGLANG_ADAPTIVE = ("EAGLE", "EAGLE3")
_TENSORRT = {"eagle3": "Eagle3", "mtp": "MTP", "draft-model": "Draft_Target", "ngram": "NGram", "dflash": "DFlash"}
_LLAMA_CPP = {"draft-model": "draft-simple"} | {name: f"draft-{name}" for name in ("dflash", "dspark", "eagle3", "mtp")}
_VLLM_ONE_DEPTH = ("medusa",)
_MNN = {"dflash": "dflash", "eagle3": "eagle", "mtp": "mtp", "draft-model": "draftmodel", "ngram": "lookahead"}
_ALL_CONTEXTS = 2**31 - 1
STEPS_FILE, COSTS_FILE = "sglang-steps.json", "sglang-costs.json"
"""Files that SGLang's flags name, in the folder of the release."""


def engine_settings(
    policy: Policy, without: Collection[Engine], method_settings: Settings = MappingProxyType({})
) -> JsonObject:
    """The settings for the winner's depth; {} where the verdict is not to draft, or not to believe it.

    without: engines that cannot load this drafter and therefore get no settings. Depths are those chosen over all
    measured prompts; a stated mixture's depth was never measured end to end and is only in the policy table. A batch
    size that measured slower than plain decoding gets depth 0. method_settings: the drafter's own, of draft.json: an
    engine that serves fewer draft tokens of such a one gets no more than those.
    """
    winner = policy.winner
    if winner is None or policy.verdict not in ("use", "undecided"):
        return {}
    shapes = {c.tree_budget for c in policy.ranking if c.draft_key == winner.draft_key}
    if shapes and None not in shapes:
        return {}  # the settings below draft chains only
    served = [c for c in policy.choices if (c.draft_key, c.workload) == (winner.draft_key, ALL)]
    slower = {c.batch_size for c in served if c.verdict == "do_not_speculate"}
    by_batch = {c.batch_size: 0 if c.batch_size in slower else c.depth_k for c in served}
    measured_slower = {c.batch_size for c in served if c.batch_size in slower and c.depth_k > 0}
    contexts = [
        replace(c, depth_k=0) if c.batch_size in measured_slower else c
        for c in policy.contexts
        if c.draft_key == winner.draft_key
    ]
    settings = settings_for(winner.method, by_batch, contexts, _least_probability(policy, winner.draft_key))
    if settings and winner.method == "dspark" and (table := cost_table(policy, winner.draft_key)):
        flags = [*settings["sglang"]["flags"], "--speculative-dspark-sps-table-path", COSTS_FILE]
        settings["sglang_costs"] = {"flags": flags, COSTS_FILE: table}
    for name in settings.keys() & ENGINE_OF_SETTING.keys():
        entry = profile_of(ENGINE_OF_SETTING[name]).methods.get(kind_of(winner.method, method_settings))
        if entry is not None and (most := entry.max_depth) is not None:
            fewer = {batch_size: min(depth, most) for batch_size, depth in by_batch.items()}
            nearer = [replace(c, depth_k=min(c.depth_k, most)) for c in contexts]
            settings[name] = settings_for(winner.method, fewer, nearer)[name]
    return {name: value for name, value in settings.items() if ENGINE_OF_SETTING.get(name) not in without}


def engines_without_method(method: str) -> set[Engine]:
    """Engines that load no drafter of this method, whatever its settings; none for a method without profiles."""
    kinds = {method} | ({OWN_MTP} if method == "mtp" else {GIVEN_MODEL} if method == "draft-model" else set())
    engines = set(ENGINE_OF_SETTING.values())
    is_known = any(kinds & {*profile_of(one).methods, *profile_of(one).unsupported} for one in engines)
    return {one for one in engines if is_known and not kinds & {*profile_of(one).methods}}


def engine_lines(engines: JsonObject) -> list[str]:
    """A line for each setting of each engine, ready to copy."""
    lines = []
    for name, settings in engines.items():
        for kind, value in settings.items() if isinstance(settings, dict) else ():
            words = shlex.join(value) if kind == "flags" else json.dumps(value)
            lines.append(f"{name}{'' if kind == 'flags' else ' ' + kind}: {words}")
    return lines


def setting_files(engines: JsonObject) -> JsonObject:
    """File name -> content of the files that flags name."""
    of_engines = [settings for settings in engines.values() if isinstance(settings, dict)]
    return {kind: value for one in of_engines for kind, value in one.items() if kind.endswith(".json")}


def cost_table(policy: Policy, draft_key: str) -> JsonObject:
    """Steps a second by tokens verified in a batch, as SGLang reads them; {} for fewer than two sizes of batch.

    A step is a drafting pass and the verifying one, in the median of the cells with as many tokens.
    """
    by_tokens: dict[int, list[float]] = {}
    for e in policy.evals:
        if (e.draft_key, e.workload, e.tree_budget) == (draft_key, ALL, None) and e.depth_k > 0:
            by_tokens.setdefault(e.batch_size * (e.depth_k + 1), []).append(e.t_verify_ms + e.t_draft_ms)
    if len(by_tokens) < 2:
        return {}
    return {
        "sample_batch_tokens": sorted(by_tokens),
        "sample_steps_per_sec": [1000.0 / statistics.median(by_tokens[tokens]) for tokens in sorted(by_tokens)],
        "max_batch_tokens": max(by_tokens),
    }


def _least_probability(policy: Policy, draft_key: str) -> tuple[float, int] | None:
    """(p_min, depth) of one sequence at a time, where decoding with it was measured to be surely faster."""
    sure = (
        s
        for s in policy.stops
        if (s.draft_key, s.batch_size) == (draft_key, 1) and s.p_min and (s.p_min_meas_lo or 0.0) > 1.0
    )
    return next(((s.p_min, s.p_min_depth) for s in sure), None)


def settings_for(
    method: str,
    by_batch: Mapping[int, int],
    contexts: Sequence[DepthChoice] = (),
    least_probability: tuple[float, int] | None = None,
) -> JsonObject:
    """Settings by engine; {} where all depths are 0.

    by_batch: measured batch size -> depth. contexts: choices by context length. least_probability: (p_min, depth) for
    engines that end drafts by a single threshold.
    """
    ranges = batch_ranges(by_batch)
    first, deepest = by_batch[min(by_batch)], max(by_batch.values())
    if deepest == 0:
        return {}
    depth = first or deepest
    vllm: JsonObject = {"num_speculative_tokens": deepest}
    if method in _VLLM_ONE_DEPTH:
        vllm["num_speculative_tokens"] = depth
    if method in _VLLM:
        vllm = {"method": _VLLM[method], **vllm}
    if len(ranges) > 1 and method not in _VLLM_ONE_DEPTH:
        vllm["num_speculative_tokens_per_batch_size"] = ranges
    sglang = _sglang_flags(method, depth)
    p_min, longest = least_probability or (0, depth)
    llama_cpp: list[Any] = ["--spec-draft-n-max", longest, "--spec-draft-p-min", p_min]
    if method in _LLAMA_CPP:
        llama_cpp = ["--spec-type", _LLAMA_CPP[method], *llama_cpp]
    mnn: JsonObject = {} if method == "dflash" else {"draft_predict_length": depth}
    if method in _MNN:
        mnn = {"speculative_type": _MNN[method], **mnn}
    if method in METHODS and METHODS[method].llama_block == "eagle":
        mnn |= {"eagle_depth": depth, "eagle_topk": 1}
    settings: JsonObject = {
        "measured_batch_sizes": sorted(by_batch),
        "vllm": {"speculative_config": vllm},
        "sglang": {"flags": sglang},
        "tensorrt_llm": {"speculative_config": _tensorrt_config(method, ranges, deepest)},
        "llama_cpp": {"flags": [str(word) for word in llama_cpp]},
        "mnn": {"config": mnn},
    }
    if len(ranges) > 1 and _SGLANG.get(method) in _SGLANG_ADAPTIVE:
        adaptive = {str(first): {"candidate_steps": [drafts]} for first, _, drafts in ranges}
        flags = [*sglang, "--speculative-adaptive", "--speculative-adaptive-config", STEPS_FILE]
        settings["sglang_by_batch_size"] = {"flags": flags, STEPS_FILE: adaptive}
    grid = context_grid(contexts)
    if grid and method not in _VLLM_ONE_DEPTH:
        deepest = max(deepest, *(row[-1] for row in grid))
        by_context = {**vllm, "num_speculative_tokens": deepest, "num_speculative_tokens_per_batch_size": grid}
        settings["vllm_by_context"] = {"speculative_config": by_context}
    return settings


def _sglang_flags(method: str, depth: int) -> list[str]:
    """One depth for all batch sizes."""
    flags: list[Any] = ["--speculative-algorithm", _SGLANG[method]] if method in _SGLANG else []
    if method == "dspark":
        flags += ["--speculative-dspark-block-size", depth]
    elif method != "dflash":
        flags += ["--speculative-num-steps", depth, "--speculative-eagle-topk", 1]
    return [str(word) for word in (*flags, "--speculative-num-draft-tokens", depth + 1)]


def _tensorrt_config(method: str, ranges: Sequence[Sequence[int]], deepest: int) -> JsonObject:
    """The schedule by batch size where its first depth can stand at its head."""
    most = ranges[0][2] or deepest
    config: JsonObject = {"decoding_type": _TENSORRT[method]} if method in _TENSORRT else {}
    config["max_draft_len"] = most
    if len(ranges) > 1 and ranges[0][2]:
        config["draft_len_schedule"] = {str(last): min(drafts, most) for _, last, drafts in ranges}
    return config


def batch_ranges(by_batch: Mapping[int, int]) -> list[list[int]]:
    """[[first, last, depth], ...] from batch size 1 to the largest measured; neighbours of equal depth are joined."""
    ranges: list[list[int]] = []
    start = 1
    for batch_size in sorted(by_batch):
        depth = by_batch[batch_size]
        if ranges and ranges[-1][2] == depth:
            ranges[-1][1] = batch_size
        else:
            ranges.append([start, batch_size, depth])
        start = batch_size + 1
    return ranges


def context_grid(contexts: Sequence[DepthChoice]) -> list[list[int]]:
    """vLLM's five-column form over batch size x context length; [] unless every cell of the grid was chosen."""
    cells = {(c.batch_size, c.kv_len): c.depth_k for c in contexts if c.kv_len is not None}
    batches, lengths = sorted({b for b, _ in cells}), sorted({length for _, length in cells})
    if not lengths or len(cells) != len(batches) * len(lengths):
        return []
    grid = []
    for before, batch_size in zip([0, *batches], batches, strict=False):
        for shorter, length in zip([0, *lengths], lengths, strict=False):
            last = _ALL_CONTEXTS if length == lengths[-1] else length
            grid.append([before + 1, batch_size, shorter + 1, last, cells[batch_size, length]])
    return grid
