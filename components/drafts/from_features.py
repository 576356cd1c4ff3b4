"""From a Features artifact to a saved drafter: vocabulary, network, batches, training, files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from components.contract import Context, Draft, Features, Target, UserError
from components.data.features import Example, FeatureRow, FeatureSource, open_features
from components.drafts.batches import BatchOrder, Packing
from components.drafts.continuing import WarmStart, load_warm_start, read_warm_start
from components.drafts.draft import AbstractDraft
from components.drafts.files import method_class, save_draft
from components.drafts.held_out import greedy_examples
from components.drafts.training import Schedule, train
from components.drafts.vocabulary import (
    DraftVocabulary,
    choose_vocabulary,
    coverage,
    coverage_by,
    default_size,
    describe_vocabulary,
)
from components.targets.load import open_target
from components.targets.model import AbstractTarget

FITTED_ROWS = 64  # answers whose hidden states set the scale of a new drafter's inputs


@dataclass(frozen=True)
class DataChoice:
    """Which features are used and how they are batched: settings of `train_draft`."""

    draft_vocab_size: int  # 0: by default_size
    batch_tokens: int
    max_tokens: int
    eval_rows: int
    packing: Packing
    order: Literal["given", "shuffled"]


def train_from_features(
    target: Target,
    features: Features,
    start_from: Draft | None,
    method: str,
    settings: Mapping[str, Any],
    schedule: Schedule,
    choice: DataChoice,
    ctx: Context,
) -> Draft:
    """Train and save a drafter, from scratch or warm-started; `settings` are what the method's `build` takes."""
    torch.set_num_threads(ctx.num_threads)
    data = open_features(features)
    _check_fit(target, data)
    rows = [row for row in data.rows("train") if row.num_answer_tokens >= 2]
    if not rows:
        raise UserError(f"{features.path}: no training row has two answer tokens; record features of longer answers")
    model = open_target(target, device=ctx.device, kernel="plain")  # plain: the same bits in every process
    data = data.computed_by(model)

    start = read_warm_start(start_from, method, choice.draft_vocab_size, model) if start_from is not None else None
    vocabulary = _choose_vocabulary(data.token_counts("train"), start, choice.draft_vocab_size)
    covered = coverage(data.token_counts("validation"), vocabulary.ids)
    covered_by = coverage_by(data, "validation", vocabulary.ids)
    draft: AbstractDraft = method_class(method).build(model, dict(settings), vocabulary.ids.to(model.device))
    if choice.packing == "pack":
        _check_packing(draft, settings)
    draft.scale_to_target_features(
        torch.cat([example.taps for example in data.load_all(rows[:FITTED_ROWS])]).to(model.device)
    )
    if start is not None:
        load_warm_start(start, draft, settings)
    size = sum(p.numel() for p in draft.parameters())
    ctx.note(f"{method}: {size:,} parameters; {describe_vocabulary(vocabulary, covered, covered_by)}")
    order = batch_order(rows, choice, ctx.seed)
    if not order.shuffled:
        _note_order(order, schedule, ctx)
    held_out = _held_out(model, data, choice, features)
    warm_start = start is not None or settings.get("start") == "own"
    weights, progress = train(draft, data, order, held_out, schedule, ctx, warm_start=warm_start)
    facts = {
        "method": method,
        "num_steps": draft.num_steps,
        "max_depth": draft.max_depth,
        "target_key": target.key,
        "draft_vocab_size": vocabulary.ids.numel(),
        "num_padded_tokens": vocabulary.num_padded,
        "held_out_coverage": covered,
        "held_out_coverage_by": covered_by,
        "held_out_al": progress.best_al,
        "held_out_al_by_workload": progress.best_by_workload,
        "held_out_answers": len(held_out),
        "best_step": progress.best_step,
        "optimiser_steps": schedule.num_steps,
        **(start.facts if start is not None else {}),
    }
    if warm_start and progress.best_step == 0:
        ctx.note(f"no step improved on the drafter it went on from (held-out {progress.best_al:.3f}): its weights stay")
    save_draft(ctx.out, method, settings, model, vocabulary.ids, weights, facts)
    num_parameters = sum(weight.numel() for weight in weights.values())
    return Draft.of_step(ctx, {**facts, "num_parameters": num_parameters})


def batch_order(rows: list[FeatureRow], choice: DataChoice, seed: int) -> BatchOrder:
    """Rows in the order declared by their mix (rows of one chat as stored), else shuffled."""
    declared = [(row.place, number, row) for number, row in enumerate(rows) if row.place is not None]
    shuffled = choice.order == "shuffled" or len(declared) < len(rows)
    if not shuffled:
        rows = [row for _, _, row in sorted(declared, key=lambda entry: entry[:2])]
    return BatchOrder(tuple(rows), choice.batch_tokens, choice.max_tokens, seed, choice.packing, shuffled)


def _note_order(order: BatchOrder, schedule: Schedule, ctx: Context) -> None:
    """Log that training keeps the declared order, and how many conversations it never reaches."""
    batches = order.epoch(0)
    ctx.note("batches keep to the order that data.mix_chats declared, in every epoch; order: shuffled would not")
    unseen = sum(map(len, batches[schedule.num_steps :]))
    if unseen:
        ctx.note(
            f"num_steps: {schedule.num_steps} ends before the last {unseen} of {len(order.rows)} conversations of the "
            f"declared order; one epoch takes {len(batches)} steps"
        )


def _choose_vocabulary(counts: Tensor, start: WarmStart | None, size: int) -> DraftVocabulary:
    """The vocabulary of the warm start, else the most frequent tokens of counts [V]."""
    if start is None:
        return choose_vocabulary(counts, size or default_size(counts.numel()))
    return DraftVocabulary(start.draft_ids, int((counts[start.draft_ids] == 0).sum()))


def _check_fit(target: Target, data: FeatureSource) -> None:
    """Raise UserError where the features are of another target."""
    recorded = data.manifest.get("target_key")
    if recorded and target.key and recorded != target.key:
        raise UserError(f"these features are of target {recorded[:12]}, not {target.key[:12]}; wire both from one step")


def _check_packing(draft: AbstractDraft, settings: Mapping[str, Any]) -> None:
    """Packing needs a drafter that respects document borders and a loss that does not depend on padding."""
    if not draft.packs:
        raise UserError(f"train_draft: packing: pack is not for method {draft.method}; take packing: bucket")
    if settings.get("normaliser") == "position":
        raise UserError(
            "train_draft: packing: pack has no padding for normaliser: position to divide by; take token or sequence"
        )


def _held_out(model: AbstractTarget, data: FeatureSource, choice: DataChoice, features: Features) -> list[Example]:
    """Load the answers that checkpoints are evaluated on."""
    rows = [row for row in data.rows("validation") if row.num_answer_tokens >= 2]
    if not rows:
        raise UserError(
            f"{features.path}: no validation row has two answer tokens; collect prompts with num_validation"
        )
    return greedy_examples(model, data.load_all(_spread(rows, choice.eval_rows)))


def _spread(rows: list[FeatureRow], limit: int) -> list[FeatureRow]:
    """At most `limit` rows, round-robin over the workloads in stored order."""
    by_workload: dict[str, list[FeatureRow]] = {}
    for row in rows:
        by_workload.setdefault(row.workload, []).append(row)
    ranked_rows = [(rank, name, row) for name, group in by_workload.items() for rank, row in enumerate(group)]
    return [row for _, _, row in sorted(ranked_rows, key=lambda ranked_row: ranked_row[:2])[:limit]]
