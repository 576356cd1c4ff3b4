"""The step that makes a drafter: from a Features artifact to a saved drafter, or only its record if it learns nothing.

A warm start continues with a drafter's weights and vocabulary and a new optimiser. Weights belong to the vocabulary
they were trained for, so the vocabulary stays as it is, whatever the new answers are. A drafter has no optimiser
moments; the warm-up of the schedule rebuilds them. Only weights that fit exactly are loaded: a drafter that is half
loaded and half random looks like one that drifted.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor

from components.contract import Context, Draft, Features, Target, UserError
from components.data.features.format import Example, FeatureRow, FeatureSource, open_features
from components.data.features.streamed import with_states
from components.data.settings import FEWEST_HELD_OUT, FEWEST_TO_LEARN_FROM
from components.drafts.interface import AbstractDraft
from components.drafts.network.vocabulary import (
    DraftVocabulary,
    choose_vocabulary,
    coverage,
    coverage_by,
    default_size,
    describe_vocabulary,
)
from components.drafts.settings import (
    DFlashSettings,
    Settings,
    SuffixSettings,
    Trained,
    resolve_settings,
    settings_of_method,
)
from components.drafts.storage.files import (
    check_target,
    method_class,
    own_taps,
    pop_vocabulary,
    read_draft,
    save_draft,
    save_untrained,
    taps_of_draft,
)
from components.drafts.training.batches import BatchOrder, DataChoice
from components.drafts.training.loop import Schedule, greedy_examples, train
from components.drafts.training.memory import check_memory
from components.drafts.training.processes import train_in_processes
from components.drafts.training.ranks import Ranks
from components.methods import AUTO, METHODS, MethodName
from components.targets.interface import AbstractTarget
from components.targets.load import is_read_whole, open_target

FITTED_ROWS = 64  # answers whose hidden states set the scale of a new drafter's inputs


def train_from_features(
    target: Target,
    features: Features,
    start_from: Draft | None,
    method: str,
    settings: Settings,
    schedule: Schedule,
    choice: DataChoice,
    ctx: Context,
    *,
    ranks: Ranks = Ranks(),  # noqa: B008 (it cannot be changed)
) -> Draft:
    """Train and save a drafter, from scratch or warm-started; `settings` are what the method's `build` takes.

    ranks: this process, of those that train together; the first one saves it.
    """
    torch.set_num_threads(ctx.num_threads)
    data = open_features(features)
    _check_fit(target.key, data)
    rows = _check_enough(data, "train", FEWEST_TO_LEARN_FROM)
    _check_enough(data, "validation", FEWEST_HELD_OUT)
    taps = data.manifest["tap_layers"]
    whole = data.needs_passes or is_read_whole(target)
    if whole:
        reason = "computes features on the fly" if data.needs_passes else "runs in transformers' code"
        ctx.note(f"the whole target is opened, since it {reason}; elsewhere embedding, final norm and head are enough")
    # plain: the same bits everywhere
    model = open_target(target, device=ctx.device, kernel="plain", tap_layers=taps, layers=whole)
    with closing(with_states(data, model, ranks.size)) as data:
        start = read_warm_start(start_from, method, choice.draft_vocab_size, model) if start_from is not None else None
        if start is not None:
            settings = settings_of_start(start, settings, ctx)
        vocabulary = _choose_vocabulary(data.token_counts("train"), start, choice.draft_vocab_size)
        covered = coverage(data.token_counts("validation"), vocabulary.ids)
        covered_by = coverage_by(data, "validation", vocabulary.ids)
        draft: AbstractDraft = method_class(method).build(model, settings, vocabulary.ids.to(model.device))
        if choice.packing == "pack":
            _check_packing(draft, settings)
        for name, cuts in (("micro_batch_tokens", schedule.micro_batch_tokens), ("processes", ranks.size > 1)):
            if cuts:
                _check_parts(settings, name)
        draft.scale_to_target_features(
            torch.cat([example.taps for example in data.load_all(rows[:FITTED_ROWS])]).to(model.device)
        )
        if start is not None:
            load_warm_start(start, draft, settings)
        size = sum(p.numel() for p in draft.parameters())
        ctx.note(f"{method}: {size:,} parameters; {describe_vocabulary(vocabulary, covered, covered_by)}")
        order = batch_order(rows, choice, ctx.seed)
        _note_order(order, schedule, ctx)
        held_out = _held_out(model, data, choice)
        ctx.note(check_memory(draft, order, schedule, model.device))
        warm_start = start is not None or settings.starts_trained
        _note_idle(order, ranks, ctx)
        weights, progress = train(draft, data, order, held_out, schedule, ctx, warm_start=warm_start, ranks=ranks)
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
            **own_taps(method, model),
            **(start.facts if start is not None else {}),
        }
        if warm_start and progress.best_step == 0:
            ctx.note(
                f"no step improved on the drafter it went on from (held-out {progress.best_al:.3f}): its weights stay"
            )
        if ranks.is_first:
            save_draft(ctx.out, method, settings.model_dump(mode="json"), model, vocabulary.ids, weights, facts)
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
    """Log that training keeps a declared order, and how many conversations it never reaches."""
    batches = order.epoch(0)
    if not order.shuffled:
        ctx.note("batches keep to the order that data.mix_chats declared, in every epoch; order: shuffled would not")
    unseen = sum(map(len, batches[schedule.num_steps :]))
    if unseen:
        ctx.note(
            f"num_steps: {schedule.num_steps} ends before the last {unseen} of {len(order.rows)} conversations; one "
            f"epoch takes {len(batches)} steps"
        )


def _note_idle(order: BatchOrder, ranks: Ranks, ctx: Context) -> None:
    """Log how many shares of an epoch's batches are empty: their processes wait for the others."""
    shares = [share for batch in order.epoch(0) for share in order.shares(batch, ranks.size)]
    idle = sum(not share for share in shares)
    if idle:
        ctx.note(
            f"{ranks.size} processes, and of their shares of batches {idle} of {len(shares)} are empty: a batch has"
            f" too few conversations; batch_tokens: {order.batch_tokens * ranks.size} is as much for each as for one"
        )


