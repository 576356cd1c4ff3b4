"""Turns answers of serving engines into rows of the Request and Round tables, and of the engine's counters.

Round rows are written only where their positions in the output are certain: every chunk is one round, and every round
drafted. Other answers have only the sums in their Request row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from components.bench.end_to_end.identity import NOT_COMPARED, Identity, IdentityChecker
from components.bench.end_to_end.request_rows import rounded, sha256_of_tokens
from components.bench.engines.acceptance import Acceptance, is_as_imposed
from components.bench.engines.connect import Answer, Connected, ServerPrompt
from components.contract import Context, Target, UserError
from components.definitions import al_with_overshoot, counts, round_counts, tpot_ms_p50, ttft_ms_p50
from components.outside_json import JsonObject
from components.rows import EngineAcceptance, Request, Round, grouped
from components.targets.generate import continue_batch
from components.targets.load import open_target


@dataclass(frozen=True)
class Turn:
    """One server's turn: some prompts of one workload at one concurrency."""

    server: Connected
    workload: str
    concurrency: int
    rep: int
    is_warmup: bool
    prompts: Sequence[ServerPrompt]


@dataclass(frozen=True)
class TurnResult:
    """A finished turn. server_counts: the server's own counters, after minus before; None where it has none."""

    turn: Turn
    answers: Sequence[Answer]
    server_counts: Acceptance | None


@dataclass(frozen=True)
class Expected:
    """Our own plain greedy answers, by prompt, and the checker of differences."""

    checker: IdentityChecker
    tokens: Mapping[str, list[int]]

    def compare(self, prompt: ServerPrompt, answer: Answer, tokenizer: Any, rows: int) -> Identity:
        """Compare tokens where the engine returns them, else texts (then without the position of the divergence).

        rows: rows of one sequence in a verification pass of the engine.
        """
        expected = self.tokens.get(prompt.prompt_id)
        if expected is None:
            return NOT_COMPARED
        if answer.tokens is not None:
            return self.checker.compare(prompt.ids, expected, answer.tokens, rows)
        text = tokenizer.decode(expected, skip_special_tokens=True)
        return Identity(answer.text.strip() == text.strip())

    def tie_chance(self, prompt: ServerPrompt) -> float | None:
        """The probability that rounding alone makes an answer differ from ours; None where none is compared."""
        expected = self.tokens.get(prompt.prompt_id)
        return None if expected is None else self.checker.check_plain(prompt.ids, expected).tie_chance


@dataclass(frozen=True)
class EngineRows:
    """All rows of one session."""

    requests: list[Request]
    rounds: list[Round]
    acceptance: list[EngineAcceptance]

    def summary(self) -> list[JsonObject]:
        """One record for each server and concurrency, pooled over prompts."""
        timed = [row for row in self.requests if not row.is_warmup]
        groups = grouped(timed, lambda row: (row.kernel, row.method, row.depth_k, row.concurrency or 1))
        return [_summary_line(key, rows) for key, rows in groups.items()]


def _summary_line(key: tuple[str, str, int, int], rows: Sequence[Request]) -> JsonObject:
    counted = [row for row in rows if counts(row)]
    totals = round_counts(counted)
    compared = [row.identical for row in counted if row.identical is not None]
    return {
        "engine": key[0],
        "method": key[1],
        "depth_k": key[2],
        "concurrency": key[3],
        "requests": len(rows),
        "failed": len(rows) - len(counted),
        "ttft_ms_p50": rounded(ttft_ms_p50(counted), 3),
        "tpot_ms_p50": rounded(tpot_ms_p50(counted), 3),
        "al_with_overshoot": rounded(al_with_overshoot(totals.accepted, totals.rounds), 4),
        "identical": f"{sum(compared)} of {len(compared)}" if compared else None,
    }


def decode_expected(
    target: Target, timed: Sequence[ServerPrompt], num_compared: int, max_new_tokens: int, dtype: str, ctx: Context
) -> Expected | None:
    """Decode our own plain greedy answers to the first prompts of each workload; None for num_compared 0.

    dtype: the server's; "bfloat16" decodes in bfloat16, any other in float32.
    """
    if not num_compared:
        return None

    own_dtype: Literal["float32", "bfloat16"] = "bfloat16" if dtype == "bfloat16" else "float32"
    model = open_target(target, device=ctx.device, dtype=own_dtype, kernel="plain")
    remaining: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    for prompt in timed:
        if remaining.setdefault(prompt.workload, num_compared) == 0:
            continue
        remaining[prompt.workload] -= 1
        answer = continue_batch(model, [prompt.ids], max_new_tokens=max_new_tokens)[0].ids
        tokens[prompt.prompt_id] = answer
        ctx.progress(len(tokens), len(timed), "answers of our own")
    return Expected(IdentityChecker(model), tokens)


