"""Rows of the history for tests, one of each kind, with what a test changes in them."""

from __future__ import annotations

import dataclasses
from typing import Any

from components.rows import DepthChoice, DepthEval, Request, Round


def request(request_id: str, **changes: Any) -> Request:
    """One request of 11 kept tokens in 1 s of decoding after 0.1 s of prefill."""
    return dataclasses.replace(
        Request(
            session_id="s",
            request_id=request_id,
            target_key="t",
            draft_key="d",
            method="eagle3",
            depth_k=3,
            prompt_id="p",
            workload="code",
            batch_size=1,
            rep=0,
            order_index=0,
            is_warmup=False,
            status="ok",
            prompt_tokens=5,
            tokens_kept=11,
            tokens_raw=11,
            num_rounds=0,
            num_drafted=0,
            num_accepted=0,
            ttft_ns=100_000_000,
            decode_ns=1_000_000_000,
            output_sha256="x",
            identical=True,
            first_divergence=None,
            tie=None,
            dtype="float32",
            kernel="plain",
            num_threads=2,
            temperature=0.0,
        ),
        **changes,
    )


def counted(request_id: str, num_rounds: int, num_drafted: int, num_accepted: int, **changes: Any) -> Request:
    """A request with the counts of its rounds."""
    counts = {"num_rounds": num_rounds, "num_drafted": num_drafted, "num_accepted": num_accepted}
    return request(request_id, **counts, **changes)


def rounds(request_id: str, *pairs: tuple[int, int]) -> list[Round]:
    """Rounds from (drafted, accepted) pairs."""
    return [Round(request_id, i, 0, d, a, a + 1, 0) for i, (d, a) in enumerate(pairs)]


def depth_eval(**changes: Any) -> DepthEval:
    row = DepthEval(
        selection_id="sel",
        target_key="t",
        draft_key="d",
        method="eagle3",
        workload="all",
        batch_size=1,
        depth_k=2,
        al=2.39,
        al_lo=2.2,
        al_hi=2.5,
        t_target_ms=76.0,
        t_verify_ms=104.0,
        t_draft_ms=14.0,
        cost_ratio=118 / 76,
        speedup_pred=1.54,
        pred_lo=1.5,
        pred_hi=1.6,
        marginal_gain=None,
        marginal_cost=None,
        p_best=0.9,
        regret=0.0,
        al_meas=None,
        speedup_meas=None,
        meas_lo=None,
        meas_hi=None,
    )
    return dataclasses.replace(row, **changes)


def choice(**changes: Any) -> DepthChoice:
    row = DepthChoice(
        selection_id="sel",
        target_key="t",
        draft_key="d",
        method="eagle3",
        workload="all",
        batch_size=1,
        depth_k=2,
        rule="argmax",
        tolerance=0.01,
        p_beats_no_spec=1.0,
        speedup_pred=1.5,
        pred_lo=1.4,
        pred_hi=1.6,
        speedup_meas=None,
        meas_lo=None,
        meas_hi=None,
        pred_error=None,
        verdict="use",
        reasons=["it is faster"],
    )
    return dataclasses.replace(row, **changes)
