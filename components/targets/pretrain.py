"""The step that trains the built-in target from nothing: tokenizer, language-model training, quality, model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from components.contract import Context, Corpus, Target, UserError

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from components.targets.training_plan import TrainingPlan

TrainingDtype = Literal["auto", "bfloat16", "float32"]


def pretrain_target(
    corpus: Corpus,
    *,
    vocab_size: Annotated[int, Field(ge=259, le=65535, description="Tokens of the byte-level BPE.")] = 4096,
    hidden_size: Annotated[int, Field(ge=8, description="Width of the residual stream.")] = 192,
    num_layers: Annotated[int, Field(ge=1, description="Layers; many narrow ones make a drafter relatively cheap.")] = 16,
    num_heads: Annotated[int, Field(ge=1, description="Query heads.")] = 6,
    num_kv_heads: Annotated[int, Field(ge=1, description="Key and value heads.")] = 2,
    intermediate_size: Annotated[int, Field(ge=8, description="Width of the gated feed-forward layer.")] = 576,
    max_positions: Annotated[int, Field(ge=32, description="Longest text, tokens.")] = 1024,
    num_steps: Annotated[int, Field(ge=1, description="Optimiser steps.")] = 6000,
    warmup_steps: Annotated[int, Field(ge=0, description="Steps of linear warm-up.")] = 100,
    decay_steps: Annotated[int, Field(ge=0, description="Last steps, in which learning rates fall to zero.")] = 1700,
    tokens_per_step: Annotated[int, Field(ge=32, description="Tokens in an optimiser step, over all processes.")] = 8192,
    sequence_length: Annotated[int, Field(ge=16, description="Tokens in a window before the decay.")] = 256,
    decay_sequence_length: Annotated[int, Field(ge=16, description="Tokens in a window during the decay.")] = 1024,
    matrix_lr: Annotated[float, Field(gt=0, description="Peak learning rate of Muon, for matrices.")] = 0.02,
    vector_lr: Annotated[float, Field(gt=0, description="Peak learning rate of AdamW, for embeddings and gains.")] = 3e-3,
    weight_decay: Annotated[float, Field(ge=0, description="Decoupled weight decay, times the learning rate.")] = 0.02,
    max_grad_norm: Annotated[float, Field(gt=0, description="Global gradient norm above which it is clipped.")] = 1.0,
    microbatch_tokens: Annotated[int, Field(ge=16, description="Tokens in one forward pass of one process.")] = 2048,
    group_repeats: Annotated[
        dict[str, int] | None, Field(description="How often a source group's documents occur in an epoch; default once.")
    ] = None,
    num_processes: Annotated[int, Field(ge=1, le=64, description="Single-thread processes; one on CUDA.")] = 2,
    dtype: Annotated[TrainingDtype, Field(description="Of matrix products; auto: bfloat16 where it is fast.")] = "auto",
    compile_layers: Annotated[bool, Field(description="Fuse layers with torch.compile; needs a C++ compiler.")] = False,
    checkpoint_minutes: Annotated[float, Field(gt=0, description="Minutes between checkpoints.")] = 5.0,
    ctx: Context,
) -> Target:
    """Train a small Llama on a corpus and write it in Hugging Face format, bf16, with measured quality and a model card.

    An interrupted run goes on from its last checkpoint and ends with the same weights, bit for bit. A run in its stable
    phase may be relaunched with other `num_steps` and `decay_steps`: the result is that of a run so planned from the start.
    """
    from components.targets.lean_llama import LlamaShape
    from components.targets.training_plan import TrainingPlan

    plan = TrainingPlan(
        shape=LlamaShape(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            intermediate_size=intermediate_size,
            max_positions=max_positions,
        ),
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        decay_steps=min(decay_steps, num_steps),
        tokens_per_step=tokens_per_step,
        sequence_length=sequence_length,
        decay_sequence_length=decay_sequence_length,
        matrix_lr=matrix_lr,
        vector_lr=vector_lr,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        microbatch_tokens=microbatch_tokens,
        num_processes=num_processes if ctx.device == "cpu" else 1,
        dtype=_resolve_dtype(dtype, ctx.device),
        compile_layers=compile_layers,
        device=ctx.device,
        seed=ctx.seed,
    )
    _refuse_uneven(plan)
    tokenizer = _tokenizer(corpus, vocab_size, max_positions, ctx)
    stream = _token_stream(corpus, tokenizer, group_repeats or {}, ctx)
    _train(plan, stream, checkpoint_minutes, ctx)
    return _finish(plan, ctx)


def _resolve_dtype(dtype: TrainingDtype, device: str) -> str:
    import torch

    if dtype != "auto":
        return dtype
    fast = device != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    return "bfloat16" if fast else "float32"


def _refuse_uneven(plan: TrainingPlan) -> None:
    for name, length in (
        ("sequence_length", plan.sequence_length),
        ("decay_sequence_length", plan.decay_sequence_length),
    ):
        share = plan.tokens_per_step // plan.num_processes
        if plan.tokens_per_step % plan.num_processes or share % length or share % min(share, plan.microbatch_tokens):
            raise UserError(
                f"tokens_per_step {plan.tokens_per_step} must be {plan.num_processes} processes times whole windows of "
                f"{name} {length} and whole microbatches of {plan.microbatch_tokens}; change one of them"
            )
        if length > plan.shape.max_positions:
            raise UserError(f"{name} {length} exceeds max_positions {plan.shape.max_positions}; raise max_positions")


def _tokenizer(corpus: Corpus, vocab_size: int, max_positions: int, ctx: Context) -> Tokenizer:
    from tokenizers import Tokenizer

    from components.targets.byte_bpe import save_tokenizer, train_byte_bpe
    from components.targets.token_windows import read_documents

    path = ctx.out / "tokenizer.json"
    if not (ctx.out / "tokenizer_config.json").exists():
        texts = (text for _, text in read_documents(corpus.path / "train.jsonl"))
        save_tokenizer(train_byte_bpe(texts, vocab_size), ctx.out, max_positions)
    return Tokenizer.from_file(str(path))


def _token_stream(corpus: Corpus, tokenizer: Tokenizer, repeats: Mapping[str, int], ctx: Context) -> np.ndarray:
    import numpy as np

    from components.targets.token_windows import pack_documents

    path = ctx.scratch / "tokens.npy"
    if not path.exists():
        np.save(ctx.scratch / "tokens.partial.npy", pack_documents(corpus.path / "train.jsonl", tokenizer, repeats))
        (ctx.scratch / "tokens.partial.npy").rename(path)
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _train(plan: TrainingPlan, stream: np.ndarray, checkpoint_minutes: float, ctx: Context) -> None:
    import torch

    from components.targets.training_run import TrainingRun, join_group, keep_freed_memory
    from components.targets.training_worker import extra_processes

    torch.set_num_threads(1 if plan.num_processes > 1 else ctx.num_threads)
    keep_freed_memory()

    def report(step: int, metrics: dict[str, float]) -> None:
        ctx.record(step, **metrics)
        ctx.progress(step, plan.num_steps, "training")

    with extra_processes(plan, ctx.scratch) as meeting:
        join_group(meeting, 0, plan.num_processes)
        TrainingRun(plan, stream, ctx.scratch).train(report, checkpoint_seconds=60 * checkpoint_minutes)


def _finish(plan: TrainingPlan, ctx: Context) -> Target:
    from components.targets.hf_files import save_model
    from components.targets.training_checkpoints import LATEST, checkpoint_weights

    _, weights = checkpoint_weights(ctx.scratch / LATEST)
    save_model(ctx.out, plan.shape, weights)
    return Target.made(ctx, {})