@dataclass(frozen=True)
class EngineSession:
    """Columns that all rows of one session share."""

    session_id: str
    target_key: str
    dtype: str
    temperature: float

    def rows(self, results: Sequence[TurnResult], tokenizer: Any, expected: Expected | None) -> EngineRows:
        """One request row for every answer, in the order of the turns, and their other rows."""
        rows = EngineRows([], [], [])
        # per server, not per turn: a turn in which it drafted nothing is still speculative
        depths = {server: _depth(server, results) for server in dict.fromkeys(result.turn.server for result in results)}
        methods = {
            server: server.settings.arm_method or ("external" if depth else "none") for server, depth in depths.items()
        }
        check_arms_differ([arm_of(server, methods[server], depth) for server, depth in depths.items()])
        for result in results:
            depth, method = depths[result.turn.server], methods[result.turn.server]
            for prompt, answer in zip(result.turn.prompts, result.answers, strict=True):
                identity, tie_chance = NOT_COMPARED, None
                if expected is not None and answer.error is None:
                    identity = expected.compare(prompt, answer, tokenizer, depth + 1)
                    tie_chance = expected.tie_chance(prompt)
                num_kept = _count_tokens(answer, tokenizer)
                number = len(rows.requests)
                request = self._request(number, result.turn, method, depth, prompt, answer, num_kept, identity)
                request = dataclasses.replace(request, tie_chance=tie_chance)
                rows.requests.append(request)
                if not request.is_warmup:
                    rows.rounds.extend(round_rows(request.request_id, prompt, answer, num_kept))
            if not result.turn.is_warmup:
                rows.acceptance.extend(_acceptance_rows(result, method, depth, self.session_id, self.target_key))
        check_imposed(rows.acceptance)
        return rows

    def _request(
        self,
        number: int,
        turn: Turn,
        method: str,
        depth: int,
        prompt: ServerPrompt,
        answer: Answer,
        num_kept: int,
        identity: Identity,
    ) -> Request:
        server, acceptance = turn.server, answer.acceptance
        return Request(
            session_id=self.session_id,
            request_id=f"{self.session_id}-{number:06d}",
            target_key=self.target_key,
            draft_key=server.settings.draft_key,
            method=method,
            depth_k=depth,
            prompt_id=prompt.prompt_id,
            workload=prompt.workload,
            batch_size=turn.concurrency,
            rep=turn.rep,
            order_index=number,
            is_warmup=turn.is_warmup,
            status="error" if answer.error is not None else "eos" if answer.finish_reason == "stop" else "ok",
            prompt_tokens=answer.prompt_tokens or len(prompt.ids),
            tokens_kept=num_kept,
            tokens_raw=num_kept,
            num_rounds=acceptance.num_rounds if acceptance else 0,
            num_drafted=acceptance.num_drafted if acceptance else 0,
            num_accepted=acceptance.num_accepted if acceptance else 0,
            ttft_ns=0 if answer.first_ns is None else answer.first_ns - answer.sent_ns,
            decode_ns=0 if answer.first_ns is None or answer.last_ns is None else answer.last_ns - answer.first_ns,
            output_sha256=sha256_of_tokens(answer.tokens or ()),
            identical=identity.identical,
            first_divergence=identity.first_divergence,
            tie=identity.tie,
            dtype=self.dtype,
            kernel=f"{server.engine} {server.version}".strip(),
            num_threads=0,
            temperature=self.temperature,
            engine=server.engine,
            engine_version=server.version,
            concurrency=turn.concurrency,
            first_chunk_tokens=answer.chunk_tokens[0] if answer.chunk_tokens else None,
            e2e_ns=answer.end_ns - answer.sent_ns,
            error=answer.error,
            first_wrong=identity.first_wrong,
            divergence_shortfall=identity.shortfall,
            divergence_noise=identity.noise,
            rounded_tokens=identity.num_rounded,
            rounded_expected=identity.rounded_expected,
        )


def round_rows(request_id: str, prompt: ServerPrompt, answer: Answer, num_kept: int) -> list[Round]:
    """The rounds of one answer if its chunks match its rounds one by one; else []."""
    rounds = answer.acceptance.rounds if answer.acceptance is not None else None
    if answer.error is not None or not rounds or len(answer.chunk_tokens) != len(rounds) + 1:
        return []
    rows, position = [], answer.chunk_tokens[0]
    for number, ((drafted, accepted), emitted) in enumerate(zip(rounds, answer.chunk_tokens[1:], strict=True)):
        last = position + emitted == num_kept
        if emitted != accepted + 1 and not (last and emitted <= accepted):
            return []
        newest = position - 1
        rows.append(Round(request_id, number, newest, drafted, accepted, emitted, len(prompt.ids) + newest))
        position += emitted
    return rows


