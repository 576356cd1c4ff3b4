"""vLLM on this machine's CPU, serving the target with a drafter, held against our own loop round for round.

vLLM is started by its module (its own command wants a distribution named vllm) and measured by bench.measure_server as
a user would. It decodes in float32, one request at a time.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.engine_cases import (
    DEPTH,
    MAX_NEW_TOKENS,
    SHOWN_FIRST,
    EngineCases,
    Served,
    by_position,
    make_context,
)
from components.bench import measure_server
from components.bench.settings import EngineServer
from components.contract import Measurements, UserError
from components.rows import EngineAcceptance, Request, Round, read_rows
from tests.engines.engine_homes import VLLM_VERSION, vllm_home
from tests.serving_engine import free_port, served

OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager")
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by itself it stays on the first core, whoever else computes there
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
GIVEN_UP = "Engine core initialization failed"
VERSION = f"{VLLM_VERSION} (vllm-cpu)"


@contextmanager
def vllm(
    model: Path, log: Path, speculation: Mapping[str, Any] | None, overrides: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """The address of a vLLM that serves `model`. overrides: what it is to read into the model's config."""
    more = ["--hf-overrides", json.dumps(overrides)] if overrides else []
    if speculation is not None:
        more += ["--speculative-config", json.dumps(speculation), "--per-request-spec-decode-metrics", "detailed"]
    with vllm_process(model, log, more) as (address, _):
        yield address


@contextmanager
def vllm_process(model: Path, log: Path, more: Sequence[str] = ()) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The same with its process, for those who end it early. more: options that follow, and so override, ours."""
    port = free_port()
    python = str(vllm_home() / "bin" / "python")
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *OPTIONS]
    command += ["--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port), *more]
    with served(command, log, QUIET) as process:
        _wait(f"http://127.0.0.1:{port}/health", log, process)
        yield f"http://127.0.0.1:{port}/v1", process


def _wait(address: str, log: Path, process: subprocess.Popen[bytes], seconds: float = 900.0) -> None:
    """Until it answers; raises UserError with vLLM's own reason as soon as it has given up, or after so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended = process.poll() is not None
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:  # not up yet
            said = log.read_text(encoding="utf-8", errors="replace")
        if ended or GIVEN_UP in said:
            reasons = [line for line in said.splitlines() if "rror: " in line and GIVEN_UP not in line]
            raise UserError(f"vLLM: {(reasons or ['no reason given'])[-1].rpartition('] ')[2][:300]}")
        time.sleep(0.5)
    raise UserError(f"vLLM: no answer within {seconds:g} s, its last words are in {log}")


def measured(
    cases: EngineCases,
    servers: Sequence[EngineServer],
    folder: Path,
    *,
    concurrency: Sequence[int] = (1,),
    num_prompts: int | None = None,
) -> Measurements:
    """Every test prompt through these servers, texts compared with our own plain decoding."""
    return measure_server(
        cases.target,
        cases.prompts,
        servers=list(servers),
        num_prompts=num_prompts or cases.num_prompts,
        max_new_tokens=MAX_NEW_TOKENS,
        concurrency=list(concurrency),
        num_compared=cases.num_prompts,
        wait_s=600,
        dtype="float32",
        ctx=make_context(folder),
        machine=cases.machine,
    )


def timed(made: Measurements) -> list[Request]:
    """The answers that count; none of them may have failed."""
    rows = [row for row in read_rows(made.path, Request) if not row.is_warmup]
    assert rows and all(row.status in ("ok", "eos") for row in rows), [row.error for row in rows]
    return rows


def counters_equal_answers(made: Measurements) -> bool:
    """Whether the Prometheus counters say what the answers themselves say, summed."""
    first, second = (
        next(row for row in read_rows(made.path, EngineAcceptance) if (row.source, row.concurrency) == (source, 1))
        for source in ("prometheus", "responses")
    )
    names = ("num_rounds", "num_drafted", "num_accepted", "accepted_per_position")
    return all(getattr(first, name) == getattr(second, name) for name in names)


def serve(
    cases: EngineCases,
    layout: str,
    method: str,
    speculation: Mapping[str, Any],
    *,
    model: Path | None = None,
    depth: int = DEPTH,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Served, Measurements]:
    """Serve a drafter in vLLM, measure, and hold every answer's rounds against ours.

    layout: how the table names the format. model: what vLLM serves; None is the target's own folder. overrides: of
    that model's config.
    """
    name = "-".join("".join(c if c.isalnum() else " " for c in layout).split())
    log = cases.work / f"vllm-{name}.log"
    key = cases.draft(method).key  # trained before the engine takes the cores
    told = {"num_speculative_tokens": depth, **speculation}
    with vllm(model or cases.target_folder, log, told, overrides) as address:
        server = EngineServer(base_url=address, method=method, draft_key=key)
        made = measured(cases, [server], cases.work / f"measured-{name}")
    return held_against_ours(cases, made, layout, method, depth), made


def held_against_ours(cases: EngineCases, made: Measurements, layout: str, method: str, depth: int = DEPTH) -> Served:
    """Rounds are compared where the text is ours: after a tie follows another text.

    An answer whose rounds came several to a chunk has no Round rows; its sums are compared.
    """
    rows = timed(made)
    theirs: dict[str, list[int]] = {}
    for one in read_rows(made.path, Round):
        theirs.setdefault(one.request_id, []).append(one.accepted)
    same = [row for row in rows if row.identical]
    ours = cases.our_rounds(method, [row.prompt_id for row in same], depth=depth)
    different, our_flat, their_flat = 0, list[int](), list[int]()
    for row in same:
        mine = ours[row.prompt_id]
        if row.request_id in theirs:
            different += theirs[row.request_id] != mine
            our_flat += mine
            their_flat += theirs[row.request_id]
        else:
            different += (row.num_rounds, row.num_accepted) != (len(mine), sum(mine))
    return Served(
        format=layout,
        engine="vLLM",
        version=VERSION,
        method=method,
        depth_k=depth,
        prompts=len(rows),
        identical=len(same),
        ties=sum(row.tie is True for row in rows),
        compared=len(same),
        different=different,
        our_rounds=len(our_flat),
        our_accepted=by_position(our_flat, depth),
        engine_rounds=len(their_flat),
        engine_accepted=by_position(their_flat, depth),
        note=SHOWN_FIRST if method == "draft-model" else "",
    )
