"""One training loop for every drafting method: warm-up and cosine, clipping, exact resume, held-out evaluation.

A run is determined by its settings and seed alone: batches follow from the seed, threads are pinned, and a
checkpoint holds all that the next step depends on, so a killed and resumed run ends with the same bits as an
uninterrupted one. The result is the weights with the best held-out acceptance length, not of the lowest loss.

Checkpoints are judged by real drafting from every position, each chain fed its own draft tokens. The loss falls long
after drafting stops improving, and teacher-forced acceptance is too optimistic. AL = 1 + sum_k P(the first k + 1 draft
tokens are all correct), bonus token included; the probability at depth k is over the positions that a chain of that
depth can reach (M_k of layers.py).

Exact resume: everything the next optimiser step depends on is in one safetensors file, written atomically. Weights and
the optimiser's moments are tensors; the step and the best held-out result are JSON in the file's own metadata, so a
single rename publishes all of it. The best weights so far lie beside it in a file named by their step. Batches follow
from the seed and the step (batches.py), so no generator needs saving. When it is written does not matter to the result:
after minutes, at the end, and before an interrupt is obeyed. Of several processes the first decides.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Final, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from components.contract import Context, UserError
from components.data.features.format import Example, FeatureSource
from components.drafts.interface import AbstractDraft, StepLosses
from components.drafts.network.layers import reachable
from components.drafts.network.recompute import recomputing_blocks
from components.drafts.training.batches import BatchOrder
from components.drafts.training.interrupts import Interrupted, held_back
from components.drafts.training.loading import Loader, MicroBatches
from components.drafts.training.losses import divisors
from components.drafts.training.optimizer import Optimizer, OptimizerName
from components.drafts.training.ranks import Ranks
from components.drafts.training.sharding import Shares, share_as, whole
from components.files import write_whole, written_whole
from components.targets.interface import AbstractTarget
from components.targets.pretraining.muon import MUON_STATE, multiplies_bfloat16
from components.tensor_files import read_tensors

Precision = Literal["auto", "float32", "bfloat16"]
Sharding = Literal["none", "full"]
FINAL_LR_SHARE = 0.05  # the cosine ends here, as a share of the peak


@dataclass(frozen=True)
class Schedule:
    """How to train. Lengths in optimiser steps, but for checkpoint_minutes."""

    num_steps: int
    peak_lr: float
    warmup_share: float
    weight_decay: float
    clip_norm: float
    eval_every: int
    checkpoint_minutes: float
    precision: Precision
    optimizer: OptimizerName
    muon_lr_scale: float
    micro_batch_tokens: int = 0
    recompute: bool = False
    deterministic: bool = True
    processes: int = 1
    nodes: int = 1
    sharding: Sharding = "none"

    @property
    def num_ranks(self) -> int:
        """Training processes of all nodes together."""
        return self.processes * self.nodes

    def learning_rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ...: linear warm-up, then a cosine down to FINAL_LR_SHARE of the peak."""
        warmup = max(1, round(self.warmup_share * self.num_steps))
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.num_steps - warmup)
        return self.peak_lr * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def resolve_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """bfloat16 where the machine multiplies it natively (CUDA, avx512_bf16, AMX), else float32."""
    if precision != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def train(
    draft: AbstractDraft,
    features: FeatureSource,
    order: BatchOrder,
    held_out: Sequence[Example],
    schedule: Schedule,
    ctx: Context,
    *,
    warm_start: bool = False,
    ranks: Ranks = Ranks(),  # noqa: B008 (it cannot be changed)
) -> tuple[dict[str, Tensor], Progress]:
    """Train, or resume from ctx.scratch; returns the best weights, in the first of the processes, and their progress.

    warm_start: evaluate the initial weights as step 0, since they are trained already.
    Raises Interrupted where the processes are asked to stop; a signal to the only one ends it when it has saved.
    """
    torch.set_num_threads(ctx.num_threads)
    device = torch.device(ctx.device)
    shares = Shares(draft, ranks.size) if schedule.sharding == "full" and ranks.size > 1 else None
    optimizer = Optimizer(draft, schedule.optimizer, schedule.weight_decay, schedule.muon_lr_scale, ranks)
    progress = load_checkpoint(ctx.scratch, draft, optimizer)
    truncate_metrics(ctx.out / "metrics.jsonl", progress.step or -1)
    if progress.step:
        ctx.note(f"goes on from optimiser step {progress.step}")
    dtype = resolve_precision(schedule.precision, device)
    left = schedule.num_steps - progress.step
    features.expect(
        order.shares(batch, ranks.size)[ranks.rank] for batch in islice(order.from_step(progress.step), left)
    )
    batches = (
        order.parts(order.shares(rows, ranks.size)[ranks.rank], schedule.micro_batch_tokens)
        for rows in islice(order.from_step(progress.step), left)
    )
    if warm_start and not progress.step:
        _evaluate(draft, held_out, progress, ctx, ranks, shares)
    draft.train()
    asked, saved_at = threading.Event(), time.monotonic()
    loader = Loader(partial(order.batch, features), device, ahead=device.type == "cuda")
    with held_back(asked.set) if ranks.size == 1 else nullcontext(), loader:
        for parts, following in pairwise(chain(batches, [[]])):
            micro_batches = MicroBatches(loader, parts, following[0] if following else None, progress.step)
            with _deterministic_kernels(device, schedule.deterministic), recomputing_blocks(schedule.recompute):
                optimizer.clear()
                result = backward(draft, micro_batches, partial(autocast, device, dtype), ranks, shares)
                norm = optimizer.step(schedule.learning_rate(progress.step), schedule.clip_norm)
            progress.step += 1
            _record_step(ctx, progress.step, result, norm, schedule.learning_rate(progress.step - 1))
            last = progress.step == schedule.num_steps
            if last or progress.step % schedule.eval_every == 0:
                _evaluate(draft, held_out, progress, ctx, ranks, shares)
            stops = asked.is_set() or ranks.are_asked_to_stop
            due = time.monotonic() - saved_at >= 60 * schedule.checkpoint_minutes
            saves, stops = ranks.first_says((last or stops or due, stops), device)
            if saves:
                save_checkpoint(ctx.scratch, draft, optimizer, progress, ranks)
                saved_at = time.monotonic()
            ctx.progress(progress.step, schedule.num_steps, f"{draft.method}: loss {float(result.loss.detach()):.3f}")
            if stops and not last:
                raise Interrupted(
                    f"interrupted after optimiser step {progress.step}: the same command goes on from there"
                )
    return load_best(ctx.scratch, draft, progress) if ranks.is_first else {}, progress