def _count_tokens(answer: Answer, tokenizer: Any) -> int:
    """The number of tokens of an answer: of the engine's ids, else its own count, else of its text encoded again."""
    if answer.error is not None:
        return 0
    if answer.tokens is not None:
        return len(answer.tokens)
    if answer.completion_tokens is not None:
        return answer.completion_tokens
    return len(tokenizer(answer.text, add_special_tokens=False, verbose=False)["input_ids"])


def arm_of(server: Connected, method: str, depth: int) -> tuple[str, ...]:
    """The columns that identify a server's rows."""
    return server.engine, server.version, method, str(depth), server.settings.draft_key


def check_arms_differ(arms: Sequence[tuple[str, ...]]) -> None:
    """Raises UserError for two servers whose rows could not be told apart."""
    twice = next((arm for number, arm in enumerate(arms) if arm in arms[:number]), None)
    if twice is not None:
        raise UserError(
            f"servers: two are {' '.join(twice[:2]).strip()} with method {twice[2] or 'not given'}, depth_k {twice[3]} "
            f"and draft_key {twice[4] or 'not given'}: give each the method (none for plain decoding), depth_k or "
            "draft_key that tells it apart, or measure them one by one"
        )


def check_imposed(rows: Sequence[EngineAcceptance]) -> None:
    """Raises UserError where a server accepts otherwise than it is said to have been told."""
    imposed = [row for row in rows if row.imposed is not None]
    for (method, depth, source), of_server in grouped(
        imposed, lambda row: (row.method, row.depth_k, row.source)
    ).items():
        rounds, accepted = sum(row.num_rounds for row in of_server), sum(row.num_accepted for row in of_server)
        rates = of_server[0].imposed or ()
        if rounds and not is_as_imposed(rates, rounds, accepted):
            raise UserError(
                f"servers: the one with method {method} at depth {depth} accepted {accepted / rounds:.3f} drafts a "
                f"round ({source}), and `imposed` says {sum(rates):.3f}: give the rates it was started with"
            )


def _depth(server: Connected, results: Sequence[TurnResult]) -> int:
    """Draft tokens a round: the stated depth, else the largest in any answer or turn of the server.

    It is the larger of two estimates: SGLang's positions end at the longest acceptance, vLLM's rounds may draft fewer.
    """
    if server.settings.arm_depth:
        return server.settings.arm_depth
    of_server = [result for result in results if result.turn.server == server]
    reports = [answer.acceptance for result in of_server for answer in result.answers if answer.acceptance is not None]
    reports += [result.server_counts for result in of_server if result.server_counts is not None]
    means = [-(-acceptance.num_drafted // acceptance.num_rounds) for acceptance in reports if acceptance.num_rounds]
    return max([*means, *(len(acceptance.per_position or ()) for acceptance in reports)], default=0)


def _acceptance_rows(
    result: TurnResult, method: str, depth: int, session_id: str, target_key: str
) -> list[EngineAcceptance]:
    """The acceptance of a turn: from the server's counters, and summed over its answers."""
    sources = [("prometheus", result.server_counts)] if result.server_counts is not None else []
    summed = [answer.acceptance for answer in result.answers if answer.acceptance is not None]
    if summed:
        positions = [acceptance.per_position for acceptance in summed]
        # SGLang's lists end at the longest acceptance of each request
        by_position = [] if None in positions else zip_longest(*(counts or () for counts in positions), fillvalue=0)
        per_position = [sum(counts) for counts in by_position]
        drafted = sum(a.num_drafted for a in summed)
        sums = type(summed[0])(
            sum(a.num_rounds for a in summed), drafted, sum(a.num_accepted for a in summed), per_position
        )
        sources.append(("responses", sums))
    return [
        EngineAcceptance(
            session_id=session_id,
            target_key=target_key,
            draft_key=result.turn.server.settings.draft_key,
            method=method,
            depth_k=depth,
            workload=result.turn.workload,
            concurrency=result.turn.concurrency,
            engine=result.turn.server.engine,
            engine_version=result.turn.server.version,
            source=source,
            num_requests=len(result.answers),
            num_rounds=counts.num_rounds,
            num_drafted=counts.num_drafted,
            num_accepted=counts.num_accepted,
            accepted_per_position=list(counts.per_position or ()),
            drafted_per_position=None,
            imposed=list(result.turn.server.settings.imposed) or None,
        )
        for source, counts in sources
        if counts is not None
    ]
