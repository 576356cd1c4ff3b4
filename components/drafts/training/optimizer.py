"""The optimiser of a drafter, in one process or spread over several.

The optimiser is Muon for the matrices inside a drafter and AdamW for the rest. Muon (Jordan et al. 2024;
`torch.optim.Muon`) replaces a matrix's momentum by the nearest orthogonal matrix, so that all directions of it learn at
one pace. A drafter has minutes to learn, and in as many steps Muon takes it much further than AdamW does (built-in
target, 300 steps, one seed: held-out AL of mtp 2.38 against 2.09), for up to a fifth more time a step. The LM head is a
table of tokens, not a map between hidden states, and norms are vectors: both stay with AdamW.

A parameter may ask for its own scale of the learning rate (`AbstractDraft.lr_scales`): a weight that multiplies inputs
of size s is 1 / s as large as others, and its steps must be as well. Gradients are clipped in the same scale.

Muon's step of a matrix, some fifteen products of its size, is done by one process, which keeps its momentum and sends
the new weights to the others; AdamW's is cheap and done by each. All end with the same bits. Of parameters in shares
(sharding.py) each process steps its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from components.drafts.interface import AbstractDraft
from components.drafts.training.ranks import Ranks, shared_out
from components.drafts.training.sharding import share_as, whole
from components.targets.pretraining.muon import MUON_STATE, make_muon
from components.targets.spread import is_share

OptimizerName = Literal["muon", "adamw"]
BETAS = (0.9, 0.95)  # as the official EAGLE-3 training


class Optimizer:
    """Steps of a drafter's parameters. `peak_lr` is AdamW's; Muon's is `muon_lr_scale` times that."""

    def __init__(
        self,
        draft: AbstractDraft,
        name: OptimizerName,
        weight_decay: float,
        muon_lr_scale: float,
        ranks: Ranks = Ranks(),  # noqa: B008 (it cannot be changed)
    ) -> None:
        self._ranks = ranks
        self._scales = {p: draft.lr_scales.get(n, 1.0) for n, p in draft.named_parameters()}
        self._parameters = list(self._scales)
        matrices = list(muon_matrices(draft, name).values())
        inside = set(matrices)
        self._owners: dict[nn.Parameter, int] = {}
        self._sharded = any(is_share(p) for p in self._parameters)
        if not self._sharded:
            self._owners = dict(zip(matrices, shared_out([p.numel() for p in matrices], ranks.size), strict=True))
            matrices = [matrix for matrix in matrices if self._owners[matrix] == ranks.rank]
        others = [p for p in self._parameters if p not in inside]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            groups = self._groups(matrices, weight_decay, muon_lr_scale)
            self._parts.append(make_muon(groups, matrices[0].device, weight_decay=weight_decay))
        if others:
            groups = self._groups(others, weight_decay, 1.0)
            # One pass over weights, gradients and moments; written as a list of operations it takes a dozen.
            self._parts.append(torch.optim.AdamW(groups, betas=BETAS, fused=True))

    def _groups(self, parameters: list[nn.Parameter], weight_decay: float, times: float) -> list[dict[str, object]]:
        """Parameters of one learning rate and one decay together; vectors (norm weights) do not decay."""
        kinds: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((self._scales[parameter], parameter.ndim > 1), []).append(parameter)
        return [
            {"params": members, "weight_decay": weight_decay if decays else 0.0, "lr_share": scale * times}
            for (scale, decays), members in kinds.items()
        ]

    def update(self, loss: Tensor, learning_rate: float, clip_norm: float) -> float:
        """One step down the gradient of `loss`; returns what `step` returns."""
        self.clear()
        loss.backward()
        return self.step(learning_rate, clip_norm)

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self, learning_rate: float, clip_norm: float) -> float:
        """One step down the processes' gradients; returns their norm before clipping, in the learning scale."""
        if not self._sharded:  # else they are summed already
            self._ranks.sum_gradients(self._parameters)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate * group["lr_share"]
        norms = [whole(p.grad.norm()) * self._scales[p] for p in self._parameters if p.grad is not None]
        norm = torch.stack(norms).norm()
        torch.nn.utils.clip_grads_with_norm_(self._parameters, clip_norm, norm)
        for part in self._parts:
            part.step()
        with torch.no_grad():
            for matrix, owner in self._owners.items():
                self._ranks.send(matrix, owner)
        return float(norm)

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimiser state of a parameter, without the step count; called by all processes."""
        found: dict[str, Tensor] = next((part.state[parameter] for part in self._parts if parameter in part.state), {})
        state = {name: value for name, value in found.items() if name != "step"}
        owner = self._owners.get(parameter)
        if owner is None or self._ranks.size == 1:
            return state
        exists = torch.tensor(float(bool(state)), device=parameter.device)
        self._ranks.send(exists, owner)
        if not exists:
            return {}
        momentum = state.get(MUON_STATE, torch.empty_like(parameter.detach()))
        self._ranks.send(momentum, owner)
        return {MUON_STATE: momentum}

    def restore(self, parameter: nn.Parameter, moments: dict[str, Tensor], step: int) -> None:
        """Restore what `moments` returned after `step` steps, where this process keeps it."""
        part = next((p for p in self._parts if any(parameter is member for member in _members(p))), None)
        if part is None:
            return
        state = {name: share_as(value, parameter) for name, value in moments.items()}
        if isinstance(part, torch.optim.AdamW):
            state["step"] = torch.tensor(float(step), device=parameter.device)
        part.state[parameter] = state


def muon_matrices(draft: AbstractDraft, name: OptimizerName) -> dict[str, nn.Parameter]:
    """The parameters that Muon steps, by name."""
    named = draft.named_parameters()
    return {n: p for n, p in named if name == "muon" and p.ndim == 2 and n not in draft.token_tables}


def _members(part: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in part.param_groups for parameter in group["params"])
