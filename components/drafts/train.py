"""The step that trains a drafter on the target's features."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from components.contract import Context, Draft, Features, Target

Method = Literal["eagle3", "mtp"]


def train_draft(
    target: Target,
    features: Features,
    start_from: Draft | None = None,
    *,
    method: Method = "eagle3",
    num_steps: Annotated[int, Field(ge=1)] = 400,
    optimizer: Literal["muon", "adamw"] = "muon",
    peak_lr: Annotated[float, Field(gt=0)] = 2e-3,
    muon_lr_scale: Annotated[float, Field(gt=0)] = 10.0,
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
    weight_decay: Annotated[float, Field(ge=0)] = 0.01,
    clip_norm: Annotated[float, Field(gt=0)] = 1.0,
    batch_tokens: Annotated[int, Field(ge=16)] = 1024,
    max_tokens: Annotated[int, Field(ge=8)] = 2048,
    draft_vocab_size: Annotated[int, Field(ge=0)] = 0,
    intermediate_size: Annotated[int, Field(ge=0)] = 0,
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 7,
    mtp_modules: Annotated[int, Field(ge=1, le=8)] = 3,
    first_hidden: Literal["post_norm", "pre_norm"] = "post_norm",
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8,
    normaliser: Literal["token", "sequence", "position"] = "token",
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    eval_every: Annotated[int, Field(ge=1)] = 50,
    eval_rows: Annotated[int, Field(ge=1)] = 32,
    checkpoint_every: Annotated[int, Field(ge=1)] = 50,
    ctx: Context,
) -> Draft:
    """Train a drafter for a target and keep the weights with the best held-out acceptance length.

    Args:
        target: the model to draft for.
        features: its hidden states over its own answers, splits train and validation.
        start_from: a drafter to go on from instead of starting over, of the same method and shape: its weights and
            vocabulary, a new optimiser. The schedule begins again with its warm-up, so give a peak_lr well below the
            one it was trained with (a quarter). If no step improves on it, its own weights are kept.
        method: eagle3 (one layer fed by three hidden states, any depth) or mtp (one module a depth, DeepSeek-V3's
            layout).
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
        draft_vocab_size: tokens the drafter can guess, the most frequent ones of the answers; 0 takes a quarter of the
            target's vocabulary, at least 256 and at most 32000. For mtp it prunes the head while drafting, not
            training.
        intermediate_size: width of the drafter's MLP; 0 takes the target's.
        ttt_steps: eagle3: drafting steps unrolled in training (training-time test).
        mtp_modules: mtp: how many modules, hence how many tokens it can guess.
        first_hidden: mtp: whether module 1 reads the target's last state after or before the final norm; engines that
            serve DeepSeek's module feed it the state after the norm.
        step_decay: drafting step k weighs step_decay^k in the loss, divided by the sum of the weights.
        normaliser: what a step's loss is averaged over: its trained tokens, its sequences, or all positions of the
            batch.
        precision: arithmetic of the training graph; auto is bfloat16 where the machine multiplies it natively.
        eval_every: optimiser steps between looks at the held-out acceptance length.
        eval_rows: held-out answers in such a look, at most.
        checkpoint_every: optimiser steps between checkpoints; a killed run goes on from the last one.
    """
    from components.drafts.from_features import DataChoice, train_from_features
    from components.drafts.training import Schedule

    settings: dict[str, Any] = {
        "intermediate_size": intermediate_size,
        "step_decay": step_decay,
        "normaliser": normaliser,
        "init_seed": ctx.seed,
    }
    settings |= {"ttt_steps": ttt_steps} if method == "eagle3" else {}
    settings |= {"mtp_modules": mtp_modules, "first_hidden": first_hidden} if method == "mtp" else {}
    schedule = Schedule(
        num_steps,
        peak_lr,
        warmup_share,
        weight_decay,
        clip_norm,
        eval_every,
        checkpoint_every,
        precision,
        optimizer,
        muon_lr_scale,
    )
    choice = DataChoice(draft_vocab_size, batch_tokens, max_tokens, eval_rows)
    return train_from_features(target, features, start_from, method, settings, schedule, choice, ctx)
