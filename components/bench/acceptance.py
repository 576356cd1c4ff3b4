"""Step `bench.measure_acceptance`: acceptance maps of one drafter over the held-out prompts.

A map says how many draft tokens a round starting at each output position would accept. The target answers every test
prompt greedily, once; the drafter then drafts from every position of every answer. Replaying a map gives the exact
acceptance length of every depth, on the same prompts. A shard is a batch of prompts that are answered together; its
rows are the same in every process.

Since the answer is known, one pass of the target gives the features of every column, and one call of
`propose_at_every_position` the draft tokens after each. A drafter's state depends on committed tokens only; therefore
replaying i <- i + min(accepted[i], k) + 1 over this map is what a live run at depth k does, for every k at once. The
drafts of a method with its own loop (lookahead) also depend on its earlier passes: its map is that of a live run at the
deepest depth, and holds for no other depth (components/methods.py decoding_loop); it has no `proxy_accepted`.

Two training-time figures are too high, and the map shows by how much. Averaging `accepted` over all positions counts
positions where no round ever starts (rounds start just after a miss). `proxy_accepted` also feeds the drafter the true
token and the true target features at each step, as in one-step training; it is the run of consecutive positions whose
first draft token is right. (True tokens alone change nothing: step j of a chain counts only if all draft tokens before
it were right, and then its inputs are the true tokens already.)

Trees of different positions cannot be drafted at once, so they are drafted once per position, on a state that grows by
one; the accepted path is the one that the answer follows. Replaying i <- i + accepted[i] + 1 over their map equals a
live greedy run with this shape.

At a temperature above 0 a draft token is kept with a probability, so no map holds; each prompt is decoded live instead,
with a seed of its own, and its rounds are counted.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from components.bench.end_to_end.arms import check_branching, tree_shape
from components.bench.prompts import (
    EncodedPrompt,
    fitting_prompts,
    greedy_answers,
    kept_length,
    open_drafter,
)
from components.bench.settings import Dtype, TreeBudgets
from components.contract import Context, Draft, Measurements, Prompts, ReportProgress, Target, UserError
from components.data.formats.prompts import prompt_format, read_prompts
from components.decoding.chain import GREEDY, decode
from components.decoding.tree import DraftTreeRows
from components.decoding.tree_shapes import TreeShape
from components.drafts.interface import CommittedPositions, Drafter, Sampling, TreeProposer
from components.drafts.settings import LookaheadSettings
from components.drafts.storage.files import DraftRecord, read_record
from components.files import written_whole
from components.methods import decoding_loop_of
from components.positions import LEAST_SHARE
from components.rows import AcceptanceMap, SampledRun, write_rows
from components.targets.generate import row_generator
from components.targets.interface import AbstractTarget
from components.targets.load import cached_target
from components.targets.source import model_name
from components.targets.spread import spread_shards
from components.weight_format import Storage

CONFIDENCE_DIGITS = 4


def measure_acceptance(
    target: Target,
    draft: Draft,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    max_depth: int,
    dtype: Dtype,
    batch_size: int,
    trees: TreeBudgets,
    temperature: float,
    ctx: Context,
) -> Measurements:
    """The step `bench.measure_acceptance`; its settings are explained in components/bench/steps.py."""
    record = read_record(draft.path)
    k_max = min(max_depth or record["num_steps"], record["max_depth"])
    if temperature and decoding_loop_of(record["method"]):
        raise UserError(f"temperature: {record['method']} has a loop of its own, which decodes greedily; leave it at 0")
    room = max_new_tokens + positions_ahead(record, k_max)
    encoded = fitting_prompts(target, prompts, "test", room, ctx, least_share=LEAST_SHARE)
    shards = [
        MapShard(
            file=ctx.scratch / f"maps-{number:05d}.json",
            prompts=tuple(encoded[start : start + batch_size]),
            target=target,
            draft=draft,
            k_max=k_max,
            trees=tuple(sorted(set(trees))),
            temperature=temperature,
            seed=ctx.seed,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            device=ctx.device,
            num_threads=ctx.num_threads,
        )
        for number, start in enumerate(range(0, len(encoded), batch_size))
    ]
    spread_shards(ctx, target)
    for _ in ctx.map(map_shard, shards, what="batches of acceptance maps"):
        pass
    weight_columns = _weight_columns(record)
    written = [json.loads(shard.file.read_text(encoding="utf-8")) for shard in shards]
    rows = [AcceptanceMap(**{**row, **weight_columns}) for of_shard in written for row in of_shard["maps"]]
    sampled = [SampledRun(**row) for of_shard in written for row in of_shard["sampled"]]
    write_rows(ctx.out, [*rows, *sampled])
    chains = [row for row in rows if row.tree_budget is None]
    positions = sum(len(row.accepted) for row in chains)
    return Measurements.of_step(
        ctx,
        {
            "model": model_name(str(target.info.get("model", ""))),
            "prompt_format": prompt_format(read_prompts(prompts, "test")),
            "method": record["method"],
            "draft_key": draft.key,
            "draft_vocab_size": record.get("draft_vocab_size"),
            "k_max": k_max,
            "trees": sorted(set(trees)),
            "num_prompts": len(chains),
            "num_positions": positions,
            "mean_accepted_everywhere": sum(sum(row.accepted) for row in chains) / max(1, positions),
            "repeated_bigrams": sum(row.repeated_bigrams for row in chains) / max(1, len(chains)),
            "temperature": temperature,
            **weight_columns,
        },
    )


def positions_ahead(record: DraftRecord, k_max: int) -> int:
    """Positions past the answer that a map needs: for draft tokens, or the window of a method with its own loop."""
    if not decoding_loop_of(record["method"]):
        return k_max
    return LookaheadSettings.model_validate(record["settings"]).positions_ahead(k_max)


def _weight_columns(record: DraftRecord) -> dict[str, str]:
    """Row columns of a quantised drafter; {} for unquantised weights."""
    storage = Storage.from_record(record)
    return {} if storage is None else {"weights": storage.description, "quantised_from": str(record["quantised_from"])}


@dataclass(frozen=True)
class MapShard:
    """All inputs of the maps of one batch of prompts, and the file that they are written to."""

    file: Path
    prompts: tuple[EncodedPrompt, ...]
    target: Target
    draft: Draft
    k_max: int
    trees: tuple[int, ...]
    temperature: float
    seed: int
    max_new_tokens: int
    dtype: Dtype
    device: str
    num_threads: int


def map_shard(shard: MapShard, report_progress: ReportProgress) -> int:
    """Answer and map the prompts of one shard and write its file; returns their number. Runs in any process."""
    torch.set_num_threads(shard.num_threads)
    model = cached_target(shard.target.path, shard.device, shard.dtype)
    drafter = _cached_drafter(shard.draft.path, shard.target.path, shard.device, shard.dtype)
    check_branching(model, drafter, shard.trees)
    length = shard.max_new_tokens + shard.k_max
    count = len(shard.prompts)
    answers = greedy_answers(model, [prompt.ids for prompt in shard.prompts], length, count)
    rows, sampled = [], []
    for number, (prompt, answer) in enumerate(zip(shard.prompts, answers, strict=True), start=1):
        num_kept = kept_length(answer[: shard.max_new_tokens], model.shape.eos_token_ids)
        position_map = acceptance_map(model, drafter, prompt.ids, answer, num_kept, shard.k_max)
        row = AcceptanceMap(
            target_key=shard.target.key,
            draft_key=shard.draft.key,
            method=drafter.method,
            prompt_id=prompt.prompt_id,
            workload=prompt.workload,
            k_max=shard.k_max,
            trained_depth=drafter.num_steps,
            num_tokens=num_kept,
            accepted=position_map.accepted,
            confidence=position_map.confidence,
            proxy_accepted=position_map.proxy_accepted,
            repeated_bigrams=repeated_bigrams(answer[:num_kept]),
            dtype=shard.dtype,
            prompt_tokens=len(prompt.ids),
            language=prompt.language,
            num_guessable=count_in_draft_vocabulary(answer[1:num_kept], drafter),
        )
        rows.append(row)
        for budget in shard.trees:
            shape = tree_shape(shard.k_max, budget)
            assert isinstance(drafter, TreeProposer)
            accepted = tree_acceptance(model, drafter, prompt.ids, answer, num_kept, shape)
            rows.append(
                replace(row, k_max=shape.depth, accepted=accepted, proxy_accepted=[], confidence=[], tree_budget=budget)
            )
        if shard.temperature:
            sampled.append(sampled_run(shard, model, drafter, prompt))
        report_progress(number / count)
    with written_whole(shard.file) as beside:
        lines = {"maps": [asdict(row) for row in rows], "sampled": [asdict(run) for run in sampled]}
        beside.write_text(json.dumps(lines), encoding="utf-8")
    return count


def sampled_run(shard: MapShard, model: AbstractTarget, drafter: Drafter, prompt: EncodedPrompt) -> SampledRun:
    """One prompt answered by sampling while the drafter drafts, with the prompt's own generator."""
    run = decode(
        model,
        drafter,
        prompt.ids,
        max_new_tokens=shard.max_new_tokens,
        depth=shard.k_max,
        sampling=Sampling(temperature=shard.temperature),
        rng=row_generator(shard.seed, prompt.prompt_id),
    )
    return SampledRun(
        target_key=shard.target.key,
        draft_key=shard.draft.key,
        method=drafter.method,
        prompt_id=prompt.prompt_id,
        workload=prompt.workload,
        depth_k=shard.k_max,
        temperature=shard.temperature,
        seed=shard.seed,
        num_rounds=len(run.rounds),
        num_tokens=len(run.tokens) - 1,
        dtype=shard.dtype,
    )


