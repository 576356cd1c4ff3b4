"""What a drafting method must be: trained on columns, proposing after columns.

Notation as in targets/model.py. A *column* t pairs the target's features at x_t with the token that follows, x_{t+1}.
After the target has processed x_0..x_{n-1} and x_n is known, columns 0..n-1 are complete; the next proposal guesses
x_{n+1}, x_{n+2}, ... The state of a drafter is a function of committed columns only, so that replaying an acceptance
map is exact. Methods with a decoding loop of their own (decoding/chain.py LOOPS: lookahead) are the exception: their
map is that of a live run at the deepest depth, and only that depth is predicted from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from components.drafts.causal_mask import CausalMask, Documents


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


class Drafter(Proposer, Protocol):
    """What a Draft artifact opens as, trained or not: a Proposer that can also be asked about every column at once."""

    num_steps: int  # the depth that is measured unless another is asked for: the trained one
    kernel: (
        str  # which kernels its linear layers run on, as targets/linear.py describes them; "plain" where it has none
    )

    def draft_everywhere(self, ids: Tensor, taps: Tensor, last: Tensor, depth: int) -> Tensor:
        """See AbstractDraft; -1, which is no token, where a chain is shorter than `depth`."""


class Branches(ABC):
    """The guesses of one round of one sequence while they branch; thrown away after the round.

    Nodes are the guesses that were given to `expand`, numbered from 0 in the order of being given. A node of depth d
    (1: the first guess) is a guess for x_{n+d}; the newest token x_n itself is number -1, of depth 0.
    N = draft vocabulary (`draft_ids` of the proposer), F = nodes of one call.
    """

    root: Tensor  # [N] logits of the first guess, x_{n+1}; scaled as in training: probabilities are taken from them

    @abstractmethod
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Add F nodes and say what may follow each: logits [F, N] of the guess one deeper, given its whole path.

        parents: F numbers, -1 for children of the newest token, else nodes that an earlier call added.
        tokens:  int64 [F], the nodes' own tokens, target ids.
        All nodes of a call have the same depth, and calls go down a level at a time. A node is given once; those that
        are never given (leaves) cost nothing. Never called for nodes as deep as the `depth` that `begin` was told.
        """


@final
class DepthBranches(Branches):
    """Branches of heads that do not see the path: one distribution a depth (Medusa, parallel MTP heads, P-EAGLE)."""

    def __init__(self, logits: Tensor) -> None:
        """logits: [K, N]; row d is the distribution of the guess at depth d + 1."""
        self.logits, self.root = logits, logits[0]
        self._depths: list[int] = []  # of every node

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """See Branches."""
        depths = [1 if parent < 0 else self._depths[parent] + 1 for parent in parents]
        self._depths += depths
        assert max(depths) < self.logits.shape[0], "no head guesses this deep"
        return self.logits[depths]


@runtime_checkable
class TreeProposer(Protocol):
    """A drafter whose guesses can branch: it says distributions, and the decoder (decoding/tree.py) picks the tokens.

    A method that fits has `begin`, `draft_ids` and all of Proposer; the chain's `propose` stays what it is. On one
    state `begin` and `propose` may take turns: both take in the same columns, and neither leaves a guess in `state`
    (scratch rows of a cache beyond the committed columns mean nothing). Following the argmax of `root`, then of every
    `expand`, gives the tokens of a greedy `propose`.
    """

    method: ClassVar[str]
    needs_features: ClassVar[bool]
    max_depth: int
    draft_ids: Tensor  # int64 [N], the target ids that the N logits stand for

    def new_state(self, capacity: int) -> Any:
        """See Proposer."""

    def begin(self, state: Any, columns: Columns, depth: int) -> Branches:
        """Take in the newly committed columns and say the distribution of the first guess.

        depth: the deepest guess that this round may ask for, 1 to max_depth.
        """


@runtime_checkable
class TwoRowProposer(Protocol):
    """A drafter that guesses one token after every new column, before it is known which of them hold (two_row.py)."""

    method: ClassVar[str]
    draft_ids: Tensor  # int64 [N], the target ids that the N logits stand for

    def new_state(self, capacity: int) -> Any:
        """See Proposer."""

    def guess_after_each(self, state: Any, columns: Columns) -> Tensor:
        """Take in T columns and say the first guess after each: logits [T, N]."""

    def forget(self, state: Any, count: int) -> None:
        """Take the last `count` columns of the `guess_after_each` just made back: they were not committed."""


@runtime_checkable
class BatchProposer(Protocol):
    """A drafter that guesses for many sequences at once; without this, `propose` is called for one after the other."""

    def propose_batch(
        self,
        states: Sequence[Any],
        columns: Sequence[Columns],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """What `propose` would say for every sequence: same states afterwards, same draws from each generator."""


class Batch(NamedTuple):
    """Training columns, right-padded. B rows of T tokens: a conversation each, or several packed (`documents`)."""

    ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool: x_t is an answer token (False on padding)
    taps: Tensor  # [B, T, 3H]
    last: Tensor  # [B, T, H] before the final norm
    lengths: Tensor  # [B] int64
    step: int = 0  # the optimiser step it is for: what a method draws while training follows from it
    documents: Documents | None = None  # None: every row is one document

    @property
    def causal(self) -> CausalMask:
        """Where the columns stand and what they see."""
        return CausalMask(self.ids.shape[1], self.ids.device, self.documents)


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
    packs: ClassVar[bool] = False  # whether `losses` heeds Batch.documents
    num_steps: int  # drafting steps it is trained for
    max_depth: int
    kernel: str = "plain"  # of its linear layers, once it is laid out for decoding; see Drafter
    lr_scales: Mapping[str, float] = MappingProxyType({})  # parameters that learn at another rate than peak_lr, times

    @property
    def token_tables(self) -> frozenset[str]:
        """Parameters with a row a token (LM heads, embeddings): tables, not maps between hidden states; see Muon."""
        return frozenset({"lm_head.weight"})

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
    def prepare_decoding(self, dtype: torch.dtype = torch.float32, kernel: str = "auto") -> None:
        """Lay the weights out for `propose`, in `dtype`; weights changed afterwards need it again.

        kernel: for its linear layers, as `lay_out` of targets/linear.py takes it; what was chosen stands in `kernel`.
        """

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