def _choose_vocabulary(counts: Tensor, start: WarmStart | None, size: int) -> DraftVocabulary:
    """The vocabulary of the warm start, else the most frequent tokens of counts [V]."""
    if start is None:
        return choose_vocabulary(counts, size or default_size(counts.numel()))
    return DraftVocabulary(start.draft_ids, int((counts[start.draft_ids] == 0).sum()))


def _check_fit(target_key: str, data: FeatureSource) -> None:
    """Raise UserError where the features are of another target."""
    recorded = data.manifest.get("target_key")
    if recorded and target_key and recorded != target_key:
        raise UserError(f"these features are of target {recorded[:12]}, not {target_key[:12]}; wire both from one step")


def _check_enough(data: FeatureSource, split: str, fewest: int) -> list[FeatureRow]:
    """The answers of a split that a draft token can be compared in; raises UserError where there are too few."""
    rows = [row for row in data.rows(split) if row.num_answer_tokens >= 2]
    if len(rows) < fewest:
        more = "limit_tokens or limit_rows of data.mix_chats, num_train of other steps that make prompts"
        raise UserError(
            f"features: {len(rows)} answers of split {split} have two tokens or more, and training needs {fewest}; make"
            f" more of them ({more if split == 'train' else 'num_validation of the step that makes the prompts'})"
        )
    return rows


def _check_packing(draft: AbstractDraft, settings: Settings) -> None:
    """Packing needs a drafter that respects document borders and a loss that does not depend on padding."""
    if not draft.packs:
        raise UserError(f"train_draft: packing: pack is not for method {draft.method}; take packing: bucket")
    if isinstance(settings, Trained) and settings.normaliser == "position":
        raise UserError(
            "train_draft: packing: pack has no padding for normaliser: position to divide by; take token or sequence"
        )


def _check_parts(settings: Settings, name: str) -> None:
    """Batches in parts need a loss that is a sum over rows. name: the setting that cuts them."""
    if isinstance(settings, Trained) and settings.normaliser == "position":
        raise UserError(
            f"train_draft: parts of a batch are padded apart, so {name} is not for normaliser: position;"
            " take token or sequence"
        )
    if isinstance(settings, DFlashSettings) and settings.slot_weights == "dpace" and settings.normaliser != "token":
        raise UserError(f"train_draft: {name} with slot_weights: dpace is for normaliser: token alone")


def _held_out(model: AbstractTarget, data: FeatureSource, choice: DataChoice) -> list[Example]:
    """Load the answers that checkpoints are evaluated on."""
    rows = _check_enough(data, "validation", FEWEST_HELD_OUT)
    return greedy_examples(model, data.load_all(_spread(rows, choice.eval_rows)))


