"""Drafters in few bits for engines: the same target and prompts, a drafter rounded by drafts.quantise_draft.

What an engine serves is held against our own loop with the very weights that the codes stand for, so a difference is
the engine's arithmetic and not the rounding. vLLM's kernel for CPUs computes int4 in bfloat16 only: there both sides
decode in bfloat16, texts part at ties, and acceptance is compared over all answers that are the same.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from benchmarks.engine_cases import DEPTH, MAX_NEW_TOKENS, EngineCases, make_context
from benchmarks.engine_vllm import vllm_process
from components.bench import measure_acceptance, measure_server
from components.bench.settings import EngineServer
from components.contract import Draft
from components.drafts import quantise_draft
from components.publish.formats.gguf import write_gguf
from components.publish.formats.registry import read_drafter_state
from components.rows import ALL, EngineComparison, read_rows
from components.speedup import compare_engines
from tests.engines.engine_homes import llama_cpp_home


def quantised(cases: EngineCases, method: str, name: str, **how: Any) -> EngineCases:
    """The same cases with one drafter, rounded. how: the settings of drafts.quantise_draft."""
    made = quantise_draft(cases.draft(method), ctx=make_context(cases.work / f"stored-{name}"), **how)
    cases.opened, cases.prompts, cases.encoded  # noqa: B018 - made once, and shared by the copy
    rounded = copy.copy(cases)
    rounded.work = cases.work / f"quantised-{name}"
    rounded.work.mkdir()
    rounded._drafts, rounded._exported = {method: Draft(key=made.key, path=made.path, info=made.info)}, {}
    return rounded


def as_gguf(cases: EngineCases, method: str) -> Path:
    """The drafter as llama.cpp's converter packs it."""
    folder, source = cases.work / "gguf", str(llama_cpp_home() / "source")
    own, ctx = read_drafter_state(cases.draft(method).path), make_context(cases.work / "converting")
    facts = write_gguf(own, cases.source, folder, source, ctx)
    assert facts is not None, "the converter is there"
    return folder / "draft.gguf"


def in_bfloat16(cases: EngineCases, method: str = "eagle3") -> EngineComparison:
    """vLLM serves target and drafter in bfloat16, one request at a time, held against our maps in bfloat16."""
    draft = cases.draft(method)
    told = {"method": method, "model": str(cases.exported(method, method)), "num_speculative_tokens": DEPTH}
    more = ["--dtype", "bfloat16", "--per-request-spec-decode-metrics", "detailed"]
    more += ["--speculative-config", json.dumps(told)]
    with vllm_process(cases.target_folder, cases.work / "vllm.log", more) as (address, _):
        made = measure_server(
            cases.target,
            cases.prompts,
            servers=[EngineServer(base_url=address, method=method, draft_key=draft.key)],
            num_prompts=cases.num_prompts,
            max_new_tokens=MAX_NEW_TOKENS,
            concurrency=[1],
            num_compared=cases.num_prompts,
            wait_s=600,
            dtype="bfloat16",
            ctx=make_context(cases.work / "measured"),
            machine=cases.machine,
        )
    maps = measure_acceptance(
        cases.target,
        draft,
        cases.prompts,
        max_new_tokens=MAX_NEW_TOKENS,
        dtype="bfloat16",
        ctx=make_context(cases.work / "maps"),
    )
    compared = compare_engines([made], acceptance=[maps], ctx=make_context(cases.work / "compared"))
    return next(row for row in read_rows(compared.path, EngineComparison) if row.workload == ALL)
