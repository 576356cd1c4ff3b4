"""The step that makes a drafter: trained on the target's features, or only recorded where nothing is learned."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from components.contract import Context, Draft, Features, Target, UserError
from components.drafts.settings import Place, Settings, check_settings, resolve_settings, settings_of_method

Method = Literal[
    "draft-model", "eagle1", "eagle3", "hass", "lookahead", "medusa", "mtp", "mtp-parallel", "ngram", "p-eagle"
]


def train_draft(
    target: Target,
    features: Features | None = None,
    start_from: Draft | None = None,
    *,
    method: Method = "eagle3",
    settings: dict[str, dict[str, Any]] = {},  # noqa: B006 - read, never changed
    num_steps: Annotated[int, Field(ge=1)] = 400,
    optimizer: Literal["muon", "adamw"] = "muon",
    peak_lr: Annotated[float, Field(gt=0)] = 2e-3,
    muon_lr_scale: Annotated[float, Field(gt=0)] = 10.0,
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
    weight_decay: Annotated[float, Field(ge=0)] = 0.01,
    clip_norm: Annotated[float, Field(gt=0)] = 1.0,
    batch_tokens: Annotated[int, Field(ge=16)] = 1024,
    max_tokens: Annotated[int, Field(ge=8)] = 2048,
    packing: Literal["none", "bucket", "pack"] = "bucket",
    order: Literal["given", "shuffled"] = "given",
    draft_vocab_size: Annotated[int, Field(ge=0)] = 0,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    eval_every: Annotated[int, Field(ge=1)] = 50,
    eval_rows: Annotated[int, Field(ge=1)] = 32,
    checkpoint_every: Annotated[int, Field(ge=1)] = 50,
    ctx: Context,
) -> Draft:
    """Train a drafter for a target and keep the weights with the best held-out acceptance length.

    A method that learns nothing (prompt lookup) makes a Draft of its settings alone, in no time and without features.

    Args:
        target: the model to draft for.
        features: its hidden states over its own answers, splits train and validation, stored (data.record_features) or
            computed along the way (data.features_on_the_fly); trained methods need them.
        start_from: a drafter to go on from instead of starting over, of the same method and shape: its weights and
            vocabulary, a new optimiser. The schedule begins again with its warm-up, so give a peak_lr well below the
            one it was trained with (a quarter). If no step improves on it, its own weights are kept.
        method: how to draft; components/drafts/METHOD.py says what each one is.
        settings: what methods are told, by method: {eagle3: {ttt_steps: 5}}; only the entry of `method` counts, the
            others are checked too, so that a matrix over methods can hold those of all. What each method can be told,
            with defaults: components/drafts/settings.py.
        num_steps: optimiser steps.
        optimizer: muon steps the matrices inside the drafter by Muon and the rest (LM head, norms) by AdamW; adamw
            steps all by AdamW.
        peak_lr: AdamW's learning rate after warm-up.
        muon_lr_scale: Muon's learning rate, as a multiple of AdamW's.
        warmup_share: share of num_steps that warms up linearly; a cosine follows.
        weight_decay: decoupled decay of the matrices; norm weights do not decay.
        clip_norm: largest gradient norm.
        batch_tokens: tokens in a batch, padding included.
        max_tokens: tokens of a conversation that are used, from its start.
        packing: what shares a batch. bucket: conversations of similar length, one a row. pack: several in a row, each
            with its own positions and attention, so that little is padding. none: as they come, a row each.
        order: of the conversations. given: the curriculum that data.mix_chats declared with its `order`, followed in
            every epoch (a batch then holds neighbours of that order, so that packing: bucket is none); where none was
            declared, shuffled. shuffled: by the seed, another way every epoch.
        draft_vocab_size: tokens the drafter can guess, the most frequent ones of the answers; 0 takes a quarter of the
            target's vocabulary, at least 256 and at most 32000. For mtp it prunes the head while drafting, not
            training.
        precision: arithmetic of the training graph; auto is bfloat16 where the machine multiplies it natively.
        eval_every: optimiser steps between looks at the held-out acceptance length.
        eval_rows: held-out answers in such a look, at most.
        checkpoint_every: optimiser steps between checkpoints; a killed run goes on from the last one.
    """
    method_settings = settings_of_method(method, settings)
    if not method_settings.trained:
        return _untrained_draft(target, start_from, method, method_settings, ctx)
    if features is None:
        raise UserError(f"train_draft: method {method} is trained: wire data.record_features into `features`")
    from components.drafts.from_features import DataChoice, train_from_features
    from components.drafts.training import Schedule

    schedule = Schedule(
        num_steps=num_steps,
        peak_lr=peak_lr,
        warmup_share=warmup_share,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        precision=precision,
        optimizer=optimizer,
        muon_lr_scale=muon_lr_scale,
    )
    data_choice = DataChoice(draft_vocab_size, batch_tokens, max_tokens, eval_rows, packing, order)
    return train_from_features(
        target, features, start_from, method, resolve_settings(method_settings, ctx.seed), schedule, data_choice, ctx
    )


def _untrained_draft(
    target: Target, start_from: Draft | None, method: str, method_settings: Settings, ctx: Context
) -> Draft:
    """Make the Draft of a method without training."""
    from components.drafts.files import save_untrained

    if start_from is not None:
        raise UserError(f"train_draft: method {method} learns nothing that start_from could go on from: leave it out")
    return Draft.of_step(ctx, save_untrained(ctx.out, method, resolve_settings(method_settings, ctx.seed), target))


def train_draft_fingerprint(settings: dict[str, Any]) -> dict[str, str]:
    """The content of a given draft model, for the step's key: file name -> sha256; {} where none is given."""
    from components.targets.source import load_target_fingerprint

    model = settings["settings"].get("draft-model", {}).get("model", "")
    return load_target_fingerprint({"model": model}) if model and settings["method"] == "draft-model" else {}


def train_draft_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Place, str]]]:
    """The settings as they enter the step's key: of `settings` only the method's own, defaults filled in; and faults.

    flows/signature.py asks for this when it reads pipelines.yaml.
    """
    method = settings["method"]
    method_settings, faults = check_settings(method, settings["settings"])
    return {
        **settings,
        "settings": {} if method_settings is None else {method: method_settings.model_dump(mode="json")},
    }, faults
