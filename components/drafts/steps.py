"""The steps of components/drafts, as pipelines.yaml names them: what each takes, its settings, and what it makes.

A step imports its implementation when it runs, so that `check` and `plan` read its settings in no time.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from components.contract import Context, Draft, Features, Target
from components.drafts.settings import quantise_draft_settings as quantise_draft_settings
from components.drafts.settings import train_draft_settings as train_draft_settings
from components.methods import MethodName
from components.targets.remembered import sha256_of
from components.targets.source import load_target_fingerprint, local_folder
from components.weight_format import Weights

DraftLayout = Literal[
    "auto",
    "dflash",
    "speculators-mtp",
    "speculators",
    "p-eagle",
    "eagle3",
    "medusa",
    "eagle1",
    "own-mtp",
    "mimo",
    "mtp",
    "causal-lm",
]


def add_suffix(
    draft: Draft,
    features: Features | None = None,
    *,
    min_score: Annotated[float, Field(ge=0, le=64)] | None = None,
    depth: Annotated[int, Field(ge=0, le=16)] = 0,
    max_draft_tokens: Annotated[int, Field(ge=1, le=64)] = 16,
    cached_tokens: Annotated[int, Field(ge=0, le=4_000_000)] = 0,
    ctx: Context,
) -> Draft:
    """Set suffix decoding beside a trained drafter: where the text repeats a copy drafts, elsewhere the drafter.

    What comes out is a drafter of its own: measured by the same maps, chosen by the same rule, decoded as a chain.

    Args:
        draft: the trained drafter; its files are copied.
        features: whose answers are copied from; for `cached_tokens` alone.
        min_score: right tokens that a copy must promise to draft; null: as many as the drafter had accepted a round in
            held-out evaluation, half its trained depth where that is unknown.
        depth: the most tokens of the drafter's own chains; 0: its trained depth.
        max_draft_tokens: the most tokens of a copy.
        cached_tokens: tokens of earlier answers that are searched beside the request's own text; 0: none.
    """
    from components.drafts.suffix_beside import add_suffix as run

    return run(
        draft,
        features,
        min_score=min_score,
        depth=depth,
        max_draft_tokens=max_draft_tokens,
        cached_tokens=cached_tokens,
        ctx=ctx,
    )


def quantise_draft(
    draft: Draft,
    *,
    weights: Weights = "int8",
    group_size: Annotated[int, Field(ge=0, le=4096)] | None = None,
    keep: list[str] = ["fc", "lm_head"],  # noqa: B006 - read, never changed
    ctx: Context,
) -> Draft:
    """Store a trained drafter in fewer bits: weight-only, symmetric, rounded to nearest;
    drafts/storage/quantisation.py says how.

    Engines, measurements and further training see the rounded weights, dequantised as they are read. Norms, biases and
    embeddings are never quantised; they and what `keep` names are stored in bfloat16.

    Args:
        draft: the drafter as it was trained.
        weights: bf16 rounds every weight to bfloat16; int8 and int4 quantise the linear layers.
        group_size: neighbouring inputs that share a scale; 0 gives every output channel one. Left out: 0 for int8, 32
            for int4. It must divide the inputs of every layer. 32 is what llama.cpp's Q8_0 has.
        keep: linear layers that stay in bfloat16, by the last part of their name. fc (EAGLE's entry, from the target's
            large hidden states) is no quantised layer in SGLang, lm_head is none wherever engines quantise "Linear"
            layers alone, and both have much to lose: every guess goes through them. [] quantises all, as llama.cpp's
            converter does. A drafter need not have the layers of the default; any other name must be one of its own.
    """
    from components.drafts.quantise import quantise_draft as run

    return run(draft, weights=weights, group_size=group_size, keep=keep, ctx=ctx)


def import_draft(
    target: Target,
    *,
    model: Annotated[str, Field(min_length=1)],
    method: MethodName = "eagle3",
    layout: DraftLayout = "auto",
    ctx: Context,
) -> Draft:
    """Adopt a drafter that another project trained: read its checkpoint, whatever its format, and fit it to a target.

    It then is a drafter like those that are trained here: measured, chosen, exported to other formats, and tuned by
    drafts.train_draft (start_from). What does not fit the target, or what no method here can hold, is said in one line.

    Args:
        target: the model that it drafts for.
        model: a folder with config.json and *.safetensors, or a hub id like owner/name (owner/name@revision pins it).
            Pickled weights are never opened, and no code of its own runs.
        method: how it drafts. It must be right: what measures the drafter, and which formats and engines take it, is
            known by it before the checkpoint is read.
        layout: its format; auto recognises it by its config and the names of its tensors.
    """
    from components.drafts.importing.imported_draft import import_draft as run

    return run(target, model=model, method=method, layout=layout, ctx=ctx)


def import_draft_fingerprint(settings: dict[str, Any]) -> dict[str, str]:
    """The content of the checkpoint, for the step's key: file name -> sha256; a hub id counts by its name alone."""
    folder = local_folder(settings["model"])
    if folder is None:
        return {}
    files = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])
    return {file.name: sha256_of(file) for file in files}


