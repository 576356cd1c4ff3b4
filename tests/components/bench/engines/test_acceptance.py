"""What engines report is read as counts of one convention; the samples are answers of the real engines, shortened."""

from __future__ import annotations

import pytest

from components.bench.engines.acceptance import (
    Acceptance,
    Counters,
    at_least_counts,
    is_as_imposed,
    read_acceptance,
    read_counters,
)

# vLLM 0.32.0, eagle3 with three guesses, --per-request-spec-decode-metrics detailed.
VLLM = {
    "mean_acceptance_length": 3.0,
    "draft_acceptance_rate": 0.6666666666666666,
    "acceptance_histogram": [0, 0, 1, 0],
    "num_spec_steps": 1,
    "num_accepted_draft_tokens": 2,
    "num_draft_tokens": 3,
    "num_spec_tokens": 3,
    "per_step_accepted": [2],
    "per_step_drafted": [3],
}


VLLM_METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="builtin"} %d.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="builtin"} 1.7952437735339074e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="builtin"} %d.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="builtin"} %d.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="builtin",position="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="builtin",position="1"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="builtin",position="2"} %d.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="builtin"} 0.0
"""


# llama-server 0.5.0, draft-eagle3 with three guesses.
LLAMA_CPP = {"prompt_n": 199, "prompt_ms": 210.1, "predicted_n": 48, "predicted_ms": 489.1}


def test_vllm_tells_every_round() -> None:
    told = {"choices": [], "usage": {}, "metrics": {"speculative_decoding": VLLM}}
    assert read_acceptance(told) == Acceptance(1, 3, 2, [1, 1, 0], [(3, 2)])
    summary = {name: value for name, value in VLLM.items() if not name.startswith("per_step")}
    assert read_acceptance({"metrics": {"speculative_decoding": summary}}) == Acceptance(1, 3, 2, [1, 1, 0])
    assert read_acceptance({"choices": [{"text": "a"}], "metrics": None}) is None


def test_sglang_names_without_the_bonus_are_read_and_older_ones_are_not() -> None:
    meta = {"spec_verify_ct": 10, "spec_num_correct_drafts": 7, "spec_num_proposed_drafts": 30}
    assert read_acceptance({"meta_info": meta}) == Acceptance(10, 30, 7)
    told = {"meta_info": {**meta, "spec_accept_histogram": [5, 3, 2]}}
    assert read_acceptance(told) == Acceptance(10, 30, 7, [5, 2])
    assert read_acceptance({"choices": [{"meta_info": meta}]}) == Acceptance(10, 30, 7)
    assert read_acceptance({"meta_info": {"spec_verify_ct": 10, "spec_accept_token_num": 17}}) is None


def test_llama_cpp_rounds_follow_from_its_counts() -> None:
    drafted = {**LLAMA_CPP, "draft_n": 87, "draft_n_accepted": 17}
    assert read_acceptance({"timings": drafted}) == Acceptance(30, 87, 17)
    assert read_acceptance({"timings": LLAMA_CPP}) is None


def test_histograms_become_counts_by_position() -> None:
    assert at_least_counts([191, 52, 13, 11]) == [76, 24, 11]
    assert at_least_counts([4]) == []


def test_prometheus_counters_are_differences() -> None:
    before, after = (
        read_counters(VLLM_METRICS % counts) for counts in ((1, 3, 2, 1, 1, 0), (268, 804, 113, 77, 25, 11))
    )
    assert before is not None and after is not None
    assert after.since(before) == Acceptance(267, 801, 111, [76, 24, 11])
    with pytest.raises(ValueError, match="restarted"):
        before.since(after)


def test_several_engines_of_one_server_are_summed() -> None:
    one = VLLM_METRICS % (1, 3, 2, 1, 1, 0)
    other = "\n".join(line.replace('engine="0"', 'engine="1"') for line in one.splitlines() if line[:1] != "#")
    text = "\n".join(line for pair in zip(one.splitlines(), [""] * 99, strict=False) for line in pair) + "\n" + other
    assert read_counters(text + "\n") == Counters(2, 6, 4, {0: 2, 1: 2, 2: 0})


def test_a_server_without_speculation_has_no_counters() -> None:
    assert read_counters("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n") is None


def test_counts_of_imposed_acceptance_may_vary_by_chance_alone() -> None:
    """1000 rounds at 0.6 a draft, two deep: 0.96 a round, a standard error of 0.026."""
    assert is_as_imposed((0.6, 0.36), 1000, 960) and is_as_imposed((0.6, 0.36), 1000, 1060)
    assert not is_as_imposed((0.6, 0.36), 1000, 1200) and not is_as_imposed((0.6, 0.36), 1000, 0)
    assert is_as_imposed((0.0, 0.0), 1000, 0) and not is_as_imposed((0.0, 0.0), 1000, 20)
