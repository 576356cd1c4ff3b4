"""Steps that measure by simulation, in the place of those of components/bench, so that a month of nights takes minutes.

A drafter that goes on from another is a little better or worse than it, by its own key: the truth of every drafter is a
draft token's chance to be kept, and stands in `truths.json` of the world, a folder outside of any home. Prompts differ;
two drafters meet the same chances, as they do where a target decodes the same prompt twice. On a busy machine (a file
`busy` in the world) times are off by up to a third, and say so as the real step does.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from components.contract import Context, DepthPolicy, Draft, Machine, Measurements, Prompts, Target
from components.data.formats.prompts import read_prompts
from components.files import write_whole
from components.rows import AcceptanceMap, CostCell, QualityFlag, Request, write_rows
from components.speedup.prediction.replay import replay

DEPTHS = (1, 2, 3)
NUM_TOKENS = 240
FIRST, LOWEST, HIGHEST = 0.62, 0.5, 0.85
PLAIN_MS, HOST_MS = 10.0, 0.1


def verify_ms(depth: int) -> float:
    """A pass over a round's guesses."""
    return 10.4 + 0.3 * depth


def draft_ms(depth: int) -> float:
    """All guesses of a round."""
    return 0.4 * depth


def truth_of(world: Path, draft: Draft) -> float:
    """The chance that a draft token of this drafter is kept; entered into the world when it is asked for first."""
    file = world / "truths.json"
    truths: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if draft.key not in truths:
        parent = truths.get(str(draft.info.get("continued_from") or ""))
        change = random.Random(draft.key).uniform(-0.04, 0.06)
        truths[draft.key] = FIRST if parent is None else min(HIGHEST, max(LOWEST, parent + change))
        write_whole(file, json.dumps(truths, indent=1))
    return truths[draft.key]


def accepted_of(prompt_id: str, chance: float) -> list[int]:
    """How many draft tokens each round of a prompt's answer would keep; better drafters keep what worse ones keep."""
    fate = random.Random(prompt_id)
    own = min(0.97, max(0.05, chance + fate.gauss(0.0, 0.05)))
    fates = [[fate.random() for _ in DEPTHS] for _ in range(NUM_TOKENS - 1)]
    return [next((kept for kept, one in enumerate(row) if one >= own), len(DEPTHS)) for row in fates]


def measure_acceptance(target: Target, draft: Draft, prompts: Prompts, *, world: str, ctx: Context) -> Measurements:
    """Maps of the `test` prompts."""
    chance, method = truth_of(Path(world), draft), str(draft.info["method"])
    rows = [
        AcceptanceMap(
            target_key=target.key,
            draft_key=draft.key,
            method=method,
            prompt_id=prompt.prompt_id,
            workload=prompt.workload,
            k_max=len(DEPTHS),
            trained_depth=len(DEPTHS),
            num_tokens=NUM_TOKENS,
            accepted=accepted_of(prompt.prompt_id, chance),
            proxy_accepted=accepted_of(prompt.prompt_id, chance),
            repeated_bigrams=0.1,
            dtype="float32",
            prompt_tokens=12,
        )
        for prompt in read_prompts(prompts, "test")
    ]
    write_rows(ctx.out, rows)
    facts = {"method": method, "draft_key": draft.key, "k_max": len(DEPTHS), "num_prompts": len(rows)}
    return Measurements.of_step(ctx, {"model": str(target.info.get("model", "")), **facts})


def measure_step_cost(
    target: Target, drafts: list[Draft], prompts: Prompts, *, ctx: Context, machine: Machine
) -> Measurements:
    """Costs of every depth, in nine blocks."""
    noise, cells = random.Random(ctx.key), list[CostCell]()
    for draft in drafts:
        method = str(draft.info["method"])
        phases = [("target_step", 0, 1, PLAIN_MS), ("host", 0, 1, HOST_MS)]
        for depth in DEPTHS:
            phases += [("verify", depth, depth + 1, verify_ms(depth)), ("draft", depth, depth, draft_ms(depth))]
            phases.append(("host", depth, depth + 1, HOST_MS))
        for block in range(9):
            for phase, depth, rows, ms in phases:
                ns = ms * 1e6 * (1.0 + 0.01 * noise.gauss(0.0, 1.0))
                cells.append(
                    CostCell(
                        target.key, draft.key, method, phase, depth, 1, rows, 64, block, 20, ns, ns * 0.01,
                        "float32", "plain", 1, process=1 + block % 3,
                    )
                )  # fmt: skip
    write_rows(ctx.out, cells)
    return Measurements.of_step(ctx, {"model": str(target.info.get("model", "")), "machine_id": machine.machine_id})


def compare_end_to_end(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    policy: DepthPolicy,
    *,
    world: str,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """Requests of plain decoding and of every drafter at every depth, by the same costs."""
    busy, noise = (Path(world) / "busy").is_file(), random.Random()
    session, rows = ctx.key[:16], list[Request]()

    def add(draft: Draft | None, depth: int, number: int, accepted: list[int]) -> None:
        prompt = tested[number]
        rounds = replay(accepted, depth)
        step_ms = verify_ms(depth) + draft_ms(depth) if depth else PLAIN_MS
        off = 1.0 + (noise.uniform(0.0, 0.33) if busy else noise.gauss(0.0, 0.004))
        rows.append(
            Request(
                session_id=session,
                request_id=f"{session}-{draft.key[:8] if draft else 'plain'}-{depth}-{number}",
                target_key=target.key,
                draft_key=draft.key if draft else "",
                method=str(draft.info["method"]) if draft else "none",
                depth_k=depth,
                prompt_id=prompt.prompt_id,
                workload=prompt.workload,
                batch_size=1,
                rep=0,
                order_index=len(rows),
                is_warmup=False,
                status="ok",
                prompt_tokens=12,
                tokens_kept=NUM_TOKENS,
                tokens_raw=NUM_TOKENS,
                num_rounds=len(rounds) if depth else 0,
                num_drafted=depth * len(rounds),
                num_accepted=sum(one.accepted for one in rounds) if depth else 0,
                ttft_ns=1_000_000,
                decode_ns=round(len(rounds) * (step_ms + HOST_MS) * 1e6 * off),
                output_sha256="0",
                identical=True if draft else None,
                first_divergence=None,
                tie=None,
                dtype="float32",
                kernel="plain",
                num_threads=1,
                temperature=0.0,
                process=1,
            )
        )

    tested = read_prompts(prompts, "test")
    for number, prompt in enumerate(tested):
        add(None, 0, number, [0] * (NUM_TOKENS - 1))
        for draft in drafts:
            accepted = accepted_of(prompt.prompt_id, truth_of(Path(world), draft))
            for depth in DEPTHS:
                add(draft, depth, number, accepted)
    flags = [QualityFlag(session, "", "", "disturbed", "info", 0.3, "share of time that other work added")] * busy
    write_rows(ctx.out, [*rows, *flags])
    return Measurements.of_step(
        ctx, {"dtype": "float32", "num_threads": 1, "kernel": "plain", "machine_id": machine.machine_id}
    )