@functools.lru_cache(maxsize=1)
def _cached_drafter(draft: Path, target: Path, device: str, dtype: Dtype) -> Drafter:
    """The drafter, kept open from shard to shard; on plain kernels, as its target and for the same reason."""
    return open_drafter(Draft(key="", path=draft), cached_target(target, device, dtype), "plain")


class PositionMap(NamedTuple):
    """The map of one answer, num_tokens - 1 entries: entry i is of a round that starts after output token i."""

    accepted: list[int]
    proxy_accepted: list[int]
    confidence: list[list[float]]  # [num_tokens - 1][k_max]; [] where the method has none


def acceptance_map(
    target: AbstractTarget,
    draft: Drafter,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    num_tokens: int,
    k_max: int,
) -> PositionMap:
    """Draft k_max tokens from each output position and count the leading ones that equal the target's.

    answer:     the target's greedy tokens, end-of-text ignored, at least num_tokens + k_max of them,
                so that the draft tokens of the last position can be compared.
    num_tokens: kept tokens N: up to the limit, or up to and including end-of-text.
    """
    if num_tokens < 2:
        return PositionMap([], [], [])  # the answer is the prefill token alone: no round starts
    if decoding_loop_of(draft.method):
        return PositionMap(_accepted_in_live_run(target, draft, prompt_ids, num_tokens, k_max), [], [])
    assert len(answer) >= num_tokens + k_max, "the answer is too short for the guesses at its end"
    token_ids = [*prompt_ids, *answer]
    first = len(prompt_ids) - 1  # the column after which a round at output token 0 drafts
    # The proxy's run of first draft tokens may extend past the start of the last round.
    num_positions = num_tokens + k_max - 2
    ids = torch.tensor(token_ids[: first + num_positions + 1], device=target.device)
    with torch.inference_mode():
        features = draft.needs_features or True
        out = target.forward(ids.unsqueeze(0), target.new_cache(1, len(ids)), logits="none", features=features)
        assert out.taps is not None and out.last is not None
        drafts = draft.propose_at_every_position(ids, out.taps[0], out.last[0], k_max, first)
    draft_tokens = drafts.tokens
    truth = torch.tensor(answer[1:], device=draft_tokens.device)
    first_matches = (draft_tokens[:, 0] == truth[:num_positions]).tolist()
    accepted = _matching_prefix(draft_tokens[: num_tokens - 1], truth.unfold(0, k_max, 1)[: num_tokens - 1])
    confidence: list[list[float]] = []
    if drafts.confidence is not None:
        rows = drafts.confidence[: num_tokens - 1].double()
        confidence = rows.round(decimals=CONFIDENCE_DIGITS).tolist()
    return PositionMap(accepted, _run_lengths(first_matches, num_tokens - 1, k_max), confidence)


