"""A real vLLM answers the training prompts: all accounted for, our own tokens, and none asked twice when it dies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from serving_engine import kill_group, requests_ended

from benchmarks.engine_cases import EngineCases
from benchmarks.engine_vllm import vllm_process
from components.bench.end_to_end.identity import compare
from components.contract import Context, Conversations, Prompts, UserError
from components.data import collect_prompts, write_answers, write_answers_by_server
from components.data.formats.prompts import encode_prompt, read_prompts
from components.data.formats.responses import open_answers
from components.targets.load import open_tokenizer
from tests.components.data.killed_step import context, run_killed

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200), pytest.mark.usefixtures("vllm_ready")]

MAX_NEW_TOKENS = 40
FLIGHT = 4


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return collect_prompts(
        num_train=26, num_validation=6, num_test=0, ctx=context(tmp_path_factory.mktemp("prompts") / "p")
    )


def lengths(cases: EngineCases, prompts: Prompts) -> list[int]:
    tokenizer = open_tokenizer(cases.target)
    every = [one for split in ("train", "validation") for one in read_prompts(prompts, split)]
    return sorted(len(encode_prompt(tokenizer, one)) for one in every)


def test_answered_failed_and_skipped_are_all_and_a_killed_vllm_or_step_costs_no_answer_twice(
    cases: EngineCases, prompts: Prompts, tmp_path: Path
) -> None:
    """Three prompts are longer than the step takes; vLLM would cut three answers short; it dies, then the step does."""
    by_length = lengths(cases, prompts)
    ours, theirs = by_length[-4], by_length[-7]  # the longest prompts that each still takes
    too_long, refused = sum(n > ours for n in by_length), sum(theirs < n <= ours for n in by_length)
    assert too_long and refused
    settings: dict[str, Any] = {
        "max_new_tokens": MAX_NEW_TOKENS,
        "max_prompt_tokens": ours,
        "concurrency": FLIGHT,
        "greedy_share": 1.0,
        "shard_size": 7,
        "max_failed": 0.3,
        "backoff_s": 0.05,
    }
    more = ["--max-model-len", str(theirs + MAX_NEW_TOKENS)]
    out, journal = tmp_path / "out", tmp_path / "out.scratch" / "answered.jsonl"

    def asked(address: str, ctx: Context, **changed: Any) -> Conversations:
        return write_answers_by_server(
            cases.target, prompts, base_url=address, wait_s=300.0, **(settings | changed), ctx=ctx
        )

    def kept() -> int:
        return len(journal.read_bytes().splitlines()) - 1  # the first line says what was asked of whom

    with vllm_process(cases.target_folder, tmp_path / "first.log", more) as (address, process):

        def kill_it(event: Mapping[str, Any]) -> None:
            if event["event"] == "progress" and event["done"] == 6:
                kill_group(process)

        with pytest.raises(UserError, match=r"failed one after the other .* answers are kept"):
            asked(address, context(out, kill_it), retries=1)
    after_vllm = kept()
    assert 6 <= after_vllm <= 6 + FLIGHT
    with vllm_process(cases.target_folder, tmp_path / "second.log", more) as (address, _):
        assert run_killed(lambda ctx: asked(address, ctx), out, after=5)
        after_step = kept()
        assert after_vllm + 5 <= after_step <= after_vllm + 5 + FLIGHT
        before = requests_ended(address)
        assert after_step - after_vllm <= before <= after_step - after_vllm + FLIGHT
        notes: list[str] = []
        made = asked(address, context(out, lambda event: notes.append(str(event.get("message")))))
        again = requests_ended(address) - before
    info = made.info
    assert info["num_asked"] == len(by_length)
    assert (info["num_skipped"], info["num_failed"]) == (too_long, refused)
    assert info["num_answered"] == len(by_length) - too_long - refused
    assert info["num_tokenised_again"] == 0 and info["server"].startswith("vllm")
    left = info["num_answered"] - after_step
    assert left <= again <= left + FLIGHT  # a killed step's last requests may still end in vLLM after it
    assert any(f"{left + refused} prompts to ask" in note for note in notes), notes
    aside = [json.loads(line) for line in (made.path / "set_aside.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(aside) == refused and all("it takes shorter texts" in line["why"] for line in aside), aside
    journaled = [json.loads(line)["id"] for line in journal.read_text(encoding="utf-8").splitlines()[1:]]
    assert len(set(journaled)) == len(journaled) == info["num_answered"]
    assert_our_own_tokens(cases, prompts, made, tmp_path, settings)


def assert_our_own_tokens(
    cases: EngineCases, prompts: Prompts, made: Conversations, tmp_path: Path, settings: Mapping[str, Any]
) -> None:
    """What vLLM said greedily is what `data.write_answers` says here, but at a tie of two tokens."""
    wanted = {name: settings[name] for name in ("max_new_tokens", "max_prompt_tokens", "shard_size")}
    here = write_answers(cases.target, prompts, sampled_share=0.0, **wanted, ctx=context(tmp_path / "ours"))
    ours = {row.row_id: ids for row, ids, _ in open_answers(here).conversations()}
    theirs = [(row.row_id, ids, mask) for row, ids, mask in open_answers(made).conversations()]
    equal = 0
    for row_id, ids, mask in theirs:
        said, expected, prompt = ids[mask].tolist(), ours[row_id][len(ids[~mask]) :].tolist(), ids[~mask].tolist()
        judged = compare(cases.opened, prompt, expected, said, rows=1)
        assert judged.identical or judged.tie, (row_id, judged)
        equal += bool(judged.identical)
    assert equal >= len(theirs) - 3
