"""Answers of serving engines as rows: the same Request and Round tables as our own loop, and the engine's counters.

A Round row is written where its place in the output is certain: every chunk one round, every round with guesses. Other
answers keep their sums in the Request row; nothing is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from components.bench.identity import NOT_COMPARED, Identity, Judge
from components.bench.request_rows import rounded, sha256_of_tokens
from components.contract import Context, Target, UserError
from components.definitions import al_with_overshoot, counts, round_counts, tpot_ms_p50, ttft_ms_p50
from components.rows import EngineAcceptance, Request, Round

if TYPE_CHECKING:
    from components.bench.engine_answers import Answer, Asked
    from components.bench.engine_server import Connected
    from components.bench.openai_server import Taken, Turn


@dataclass(frozen=True)
class Expected:
    """Our own plain greedy answers, by prompt, and who judges a difference."""

    own: Judge
    tokens: Mapping[str, list[int]]

    def judge(self, asked: Asked, answer: Answer, tokenizer: Any, rows: int) -> Identity:
        """By tokens where the engine shows them, else by text (then without the place of the divergence).

        rows: that a verification pass of the engine has for one sequence.
        """
        expected = self.tokens.get(asked.prompt_id)
        if expected is None:
            return NOT_COMPARED
        if answer.tokens is not None:
            return self.own.judge(asked.ids, expected, answer.tokens, rows)
        said = tokenizer.decode(expected, skip_special_tokens=True)
        return Identity(answer.text.strip() == said.strip())

    def tie_chance(self, asked: Asked) -> float | None:
        """The probability that rounding alone parts an answer from ours; None where nothing is compared."""
        expected = self.tokens.get(asked.prompt_id)
        return None if expected is None else self.own.plain(asked.ids, expected).tie_chance


@dataclass(frozen=True)
class EngineRows:
    """All rows of one session."""

    requests: list[Request]
    rounds: list[Round]
    counted: list[EngineAcceptance]

    def summary(self) -> list[dict[str, Any]]:
        """One line for each server and concurrency, pooled over prompts."""
        groups: dict[tuple[str, str, int, int], list[Request]] = {}
        for row in self.requests:
            if not row.is_warmup:
                key = (row.kernel, row.method, row.depth_k, row.concurrency or 1)
                groups.setdefault(key, []).append(row)
        return [_line(key, rows) for key, rows in groups.items()]


def _line(key: tuple[str, str, int, int], rows: Sequence[Request]) -> dict[str, Any]:
    well = [row for row in rows if counts(row)]
    found = round_counts(well)
    compared = [row.identical for row in well if row.identical is not None]
    return {
        "engine": key[0],
        "method": key[1],
        "depth_k": key[2],
        "concurrency": key[3],
        "requests": len(rows),
        "failed": len(rows) - len(well),
        "ttft_ms_p50": rounded(ttft_ms_p50(well), 3),
        "tpot_ms_p50": rounded(tpot_ms_p50(well), 3),
        "al_with_overshoot": rounded(al_with_overshoot(found.accepted, found.rounds), 4),
        "identical": f"{sum(compared)} of {len(compared)}" if compared else None,
    }


def compared_answers(
    target: Target, timed: Sequence[Asked], num_compared: int, max_new_tokens: int, dtype: str, ctx: Context
) -> Expected | None:
    """Our own plain greedy answers to the first prompts of each workload; None when nothing is to be compared.

    dtype: of the server: rounding is judged by that of the same arithmetic, which is float32 unless it is bfloat16.
    """
    if not num_compared:
        return None
    from components.targets.generate import continue_batch
    from components.targets.load import open_target

    ours: Literal["float32", "bfloat16"] = "bfloat16" if dtype == "bfloat16" else "float32"
    opened = open_target(target, device=ctx.device, dtype=ours, kernel="plain")
    left: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    for asked in timed:
        if left.setdefault(asked.workload, num_compared) == 0:
            continue
        left[asked.workload] -= 1
        answer = continue_batch(opened, [asked.ids], max_new_tokens=max_new_tokens)[0].ids
        tokens[asked.prompt_id] = answer
        ctx.progress(len(tokens), len(timed), "answers of our own")
    return Expected(Judge(opened), tokens)


@dataclass(frozen=True)
class EngineSession:
    """What all rows of one session share."""

    session_id: str
    target_key: str
    dtype: str
    temperature: float

    def rows(self, taken: Sequence[Taken], tokenizer: Any, expected: Expected | None) -> EngineRows:
        """Every answer as a row, in the order of the turns; nothing is dropped."""
        rows = EngineRows([], [], [])
        # once for each server: a turn in which it found nothing to draft is no turn of plain decoding
        depths = {server: _depth(server, taken) for server in dict.fromkeys(one.turn.server for one in taken)}
        methods = {server: server.settings.method or ("external" if depths[server] else "none") for server in depths}
        refuse_doubles([arm_of(server, methods[server], depth) for server, depth in depths.items()])
        for one in taken:
            depth, method = depths[one.turn.server], methods[one.turn.server]
            for asked, answer in zip(one.turn.asked, one.answers, strict=True):
                identity, tie_chance = NOT_COMPARED, None
                if expected is not None and answer.error is None:
                    identity = expected.judge(asked, answer, tokenizer, depth + 1)
                    tie_chance = expected.tie_chance(asked)
                kept = _kept(answer, tokenizer)
                request = self._request(len(rows.requests), one.turn, method, depth, asked, answer, kept, identity)
                request = dataclasses.replace(request, tie_chance=tie_chance)
                rows.requests.append(request)
                if not request.is_warmup:
                    rows.rounds.extend(round_rows(request.request_id, asked, answer, kept))
            if not one.turn.is_warmup:
                rows.counted.extend(_counted(one, method, depth, self.session_id, self.target_key))
        return rows

    def _request(
        self,
        number: int,
        turn: Turn,
        method: str,
        depth: int,
        asked: Asked,
        answer: Answer,
        kept: int,
        identity: Identity,
    ) -> Request:
        server, found = turn.server, answer.acceptance
        return Request(
            session_id=self.session_id,
            request_id=f"{self.session_id}-{number:06d}",
            target_key=self.target_key,
            draft_key=server.settings.draft_key,
            method=method,
            depth_k=depth,
            prompt_id=asked.prompt_id,
            workload=asked.workload,
            batch_size=turn.concurrency,
            rep=turn.rep,
            order_index=number,
            is_warmup=turn.is_warmup,
            status="error" if answer.error is not None else "eos" if answer.finish_reason == "stop" else "ok",
            prompt_tokens=answer.prompt_tokens or len(asked.ids),
            tokens_kept=kept,
            tokens_raw=kept,
            num_rounds=found.num_rounds if found else 0,
            num_drafted=found.num_drafted if found else 0,
            num_accepted=found.num_accepted if found else 0,
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


def round_rows(request_id: str, asked: Asked, answer: Answer, kept: int) -> list[Round]:
    """The rounds of one answer, where chunks and rounds agree one by one; else none."""
    rounds = answer.acceptance.rounds if answer.acceptance is not None else None
    if answer.error is not None or not rounds or len(answer.chunk_tokens) != len(rounds) + 1:
        return []
    rows, position = [], answer.chunk_tokens[0]
    for number, ((drafted, accepted), emitted) in enumerate(zip(rounds, answer.chunk_tokens[1:], strict=True)):
        last = position + emitted == kept
        if emitted != accepted + 1 and not (last and emitted <= accepted):
            return []
        newest = position - 1
        rows.append(Round(request_id, number, newest, drafted, accepted, emitted, len(asked.ids) + newest))
        position += emitted
    return rows


def _kept(answer: Answer, tokenizer: Any) -> int:
    """Kept tokens: the engine's ids, else its own count, else its text encoded again."""
    if answer.error is not None:
        return 0
    if answer.tokens is not None:
        return len(answer.tokens)
    if answer.completion_tokens is not None:
        return answer.completion_tokens
    return len(tokenizer(answer.text, add_special_tokens=False, verbose=False)["input_ids"])