def _accepted_in_live_run(
    target: AbstractTarget, draft: Drafter, prompt_ids: Sequence[int], num_tokens: int, k_max: int
) -> list[int]:
    """Draft tokens accepted from each position in one run at k_max, [num_tokens - 1].

    At a position inside a round it is the number of its accepted draft tokens from there on, which estimates the
    acceptance of a shallower run whose round starts there.
    """
    run = decode(target, draft, prompt_ids, max_new_tokens=num_tokens, depth=k_max, ignore_eos=True)
    accepted = [0] * (num_tokens - 1)
    for round_facts in run.rounds:
        stop = min(round_facts.out_pos + round_facts.accepted + 1, len(accepted))
        for step, position in enumerate(range(round_facts.out_pos, stop)):
            accepted[position] = round_facts.accepted - step
    return accepted


def _matching_prefix(draft_tokens: Tensor, truth: Tensor) -> list[int]:
    """For each row, how many leading draft tokens equal the truth; both [N, k]."""
    return (draft_tokens == truth).long().cumprod(-1).sum(-1).tolist()


def _run_lengths(matches: list[bool], count: int, longest: int) -> list[int]:
    """For each of the first `count` positions, the number of consecutive matches from there, at most `longest`."""
    runs = [0] * (len(matches) + 1)
    for i in reversed(range(len(matches))):
        runs[i] = runs[i + 1] + 1 if matches[i] else 0
    return [min(run, longest) for run in runs[:count]]


