"""Random measurements with everything that conventions differ by: cut rounds, overshoot, repetitions, failures, chunks.

What is drawn is consistent, as measured rows are: a request's counts are the sums of its rounds.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from components.rows import AcceptanceMap, EngineAcceptance, Request, Round
from components.speedup.prediction.replay import RoundOutcome, replay

PROMPTS = {"p0": "code", "p1": "code", "p2": "chat", "p3": "chat", "p4": "chat", "p5": "all"}
PLAIN = ("none", "", 0, None)
DRAFTING = (("eagle3", "e", 3, None), ("eagle3", "e", 1, None), ("mtp", "m", 2, None), ("eagle3", "e", 3, 9))
LOADED_OFF = ("eagle3", "e", 0, None)
Arm = tuple[str, str, int, int | None]


def random_request(rng: random.Random, arm: Arm, prompt: str, **changes: object) -> Request:
    """One request without rounds; most have a decoding time, some have one token or none."""
    method, draft_key, depth, tree = arm
    kept = rng.choice([1, 2, 9, 33, 64])
    values: dict[str, object] = {
        "session_id": "s",
        "request_id": f"{rng.getrandbits(64):016x}",
        "target_key": "t",
        "draft_key": draft_key,
        "method": method,
        "depth_k": depth,
        "prompt_id": prompt,
        "workload": PROMPTS[prompt],
        "batch_size": 1,
        "rep": 0,
        "order_index": 0,
        "is_warmup": rng.random() < 0.1,
        "status": rng.choice(["ok", "ok", "eos"]),
        "prompt_tokens": 10,
        "tokens_kept": kept,
        "tokens_raw": kept,
        "num_rounds": 0,
        "num_drafted": 0,
        "num_accepted": 0,
        "ttft_ns": rng.randrange(1, 10**8),
        "decode_ns": rng.randrange(1, 10**9) if kept > 1 or rng.random() < 0.3 else 0,
        "output_sha256": "0",
        "identical": None,
        "first_divergence": None,
        "divergence_margin": None,
        "tie": None,
        "dtype": "float32",
        "kernel": "prepacked",
        "num_threads": 2,
        "temperature": 0.0,
        "tree_budget": tree,
    }
    made = Request(**{**values, **changes})  # type: ignore[arg-type]
    if made.engine is None and rng.random() < 0.05:
        made = dataclasses.replace(made, status="error", tokens_kept=0, tokens_raw=0, decode_ns=0, ttft_ns=0)
    return made


def random_outcomes(rng: random.Random, depth: int, tokens: int, idle: float = 0.0) -> list[RoundOutcome]:
    """Rounds that emit so many tokens in all; a few draft fewer than they may, the last is often cut.

    idle: the share of rounds that draft nothing.
    """
    rounds: list[RoundOutcome] = []
    place = 0
    while place < tokens:
        drafted = 0 if rng.random() < idle else rng.choice([depth, depth, depth, rng.randint(0, depth)])
        accepted = rng.randint(0, drafted)
        emitted = min(accepted + 1, tokens - place)
        rounds.append(RoundOutcome(place, drafted, accepted, emitted))
        place += emitted
    return rounds


def with_rounds(request: Request, outcomes: list[RoundOutcome]) -> tuple[Request, list[Round]]:
    """The request with the counts of these rounds, and their rows."""
    told = dataclasses.replace(
        request,
        num_rounds=len(outcomes),
        num_drafted=sum(r.drafted for r in outcomes),
        num_accepted=sum(r.accepted for r in outcomes),
        tokens_raw=1 + sum(r.accepted + 1 for r in outcomes),
    )
    return told, [Round(request.request_id, number, *one, one.out_pos) for number, one in enumerate(outcomes)]


def random_session(rng: random.Random) -> tuple[list[Request], list[Round]]:
    """Own loop: two plain kernels, drafters, a tree, one loaded and off; batches of two; some prompts missing."""
    requests: list[Request] = []
    rounds: list[Round] = []
    arms: list[tuple[Arm, str]] = [(PLAIN, "plain"), (PLAIN, "prepacked"), (LOADED_OFF, "prepacked")]
    arms += [(arm, rng.choice(["plain", "prepacked"])) for arm in DRAFTING]
    for size in (1, 2):
        for arm, kernel in arms:
            for prompt in PROMPTS:
                for rep in range(rng.choice([0, 1, 3, 5])):
                    batch_id = None if size == 1 else f"{arm}-{kernel}-{rng.randrange(3)}"
                    same = {"kernel": kernel, "batch_size": size, "batch_id": batch_id, "rep": rep}
                    same |= {"process": rng.choice([0, 1, 1, 2])}
                    made = random_request(rng, arm, prompt, **same)
                    if arm[2] and made.tokens_kept > 1:
                        made, own = with_rounds(made, random_outcomes(rng, arm[2], made.tokens_kept - 1))
                        rounds += own if not made.is_warmup else []
                    requests.append(made)
    return requests, rounds


def crossed_session(rng: random.Random) -> tuple[list[Request], list[Round]]:
    """Own loop, as a measurement without a failure: every arm decodes every prompt three times in two processes."""
    requests: list[Request] = []
    rounds: list[Round] = []
    for arm in (PLAIN, *DRAFTING):
        for prompt in PROMPTS:
            for rep in range(6):
                kept = rng.randint(2, 60)
                told = {
                    "tokens_kept": kept,
                    "rep": rep,
                    "process": rep % 2 + 1,
                    "is_warmup": False,
                    "decode_ns": rng.randrange(10**6, 10**9),
                }
                made = dataclasses.replace(random_request(rng, arm, prompt, engine="none yet"), engine=None, **told)  # type: ignore[arg-type]
                if arm[2]:
                    made, own = with_rounds(made, random_outcomes(rng, arm[2], kept - 1))
                    rounds += own
                requests.append(made)
    return requests, rounds


def engine_session(rng: random.Random) -> list[Request]:
    """Two engines that tell of first chunks, or not, and leave rounds that guessed nothing out of their counts."""
    requests = []
    for engine in ("vllm", "sglang"):
        for arm in (PLAIN, DRAFTING[0]):
            for prompt in PROMPTS:
                chunk = rng.choice([None, 0, 1, 4, 64])
                told = {"engine": engine, "engine_version": "1", "kernel": f"{engine} 1", "first_chunk_tokens": chunk}
                if prompt == "p0":
                    told |= {"tokens_kept": 33, "is_warmup": False}
                made = random_request(rng, arm, prompt, **told)
                if arm[2] and made.tokens_kept > 1:
                    idle = 0.5 if engine == "vllm" else 0.0
                    outcomes = random_outcomes(rng, arm[2], made.tokens_kept - 1, idle)
                    made, _ = with_rounds(made, [r for r in outcomes if r.drafted or not idle])
                requests.append(made)
    return requests


def random_maps(rng: random.Random) -> list[AcceptanceMap]:
    """One drafter's maps, of unequal lengths; the last places can accept past the end of the answer."""
    maps = []
    for prompt, workload in PROMPTS.items():
        tokens = rng.randint(2, 50)
        accepted, proxy = ([rng.randint(0, 4) for _ in range(tokens - 1)] for _ in range(2))
        maps.append(
            AcceptanceMap("t", "e", "eagle3", prompt, workload, 4, 7, tokens, accepted, proxy, 0.1, "float32", None)
        )
    return maps


