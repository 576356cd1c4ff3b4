"""A real vLLM on this machine's CPU serves the target and our drafter: the same tokens, rounds and counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from measured_alike import DEPTH, MAX_NEW_TOKENS, make_context
from serving_engine import free_port, served

from components.bench import measure_server
from components.bench.engine_server import EngineServer
from components.contract import Draft, Machine, Measurements, Prompts, Target
from components.data.prompts import encode_prompt, read_prompts
from components.decoding.chain import decode
from components.drafts.draft import AbstractDraft
from components.rows import EngineAcceptance, Request, Round, read_rows
from components.targets.load import open_tokenizer
from components.targets.model import AbstractTarget

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

OPTIONS = ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager"]
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@contextmanager
def vllm(python: Path, model: Path, log: Path, speculation: dict[str, object] | None) -> Iterator[str]:
    """The address of `vllm serve`, started by its module: its own command wants a distribution named vllm."""
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *OPTIONS]
    command += ["--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port)]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation), "--per-request-spec-decode-metrics", "detailed"]
    with served(command, log, QUIET):
        yield f"http://127.0.0.1:{port}/v1"


def measured(
    folder: Path, server: EngineServer, target: Target, prompts: Prompts, machine: Machine, concurrency: Sequence[int]
) -> Measurements:
    return measure_server(
        target,
        prompts,
        servers=[server],
        num_prompts=8,
        max_new_tokens=MAX_NEW_TOKENS,
        concurrency=list(concurrency),
        num_compared=8,
        wait_s=600,
        dtype="float32",
        ctx=make_context(folder / "measured"),
        machine=machine,
    )


def timed(made: Measurements) -> list[Request]:
    rows = [row for row in read_rows(made.path, Request) if not row.is_warmup]
    assert rows and all(row.status in ("ok", "eos") for row in rows), [row.error for row in rows]
    return rows


def test_plain_vllm_says_what_we_say(
    vllm_python: Path, target_folder: Path, target: Target, prompts: Prompts, machine: Machine, tmp_path: Path
) -> None:
    with vllm(vllm_python, target_folder, tmp_path / "log", None) as address:
        made = measured(tmp_path, EngineServer(base_url=address), target, prompts, machine, [1, 4])
    rows = timed(made)
    assert {(row.engine, row.method, row.depth_k) for row in rows} == {("vllm", "none", 0)}
    assert all(row.identical or row.tie for row in rows) and len(rows) == 16
    assert read_rows(made.path, EngineAcceptance) == []


def test_prompt_lookup_in_vllm_is_counted_alike_by_its_counters_and_its_answers(
    vllm_python: Path, target_folder: Path, target: Target, prompts: Prompts, machine: Machine, tmp_path: Path
) -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": DEPTH, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with vllm(vllm_python, target_folder, tmp_path / "log", lookup) as address:
        server = EngineServer(base_url=address, method="ngram")
        made = measured(tmp_path, server, target, prompts, machine, [1])
    rows = timed(made)
    assert {(row.method, row.depth_k) for row in rows} == {("ngram", DEPTH)}
    assert all(row.identical or row.tie for row in rows) and sum(row.num_accepted for row in rows) > 0
    assert_counters_agree_with_answers(made, rows)


def assert_counters_agree_with_answers(made: Measurements, rows: list[Request]) -> None:
    counters, answers = (
        next(row for row in read_rows(made.path, EngineAcceptance) if row.source == source and row.concurrency == 1)
        for source in ("prometheus", "responses")
    )
    assert counters.accepted_per_position == answers.accepted_per_position
    for name in ("num_rounds", "num_drafted", "num_accepted"):
        of_rows = sum(getattr(row, name) for row in rows if row.concurrency == 1)
        assert getattr(counters, name) == getattr(answers, name) == of_rows


def test_our_eagle3_export_drafts_in_vllm_round_for_round_as_in_our_loop(
    vllm_python: Path,
    target_folder: Path,
    exported: Path,
    draft: Draft,
    target: Target,
    opened: AbstractTarget,
    drafter: AbstractDraft,
    prompts: Prompts,
    machine: Machine,
    tmp_path: Path,
) -> None:
    eagle3 = {"method": "eagle3", "model": str(exported), "num_speculative_tokens": DEPTH}
    with vllm(vllm_python, target_folder, tmp_path / "log", eagle3) as address:
        server = EngineServer(base_url=address, method="eagle3", draft_key=draft.key)
        made = measured(tmp_path, server, target, prompts, machine, [1])
    rows = timed(made)
    assert_counters_agree_with_answers(made, rows)
    rounds: dict[str, list[Round]] = {}
    for row in read_rows(made.path, Round):
        rounds.setdefault(row.request_id, []).append(row)
    tokenizer = open_tokenizer(target)
    by_id = {prompt.prompt_id: prompt for prompt in read_prompts(prompts, "test")}
    # where two tokens were equally good each may take either, and what follows is another text
    assert all(row.identical or row.tie for row in rows)
    same_text = [row for row in rows if row.identical]
    assert len(same_text) >= len(rows) // 2
    for row in same_text:
        ids = encode_prompt(tokenizer, by_id[row.prompt_id])
        ours = decode(opened, drafter, ids, max_new_tokens=MAX_NEW_TOKENS, depth=DEPTH).rounds
        assert (row.num_rounds, row.num_accepted) == (len(ours), sum(one.accepted for one in ours))
        if theirs := rounds.get(row.request_id):  # absent where two rounds came in one chunk
            assert [(r.out_pos, r.accepted, r.kv_len) for r in theirs] == [
                (r.out_pos, r.accepted, r.kv_len) for r in ours
            ]
    assert rounds and sum(row.num_accepted for row in same_text) > 0
