"""The steps of components/targets, as pipelines.yaml names them: what each takes, its settings, and what it makes.

A step imports its implementation when it runs, so that `check` and `plan` read its settings in no time.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from components.contract import Context, Corpus, Target
from components.outside_json import JsonObject

Positive = Annotated[int, Field(ge=1)]

Rate = Annotated[float, Field(gt=0)]


def pretrain_target(
    corpus: Corpus,
    *,
    vocab_size: Annotated[int, Field(ge=260, le=65535)] = 4096,
    hidden_size: Positive = 192,
    num_layers: Positive = 16,
    num_heads: Positive = 6,
    num_kv_heads: Positive = 2,
    intermediate_size: Positive = 576,
    num_steps: Positive = 6000,
    decay_steps: Annotated[int, Field(ge=0)] = 1700,
    tokens_per_step: Annotated[int, Field(ge=16)] = 8192,
    sequence_length: Annotated[int, Field(ge=8)] = 256,
    decay_sequence_length: Annotated[int, Field(ge=8)] = 1024,
    matrix_lr: Rate = 0.02,
    vector_lr: Rate = 3e-3,
    weight_decay: Annotated[float, Field(ge=0)] = 0.02,
    repetition_weight: Annotated[float, Field(ge=0)] = 0.0,
    repetition_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5,
    unlikelihood_weight: Annotated[float, Field(ge=0)] = 0.0,
    unlikelihood_every: Positive = 2,
    group_repeats: dict[str, int] | None = None,
    decay_group_repeats: dict[str, int] | None = None,
    num_processes: Annotated[int, Field(ge=1, le=64)] = 2,
    compile_layers: bool = False,
    checkpoint_minutes: Rate = 5.0,
    ctx: Context,
) -> Target:
    """Train a small Llama on a corpus; write it in Hugging Face format, bf16, with measured quality and a model card.

    A corpus in chat markup (`data.corpus_from_chats`) gives a target that answers: its tokenizer knows the roles and
    brings a chat template, and an answer ends with the end-of-text token.

    An interrupted run goes on from its last checkpoint and ends with the same weights, bit for bit. A run before its
    decay, called again on the same scratch folder with other `num_steps` and `decay_steps`, ends as one planned so.

    Args:
        vocab_size: tokens of the byte-level BPE, with 256 bytes and three specials (and four roles for chats).
        hidden_size: width of the residual stream; a multiple of twice `num_heads`.
        num_layers: layers; many narrow ones make a one-layer drafter relatively cheap.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        intermediate_size: width of the gated feed-forward part.
        num_steps: optimiser steps, the decay included.
        decay_steps: the last steps, over which learning rates fall linearly to zero.
        tokens_per_step: tokens in an optimiser step, over all processes.
        sequence_length: tokens in a window before the decay.
        decay_sequence_length: tokens in a window during the decay; also the longest text of the model.
        matrix_lr: peak learning rate of Muon, for the matrices of the layers.
        vector_lr: peak learning rate of AdamW, for embeddings and norm gains.
        weight_decay: decoupled weight decay, in units of the learning rate (gains: none).
        repetition_weight: weight, during the decay, of a loss that makes repeated text less likely with each time.
        repetition_ratio: how likely a repeated token should be, as a fraction of its probability one occurrence before.
        unlikelihood_weight: weight, during the decay, of making loops in the model's own greedy text less likely.
        unlikelihood_every: steps of the decay between two that do so; writing that text takes about a step's time.
        group_repeats: how often the documents of a source group occur in an epoch; a group not named: once.
        decay_group_repeats: the same during the decay; null: as before it.
        num_processes: data-parallel processes of one thread each, on CPUs; on CUDA always one.
        compile_layers: fuse each layer with torch.compile: a fifth faster, needs a C++ compiler on CPUs.
        checkpoint_minutes: minutes between checkpoints.
    """
    from components.targets.pretraining.pretrain import pretrain_target as run

    return run(
        corpus,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        num_steps=num_steps,
        decay_steps=decay_steps,
        tokens_per_step=tokens_per_step,
        sequence_length=sequence_length,
        decay_sequence_length=decay_sequence_length,
        matrix_lr=matrix_lr,
        vector_lr=vector_lr,
        weight_decay=weight_decay,
        repetition_weight=repetition_weight,
        repetition_ratio=repetition_ratio,
        unlikelihood_weight=unlikelihood_weight,
        unlikelihood_every=unlikelihood_every,
        group_repeats=group_repeats,
        decay_group_repeats=decay_group_repeats,
        num_processes=num_processes,
        compile_layers=compile_layers,
        checkpoint_minutes=checkpoint_minutes,
        ctx=ctx,
    )


def fine_tune_target(
    target: Target,
    corpus: Corpus,
    *,
    num_steps: Positive = 200,
    peak_lr: Rate = 1e-4,
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
    weight_decay: Annotated[float, Field(ge=0)] = 0.01,
    tokens_per_step: Annotated[int, Field(ge=8)] = 2048,
    sequence_length: Annotated[int, Field(ge=8)] = 256,
    ctx: Context,
) -> Target:
    """Go on training a target on a corpus: the changed target that a drafter of the old one then has to follow.

    The result is a model folder like the target's, with its tokenizer and its dtype. Every causal language model that
    transformers opens whole can be changed, code of its own and quantised weights excepted. An interrupted run begins
    again.

    Args:
        target: the model to go on from; it stays as it is.
        corpus: plain documents, each ended by the target's end token.
        num_steps: optimiser steps (AdamW, all weights, in float32).
        peak_lr: learning rate after warm-up; a cosine takes it to a tenth.
        warmup_share: share of num_steps that warms up linearly.
        weight_decay: decoupled decay of all weights.
        tokens_per_step: tokens in an optimiser step; a multiple of sequence_length.
        sequence_length: tokens in a window.
    """
    from components.targets.pretraining.fine_tune import fine_tune_target as run

    return run(
        target,
        corpus,
        num_steps=num_steps,
        peak_lr=peak_lr,
        warmup_share=warmup_share,
        weight_decay=weight_decay,
        tokens_per_step=tokens_per_step,
        sequence_length=sequence_length,
        ctx=ctx,
    )


def load_target(
    *,
    model: Annotated[str, Field(min_length=1)] = "builtin",
    trust_remote_code: bool = False,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device_map: Literal["none", "auto"] = "none",
    tp_size: Annotated[int, Field(ge=1, le=64)] = 1,
    ctx: Context,
) -> Target:
    """Name the target, the large model whose decoding is sped up, and check that Draftsmith can work with it.

    Args:
        model: "builtin", a folder in Hugging Face format (config.json, *.safetensors, a tokenizer), or a hub id,
            owner/name or owner/name@revision.
        trust_remote_code: run Python code that comes with the model; leave off unless you have read that code.
        dtype: the numbers it computes with; auto is float32 on a CPU and the checkpoint's own on a GPU.
        device_map: auto lets transformers put its layers onto all GPUs of a machine, which work in turns: for a target
            that one GPU does not hold. It then runs in transformers' code, in every step.
        tp_size: processes, each with a GPU and a part of every layer's matrices, that data.write_answers,
            data.record_features and bench.measure_acceptance run together (transformers' tp_plan); other steps refuse
            such a target, but for training on stored or served features.
    """
    from components.targets.config import load_target as run

    return run(
        model=model,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        device_map=device_map,
        tp_size=tp_size,
        ctx=ctx,
    )


def load_target_fingerprint(settings: JsonObject) -> dict[str, str]:
    """The content behind `model`, for the step's key: file name -> sha256.

    Planning never asks the network, so a hub id counts by its name alone; pin it as owner/name@revision."""
    from components.targets.source import load_target_fingerprint as fingerprint

    return fingerprint(settings)


def make_stand_in(*, model: Annotated[str, Field(min_length=1)], ctx: Context) -> Target:
    """Make a small random target of a large one's configuration and tokenizer, without its weights, for a rehearsal.

    It keeps the architecture, every layer and kind of layer, head size, positions, vocabulary and chat template.

    Args:
        model: a folder with config.json, best with the files of its tokenizer, or a hub id, owner/name@revision.
    """
    from components.targets.stand_in import make_stand_in as run

    return run(model=model, ctx=ctx)


def make_stand_in_fingerprint(settings: JsonObject) -> dict[str, str]:
    """The content behind `model`, weights aside, for the step's key: file name -> sha256; a hub id counts by name."""
    from components.targets.source import make_stand_in_fingerprint as fingerprint

    return fingerprint(settings)
