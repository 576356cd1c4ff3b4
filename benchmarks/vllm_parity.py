"""Does a real vLLM, serving our EAGLE-3 export, keep the tokens and the rounds of our own loop?

Needs a finished `quickstart` run and the environment that tests/engines/install_vllm.py builds. vLLM on this machine's
CPU decodes held-out prompts greedily in float32 with the newest EAGLE-3 drafter; its tokens, the accepted drafts of
every round and its Prometheus counters are held against our loop on the same prompts. Exit code 1 when they differ.

    python -m benchmarks.vllm_parity [--home DIR] [--draft KEY] [--prompts 16] [--tokens 64] [--depth 3]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.identity import find_drafts
from benchmarks.record import ROOT, write_record
from components.bench import measure_server
from components.bench.engine_server import EngineServer
from components.bench.machine import describe_machine
from components.bench.subjects import open_drafter
from components.contract import Context, Draft, Measurements, Prompts, Target, UserError
from components.data import collect_prompts
from components.data.prompts import encode_prompt, read_prompts
from components.decoding.chain import decode
from components.drafts.files import read_draft
from components.publish.eagle3_layout import lay_out
from components.publish.exact_check import write_checkpoint
from components.rows import EngineAcceptance, Request, Round, read_rows
from components.targets import load_target
from components.targets.load import open_target, open_tokenizer
from components.targets.source import open_record
from storage.artifacts import Store
from tests.engines.engine_homes import VLLM_VERSION, is_ready, vllm_home
from tests.serving_engine import free_port, served


def context(folder: Path) -> Context:
    """A context with directories of its own, on one thread: the engine computes beside it."""
    folder.mkdir(parents=True)
    return Context(key=(folder.name.encode().hex() + "0" * 64)[:64], out=folder, scratch=folder, num_threads=1)


def serve_and_measure(
    python: Path, target: Target, draft: Draft, prompts: Prompts, depth: int, tokens: int, work: Path
) -> Measurements:
    """Start vLLM with the exported drafter, measure it one request at a time, end it."""
    record, tensors = read_draft(draft.path)
    write_checkpoint(work / "eagle3", lay_out(tensors, open_target(target, dtype="float32").shape, record))
    port = free_port()
    speculation = {"method": "eagle3", "model": str(work / "eagle3"), "num_speculative_tokens": depth}
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(open_record(target.path)[0])]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target"]
    command += ["--speculative-config", json.dumps(speculation), "--per-request-spec-decode-metrics", "detailed"]
    with served(command, work / "vllm.log", {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}):
        return measure_server(
            target,
            prompts,
            servers=[EngineServer(base_url=f"http://127.0.0.1:{port}", method="eagle3", draft_key=draft.key)],
            num_prompts=10_000,
            max_new_tokens=tokens,
            num_compared=10_000,
            wait_s=900,
            dtype="float32",
            ctx=context(work / "measured"),
            machine=describe_machine(),
        )


def held_against_ours(
    made: Measurements, target: Target, draft: Draft, prompts: Prompts, depth: int, tokens: int
) -> dict[str, Any]:
    """Counts of what agrees, prompt by prompt and round by round.

    Where two tokens were equally good (a tie), each engine may take either, and what follows is another text: rounds
    are held against each other on the prompts whose texts are identical.
    """
    opened, tokenizer = open_target(target, dtype="float32", kernel="plain"), open_tokenizer(target)
    drafter = open_drafter(draft, opened)
    by_id = {prompt.prompt_id: prompt for prompt in read_prompts(prompts, "test")}
    theirs: dict[str, list[int]] = {}
    for one in read_rows(made.path, Round):
        theirs.setdefault(one.request_id, []).append(one.accepted)
    requests = [row for row in read_rows(made.path, Request) if not row.is_warmup]
    ours, shown = {}, {}
    for row in requests:
        if row.identical and row.request_id in theirs:
            ids = encode_prompt(tokenizer, by_id[row.prompt_id])
            rounds = decode(opened, drafter, ids, max_new_tokens=tokens, depth=depth).rounds
            ours[row.request_id], shown[row.request_id] = [one.accepted for one in rounds], theirs[row.request_id]
    counted, answered = (
        next(row for row in read_rows(made.path, EngineAcceptance) if row.source == source)
        for source in ("prometheus", "responses")
    )
    return {
        "prompts": len(requests),
        "token_identical": sum(row.identical is True for row in requests),
        "ties": [row.divergence_margin for row in requests if row.tie],
        "failed": sum(row.status == "error" for row in requests),
        "prompts_compared_round_by_round": len(ours),
        "of_them_identical": sum(ours[name] == shown[name] for name in ours),
        "ours": by_position(ours.values(), depth),
        "vllm": by_position(shown.values(), depth),
        "vllm_counters_equal_its_answers": counted.accepted_per_position == answered.accepted_per_position
        and counted.num_rounds == answered.num_rounds,
        "engine": f"vllm {counted.engine_version} (package vllm-cpu {VLLM_VERSION})",
    }


def by_position(answers: Iterable[list[int]], depth: int) -> dict[str, Any]:
    """Rounds, and how many of them accepted each position."""
    accepted = [count for answer in answers for count in answer]
    return {
        "rounds": len(accepted),
        "accepted_per_position": [sum(count > at for count in accepted) for at in range(depth)],
    }


def main() -> int:
    """Measure, print and record; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=ROOT / ".draftsmith")
    parser.add_argument("--draft", default="")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    asked = parser.parse_args()
    if not is_ready(vllm_home()):
        raise UserError(f"no vLLM in {vllm_home()}: run `python tests/engines/install_vllm.py`")
    drafts = find_drafts(Store(asked.home), [asked.draft] if asked.draft else [])
    draft = next((one for one in drafts if one.info["method"] == "eagle3"), None)
    if draft is None:
        raise UserError(f"{asked.home}: no EAGLE-3 drafter in its store; run `draftsmith run quickstart` first")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        target = load_target(model="builtin", dtype="float32", ctx=context(work / "target"))
        wanted = {"num_train": 0, "num_validation": 0, "num_test": asked.prompts, "num_warm_up": 2}
        prompts = collect_prompts(workload="code", **wanted, ctx=context(work / "prompts"))
        made = serve_and_measure(
            vllm_home() / "bin" / "python", target, draft, prompts, asked.depth, asked.tokens, work
        )
        found = held_against_ours(made, target, draft, prompts, asked.depth, asked.tokens)
    facts = {"method": "eagle3", "draft_key": draft.key, "depth_k": asked.depth, "max_new_tokens": asked.tokens}
    file = write_record("vllm-parity", {**facts, "dtype": "float32", "result": found})
    print(json.dumps(found, indent=1))
    print(f"recorded in {file.relative_to(ROOT)}")
    same = found["ours"] == found["vllm"] and found["vllm_counters_equal_its_answers"] and not found["failed"]
    return 0 if same and found["token_identical"] + len(found["ties"]) == found["prompts"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"vllm_parity: {error}")
