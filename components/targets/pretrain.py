"""The step that trains a small target from nothing: tokenizer, language-model training, quality, model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from components.contract import Context, Corpus, Target, UserError

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from components.targets.training_plan import TrainingPlan

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
    from components.targets.training_worker import STREAM_FILES

    decay_group_repeats = group_repeats or {} if decay_group_repeats is None else decay_group_repeats
    settings: dict[str, Any] = dict(locals())
    shape, schedule = ({name: settings[name] for name in names} for names in (_SHAPE_SETTINGS, _PLAN_SETTINGS))
    plan = _make_plan(shape, schedule, ctx)
    tokenizer = _make_tokenizer(corpus, plan, ctx)
    stable, decay = STREAM_FILES
    streams = (
        _token_stream(stable, corpus, tokenizer, group_repeats or {}, ctx),
        _token_stream(decay, corpus, tokenizer, plan.decay_group_repeats, ctx),
    )
    seconds = _train(plan, streams, corpus, tokenizer, checkpoint_minutes, ctx)
    facts = {
        "group_repeats": group_repeats or {},
        "corpus_tokens": len(streams[0]),
        "decay_corpus_tokens": len(streams[1]),
        "training_seconds": seconds,
    }
    return _write_target(plan, corpus, tokenizer, facts, ctx)


_SHAPE_SETTINGS = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")
_PLAN_SETTINGS = (
    "num_steps",
    "decay_steps",
    "tokens_per_step",
    "sequence_length",
    "decay_sequence_length",
    "matrix_lr",
    "vector_lr",
    "weight_decay",
    "decay_group_repeats",
    "repetition_weight",
    "repetition_ratio",
    "unlikelihood_weight",
    "unlikelihood_every",
    "num_processes",
    "compile_layers",
)


def _make_plan(shape: Mapping[str, Any], schedule: Mapping[str, Any], ctx: Context) -> TrainingPlan:
    import torch

    from components.targets.lean_llama import LlamaShape
    from components.targets.training_plan import TrainingPlan

    fast_bfloat16 = ctx.device != "cpu" or bool(torch.cpu.get_capabilities().get("avx512_bf16", False))
    longest = max(schedule["sequence_length"], schedule["decay_sequence_length"])
    plan = TrainingPlan(
        shape=LlamaShape(**shape, max_positions=longest),
        **{
            **schedule,
            "decay_steps": min(schedule["decay_steps"], schedule["num_steps"]),
            "num_processes": schedule["num_processes"] if ctx.device == "cpu" else 1,
        },
        dtype="bfloat16" if fast_bfloat16 else "float32",
        device=ctx.device,
        seed=ctx.seed,
    )
    if plan.shape.num_heads % plan.shape.num_kv_heads or plan.shape.hidden_size % (2 * plan.shape.num_heads):
        raise UserError("num_kv_heads must divide num_heads, and twice num_heads must divide hidden_size")
    share = plan.tokens_per_step // plan.num_processes
    for name in ("sequence_length", "decay_sequence_length"):
        length = schedule[name]
        piece = max(length, min(share, plan.microbatch_tokens) // length * length)
        if plan.tokens_per_step % plan.num_processes or share % piece:
            raise UserError(
                f"tokens_per_step: {plan.tokens_per_step} is not {plan.num_processes} processes times whole "
                f"microbatches of {piece} tokens ({name} {length}); use a multiple of {plan.num_processes * piece}"
            )
    return plan


def _make_tokenizer(corpus: Corpus, plan: TrainingPlan, ctx: Context) -> Tokenizer:
    from tokenizers import Tokenizer

    from components.targets.byte_bpe import save_tokenizer, train_byte_bpe
    from components.targets.chat_markup import CHAT_TEMPLATE, ROLE_TOKENS, text_pieces
    from components.targets.token_windows import read_documents

    if not all((ctx.out / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        texts = (text for _, text in read_documents(corpus.path / "train.jsonl"))
        if is_chats(corpus):
            pieces = (piece for text in texts for piece in text_pieces(text))
            trained = train_byte_bpe(pieces, plan.shape.vocab_size, ROLE_TOKENS)
            save_tokenizer(trained, ctx.out, plan.shape.max_positions, CHAT_TEMPLATE)
        else:
            save_tokenizer(train_byte_bpe(texts, plan.shape.vocab_size), ctx.out, plan.shape.max_positions)
    tokenizer = Tokenizer.from_file(str(ctx.out / "tokenizer.json"))
    if (least := tokenizer.get_vocab_size()) > plan.shape.vocab_size:
        raise UserError(f"vocab_size: {plan.shape.vocab_size} does not hold bytes and specials; use {least} or more")
    return tokenizer


def is_chats(corpus: Corpus) -> bool:
    """Whether its documents are written in chat markup."""
    from components.targets.chat_markup import MARKUP

    return corpus.info.get("markup") == MARKUP


def _token_stream(
    name: str, corpus: Corpus, tokenizer: Tokenizer, repeats: Mapping[str, int], ctx: Context
) -> np.ndarray:
    import numpy as np

    from components.targets.token_windows import pack_documents

    path = ctx.scratch / name
    if not path.exists():
        partial = path.with_suffix(".partial.npy")
        np.save(partial, pack_documents(corpus.path / "train.jsonl", tokenizer, repeats))
        partial.rename(path)
    stream: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return stream


def _train(
    plan: TrainingPlan,
    streams: tuple[np.ndarray, np.ndarray],
    corpus: Corpus,
    tokenizer: Tokenizer,
    checkpoint_minutes: float,
    ctx: Context,
) -> float:
    import torch

    from components.targets.quality import held_out_windows
    from components.targets.training_run import TrainingRun, join_group, keep_freed_memory, leave_group
    from components.targets.training_worker import extra_processes

    torch.set_num_threads(1 if plan.num_processes > 1 else ctx.num_threads)
    keep_freed_memory()
    held_out = held_out_windows(corpus.path / "held_out.jsonl", tokenizer, plan.sequence_length)

    def report(step: int, metrics: dict[str, float]) -> None:
        ctx.record(step, **metrics)
        ctx.progress(step, plan.num_steps, "training")

    with extra_processes(plan, ctx.scratch) as meeting:
        join_group(meeting, 0, plan.num_processes)
        run = TrainingRun(plan, streams, ctx.scratch)
        _drop_metrics_after(run.steps_done, ctx)
        seconds = run.train(report, held_out=held_out, checkpoint_seconds=60 * checkpoint_minutes)
        leave_group(plan.num_processes)
    return seconds


def _drop_metrics_after(step: int, ctx: Context) -> None:
    """Drop metrics recorded since the last checkpoint of an interrupted run: those steps are done again."""
    path = ctx.out / "metrics.jsonl"
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")


def _write_target(
    plan: TrainingPlan, corpus: Corpus, tokenizer: Tokenizer, facts: Mapping[str, Any], ctx: Context
) -> Target:
    from components.targets.card import training_machine, write_card
    from components.targets.hf_files import save_model
    from components.targets.inspect_files import facts_of
    from components.targets.quality import measure_quality
    from components.targets.training_checkpoints import LATEST, checkpoint_weights

    _, weights = checkpoint_weights(ctx.scratch / LATEST)
    save_model(ctx.out, plan.shape, weights)
    ctx.progress(0, 1, "measuring quality")
    tokens_seen = plan.num_steps * plan.tokens_per_step
    info = {
        **facts_of(ctx.out, location="pretrain_target", trust_remote_code=False, dtype="auto", device=ctx.device),
        **facts,
        "corpus": dict(corpus.info),
        "weight_bytes": (ctx.out / "model.safetensors").stat().st_size,
        "tokens_seen": tokens_seen,
        "epochs": plan.decay_start * plan.tokens_per_step / facts["corpus_tokens"],
        "decay_epochs": plan.decay_steps * plan.tokens_per_step / facts["decay_corpus_tokens"],
        "plan": asdict(plan),
        "trained_on": training_machine(plan.num_processes, ctx.device),
        **measure_quality(ctx.out, plan, corpus.path / "held_out.jsonl", tokenizer, is_chats(corpus)),
    }
    write_card(ctx.out, info)
    return Target.of_step(ctx, info)
