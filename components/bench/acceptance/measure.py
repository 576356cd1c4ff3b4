"""Step `bench.measure_acceptance`: acceptance maps of one drafter over the held-out prompts.

The target answers every test prompt greedily, once; the drafter then drafts from every position of every answer
(chain_map.py). Replaying a map gives the exact acceptance length of every depth, on the same prompts. A shard is
a batch of prompts that are answered together; its rows are the same in every process.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from components.bench.acceptance.chain_map import acceptance_map, count_in_draft_vocabulary, repeated_bigrams
from components.bench.acceptance.trees import check_branching, tree_acceptance, tree_shape
from components.bench.prompts import EncodedPrompt, fitting_prompts, greedy_answers, kept_length, open_drafter
from components.bench.settings import Dtype, TreeBudgets
from components.contract import Context, Draft, Measurements, Prompts, ReportProgress, Target
from components.drafts.interface import Drafter, TreeProposer
from components.drafts.settings import LookaheadSettings
from components.drafts.storage.files import DraftRecord, read_record
from components.files import written_whole
from components.methods import decoding_loop_of
from components.rows import AcceptanceMap, write_rows
from components.targets.load import cached_target
from components.weight_format import Storage


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
    ctx: Context,
) -> Measurements:
    """The step `bench.measure_acceptance`; its settings are explained in components/bench/steps.py."""
    record = read_record(draft.path)
    k_max = min(max_depth or record["num_steps"], record["max_depth"])
    room = max_new_tokens + positions_ahead(record, k_max)
    encoded = fitting_prompts(target, prompts, "test", room, ctx)
    shards = [
        MapShard(
            file=ctx.scratch / f"maps-{number:05d}.json",
            prompts=tuple(encoded[start : start + batch_size]),
            target=target,
            draft=draft,
            k_max=k_max,
            trees=tuple(sorted(set(trees))),
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            device=ctx.device,
            num_threads=ctx.num_threads,
        )
        for number, start in enumerate(range(0, len(encoded), batch_size))
    ]
    for _ in ctx.map(map_shard, shards, what="batches of acceptance maps"):
        pass
    weight_columns = _weight_columns(record)
    rows = [
        AcceptanceMap(**{**row, **weight_columns})
        for shard in shards
        for row in json.loads(shard.file.read_text(encoding="utf-8"))
    ]
    write_rows(ctx.out, rows)
    chains = [row for row in rows if row.tree_budget is None]
    positions = sum(len(row.accepted) for row in chains)
    return Measurements.of_step(
        ctx,
        {
            "method": record["method"],
            "draft_key": draft.key,
            "draft_vocab_size": record.get("draft_vocab_size"),
            "k_max": k_max,
            "trees": sorted(set(trees)),
            "num_prompts": len(chains),
            "num_positions": positions,
            "mean_accepted_everywhere": sum(sum(row.accepted) for row in chains) / max(1, positions),
            "repeated_bigrams": sum(row.repeated_bigrams for row in chains) / max(1, len(chains)),
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
    rows = []
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
            rows.append(replace(row, k_max=shape.depth, accepted=accepted, proxy_accepted=[], tree_budget=budget))
        report_progress(number / count)
    with written_whole(shard.file) as beside:
        beside.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    return count


@functools.lru_cache(maxsize=1)
def _cached_drafter(draft: Path, target: Path, device: str, dtype: Dtype) -> Drafter:
    """The drafter, kept open from shard to shard."""
    return open_drafter(Draft(key="", path=draft), cached_target(target, device, dtype))