def backward(
    draft: AbstractDraft,
    batches: MicroBatches,
    arithmetic: Callable[[], AbstractContextManager[object]],
    ranks: Ranks = Ranks(),  # noqa: B008 (it cannot be changed)
    shares: Shares | None = None,
) -> StepLosses:
    """Add the gradients of a batch's loss to those of the parameters, part by part; returns the batch's losses.

    The loss of a part is divided by what that of the whole is divided by, so gradients add up to those of the whole
    batch: over the parts here, and over the processes in `Optimizer.step`, or here with those of the last part where
    the drafter is in shares.
    """
    shared = None
    nothing = torch.zeros(draft.num_steps, device=draft.target.device)
    if len(batches.parts) > 1 or ranks.size > 1:
        shared = ranks.sum(sum((divisors(batch, draft) for batch in batches.once(again=True)), nothing.clone()))
    results = []
    for number, part in enumerate(batches.once(again=False), 1):
        batch, last = part._replace(divisors=shared), number == len(batches.parts)
        with arithmetic():
            result = draft.losses(batch) if shares is None else shares.losses(batch, last=last)
        result.loss.backward()
        results.append(result._replace(loss=result.loss.detach()))
    if shares is not None and not batches.parts:
        shares.losses(None, last=True).loss.backward()
    if ranks.size > 1:  # a process without rows of this batch adds nothing, in tensors of the others' shapes
        results.append(StepLosses(nothing[0], nothing, nothing, nothing))
        results = [
            StepLosses(each.loss, *(F.pad(of, (0, draft.num_steps - len(of))) for of in each[1:])) for each in results
        ]
    elif len(results) == 1:
        return results[0]
    return StepLosses(*(ranks.sum(torch.stack(of).sum(0)) for of in zip(*results, strict=True)))


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """The arithmetic of the training graph."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


@contextmanager
def _deterministic_kernels(device: torch.device, on: bool) -> Iterator[None]:
    """On a GPU select deterministic kernels: others sum some gradients in the order in which blocks finish.

    An operator without one only warns, in the step's log.
    """
    if device.type != "cuda" or not on:
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # cuBLAS is deterministic only with fixed-size workspaces
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=only_warns)


def _record_step(ctx: Context, step: int, result: StepLosses, norm: float, learning_rate: float) -> None:
    proxy = (result.accepted / result.num_reachable.clamp(min=1)).sum()
    ctx.record(
        step,
        loss=float(result.loss.detach()),
        teacher_forced_al=1.0 + float(proxy),
        grad_norm=norm,
        learning_rate=learning_rate,
    )


def _evaluate(
    draft: AbstractDraft,
    held_out: Sequence[Example],
    progress: Progress,
    ctx: Context,
    ranks: Ranks,
    shares: Shares | None,
) -> None:
    """Measure held-out acceptance length, log it by workload, and save the weights when they are the best so far."""
    draft.eval()
    with nullcontext() if shares is None else shares.gathered():
        result = measure(draft, held_out, draft.num_steps, torch.device(ctx.device), ranks)
    draft.train()
    al = result.total.acceptance_length
    by_workload = {name: tally.acceptance_length for name, tally in sorted(result.by_workload.items())}
    ctx.record(progress.step, held_out_al=al, **{f"held_out_al/{name}": value for name, value in by_workload.items()})
    if al > progress.best_al:
        progress.best_step, progress.best_al, progress.best_by_workload = progress.step, al, by_workload
        save_best(ctx.scratch, draft, progress, ranks)


GREEDY_SHARE = 0.9  # argmax share from which an answer counts as greedy; bf16 features flip a few


@dataclass
class Tally:
    """Counts of evaluated and of accepted positions at each depth."""

    accepted: list[int]
    evaluated: list[int]

    @property
    def acceptance_length(self) -> float:
        return 1.0 + sum(
            accepted / evaluated for accepted, evaluated in zip(self.accepted, self.evaluated, strict=True) if evaluated
        )


@dataclass
class HeldOut:
    """Tallies over all answers and per workload."""

    total: Tally
    by_workload: dict[str, Tally] = field(default_factory=dict)


def greedy_examples(target: AbstractTarget, examples: Sequence[Example]) -> list[Example]:
    """The answers sampled at temperature 0 (all, if none was): only there is the next token the target's argmax."""
    greedy = [example for example in examples if _argmax_share(target, example) >= GREEDY_SHARE]
    return greedy or list(examples)


