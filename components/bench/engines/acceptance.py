"""Reads the acceptance that engines report: per request in the answer, and server-wide in Prometheus counters.

    vLLM       metrics.speculative_decoding of the last chunk (--per-request-spec-decode-metrics), and
               vllm:spec_decode_num_{drafts,draft_tokens,accepted_tokens}_total, ..._per_pos_total{position} at /metrics
    SGLang     meta_info: spec_verify_ct, spec_num_correct_drafts, spec_num_proposed_drafts and a histogram
    llama.cpp  timings: draft_n, draft_n_accepted (rounds are computed from them and predicted_n, see below)

All are converted to one convention: a round drafts d, accepts a of them and emits a + 1. Rounds that drafted nothing
are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from components.outside_json import JsonObject

_SGLANG_COUNTS: Final = (
    ("spec_num_correct_drafts", "spec_num_proposed_drafts"),
    ("spec_accepted_drafts", "spec_proposed_drafts"),
)
"""(accepted, drafted), both without the bonus token; the engine's older names, which include it, are not read."""
_SGLANG_HISTOGRAMS: Final = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_PREFIX: Final = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Acceptance:
    """Counts over rounds that drafted.

    per_position[i]: rounds that accepted draft i + 1; None where the engine does not report it.
    rounds: (drafted, accepted) of each round in order; None where the engine does not report them.
    """

    num_rounds: int
    num_drafted: int
    num_accepted: int
    per_position: list[int] | None = None
    rounds: list[tuple[int, int]] | None = None


def read_acceptance(payload: JsonObject) -> Acceptance | None:
    """The acceptance in an answer (its last chunk, or the whole of it); None where it has none."""
    choices = payload.get("choices")
    holders = [payload, *(choices if isinstance(choices, list) else [])]
    for holder in holders:
        if not isinstance(holder, dict):
            continue
        metrics = holder.get("metrics")
        if isinstance(metrics, Mapping) and isinstance(metrics.get("speculative_decoding"), Mapping):
            return _vllm(metrics["speculative_decoding"])
        for name in ("meta_info", "sglext"):
            meta = holder.get(name)
            if isinstance(meta, dict) and (acceptance := _sglang(meta)) is not None:
                return acceptance
        timings = holder.get("timings")
        if isinstance(timings, dict) and (acceptance := _llama_cpp(timings)) is not None:
            return acceptance
    return None


def _vllm(metrics: JsonObject) -> Acceptance:
    histogram = [int(count) for count in metrics["acceptance_histogram"]]
    steps = metrics.get("per_step_accepted")
    rounds = None
    if isinstance(steps, list) and isinstance(metrics.get("per_step_drafted"), list):
        rounds = [(int(d), int(a)) for d, a in zip(metrics["per_step_drafted"], steps, strict=True)]
    return Acceptance(
        num_rounds=int(metrics["num_spec_steps"]),
        num_drafted=int(metrics["num_draft_tokens"]),
        num_accepted=int(metrics["num_accepted_draft_tokens"]),
        per_position=at_least_counts(histogram),
        rounds=rounds,
    )


def _sglang(meta: JsonObject) -> Acceptance | None:
    verified = meta.get("spec_verify_ct")
    for accepted, drafted in _SGLANG_COUNTS:
        if isinstance(verified, int) and isinstance(meta.get(accepted), int) and isinstance(meta.get(drafted), int):
            histogram = next((meta[name] for name in _SGLANG_HISTOGRAMS if isinstance(meta.get(name), list)), None)
            counts = at_least_counts([int(count) for count in histogram]) if histogram else None
            return Acceptance(verified, meta[drafted], meta[accepted], counts)
    return None


def _llama_cpp(timings: JsonObject) -> Acceptance | None:
    """llama-server reports no rounds: every token that is neither an accepted draft nor the first ends one.

    That holds if each round drafts something (p_min 0); rounds without drafts would be counted too.
    """
    if "draft_n" not in timings:
        return None
    accepted = int(timings["draft_n_accepted"])
    return Acceptance(max(0, int(timings["predicted_n"]) - 1 - accepted), int(timings["draft_n"]), accepted)


def at_least_counts(histogram: Sequence[int]) -> list[int]:
    """From the number of rounds that accepted exactly j to that of at least i + 1, for i = 0, 1, ..."""
    return [sum(histogram[position:]) for position in range(1, len(histogram))]


def is_as_imposed(rates: Sequence[float], num_rounds: int, num_accepted: int) -> bool:
    """Whether these counts can come of the rates: within five standard errors and 0.5 % of what is drafted.

    rates: share of rounds that accept draft 1, 2, ....
    """
    mean = sum(rates)
    variance = sum((2 * i - 1) * rate for i, rate in enumerate(rates, start=1)) - mean**2
    allowed = 5.0 * (max(0.0, variance) / num_rounds) ** 0.5 + 0.005 * len(rates)
    return abs(num_accepted / num_rounds - mean) <= allowed


@dataclass(frozen=True)
class Counters:
    """vLLM's counters at one moment, summed over its engines. per_position: position (from 0) -> accepted so far."""

    num_rounds: float
    num_drafted: float
    num_accepted: float
    per_position: Mapping[int, float]

    def since(self, before: Counters) -> Acceptance:
        """The acceptance between two readings of the same server.

        Raises ValueError for a counter that went down: the server restarted.
        """
        positions = range(max(self.per_position, default=-1) + 1)
        passed = [
            self.num_rounds - before.num_rounds,
            self.num_drafted - before.num_drafted,
            self.num_accepted - before.num_accepted,
            *(self.per_position.get(i, 0.0) - before.per_position.get(i, 0.0) for i in positions),
        ]
        if any(count < 0 for count in passed):
            raise ValueError("a spec_decode counter went down: the server was restarted meanwhile")
        whole = [round(count) for count in passed]
        return Acceptance(whole[0], whole[1], whole[2], whole[3:])


def read_counters(text: str) -> Counters | None:
    """vLLM's speculation counters from the text of /metrics; None without any (no speculation, other engine)."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(_PREFIX):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_total"):
                continue  # _created: when the counter began
            name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
            if name == "accepted_tokens_per_pos":
                at = int(sample.labels["position"])
                positions[at] = positions.get(at, 0.0) + sample.value
            else:
                sums[name] = sums.get(name, 0.0) + sample.value
    if "drafts" not in sums:
        return None
    return Counters(sums["drafts"], sums.get("draft_tokens", 0.0), sums.get("accepted_tokens", 0.0), positions)