def replayed(maps: list[AcceptanceMap], depth: int) -> Iterator[tuple[Request, list[Round]]]:
    """What live decoding at a depth would have written for the answers of the maps."""
    rng = random.Random(depth)
    for one in maps:
        told = {"is_warmup": False, "tokens_kept": one.num_tokens, "engine": "none yet"}
        request = random_request(rng, ("eagle3", "e", depth, None), one.prompt_id, **told)
        yield with_rounds(dataclasses.replace(request, engine=None), replay(one.accepted, depth, one.num_tokens))


def random_counters(rng: random.Random) -> list[EngineAcceptance]:
    """What engines counted about themselves; one that drafted nothing."""
    rows = []
    for workload in ("code", "chat", "none"):
        rounds = 0 if workload == "none" else rng.randint(1, 40)
        kept = sorted((rng.randint(0, rounds) for _ in range(3)), reverse=True)
        rows.append(
            EngineAcceptance(
                *("s", "t", "e", "eagle3", 3, workload, 1, "vllm", "1", "prometheus"),
                num_requests=3,
                num_rounds=rounds,
                num_drafted=3 * rounds,
                num_accepted=sum(kept),
                accepted_per_position=kept,
                drafted_per_position=None,
                imposed=[0.6, 0.36, 0.2] if workload == "chat" else None,
            )
        )
    return rows
