"""What a drafting method must be: trained on columns, proposing after columns.

Notation as in targets/model.py. A *column* t pairs the target's features at x_t with the token that follows, x_{t+1}.
After the target has processed x_0..x_{n-1} and x_n is known, columns 0..n-1 are complete; the next proposal guesses
x_{n+1}, x_{n+2}, ... The state of a drafter is a function of committed columns only, so that replaying an acceptance
map is exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Columns(NamedTuple):
    """New complete columns of one sequence, in order. T of them."""

    next_tokens: Tensor  # [T] int64: x_{t+1}
    taps: Tensor  # [T, 3H] target features at x_t
    last: Tensor  # [T, H] last layer's output at x_t, before the final norm


class Proposal(NamedTuple):
    """A chain of guesses. `probs` is None for a deterministic (greedy) proposal."""

    tokens: Tensor  # [k] int64 target token ids; may be shorter than asked (prompt lookup finds nothing: 0)
    probs: (
        Tensor | None
    )  # [k, V] float32: the distribution each token was drawn from, zero outside the draft vocabulary


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked. temperature 0 is greedy; top_k 0 and top_p 1 switch the cuts off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


class Proposer(Protocol):
    """Whatever can guess the next tokens: a trained drafter or prompt lookup."""

    method: ClassVar[str]
    needs_features: ClassVar[bool]  # False (prompt lookup): the target computes none, columns.taps and .last are empty
    max_depth: (
        int  # deepest chain it can propose (trained depth is in its settings; deeper is allowed where it makes sense)
    )

    def new_state(self, capacity: int) -> Any:
        """State for one sequence of at most `capacity` tokens."""

    def propose(self, state: Any, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator) -> Proposal:
        """Take in the newly committed columns, then guess up to `depth` tokens. Guesses leave no trace in `state`."""


class Batch(NamedTuple):
    """Training columns, right-padded. B sequences of T tokens."""

    ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool: x_t is an answer token (False on padding)
    taps: Tensor  # [B, T, 3H]
    last: Tensor  # [B, T, H] before the final norm
    lengths: Tensor  # [B] int64


class StepLosses(NamedTuple):
    """What one training forward gives; K = drafting steps."""

    loss: Tensor  # scalar to minimise
    per_step: Tensor  # [K] loss of each step, detached
    accepted: Tensor  # [K] count of positions where the first k+1 teacher-forced drafts are all right (prefix-joint)
    reached: Tensor  # [K] count of positions that M_k allows


class AbstractDraft(nn.Module, ABC):
    """A trained drafter. Subclasses are final; one file each; one line each in METHODS."""

    method: ClassVar[str]
    needs_features: ClassVar[bool] = True
    num_steps: int  # drafting steps it is trained for
    max_depth: int
    lr_scales: Mapping[str, float] = MappingProxyType({})  # parameters that learn at another rate than peak_lr, times

    def fit_inputs(self, taps: Tensor) -> None:
        """Scale an untrained drafter to the target's hidden states, seen as a sample [N, 3H]; may set lr_scales."""

    @classmethod
    @abstractmethod
    def build(cls, target: Any, settings: dict[str, Any], draft_ids: Tensor) -> AbstractDraft:
        """A new drafter for an AbstractTarget; draft_ids [N] are the target ids of its draft vocabulary, ascending."""

    @abstractmethod
    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: teacher-forced, all columns at once."""

    @abstractmethod
    def prepare_decoding(self, dtype: torch.dtype = torch.float32) -> None:
        """Lay the weights out for `propose`, in `dtype`; weights changed afterwards need it again."""

    @abstractmethod
    def draft_everywhere(self, ids: Tensor, taps: Tensor, last: Tensor, depth: int) -> Tensor:
        """Greedy proposals from every column at once, each fed its own guesses: [T] ids -> int64 [T-1, depth].

        Row t holds the guesses for x_{t+2}, x_{t+3}, ... given columns 0..t. Equal to calling `propose` at each column.
        """

    @abstractmethod
    def new_state(self, capacity: int) -> Any:
        """See Proposer."""

    @abstractmethod
    def propose(self, state: Any, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator) -> Proposal:
        """See Proposer."""