def train_draft(
    target: Target,
    features: Features | None = None,
    start_from: Draft | None = None,
    *,
    method: Literal[MethodName, "auto"] = "eagle3",
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
    checkpoint_minutes: Annotated[float, Field(gt=0)] = 2.0,
    micro_batch_tokens: Annotated[int, Field(ge=0)] = 0,
    recompute: bool = False,
    deterministic: bool = True,
    processes: Annotated[int, Field(ge=1, le=64)] = 1,
    nodes: Annotated[int, Field(ge=1, le=64)] = 1,
    sharding: Literal["none", "full"] = "none",
    ctx: Context,
) -> Draft:
    """Train a drafter for a target and keep the weights with the best held-out acceptance length.

    A method that learns nothing (prompt lookup) makes a Draft of its settings alone, in no time and without features;
    suffix decoding also keeps the answers of the features if it is told to (`cached_tokens`).

    Args:
        target: the model to draft for.
        features: its hidden states over its own answers, splits train and validation, stored (data.record_features) or
            computed along the way (data.features_on_the_fly); trained methods need them.
        start_from: a drafter to go on from instead of starting over, of the same method and shape: its weights and
            vocabulary, its settings where none are given, a new optimiser. The schedule begins again with its warm-up,
            so give a peak_lr well below the one it was trained with (a quarter). If no step improves on it, its own
            weights are kept.
        method: how to draft; components/drafts/METHOD.py says what each one is. auto is the method of start_from.
        settings: what methods are told, by method: {eagle3: {ttt_steps: 5}}; only the entry of `method` counts, the
            others are checked too, so that a matrix over methods can hold those of all. `draftsmith explain METHOD`
            lists what each one can be told.
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
        checkpoint_minutes: minutes between checkpoints, from the last of which a killed run goes on. An interrupted or
            cancelled one writes another before it ends, after the optimiser step at hand, if that comes in 20 seconds.
        micro_batch_tokens: tokens of a batch that are in memory at once, padding included; the gradients of a batch are
            summed over its parts, and are those of the whole.  0: the batch at once.
        recompute: keep no activations inside the drafter's blocks and compute them again for the gradients: much less
            memory for a third more time, and the same gradients.
        deterministic: on a GPU, kernels whose sums do not depend on timing, so that a resumed run has the same bits.
        processes: training processes on every node, each on a share of every batch; on GPUs one each, on a CPU they
            share its threads. Batches are the same whatever the number, and losses and weights but for rounding. When
            one dies, all go on from the last checkpoint.
        nodes: machines that train together, this one among them. Each of the others runs
            `python -m components.drafts.training.node`; DRAFTSMITH_RENDEZVOUS=HOST:PORT says to all where they meet.
        sharding: what each process keeps from step to step. none: all weights and AdamW's moments. full: its share of
            weights, gradients and moments (FSDP2), which leaves room for a large drafter; more is sent.
    """
    from components.drafts.training.from_features import train_draft as run

    return run(
        target,
        features,
        start_from,
        method=method,
        settings=settings,
        num_steps=num_steps,
        optimizer=optimizer,
        peak_lr=peak_lr,
        muon_lr_scale=muon_lr_scale,
        warmup_share=warmup_share,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        batch_tokens=batch_tokens,
        max_tokens=max_tokens,
        packing=packing,
        order=order,
        draft_vocab_size=draft_vocab_size,
        precision=precision,
        eval_every=eval_every,
        eval_rows=eval_rows,
        checkpoint_minutes=checkpoint_minutes,
        micro_batch_tokens=micro_batch_tokens,
        recompute=recompute,
        deterministic=deterministic,
        processes=processes,
        nodes=nodes,
        sharding=sharding,
        ctx=ctx,
    )


def train_draft_fingerprint(settings: dict[str, Any]) -> dict[str, str]:
    """The content of a given draft model, for the step's key: file name -> sha256; {} where none is given."""
    model = settings["settings"].get("draft-model", {}).get("model", "")
    return load_target_fingerprint({"model": model}) if model and settings["method"] == "draft-model" else {}
