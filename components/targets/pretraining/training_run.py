"""The data-parallel training loop of a small target, its exact checkpoints, and its losses against loops.

Every process holds the whole model, computes its share of a step's windows on one thread, and averages gradients once a
step (gloo). Process 0 is the step itself; it starts the others, after it wrote `plan.json` and the token streams into
the scratch folder, and when it dies, their next exchange of gradients fails and ends them.

Muon for matrices, AdamW for embeddings and gains (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
Checkpoints are safetensors with JSON in the header, written atomically.

Two losses in the decay make loops unlikely:
  - pseudo-repetition, DITTO (Xu et al. 2022, arXiv:2206.02369, section 3.2): a piece of training text is repeated to
    the end of a window; for token l of its n-th occurrence, n >= 1 counted from 0, the loss is
    -log(1 - |p(n, l) - ratio * p(n - 1, l)|), where p(n - 1, l) is held constant and `ratio` is their lambda. Untreated
    models do the opposite (p grows with n), so greedy text gets stuck. Deviations: pieces are cut by length in tokens,
    not at sentence ends, and follow a short prefix of the text before them.
  - sequence-level unlikelihood (Welleck et al. 2019, arXiv:1908.04319, section 5): the model continues windows of
    training text greedily; tokens that complete an n-gram already present in that continuation are made less likely by
    -log(1 - p).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import components
from components.contract import UserError
from components.files import written_whole
from components.outside_json import JsonObject
from components.targets.pretraining.llama import LeanLlama, initial_weights, llama_config
from components.targets.pretraining.muon import make_muon
from components.targets.pretraining.plan import TokenWindows, TrainingPlan, plan_from_json
from components.targets.pretraining.quality import held_out_loss
from components.targets.pretraining.tokenizer import EOS_ID, PAD_ID
from components.tensor_files import read_tensors

REPORT_EVERY = 20
"""Steps between reports."""

SCORE_EVERY = 200
"""Steps between measurements of the held-out loss on a few windows."""

SCORED_WINDOWS = 32
"""Held-out windows of each group in such a measurement; the model card uses all of them."""

Report = Callable[[int, dict[str, float]], None]
"""(steps done, metrics) -> nothing; called by process 0 only."""


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks: giving megabytes back at every operation costs an eighth of a CPU step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 2**28)


def join_group(rendezvous: Path, rank: int, num_processes: int) -> None:
    """Join the process group that meets at a file; it uses the loopback interface and picks its port itself."""
    if num_processes == 1:
        return
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_processes, timeout=timedelta(minutes=15)
    )


def leave_group(num_processes: int) -> None:
    """Leave the group, so that another one can be joined later."""
    if num_processes > 1:
        dist.destroy_process_group()


RENDEZVOUS = "rendezvous"


STREAM_FILES = ("tokens.npy", "decay_tokens.npy")
"""Training tokens before the decay and during it, in the scratch folder."""


@contextmanager
def extra_processes(plan: TrainingPlan, scratch: Path) -> Iterator[Path]:
    """Run processes 1 .. num_processes - 1 while the body runs; yields the rendezvous file."""
    meeting = scratch / f"{RENDEZVOUS}-{uuid.uuid4().hex}"
    (scratch / "plan.json").write_text(json.dumps(asdict(plan)), encoding="utf-8")
    root = str(Path(components.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "components.targets.pretraining.training_run", str(scratch), str(meeting)]
    workers = [
        subprocess.Popen([*command, str(rank)], env=environment, stdin=subprocess.DEVNULL)
        for rank in range(1, plan.num_processes)
    ]
    try:
        yield meeting
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    finally:
        for worker in workers:
            worker.wait()
        meeting.unlink(missing_ok=True)


class TrainingRun:
    """One process's share of a run.

    streams: training tokens [tokens] uint16 before the decay, and during it. scratch: the folder of checkpoints. rank:
    number of this process, from 0. The newest usable checkpoint is restored: `steps_done`, `seconds_done`.
    """

    def __init__(
        self, plan: TrainingPlan, streams: tuple[np.ndarray, np.ndarray], scratch: Path, rank: int = 0
    ) -> None:
        self.plan, self.scratch, self.rank = plan, scratch, rank
        self.device = torch.device(plan.device)
        self.weights = {
            name: torch.nn.Parameter(weight.detach().to(self.device))
            for name, weight in initial_weights(plan.shape, plan.seed).items()
        }
        self.names: dict[Tensor, str] = {weight: name for name, weight in self.weights.items()}
        self.model = LeanLlama(plan.shape, self.weights, getattr(torch, plan.dtype), plan.compile_layers)
        self.plain = LeanLlama(plan.shape, self.weights, self.model.dtype)
        """The same model uncompiled, for the few passes of other shapes."""
        matrices = [weight for name, weight in self.weights.items() if "layers" in name and weight.ndim == 2]
        vectors = [weight for weight in self.weights.values() if weight.ndim == 1]
        embedding = self.weights["model.embed_tokens.weight"]
        self.optimisers: dict[str, torch.optim.Optimizer] = {
            "muon": make_muon(matrices, self.device, lr=plan.matrix_lr, weight_decay=plan.weight_decay, momentum=0.95),
            "adamw": torch.optim.AdamW(
                [{"params": [embedding], "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
                lr=plan.vector_lr,
                betas=(0.9, 0.95),
            ),
        }
        stable, self.decay_stream = streams
        self.stable_windows = TokenWindows(stable, plan.sequence_length, plan.seed)
        self.decay_windows = TokenWindows(self.decay_stream, plan.decay_sequence_length, plan.seed)
        self.prompt_windows = TokenWindows(self.decay_stream, PROMPT_TOKENS, plan.seed)
        self.writer: GreedyWriter | None = None
        self.steps_done, self.seconds_done = load_checkpoint(scratch, plan, self.weights, self.optimisers, self.names)

    def train(
        self,
        report: Report | None,
        *,
        held_out: Mapping[str, np.ndarray] | None = None,
        checkpoint_seconds: float = 300.0,
        until: int | None = None,
    ) -> float:
        """Train from `steps_done` to the end of the plan, or to step `until`.

        held_out: windows of each group [windows, length + 1]; process 0 scores a few of each every SCORE_EVERY steps.
        Returns the seconds spent training, those before an interruption included.
        """
        step, last = self.steps_done, self.plan.num_steps if until is None else until
        saved_at, began = time.monotonic(), time.monotonic() - self.seconds_done
        losses: list[float] = []
        if self.rank == 0 and step >= last:
            self._save(step, self.seconds_done)  # LATEST may be another plan's
        while step < last:
            losses.append(self.step(step))
            step += 1
            if self.rank == 0 and report is not None and (step % REPORT_EVERY == 0 or step == last):
                scored = held_out if step % SCORE_EVERY == 0 or step == last else None
                report(step, {"loss": float(np.mean(losses)), **self._metrics(step, scored, time.monotonic() - began)})
                losses = []
            milestone = step in (last, self.plan.decay_start)
            if self.rank == 0 and (milestone or time.monotonic() - saved_at > checkpoint_seconds):
                self._save(step, time.monotonic() - began)
                saved_at = time.monotonic()
        return time.monotonic() - began

    def _metrics(self, step: int, scored: Mapping[str, np.ndarray] | None, seconds: float) -> dict[str, float]:
        losses = {
            f"held_out_loss_{group}": held_out_loss(self.plain, rows, SCORED_WINDOWS)
            for group, rows in (scored or {}).items()
        }
        tokens_seen = float(step * self.plan.tokens_per_step)
        return {**losses, "lr_scale": self.plan.lr_scale(step - 1), "tokens_seen": tokens_seen, "seconds": seconds}

    def step(self, step: int) -> float:
        """Do optimiser step number `step` (from 0); returns the mean loss over all processes, nats per token."""
        loss = self._gradients(step)
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self.plan.max_grad_norm)
        scale = self.plan.lr_scale(step)
        for optimiser, peak in zip(self.optimisers.values(), (self.plan.matrix_lr, self.plan.vector_lr), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=False)
        return loss

    def _gradients(self, step: int) -> float:
        count = 0
        total = torch.zeros((), device=self.device)
        for tokens in self._microbatches(step):
            loss = self.model.loss(tokens)
            loss.backward()
            total += loss.detach()
            count += 1
        if step >= self.plan.decay_start:
            self._add_gradients_against_loops(step, share_of_total=count)
        gradients = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), total.reshape(1)]) / count
        if self.plan.num_processes > 1:
            dist.all_reduce(flat)
            flat /= self.plan.num_processes
        offset = 0
        for gradient in gradients:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()
        return float(flat[-1])

    def _add_gradients_against_loops(self, step: int, share_of_total: int) -> None:
        """share_of_total: the number by which this process's summed gradients are divided afterwards."""
        plan = self.plan
        if plan.repetition_weight > 0:
            random = np.random.default_rng((plan.seed, step, self.rank))
            loops = synthetic_loops(self.decay_stream, random, min(WINDOW_TOKENS, plan.shape.max_positions))
            loss = repetition_loss(self.plain, loops.to(self.device), plan.repetition_ratio)
            (loss * plan.repetition_weight * share_of_total).backward()
        if plan.unlikelihood_at(step):
            if self.writer is None:
                self.writer = GreedyWriter(plan)
            first = ((step - plan.decay_start) // plan.unlikelihood_every * plan.num_processes + self.rank) * BATCH
            prompts = torch.from_numpy(self.prompt_windows.batch(first, BATCH)[:, :PROMPT_TOKENS]).to(self.device)
            continuations = self.writer.write(self.weights, prompts)
            loss = unlikelihood_loss(self.plain, prompts, continuations)
            (loss * plan.unlikelihood_weight * share_of_total).backward()

    def _microbatches(self, step: int) -> Iterator[Tensor]:
        length, first = self.plan.windows_at(step)
        share = self.plan.tokens_per_step // length // self.plan.num_processes
        windows = self.decay_windows if step >= self.plan.decay_start else self.stable_windows
        rows = windows.batch(first + self.rank * share, share)
        for piece in torch.from_numpy(rows).split(max(1, self.plan.microbatch_tokens // length)):
            yield piece.to(self.device)

    def _save(self, step: int, seconds: float) -> None:
        names = [LATEST]
        names += [STABLE] if step <= self.plan.decay_start else []
        for name in names:
            path = self.scratch / name
            save_checkpoint(path, step, seconds, self.plan, self.weights, self.optimisers, self.names)


AGAIN: Final = "delete the file, and training goes on from what is left"
LATEST = "latest.safetensors"
STABLE = "stable.safetensors"
"""The last checkpoint before the decay, from which a run can continue with another decay."""


def save_checkpoint(
    path: Path,
    step: int,
    seconds: float,
    plan: TrainingPlan,
    weights: Mapping[str, Tensor],
    optimisers: Mapping[str, torch.optim.Optimizer],
    names: Mapping[Tensor, str],
) -> None:
    """Write weights and optimiser state after `step` steps and `seconds` of training. names: of each parameter."""
    tensors = {f"weights/{name}": weight.detach().contiguous() for name, weight in weights.items()}
    for kind, optimiser in optimisers.items():
        for parameter, state in optimiser.state.items():
            for field, value in state.items():
                tensors[f"{kind}/{names[parameter]}/{field}"] = torch.as_tensor(value).detach().contiguous()
    header = {"step": str(step), "seconds": repr(seconds), "plan": json.dumps(asdict(plan))}
    with written_whole(path) as beside:
        save_file(tensors, beside, metadata=header)


def load_checkpoint(
    folder: Path,
    plan: TrainingPlan,
    weights: Mapping[str, Tensor],
    optimisers: Mapping[str, torch.optim.Optimizer],
    names: Mapping[Tensor, str],
) -> tuple[int, float]:
    """Restore the newest checkpoint that this plan may resume; returns its (step, seconds), (0, 0.0) without one.

    Raises:
        UserError: a checkpoint is damaged, or is no regular file.
    """
    for path in (folder / LATEST, folder / STABLE):
        if os.path.lexists(path) and not path.is_file():
            raise UserError(f"{path}: no regular file; {AGAIN}")
    for path in (folder / LATEST, folder / STABLE):
        if not path.exists():
            continue
        step, seconds, saved_plan, tensors = _read(path)
        try:
            usable = plan.may_resume(step, saved_plan)
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{path}: was made by no plan that is known here; {AGAIN}") from error
        if not usable:
            continue
        _check_fit(path, tensors, weights, optimisers, names)
        by_name = {name: parameter for parameter, name in names.items()}
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(tensors[f"weights/{name}"])
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            if kind in optimisers:
                name, _, field = rest.rpartition("/")
                parameter = by_name[name]
                device = parameter.device if value.ndim else value.device
                optimisers[kind].state[parameter][field] = value.to(device)
        return step, seconds
    return 0, 0.0


def checkpoint_weights(path: Path) -> tuple[int, dict[str, Tensor]]:
    """(steps done, fp32 weights by Hugging Face name) of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        names = [key for key in file.keys() if key.startswith("weights/")]  # noqa: SIM118
        return int(file.metadata()["step"]), {name.removeprefix("weights/"): file.get_tensor(name) for name in names}


def _read(path: Path) -> tuple[int, float, JsonObject, dict[str, Tensor]]:
    """(steps, seconds, plan, tensors) of a checkpoint; raises UserError where it is damaged."""
    tensors, facts = read_tensors(path, AGAIN)
    try:
        step, seconds, saved_plan = int(facts["step"]), float(facts["seconds"]), json.loads(facts["plan"])
        is_valid = step >= 0 and 0 <= seconds < math.inf
    except (KeyError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: is damaged ({type(error).__name__}: {str(error)[:80]}); {AGAIN}") from error
    if not is_valid:
        raise UserError(f"{path}: says {step} steps in {seconds} seconds; {AGAIN}")
    return step, seconds, saved_plan, tensors


def _check_fit(
    path: Path,
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    optimisers: Mapping[str, torch.optim.Optimizer],
    names: Mapping[Tensor, str],
) -> None:
    """Check that every weight is present, and other tensors are optimiser state: of their weight's shape, or a scalar.

    Raises UserError otherwise.
    """
    shapes = {name: parameter.shape for parameter, name in names.items()}
    misfits = [f"weights/{name}" for name in weights if f"weights/{name}" not in tensors]
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        name = rest if kind == "weights" else rest.rpartition("/")[0]
        scalar = kind != "weights" and tensor.shape == () and key.endswith("/step")
        is_expected = kind in optimisers or (kind == "weights" and name in weights)
        if not is_expected or tensor.dtype != torch.float32 or not (scalar or tensor.shape == shapes.get(name)):
            misfits.append(key)
    fields: dict[str, set[str]] = {kind: set() for kind in optimisers}
    owners: dict[str, dict[str, set[str]]] = {kind: {} for kind in optimisers}
    for key in tensors:
        kind, _, rest = key.partition("/")
        if kind in optimisers:
            name, _, field = rest.rpartition("/")
            fields[kind].add(field)
            owners[kind].setdefault(name, set()).add(field)
    # an optimiser keeps the same fields for each of its weights
    misfits += [
        f"{kind}/{name}" for kind in owners for name, present in owners[kind].items() if present != fields[kind]
    ]
    if misfits:
        raise UserError(f"{path}: {misfits[0][:120]} does not fit the model that is trained here; {AGAIN}")


ROWS: Final = 4
"""Windows in one forward pass of one process."""

WINDOW_TOKENS: Final = 256
PREFIX_TOKENS: Final = (1, 64)
PIECE_TOKENS: Final = (2, 32)
"""Least and most tokens before the first occurrence, and in the repeated piece."""


@dataclass(frozen=True)
class Loops:
    """Synthetic loops. tokens [rows, window] int64. earlier [rows, window - 1] int64: for the prediction of token t + 1
    the index of the prediction of the same token one occurrence earlier, -1 where there was none."""

    tokens: Tensor
    earlier: Tensor

    def to(self, device: torch.device) -> Loops:
        """A copy on a device."""
        return Loops(self.tokens.to(device), self.earlier.to(device))


def synthetic_loops(stream: np.ndarray, random: np.random.Generator, window: int, rows: int = ROWS) -> Loops:
    """Cut pieces out of a token stream [tokens] and repeat each to the end of its window."""
    tokens, earlier = [], []
    for _ in range(rows):
        prefix = int(random.integers(PREFIX_TOKENS[0], min(PREFIX_TOKENS[1], window // 4) + 1))
        piece = int(random.integers(PIECE_TOKENS[0], min(PIECE_TOKENS[1], window // 4) + 1))
        start = int(random.integers(0, len(stream) - prefix - piece))
        before = stream[start : start + prefix]
        repeated = np.resize(stream[start + prefix : start + prefix + piece], window - prefix)
        tokens.append(np.concatenate((before, repeated)).astype(np.int64))
        position = np.arange(window - 1)  # predicts the token at position + 1
        earlier.append(np.where(position + 1 >= prefix + piece, position - piece, -1))
    return Loops(torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(earlier)))


def repetition_loss(model: LeanLlama, loops: Loops, ratio: float) -> Tensor:
    """Mean of -log(1 - |p - ratio * p one occurrence earlier|) over repeated tokens; scalar, nats per token."""
    targets = loops.tokens[:, 1:, None]
    p = model.logits(loops.tokens[:, :-1]).float().log_softmax(-1).gather(-1, targets)[..., 0].exp()
    repeated = loops.earlier >= 0
    p_earlier = p.detach().gather(1, loops.earlier.clamp_min(0))
    distance = (p - ratio * p_earlier).abs()
    return -torch.log((1.0 - distance).clamp_min(1e-4))[repeated].mean()


PROMPT_TOKENS: Final = 64
CONTINUATION_TOKENS: Final = 96
NGRAM: Final = 4
BATCH: Final = 16
"""Continuations in one forward pass of one process."""


def repeated_ngrams(continuations: Tensor, ngram: int = NGRAM) -> Tensor:
    """[rows, time] bool: whether a token completes an n-gram that occurred earlier in its row; False from EOS on."""
    repeated = torch.zeros_like(continuations, dtype=torch.bool)
    for row, tokens in enumerate(continuations.tolist()):
        end = tokens.index(EOS_ID) if EOS_ID in tokens else len(tokens)
        earlier: set[tuple[int, ...]] = set()
        for last in range(ngram - 1, end):
            gram = tuple(tokens[last - ngram + 1 : last + 1])
            repeated[row, last] = gram in earlier
            earlier.add(gram)
    return repeated


def unlikelihood_loss(model: LeanLlama, prompts: Tensor, continuations: Tensor) -> Tensor:
    """Sum of -log(1 - p) over repeated tokens / number of continuation tokens.

    prompts [rows, time], continuations [rows, new] -> scalar, nats per continuation token.
    """
    tokens = torch.cat((prompts, continuations), 1)
    logits = model.logits(tokens[:, :-1])[:, prompts.shape[1] - 1 :].float()
    log_p = logits.log_softmax(-1).gather(-1, continuations[..., None])[..., 0]
    penalty = -torch.log((1.0 - log_p.exp()).clamp_min(1e-4))
    return (penalty * repeated_ngrams(continuations)).sum() / continuations.numel()


class GreedyWriter:
    """Continues prompts greedily with the current weights, by transformers' cached generation."""

    def __init__(self, plan: TrainingPlan) -> None:
        dtype: Any = getattr(torch, plan.dtype)
        facts = {name: value for name, value in llama_config(plan.shape, dtype).items() if name != "torch_dtype"}
        self.model = LlamaForCausalLM(LlamaConfig(**facts)).to(device=plan.device, dtype=dtype).eval()

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor], prompts: Tensor) -> Tensor:
        """prompts [rows, time] -> greedy continuations [rows, CONTINUATION_TOKENS], padded after EOS."""
        self.model.load_state_dict(dict(weights), strict=False)  # the tied output matrix has no entry of its own
        out: Tensor = self.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=CONTINUATION_TOKENS,
            do_sample=False,
            pad_token_id=PAD_ID,
        )
        return torch.nn.functional.pad(out, (0, prompts.shape[1] + CONTINUATION_TOKENS - out.shape[1]), value=PAD_ID)[
            :, prompts.shape[1] :
        ]


def main(scratch: Path, meeting: Path, rank: int) -> None:
    """Train beside process 0, which starts this one as `-m ... SCRATCH MEETING RANK`, until the plan is done."""
    torch.set_num_threads(1)
    keep_freed_memory()
    plan = plan_from_json(json.loads((scratch / "plan.json").read_text(encoding="utf-8")))
    join_group(meeting, rank, plan.num_processes)
    stable, decay = (np.load(scratch / name, mmap_mode="r", allow_pickle=False) for name in STREAM_FILES)
    TrainingRun(plan, (stable, decay), scratch, rank).train(None)
    leave_group(plan.num_processes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