def arm_of(server: Connected, method: str, depth: int) -> tuple[str, ...]:
    """What rows of different servers are told apart by."""
    return server.engine, server.version, method, str(depth), server.settings.draft_key


def refuse_doubles(arms: Sequence[tuple[str, ...]]) -> None:
    """Raise UserError for two servers whose rows would be pooled as one."""
    twice = next((arm for number, arm in enumerate(arms) if arm in arms[:number]), None)
    if twice is not None:
        raise UserError(
            f"servers: two are {' '.join(twice[:2]).strip()} with method {twice[2] or 'not given'}, depth_k {twice[3]} "
            f"and draft_key {twice[4] or 'not given'}: give each the method (none for plain decoding), depth_k or "
            "draft_key that tells it apart, or measure them one by one"
        )


def _depth(server: Connected, taken: Sequence[Taken]) -> int:
    """Guesses a round: what was stated, else the most that any answer or turn of the server tells of.

    SGLang's positions end at the longest acceptance it saw, vLLM's rounds may draft less than they may: the larger.
    """
    if server.settings.depth_k:
        return server.settings.depth_k
    mine = [one for one in taken if one.turn.server == server]
    told = [answer.acceptance for one in mine for answer in one.answers if answer.acceptance is not None]
    told += [one.counted for one in mine if one.counted is not None]
    means = [-(-acceptance.num_drafted // acceptance.num_rounds) for acceptance in told if acceptance.num_rounds]
    return max([*means, *(len(acceptance.per_position or ()) for acceptance in told)], default=0)


def _counted(one: Taken, method: str, depth: int, session_id: str, target_key: str) -> list[EngineAcceptance]:
    """What the server counted over this turn: by its counters, and summed over its answers."""
    found = [("prometheus", one.counted)] if one.counted is not None else []
    summed = [answer.acceptance for answer in one.answers if answer.acceptance is not None]
    if summed:
        positions = [acceptance.per_position for acceptance in summed]
        # SGLang's end at the longest acceptance of each request
        known = [] if None in positions else zip_longest(*(of_it or () for of_it in positions), fillvalue=0)
        per_position = [sum(counts) for counts in known]
        drafted = sum(a.num_drafted for a in summed)
        sums = type(summed[0])(
            sum(a.num_rounds for a in summed), drafted, sum(a.num_accepted for a in summed), per_position
        )
        found.append(("responses", sums))
    return [
        EngineAcceptance(
            session_id=session_id,
            target_key=target_key,
            draft_key=one.turn.server.settings.draft_key,
            method=method,
            depth_k=depth,
            workload=one.turn.workload,
            concurrency=one.turn.concurrency,
            engine=one.turn.server.engine,
            engine_version=one.turn.server.version,
            source=source,
            num_requests=len(one.answers),
            num_rounds=counts.num_rounds,
            num_drafted=counts.num_drafted,
            num_accepted=counts.num_accepted,
            accepted_per_position=list(counts.per_position or ()),
            drafted_per_position=None,
        )
        for source, counts in found
        if counts is not None
    ]
