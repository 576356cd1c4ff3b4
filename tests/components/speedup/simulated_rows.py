"""Simulated measurements with a known truth: acceptance maps, cost cells and timed requests."""

from __future__ import annotations

import dataclasses

import numpy as np

from components.rows import AcceptanceMap, CostCell, Request
from components.speedup.prediction.costs import StepTimes, round_cost
from components.speedup.prediction.replay import replay

TARGET, DRAFT = "t" * 64, "d" * 64


def speedup(al: float, target: float, verify: float, draft: float, host: float = 0.0, host_plain: float = 0.0) -> float:
    """S of the speedup model, by the costs of a round and of a plain step. All times in one unit."""
    pairs = ((target, verify), (0.0, draft), (host_plain, host))
    plain, cycle = round_cost(StepTimes(np.array(target), *map(np.array, pairs)), include_host=True)
    return float(al * plain / cycle[1])


def make_maps(
    p: list[float],
    *,
    num_prompts: int,
    num_tokens: int,
    seed: int,
    spread: float = 0.0,
    draft_key: str = DRAFT,
    method: str = "eagle3",
    workload: str = "code",
) -> list[AcceptanceMap]:
    """Maps whose drafts are kept with conditional probability p_i, independently; `spread` makes prompts differ."""
    rng = np.random.default_rng(seed)
    maps = []
    for n in range(num_prompts):
        own = np.clip(np.array(p) + spread * rng.standard_normal(), 0.0, 1.0)
        kept = rng.random((num_tokens - 1, len(p))) < own
        accepted = np.cumprod(kept, axis=1).sum(axis=1).tolist()
        maps.append(
            AcceptanceMap(
                TARGET,
                draft_key,
                method,
                f"{workload}-{n:04d}",
                workload,
                len(p),
                7,
                num_tokens,
                accepted,
                accepted,
                0.1,
                "float32",
            )
        )
    return maps


def make_cells(
    t_target: float,
    t_verify: list[float],
    t_draft: list[float],
    *,
    t_host: list[float] | None = None,
    noise: float = 0.0,
    seed: int = 0,
    num_blocks: int = 9,
    num_processes: int = 3,
    draft_key: str = DRAFT,
    method: str = "eagle3",
) -> list[CostCell]:
    """Cost cells in ms for depths 1..K (t_host: 0..K), with relative noise a block. Processes take turns at blocks; in
    one process all are of process 0."""
    rng = np.random.default_rng(seed)

    def cell(phase: str, depth: int, rows: int, block: int, ms: float) -> CostCell:
        ns = ms * 1e6 * (1.0 + noise * rng.standard_normal())
        timed = CostCell(
            TARGET, draft_key, method, phase, depth, 1, rows, 64, block, 20, ns, ns * 0.01, "float32", "prepacked", 2
        )
        return dataclasses.replace(timed, process=1 + block % num_processes if num_processes > 1 else 0)

    cells = []
    for block in range(num_blocks):
        cells.append(cell("target_step", 0, 1, block, t_target))
        for k in range(1, len(t_verify) + 1):
            cells.append(cell("verify", k, k + 1, block, t_verify[k - 1]))
            cells.append(cell("draft", k, k, block, t_draft[k - 1]))
        for k, host in enumerate(t_host or []):
            cells.append(cell("host", k, k + 1, block, host))
    return cells


