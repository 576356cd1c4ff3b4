"""From a Features artifact to a saved drafter: vocabulary, network, batches, training, files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from components.contract import Context, Draft, Features, Target, UserError
from components.data.features import Example, FeatureRow, FeatureSet, open_features
from components.drafts.batches import BatchOrder
from components.drafts.draft import AbstractDraft
from components.drafts.files import method_class, save_draft
from components.drafts.held_out import greedy_examples
from components.drafts.training import Schedule, train
from components.drafts.vocabulary import choose_vocabulary, coverage, default_size
from components.targets.load import open_target
from components.targets.model import AbstractTarget


@dataclass(frozen=True)
class DataChoice:
    """What of the features is used, as the settings of `train_draft` say."""

    draft_vocab_size: int  # 0: by default_size
    batch_tokens: int
    max_tokens: int
    eval_rows: int


def train_from_features(
    target: Target,
    features: Features,
    method: str,
    settings: Mapping[str, Any],
    schedule: Schedule,
    choice: DataChoice,
    ctx: Context,
) -> Draft:
    """Train and save a drafter; `settings` are what the method's `build` takes. See `train_draft`."""
    torch.set_num_threads(ctx.num_threads)
    data = open_features(features)
    _check_fit(target, data)
    rows = [row for row in data.rows("train") if row.num_answer_tokens >= 2]
    if not rows:
        raise UserError(f"{features.path}: no training row has two answer tokens; record features of longer answers")
    model = open_target(target, device=ctx.device, kernel="plain")  # plain: the same bits in every process

    counts = data.token_counts("train")
    vocabulary = choose_vocabulary(counts, choice.draft_vocab_size or default_size(counts.numel()))
    covered = coverage(data.token_counts("validation"), vocabulary.ids)
    draft: AbstractDraft = method_class(method).build(model, dict(settings), vocabulary.ids.to(model.device))
    ctx.note(
        f"{method}: {sum(p.numel() for p in draft.parameters()):,} parameters; draft vocabulary"
        f" {vocabulary.ids.numel()} ({vocabulary.num_padded} padded) covers {covered:.2%} of held-out answer tokens"
    )
    order = BatchOrder(tuple(rows), choice.batch_tokens, choice.max_tokens, ctx.seed)
    held_out = _held_out(model, data, choice, features)
    weights, progress = train(draft, data, order, held_out, schedule, ctx)
    facts = {
        "method": method,
        "num_steps": draft.num_steps,
        "max_depth": draft.max_depth,
        "target_key": target.key,
        "draft_vocab_size": vocabulary.ids.numel(),
        "num_padded_tokens": vocabulary.num_padded,
        "held_out_coverage": covered,
        "held_out_al": progress.best_al,
        "held_out_al_by_workload": progress.best_by_workload,
        "held_out_answers": len(held_out),
        "best_step": progress.best_step,
        "optimiser_steps": schedule.num_steps,
    }
    save_draft(ctx.out, method, settings, model, vocabulary.ids, weights, facts)
    return Draft.made(ctx, facts)


def _check_fit(target: Target, data: FeatureSet) -> None:
    """The features must be this target's."""
    recorded = data.manifest.get("target_key")
    if recorded and target.key and recorded != target.key:
        raise UserError(f"these features are of target {recorded[:12]}, not {target.key[:12]}; wire both from one step")


def _held_out(model: AbstractTarget, data: FeatureSet, choice: DataChoice, features: Features) -> list[Example]:
    """The answers that checkpoints are judged on."""
    rows = [row for row in data.rows("validation") if row.num_answer_tokens >= 2]
    if not rows:
        raise UserError(
            f"{features.path}: no validation row has two answer tokens; collect prompts with num_validation"
        )
    return greedy_examples(model, [data.load(row) for row in _spread(rows, choice.eval_rows)])


def _spread(rows: list[FeatureRow], limit: int) -> list[FeatureRow]:
    """At most `limit` rows, taking turns among the workloads in their stored order."""
    by_workload: dict[str, list[FeatureRow]] = {}
    for row in rows:
        by_workload.setdefault(row.workload, []).append(row)
    turns = [(place, name, row) for name, group in by_workload.items() for place, row in enumerate(group)]
    return [row for _, _, row in sorted(turns, key=lambda turn: turn[:2])[:limit]]
