"""Step `targets.pretrain_target`: trains a small target from nothing: tokenizer, weights, quality, model card.

The card is written from the measured facts of the target alone.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from components.contract import Context, Corpus, Target, UserError
from components.files import written_whole
from components.outside_json import JsonObject
from components.targets.config import facts_of
from components.targets.pretraining.llama import LlamaShape, save_model
from components.targets.pretraining.muon import multiplies_bfloat16
from components.targets.pretraining.plan import TrainingPlan, pack_documents, read_documents
from components.targets.pretraining.quality import held_out_windows, measure_quality
from components.targets.pretraining.tokenizer import (
    CHAT_TEMPLATE,
    MARKUP,
    ROLE_TOKENS,
    save_tokenizer,
    text_pieces,
    train_byte_bpe,
)
from components.targets.pretraining.training_run import (
    LATEST,
    STREAM_FILES,
    TrainingRun,
    checkpoint_weights,
    extra_processes,
    join_group,
    keep_freed_memory,
    leave_group,
)


def pretrain_target(
    corpus: Corpus,
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    num_steps: int,
    decay_steps: int,
    tokens_per_step: int,
    sequence_length: int,
    decay_sequence_length: int,
    matrix_lr: float,
    vector_lr: float,
    weight_decay: float,
    repetition_weight: float,
    repetition_ratio: float,
    unlikelihood_weight: float,
    unlikelihood_every: int,
    group_repeats: dict[str, int] | None,
    decay_group_repeats: dict[str, int] | None,
    num_processes: int,
    compile_layers: bool,
    checkpoint_minutes: float,
    ctx: Context,
) -> Target:
    """The step `targets.pretrain_target`; its settings are explained in components/targets/steps.py."""
    plan = TrainingPlan(
        shape=LlamaShape(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            intermediate_size=intermediate_size,
            max_positions=max(sequence_length, decay_sequence_length),
        ),
        num_steps=num_steps,
        decay_steps=min(decay_steps, num_steps),
        tokens_per_step=tokens_per_step,
        sequence_length=sequence_length,
        decay_sequence_length=decay_sequence_length,
        matrix_lr=matrix_lr,
        vector_lr=vector_lr,
        weight_decay=weight_decay,
        decay_group_repeats=group_repeats or {} if decay_group_repeats is None else decay_group_repeats,
        repetition_weight=repetition_weight,
        repetition_ratio=repetition_ratio,
        unlikelihood_weight=unlikelihood_weight,
        unlikelihood_every=unlikelihood_every,
        num_processes=num_processes if ctx.device == "cpu" else 1,
        compile_layers=compile_layers,
        dtype="bfloat16" if multiplies_bfloat16(torch.device(ctx.device)) else "float32",
        microbatch_tokens=TrainingPlan.microbatch_tokens if ctx.device == "cpu" else tokens_per_step,
        device=ctx.device,
        seed=ctx.seed,
    )
    _check_plan(plan)
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


def _check_plan(plan: TrainingPlan) -> None:
    """Raises UserError for sizes that do not divide each other as the model and the processes need."""
    if plan.shape.num_heads % plan.shape.num_kv_heads or plan.shape.hidden_size % (2 * plan.shape.num_heads):
        raise UserError("num_kv_heads must divide num_heads, and twice num_heads must divide hidden_size")
    share = plan.tokens_per_step // plan.num_processes
    for name in ("sequence_length", "decay_sequence_length"):
        length = getattr(plan, name)
        piece = max(length, min(share, plan.microbatch_tokens) // length * length)
        if plan.tokens_per_step % plan.num_processes or share % piece:
            raise UserError(
                f"tokens_per_step: {plan.tokens_per_step} is not {plan.num_processes} processes times whole "
                f"microbatches of {piece} tokens ({name} {length}); use a multiple of {plan.num_processes * piece}"
            )


def _make_tokenizer(corpus: Corpus, plan: TrainingPlan, ctx: Context) -> Tokenizer:
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
    return corpus.info.get("markup") == MARKUP


def _token_stream(
    name: str, corpus: Corpus, tokenizer: Tokenizer, repeats: Mapping[str, int], ctx: Context
) -> np.ndarray:
    path = ctx.scratch / name
    if not path.exists():
        with written_whole(path) as beside, beside.open("wb") as file:
            np.save(file, pack_documents(corpus.path / "train.jsonl", tokenizer, repeats))
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


def _write_target(plan: TrainingPlan, corpus: Corpus, tokenizer: Tokenizer, facts: JsonObject, ctx: Context) -> Target:
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


_LICENCES = {"PSF-2.0": "Python Software Foundation License 2 (https://docs.python.org/3/license.html)"}


class _CardTexts(NamedTuple):
    """The fixed texts of a card for one kind of corpus. prompt: has {} for the number of tokens."""

    title: str
    opening: str
    prompt: str
    limits: str


_CODE = _CardTexts(
    "Draftsmith's built-in target",
    """A small Llama that continues Python code. It is the large model of every example, test and quickstart that must