def _spread(rows: list[FeatureRow], limit: int) -> list[FeatureRow]:
    """At most `limit` rows, round-robin over the workloads in stored order."""
    by_workload: dict[str, list[FeatureRow]] = {}
    for row in rows:
        by_workload.setdefault(row.workload, []).append(row)
    ranked_rows = [(rank, name, row) for name, group in by_workload.items() for rank, row in enumerate(group)]
    return [row for _, _, row in sorted(ranked_rows, key=lambda ranked_row: ranked_row[:2])[:limit]]


MEANING: Final = (
    *("norm_output", "norm_before_residual", "first_hidden"),
    *("rms_norm_eps", "rope_theta", "rope_scaling"),
    *("sample_from_anchor", "mask_token_id"),
)
"""Settings that change the meaning of weights but not their shapes."""


@dataclass(frozen=True)
class WarmStart:
    """The drafter to start from. draft_ids: int64 [N], ascending target ids. weights: under the names of its method."""

    key: str
    record: Mapping[str, Any]  # draft.json
    draft_ids: Tensor
    weights: Mapping[str, Tensor]

    @property
    def facts(self) -> dict[str, Any]:
        """The entries about it in the new drafter's draft.json."""
        return {
            "continued_from": self.key,
            "optimiser_steps_before": self.record.get("optimiser_steps", 0)
            + self.record.get("optimiser_steps_before", 0),
        }


def read_warm_start(start_from: Draft, method: str, draft_vocab_size: int, target: AbstractTarget) -> WarmStart:
    """Read the drafter to start from; draft_vocab_size 0 accepts any vocabulary size.

    Raises:
        UserError: it is of another method, for a target of another shape or with other taps, or has another vocabulary
            size.
    """
    record, tensors = read_draft(start_from.path)
    label = f"start_from ({start_from.key[:12]})"
    if record["method"] != method:
        raise UserError(f"{label} is of method {record['method']}, not {method}; set method: {record['method']}")
    check_target(start_from.path, record, target)
    taps = taps_of_draft(record, target)
    if METHODS[method].reads_taps and taps != target.tap_layers:
        raise UserError(
            f"{label} reads hidden_states{list(taps)}, and these features hold {list(target.tap_layers)}: record them"
            f" with tap_layers: {list(taps)}"
        )
    ids = pop_vocabulary(start_from.path, tensors, target.shape.vocab_size)
    if draft_vocab_size not in (0, ids.numel()):
        raise UserError(
            f"{label} has a draft vocabulary of {ids.numel()}, not {draft_vocab_size}; draft_vocab_size: 0 keeps it"
        )
    return WarmStart(start_from.key, record, ids, tensors)


def settings_of_start(start: WarmStart, settings: Settings, ctx: Context) -> Settings:
    """The settings, with those of the drafter to start from where they are at their defaults; the step says which."""
    made_with = type(settings).model_validate(start.record["settings"])
    usual = type(settings)()
    taken = {
        name: value
        for name, value in made_with.model_dump().items()
        if name != "init_seed" and getattr(settings, name) == getattr(usual, name) != getattr(made_with, name)
    }
    if taken:
        ctx.note("as the drafter it starts from: " + ", ".join(f"{name} {value!r}" for name, value in taken.items()))
    return type(settings).model_validate(settings.model_dump() | taken)


def load_warm_start(start: WarmStart, draft: AbstractDraft, settings: Settings) -> None:
    """Load the weights into a drafter that was built with `settings`.

    Raises:
        UserError: a tensor is missing, unexpected or of another shape; the line names the settings that differ.
    """
    old, new = type(settings).model_validate(start.record["settings"]).model_dump(), settings.model_dump()
    differing = [name for name in sorted(new) if old[name] != new[name] and name != "init_seed"]
    label, expected = f"start_from ({start.key[:12]})", draft.state_dict()
    wrong = [
        f"{name} is {_shape(start.weights.get(name))} there and {_shape(expected.get(name))} here"
        for name in sorted(expected.keys() | start.weights.keys())
        if _shape(start.weights.get(name)) != _shape(expected.get(name))
    ]
    if wrong:
        made_with = ", ".join(f"{name}: {old[name]!r} there, {new[name]!r} here" for name in differing)
        remedy = f"give it the settings it was made with ({made_with})" if differing else "train without start_from"
        raise UserError(f"{label} has another shape: {wrong[0]}{_others(wrong)}; {remedy}")
    for name in MEANING:
        if name in differing:
            raise UserError(f"{label} was trained with {name}: {old[name]!r}, not {new[name]!r}; give it the same")
    draft.load_state_dict(dict(start.weights))


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))


