"""Turns runs of llama.cpp's programs into rows: a Request a run, and the counts of each workload and depth."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.bench.llama_cpp_output import ProgramOutput
from components.bench.subjects import EncodedPrompt
from components.rows import EngineAcceptance, Request


@dataclass(frozen=True)
class Run:
    """One process: its input and its output. error is the reason where printed is None."""

    prompt: EncodedPrompt
    depth: int
    rep: int
    is_warmup: bool
    printed: ProgramOutput | None
    output: str
    error: str | None


@dataclass(frozen=True)
class SessionFacts:
    """Columns that all rows of one session share."""

    session_id: str
    target_key: str
    draft_key: str
    method: str
    version: str
    dtype: str
    num_threads: int
    max_new_tokens: int

    def requests(self, runs: Sequence[Run], expected: Mapping[str, str]) -> list[Request]:
        """One row a run, in the order in which they ran. expected: prompt_id -> our own greedy text."""
        return [self._request(number, run, expected.get(run.prompt.prompt_id)) for number, run in enumerate(runs)]

    def _request(self, number: int, run: Run, expected: str | None) -> Request:
        printed = run.printed
        counts = printed.acceptance if printed is not None else None
        # The speculative program's prefill leaves the last prompt token to its decoding loop, so decode_ns makes all n
        # tokens. Rates count n - 1 tokens, as if prefill made the first: a mean token's time moves to ttft_ns.
        first_ns = round(printed.decode_ns / printed.tokens) if printed is not None and run.depth else 0
        identical = None
        if printed is not None and expected is not None and not run.is_warmup:
            output, wanted_text = run.output.strip(), expected.strip()
            # the program may run past the limit by a round: then its answer only begins with ours
            ran_on = printed.tokens > self.max_new_tokens
            identical = output.startswith(wanted_text) if ran_on else output == wanted_text
        return Request(
            session_id=self.session_id,
            request_id=f"{self.session_id}-{number:06d}",
            target_key=self.target_key,
            draft_key=self.draft_key if run.depth else "",
            method=self.method if run.depth else "none",
            depth_k=run.depth,
            prompt_id=run.prompt.prompt_id,
            workload=run.prompt.workload,
            batch_size=1,
            rep=run.rep,
            order_index=number,
            is_warmup=run.is_warmup,
            status="error" if printed is None else "ok" if printed.tokens >= self.max_new_tokens else "eos",
            prompt_tokens=len(run.prompt.ids),
            tokens_kept=min(printed.tokens, self.max_new_tokens) if printed else 0,
            tokens_raw=printed.tokens if printed else 0,
            num_rounds=counts.num_rounds if counts else 0,
            num_drafted=counts.num_drafted if counts else 0,
            num_accepted=counts.num_accepted if counts else 0,
            ttft_ns=printed.prefill_ns + first_ns if printed else 0,
            decode_ns=printed.decode_ns - first_ns if printed else 0,
            output_sha256=hashlib.sha256(run.output.encode()).hexdigest(),
            identical=identical,
            first_divergence=None,
            tie=None,
            dtype=self.dtype,
            kernel=f"llama.cpp {self.version}".strip(),
            num_threads=self.num_threads,
            temperature=0.0,
            engine="llama.cpp",
            engine_version=self.version,
            concurrency=1,
            error=run.error,
        )

    def acceptance(self, runs: Sequence[Run]) -> list[EngineAcceptance]:
        """The counts that the programs printed, summed over each workload and depth."""
        groups: dict[tuple[str, int], list[Run]] = {}
        for run in runs:
            if run.depth and not run.is_warmup and run.printed is not None:
                groups.setdefault((run.prompt.workload, run.depth), []).append(run)
        return [self._counted(workload, depth, of_group) for (workload, depth), of_group in groups.items()]

    def _counted(self, workload: str, depth: int, runs: Sequence[Run]) -> EngineAcceptance:
        acceptances = [run.printed.acceptance for run in runs if run.printed is not None and run.printed.acceptance]
        lists = [counts.per_position for counts in acceptances if counts.per_position is not None]
        padded = [[*counts, *[0] * (depth - len(counts))] for counts in lists]
        by_position = [sum(column) for column in zip(*padded, strict=True)] if len(lists) == len(acceptances) else []
        return EngineAcceptance(
            session_id=self.session_id,
            target_key=self.target_key,
            draft_key=self.draft_key,
            method=self.method,
            depth_k=depth,
            workload=workload,
            concurrency=1,
            engine="llama.cpp",
            engine_version=self.version,
            source="program",
            num_requests=len(runs),
            num_rounds=sum(counts.num_rounds for counts in acceptances),
            num_drafted=sum(counts.num_drafted for counts in acceptances),
            num_accepted=sum(counts.num_accepted for counts in acceptances),
            accepted_per_position=by_position,
            drafted_per_position=None,
        )