def count_in_draft_vocabulary(tokens: Sequence[int], draft: Drafter) -> int:
    """How many of these tokens are in the draft vocabulary; all of them for a drafter with the full vocabulary."""
    ids = getattr(draft, "draft_ids", None)
    if ids is None:
        return len(tokens)
    return int(torch.isin(torch.tensor(tokens, dtype=ids.dtype, device=ids.device), ids).sum())


def repeated_bigrams(tokens: Sequence[int]) -> float:
    """The share of bigrams that occurred before in the same text; 0 for fewer than two tokens."""
    bigrams = list(itertools.pairwise(tokens))
    return 1.0 - len(set(bigrams)) / len(bigrams) if bigrams else 0.0


def tree_acceptance(
    target: AbstractTarget,
    proposer: TreeProposer,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    num_tokens: int,
    shape: TreeShape,
) -> list[int]:
    """Entry i: draft tokens accepted by a round that starts when output token i is the newest; num_tokens - 1 entries.

    answer:     the target's greedy tokens, end-of-text ignored, at least num_tokens - 1 + shape.depth of them.
    num_tokens: output tokens N, up to the limit or up to and including end-of-text.
    """
    if num_tokens < 2:
        return []  # the answer ends with the prefill token: no round starts
    assert len(answer) >= num_tokens - 1 + shape.depth, "the answer is too short for the drafts at its end"
    text = [*prompt_ids, *answer]
    num_columns = len(prompt_ids) + num_tokens - 2  # the last round starts at output token num_tokens - 2
    ids = torch.tensor(text[: num_columns + 1], device=target.device)
    empty = torch.empty(num_columns, 0, device=target.device)
    taps, last = empty, empty
    accepted = []
    with torch.inference_mode():
        if proposer.needs_features:
            cache, features = target.new_cache(1, num_columns), proposer.needs_features
            out = target.forward(ids[None, :-1], cache, logits="none", features=features)
            assert out.taps is not None and out.last is not None
            taps, last = out.taps[0], out.last[0]
        state, start = proposer.new_state(num_columns + shape.num_draft_tokens + 1), 0
        for newest in range(len(prompt_ids), num_columns + 1):
            committed = CommittedPositions(ids[start + 1 : newest + 1], taps[start:newest], last[start:newest])
            branches, start = proposer.begin(state, committed, shape.depth), newest
            vocab_size = target.shape.vocab_size
            tree = shape.grow(branches, text[newest], proposer.draft_ids, vocab_size, GREEDY, torch.Generator())
            accepted.append(count_accepted(tree, text[newest + 1 :]))
    return accepted


def count_accepted(tree: DraftTreeRows, answer: Sequence[int]) -> int:
    """How many draft tokens of a tree lie on the path that `answer` follows from the newest token."""
    children, row = tree.children, 0
    for depth, token in enumerate(answer):
        matching = [child for child in children[row] if tree.tokens[child] == token]
        if not matching:
            return depth
        row = matching[0]
    return len(answer)