def _others(wrong: list[str]) -> str:
    return f" and {len(wrong) - 1} tensors more" if len(wrong) > 1 else ""


def train_draft(
    target: Target,
    features: Features | None,
    start_from: Draft | None,
    *,
    method: Literal[MethodName, "auto"],
    settings: dict[str, dict[str, Any]],
    num_steps: int,
    optimizer: Literal["muon", "adamw"],
    peak_lr: float,
    muon_lr_scale: float,
    warmup_share: float,
    weight_decay: float,
    clip_norm: float,
    batch_tokens: int,
    max_tokens: int,
    packing: Literal["none", "bucket", "pack"],
    order: Literal["given", "shuffled"],
    draft_vocab_size: int,
    precision: Literal["auto", "float32", "bfloat16"],
    eval_every: int,
    eval_rows: int,
    checkpoint_minutes: float,
    micro_batch_tokens: int,
    recompute: bool,
    deterministic: bool,
    processes: int,
    nodes: int,
    sharding: Literal["none", "full"],
    ctx: Context,
) -> Draft:
    """The step `drafts.train_draft`; its settings are explained in components/drafts/steps.py."""
    if method == AUTO:
        if start_from is None:
            raise UserError("train_draft: method: auto is the method of start_from: give that, or name a method")
        method = cast("MethodName", start_from.info["method"])
    method_settings = settings_of_method(method, settings)
    if not method_settings.trained:
        return _untrained_draft(target, features, start_from, method, method_settings, ctx)
    if features is None:
        raise UserError(f"train_draft: method {method} is trained: wire data.record_features into `features`")

    schedule = Schedule(
        num_steps=num_steps,
        peak_lr=peak_lr,
        warmup_share=warmup_share,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        eval_every=eval_every,
        checkpoint_minutes=checkpoint_minutes,
        precision=precision,
        optimizer=optimizer,
        muon_lr_scale=muon_lr_scale,
        micro_batch_tokens=micro_batch_tokens,
        recompute=recompute,
        deterministic=deterministic,
        processes=processes,
        nodes=nodes,
        sharding=sharding,
    )
    data_choice = DataChoice(draft_vocab_size, batch_tokens, max_tokens, eval_rows, packing, order)
    resolved = resolve_settings(method_settings, ctx.seed)
    if schedule.num_ranks > 1:
        return train_in_processes(target, features, start_from, method, resolved, schedule, data_choice, ctx)
    return train_from_features(target, features, start_from, method, resolved, schedule, data_choice, ctx)


def _untrained_draft(
    target: Target,
    features: Features | None,
    start_from: Draft | None,
    method: str,
    method_settings: Settings,
    ctx: Context,
) -> Draft:
    """Make the Draft of a method without training."""

    if start_from is not None:
        raise UserError(f"train_draft: method {method} learns nothing that start_from could go on from: leave it out")
    answers: list[Tensor] = []
    if isinstance(method_settings, SuffixSettings) and method_settings.cached_tokens:
        answers = latest_answers(target.key, features, method_settings.cached_tokens, "train_draft")
        ctx.note(f"{method}: {sum(map(len, answers)):,} tokens of {len(answers)} answers to copy from")
    settings = resolve_settings(method_settings, ctx.seed)
    return Draft.of_step(ctx, save_untrained(ctx.out, method, settings, target, answers))


def latest_answers(target_key: str, features: Features | None, max_tokens: int, step: str) -> list[Tensor]:
    """The last training answers that together have at most `max_tokens` tokens, int64 each, in stored order."""
    if features is None:
        raise UserError(f"{step}: cached_tokens needs answers: wire data.record_features into `features`")
    data = open_features(features)
    _check_fit(target_key, data)
    rows, total = list[FeatureRow](), 0
    for row in reversed(data.rows("train")):
        total += row.num_answer_tokens
        if total > max_tokens:
            break
        rows.append(row)
    return [data.answer_ids(row) for row in reversed(rows) if row.num_answer_tokens]