def make_request(method: str, depth: int, prompt: int, tokens: int, seconds: float, **changes: object) -> Request:
    """One timed request; a round keeps two tokens unless told otherwise."""
    rounds = 0 if method == "none" else max(1, (tokens - 1) // 2)
    values: dict[str, object] = {
        "session_id": "s",
        "request_id": f"{method}-{depth}-{prompt}",
        "target_key": TARGET,
        "draft_key": "" if method in ("none", "ngram") else DRAFT,
        "method": method,
        "depth_k": depth,
        "prompt_id": f"code-{prompt:04d}",
        "workload": "code",
        "batch_size": 1,
        "rep": 0,
        "order_index": 0,
        "is_warmup": False,
        "status": "ok",
        "prompt_tokens": 10,
        "tokens_kept": tokens,
        "tokens_raw": tokens,
        "num_rounds": rounds,
        "num_drafted": rounds * depth,
        "num_accepted": max(0, tokens - 1 - rounds) if rounds else 0,
        "ttft_ns": 1000,
        "decode_ns": int(seconds * 1e9),
        "output_sha256": "0",
        "identical": None if method == "none" else True,
        "first_divergence": None,
        "tie": None,
        "dtype": "float32",
        "kernel": "prepacked",
        "num_threads": 2,
        "temperature": 0.0,
    }
    return Request(**{**values, **changes})  # type: ignore[arg-type]


def make_study(num_prompts: int = 40, seed: int = 0) -> dict[str, list[object]]:
    """Two drafters and prompt lookup, measured as the bench steps measure: maps, cells and requests that agree.

    Decoding is simulated: a round at depth k costs verify + draft + host, with noise; rounds are replayed from maps.
    """
    rng = np.random.default_rng(seed)
    host = [0.05, 0.12, 0.13, 0.14, 0.15, 0.16, 0.17, 0.18]
    drafters = {
        ("e" * 64, "eagle3"): ([0.78, 0.74, 0.72, 0.70, 0.69, 0.67, 0.66], 0.35),
        ("m" * 64, "mtp"): ([0.74, 0.66, 0.60], 0.55),
    }
    maps: list[object] = []
    cells: list[object] = []
    requests: list[object] = []
    plain_step = 3.2
    for n in range(num_prompts):
        seconds = 95 * (plain_step + host[0]) / 1e3 * (1 + 0.02 * rng.standard_normal())
        requests.append(make_request("none", 0, n, 96, seconds, workload="functions" if n % 2 else "classes"))
        lookup = seconds / 1.21 * (1 + 0.1 * rng.standard_normal())
        requests.append(make_request("ngram", 3, n, 96, lookup, num_rounds=70, num_drafted=90, num_accepted=25))
    for (key, method), (p, one_draft) in drafters.items():
        verify = [3.4 + 0.28 * k for k in range(1, len(p) + 1)]
        draft = [0.2 + one_draft * k for k in range(1, len(p) + 1)]
        cells += make_cells(
            plain_step, verify, draft, t_host=host[: len(p) + 1], noise=0.015, seed=seed, draft_key=key, method=method
        )
        own = [
            *make_maps(p, num_prompts=num_prompts, num_tokens=96, seed=seed, spread=0.12, draft_key=key, method=method)
        ]
        own = [
            dataclasses.replace(
                m,
                workload="functions" if i % 2 else "classes",
                proxy_accepted=[min(a + 1, m.k_max) for a in m.accepted],
            )
            for i, m in enumerate(own)
        ]
        maps += own
        for depth in range(1, len(p) + 1):
            for n, m in enumerate(own):
                rounds = replay(m.accepted, depth)
                cycle = (verify[depth - 1] + draft[depth - 1] + host[depth]) / 1e3
                seconds = len(rounds) * cycle * (1.02 + 0.02 * rng.standard_normal())
                counts = {"num_rounds": len(rounds), "num_drafted": depth * len(rounds)}
                kept = sum(r.accepted for r in rounds)
                requests.append(
                    make_request(
                        method, depth, n, 96, seconds, draft_key=key, workload=m.workload, num_accepted=kept, **counts
                    )
                )
    return {"maps": maps, "cells": cells, "requests": requests}


EASY, HARD = [0.95] * 6, [0.55] * 6
VERIFY_MS, DRAFT_MS = [10.5 + 0.5 * k for k in range(6)], [0.5 + 0.5 * k for k in range(6)]
"""Times of depths 1 to 6 beside a plain step of 10 ms."""


def two_workloads(num_prompts: int = 40) -> list[AcceptanceMap]:
    """Maps of an easy and of a hard workload."""
    return [
        *make_maps(EASY, num_prompts=num_prompts, num_tokens=200, seed=1, workload="code"),
        *make_maps(HARD, num_prompts=num_prompts, num_tokens=200, seed=2, workload="chat"),
    ]


def changed(cells: list[CostCell], **changes: object) -> list[CostCell]:
    """The same cells at another batch size or context length."""
    return [dataclasses.replace(c, **changes) for c in cells]  # type: ignore[arg-type]