def measure(
    draft: AbstractDraft,
    examples: Sequence[Example],
    depth: int,
    device: torch.device,
    ranks: Ranks = Ranks(),  # noqa: B008 (it cannot be changed)
) -> HeldOut:
    """Draft from every position of every example to `depth` and count what would be accepted.

    Every process drafts for some of the examples, and all have the counts.
    """
    workloads = sorted({example.workload for example in examples})
    counts = torch.zeros(len(workloads), 2, depth, dtype=torch.int64)
    for example in examples[ranks.rank :: ranks.size]:
        ids = example.ids.to(device)
        draft_tokens = draft.propose_at_every_position(
            ids, example.taps.to(device).float(), example.last.to(device).float(), depth
        ).tokens
        of_example = count_accepted(draft_tokens, ids, example.mask.to(device))
        counts[workloads.index(example.workload)] += torch.tensor(of_example)
    counts = ranks.sum(counts.to(device)).cpu()
    by_workload = {name: Tally(*of.tolist()) for name, of in zip(workloads, counts, strict=True)}
    return HeldOut(Tally(*counts.sum(0).tolist()), by_workload)


def count_accepted(draft_tokens: Tensor, ids: Tensor, mask: Tensor) -> tuple[list[int], list[int]]:
    """Accepted and evaluated counts per depth: draft_tokens int64 [T-1, K] (row t: x_{t+2}, ...), ids and mask [T]."""
    num_roots, depth = draft_tokens.shape
    evaluated = reachable(mask[None], depth)[:, 0, :num_roots]  # [K, T-1]
    next_columns = torch.arange(num_roots, device=ids.device)[:, None] + 2 + torch.arange(depth, device=ids.device)
    correct = (draft_tokens == ids[next_columns.clamp(max=ids.numel() - 1)]).T
    accepted = correct.cummin(0).values & evaluated
    return accepted.sum(1).tolist(), evaluated.sum(1).tolist()


@torch.no_grad()
def _argmax_share(target: AbstractTarget, example: Example) -> float:
    """Share of the answer tokens that are the target's most likely token."""
    last = example.last.to(target.device, target.dtype)[None]
    best = target.silence(target.unembed(target.final_norm(last)))[0].argmax(-1)
    answers = example.mask[1:].to(best.device)
    matches = (best[:-1] == example.ids[1:].to(best.device)) & answers
    return float(matches.sum() / answers.sum().clamp(min=1))


CHECKPOINT = "checkpoint.safetensors"
REMEDY: Final = "delete the folder it is in, and training begins again"
MOST_STEPS: Final = 1 << 40
MOMENTS = ("exp_avg", "exp_avg_sq", MUON_STATE)  # of AdamW and of Muon


@dataclass
class Progress:
    """Where training stands. step: optimiser steps done. best_al: -1 before the first evaluation, never NaN."""

    step: int = 0
    best_step: int = 0
    best_al: float = -1.0
    best_by_workload: dict[str, float] = field(default_factory=dict)