run on a laptop without a download; it is not a useful assistant. It was trained from random weights by the pipeline
`build-builtin-target`.""",
    "{} tokens that ends a `def` line of a held-out library file",
    """It writes plausible Python, not correct Python. It has seen nothing but the standard library: no other language,
hardly any prose, no chats, no instructions. End-of-text stands at the end of files only, so a continuation seldom ends
by itself. Greedy text repeats itself more than real code does. The test suite of a held-out module may be in the
training data (files are held out one by one). Do not read its acceptance lengths as those of a large model.""",
)
_CHATS = _CardTexts(
    "A small chat target",
    """A small Llama that answers in chats. It stands in for a large model where a pipeline must show something about
its data (a mix of languages, say) without a download; it is not a useful assistant. It was trained from random weights
by `targets.pretrain_target` on chats.""",
    "at most {} tokens that ends where an answer begins in a held-out chat",
    """It writes plausible sentences, not true ones: it has seen nothing but the chats named above. A turn ends with the
end-of-text token; roles have tokens of their own, and the chat template writes both. Its licence is that of its chats.
Do not read its acceptance lengths as those of a large model.""",
)


def training_machine(num_processes: int, device: str) -> JsonObject:
    """Kind of machine and versions, for the card; nothing that names a particular machine."""
    return {
        "cpu": _cpu_model(),
        "device": device,
        "processes": num_processes,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def write_card(folder: Path, facts: JsonObject) -> None:
    """Write README.md. facts: the `info` of the Target made by `pretrain_target`."""
    (folder / "README.md").write_text(card_text(facts), encoding="utf-8")


def card_text(facts: JsonObject) -> str:
    """The card as Markdown, from the Target's facts alone."""
    layers = facts["plan"]["shape"]["num_layers"]
    window, loops = facts["plan"]["shape"]["max_positions"], facts["loops"]
    texts = _CHATS if facts["corpus"].get("markup") else _CODE
    return f"""# {texts.title}

{texts.opening}

{_table(_model_rows(facts))}

Deep and narrow on purpose: a drafter of one layer then costs about 1/{layers} of the target's layers, as it does for a
large model.

## Training

{_table(_training_rows(facts))}

## Quality

{_table(_quality_rows(facts))}

Held-out loss: windows of {window} tokens, weights as stored. Distinct bigrams / all bigrams of a text, averaged over
{loops["num_measured"]} continuations of {loops["continuation_tokens"]} tokens, each after a prompt of
{texts.prompt.format(loops["prompt_tokens"])}. A continuation ends before the first
end-of-text token ({loops["num_too_short"]} were too short to count).

## Limits

{texts.limits}
"""


def _model_rows(facts: JsonObject) -> dict[str, str]:
    shape = facts["plan"]["shape"]
    return {
        "architecture": f"{facts['architecture']}, {shape['num_layers']} layers, width {shape['hidden_size']}, "
        f"feed-forward {shape['intermediate_size']}, tied embeddings",
        "attention": f"{shape['num_heads']} query heads, {shape['num_kv_heads']} key-value heads",
        "key-value cache": f"{_kv_numbers(shape):,} numbers a token ({4 * _kv_numbers(shape):,} bytes in float32)",
        "parameters": f"{facts['num_params']:,} ({facts['weight_bytes'] / 1e6:.1f} MB, {facts['stored_dtype']})",
        "tokenizer": f"byte-level BPE, {shape['vocab_size']} tokens, {facts['characters_per_token']:.2f} characters a "
        "token on held-out text; adds no special tokens by itself",
        "longest text": f"{shape['max_positions']} tokens",
    }


def _kv_numbers(shape: JsonObject) -> int:
    """2 n h_kv d: keys and values of every layer, as shape.kv_bytes_per_token counts them."""
    head_dim = shape["hidden_size"] // shape["num_heads"]
    return int(2 * shape["num_layers"] * shape["num_kv_heads"] * head_dim)


def _training_rows(facts: JsonObject) -> dict[str, str]:
    corpus, machine, plan = facts["corpus"], facts["trained_on"], facts["plan"]
    against_loops = []
    if plan["repetition_weight"]:
        against_loops.append(f"pseudo-repetition (weight {plan['repetition_weight']:g}) at every step")
    if plan["unlikelihood_weight"]:
        every = plan["unlikelihood_every"]
        against_loops.append(
            f"sequence-level unlikelihood (weight {plan['unlikelihood_weight']:g}) at one step in {every}"
        )
    licence = str(corpus.get("licence", "unknown"))
    if corpus.get("markup"):
        languages = ", ".join(f"{name} {count:,}" for name, count in corpus["languages"]["train"].items())
        source, hashed, unit = f"chats by language: {languages}", "question", "chats"
    else:
        source = f"{corpus.get('source', 'given')}, Python {corpus.get('python_version', '?')}"
        hashed, unit = "path", "files"
    return {
        "corpus": f"{source}: {corpus.get('train_documents', 0):,} {unit}, {facts['corpus_tokens']:,} tokens an epoch",
        "licence of the corpus": _LICENCES.get(licence, licence),
        "held out": f"{corpus.get('held_out_documents', 0):,} {unit} ({corpus.get('held_out_percent', '?')} % by a "
        f"hash of the {hashed}), never trained on",
        "tokens seen": f"{facts['tokens_seen']:,}: {facts['epochs']:.1f} epochs ({_repeats(facts['group_repeats'])}), "
        f"in the decay {facts['decay_epochs']:.1f} ({_repeats(plan['decay_group_repeats'])})",
        "optimiser": "Muon (matrices), AdamW (embeddings, gains); warm-up, stable, linear decay over the last "
        f"{plan['decay_steps']:,} of {plan['num_steps']:,} steps of {plan['tokens_per_step']:,} tokens",
        "against loops, in the decay": "; ".join(against_loops) or "nothing",
        "sequence length": f"{plan['sequence_length']}, in the decay {plan['decay_sequence_length']} tokens",
        "time": f"{facts['training_seconds'] / 60:.0f} minutes, processes: {machine['processes']}, {plan['dtype']}",
        "machine": f"{machine['cpu']}, {machine['device']}",
        "versions": f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"tokenizers {machine['tokenizers']}",
    }


def _repeats(group_repeats: Mapping[str, int]) -> str:
    named = ", ".join(f"{group} x {times}" for group, times in group_repeats.items())
    return f"of which {named}" if named else "everything once"


def _quality_rows(facts: JsonObject) -> dict[str, str]:
    whose = "chats" if facts["corpus"].get("markup") else "files"
    return {
        **{f"held-out loss, {group}": f"{loss:.3f} nats/token" for group, loss in facts["held_out_loss"].items()},
        "distinct bigrams, greedy continuations": f"{facts['loops']['greedy']:.3f}",
        f"distinct bigrams, the {whose}' own continuations": f"{facts['loops']['real']:.3f}",
    }


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