def save_checkpoint(
    directory: Path,
    draft: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> None:
    """Publish the state after `progress.step` steps, then drop best weights that are no longer the best.

    All processes call it, since they keep the optimiser's state together; the first writes it, whole.
    """
    tensors = _at_the_first(((f"weight.{name}", weight) for name, weight in draft.state_dict().items()), ranks)
    for name, parameter in draft.named_parameters():
        moments = optimizer.moments(parameter)
        assert moments.keys() <= set(MOMENTS), f"the optimiser keeps {sorted(moments)}"
        tensors |= _at_the_first(((f"{moment}.{name}", tensor) for moment, tensor in moments.items()), ranks)
    if not ranks.is_first:
        return
    write_tensors(directory / CHECKPOINT, tensors, {"progress": json.dumps(asdict(progress))})
    for file in directory.glob("best-*.safetensors"):
        if file != best_file(directory, progress):
            file.unlink()


def _at_the_first(tensors: Iterable[tuple[str, Tensor]], ranks: Ranks) -> dict[str, Tensor]:
    """Tensors in the first process's memory, gathered one by one where they are in shares; the others keep none."""
    gathered = ((name, whole(tensor.detach())) for name, tensor in tensors)
    return {name: tensor.cpu() for name, tensor in gathered if ranks.is_first}


def load_checkpoint(directory: Path, draft: nn.Module, optimizer: Optimizer) -> Progress:
    """Restore what `save_checkpoint` wrote; a fresh Progress where there is no checkpoint.

    Raises:
        UserError: the file is damaged, or is of another drafter.
    """
    file = directory / CHECKPOINT
    if not os.path.lexists(file):
        return Progress()
    tensors, metadata = read_tensors(file, REMEDY)
    progress = _parse_progress(metadata, file)
    weights = {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name.startswith("weight.")}
    _check_fit(file, weights, draft.state_dict(), "weight")
    parameters = dict(draft.named_parameters())
    for name, tensor in tensors.items():
        moment, _, owner = name.partition(".")
        if moment == "weight":
            continue
        if moment not in MOMENTS or owner not in parameters:
            raise UserError(f"{file}: {name[:120]} belongs to nothing; {REMEDY}")
        _check_fit(file, {owner: tensor}, {owner: parameters[owner]}, moment)
        if moment != MUON_STATE and not {f"exp_avg.{owner}", f"exp_avg_sq.{owner}"} <= tensors.keys():
            raise UserError(f"{file}: of {owner} one of AdamW's two moments is missing; {REMEDY}")
    here = draft.state_dict()
    draft.load_state_dict({name: share_as(weight, here[name]) for name, weight in weights.items()})
    for name, parameter in parameters.items():
        moments = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS if f"{moment}.{name}" in tensors}
        optimizer.restore(parameter, moments, progress.step)
    return progress


def _parse_progress(metadata: Mapping[str, str], file: Path) -> Progress:
    """Parse a checkpoint's progress; a UserError where training cannot have made it."""
    try:
        record = json.loads(metadata["progress"])
        progress = Progress(**record)
        steps = (progress.step, progress.best_step)
        valid = all(type(step) is int for step in steps) and 0 <= progress.best_step <= progress.step <= MOST_STEPS
        lengths = [progress.best_al, *progress.best_by_workload.values()]
        valid &= all(isinstance(al, (int, float)) and math.isfinite(al) for al in lengths)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{file}: does not say how far training was; {REMEDY}") from error
    if not valid:
        raise UserError(f"{file}: says what cannot be, {str(record)[:120]}; {REMEDY}")
    return progress


def _check_fit(file: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], kind: str) -> None:
    """Raise UserError unless names, shapes and types are those expected."""
    mismatched = sorted(tensors.keys() ^ expected.keys())
    mismatched += [
        name
        for name, tensor in tensors.items()
        if name in expected and (tensor.shape, tensor.dtype) != (expected[name].shape, expected[name].dtype)
    ]
    if mismatched:
        raise UserError(f"{file}: its {kind} {mismatched[0][:120]} is not the drafter's that is trained here; {REMEDY}")


def save_best(
    directory: Path,
    draft: nn.Module,
    progress: Progress,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> None:
    """Write the weights of `progress.best_step`; all processes call it, and the first writes them, whole."""
    tensors = _at_the_first(draft.state_dict().items(), ranks)
    if ranks.is_first:
        write_tensors(best_file(directory, progress), tensors, {})


def load_best(directory: Path, draft: nn.Module, progress: Progress) -> dict[str, Tensor]:
    """Read the weights that `save_best` wrote for this drafter; raises UserError where the file is damaged."""
    file = best_file(directory, progress)
    tensors, _ = read_tensors(file, REMEDY)
    _check_fit(file, tensors, draft.state_dict(), "weight")
    return tensors


def best_file(directory: Path, progress: Progress) -> Path:
    return directory / f"best-{progress.best_step}.safetensors"


def truncate_metrics(file: Path, step: int) -> None:
    """Drop rows of metrics.jsonl after `step` and a torn last line: training will write them again."""
    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    lines = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    write_whole(file, "".join(lines))


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a new file, then rename it: a kill leaves the old file or the new one."""
    with written_whole(file) as beside:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, beside, metadata=metadata)
