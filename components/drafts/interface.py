"""The interface of a drafting method: it trains on columns and proposes draft tokens after committed positions.

Notation as in targets/interface.py. A *column* t pairs the target's features at x_t with the token that follows,
x_{t+1}.
After the target has processed x_0..x_{n-1} and x_n is known, columns 0..n-1 are complete (committed); the next proposal
drafts x_{n+1}, x_{n+2}, ... The state of a drafter is a function of committed positions only, so that replaying an
acceptance map is exact. Methods with their own decoding loop (lookahead) are the exception:
their map is that of a live run at the deepest depth, and only that depth is predicted from it.
`taps` are the target's auxiliary hidden states (vLLM: aux_hidden_states).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from components.drafts.network.layers import CausalMask, Documents
from components.drafts.settings import Settings
from components.methods import METHODS
from components.stop_rule import StopRule
from components.targets.interface import AbstractTarget
from components.targets.shape import TapLayers


class CommittedPositions(NamedTuple):
    """T newly committed positions of one sequence, in order."""

    next_tokens: Tensor  # [T] int64: x_{t+1}
    taps: Tensor  # [T, N * H] the target's auxiliary hidden states at x_t, of N layers
    last: Tensor  # [T, H] last layer's output at x_t, before the final norm


class Proposal(NamedTuple):
    """A chain of draft tokens. `probs` is None for a deterministic (greedy) proposal."""

    tokens: Tensor  # [k] int64 target token ids; may be shorter than requested (prompt lookup without a match: 0)
    probs: Tensor | None
    """[k, V] float32: the distribution each token was drawn from, zero outside the draft vocabulary."""


class EveryPosition(NamedTuple):
    """Greedy proposals after every column of a text, or the last S of them."""

    tokens: Tensor  # int64 [S, depth]
    confidence: Tensor | None
    """float32 [S, depth]: the probability of each token at temperature 1, or a head's estimate that it is kept"""

    @classmethod
    def of_steps(cls, steps: Sequence[tuple[Tensor, Tensor]]) -> EveryPosition:
        """From the tokens [S] and confidences [S] of draft tokens 1, 2, ..."""
        tokens, confidence = (torch.stack(parts, 1) for parts in zip(*steps, strict=True))
        return cls(tokens, confidence)

    @classmethod
    def concatenated(cls, parts: Sequence[EveryPosition]) -> EveryPosition:
        """From the rows of one stretch of columns after the other, all with confidences."""
        tokens, confidence = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
        return cls(tokens, confidence)


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. temperature 0 is greedy; top_k 0 and top_p 1 switch the cuts off.

    stop: ends chains of draft tokens before the depth that is asked for; the target's own tokens know nothing of it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: StopRule | None = None


class Proposer(Protocol):
    """Proposes draft tokens: a trained drafter or prompt lookup."""

    method: ClassVar[str]
    max_depth: int
    """The longest chain it can propose, at least the trained depth of its settings."""

    @property
    def needs_features(self) -> bool | TapLayers:
        """What the target's passes are asked for (`features`). False: none, committed.taps and .last are empty."""

    def new_state(self, capacity: int) -> Any:
        """State for one sequence of at most `capacity` tokens."""

    def propose(
        self, state: Any, committed: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """Commit new positions, then draft up to `depth` tokens; draft tokens leave no trace in `state`."""


class Drafter(Proposer, Protocol):
    """An opened Draft artifact, trained or not: a Proposer that can also propose at every position at once."""

    num_steps: int  # the trained depth, and the default depth of measurements
    kernel: (
        str  # the kernels of its linear layers, as targets/forward/linear.py describes them; "plain" where it has none
    )

    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As AbstractDraft; -1 (no token) pads chains shorter than `depth`; found tokens have no confidence."""


@runtime_checkable
class CopiesAnswers(Protocol):
    """A drafter that also copies from earlier answers."""

    def remember(self, answers: Iterable[Sequence[int]]) -> None:
        """Add answers, token ids; it may forget others for them."""


class UntrainedRecord(NamedTuple):
    """The entries of a method without training in draft.json, beside names and sizes."""

    settings: Settings
    num_steps: int
    max_depth: int
    num_parameters: int


class Branches(ABC):
    """The drafter's side of one draft tree; thrown away after the round.

    Nodes are the draft tokens passed to `expand`, numbered from 0 in that order. A node of depth d (from 1) is a draft
    token for x_{n+d}; the newest token x_n itself is number -1, of depth 0.
    N = draft vocabulary (`draft_ids` of the proposer), F = nodes of one call.
    """

    root: Tensor  # [N] logits of x_{n+1}, scaled as in training: probabilities are taken from them

    @abstractmethod
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Add F nodes; return the logits [F, N] of the token after each, given its whole path.

        parents: F numbers, -1 for children of the newest token, else nodes that an earlier call added.
        tokens:  int64 [F], the nodes' own tokens, target ids.
        All nodes of a call have the same depth, and calls go down a level at a time. A node is added once; leaves that
        are never added cost nothing. Never called for nodes as deep as the `depth` that `begin` was called with.
        """


@final
class DepthBranches(Branches):
    """Branches of heads that do not see the path: one distribution per depth (Medusa, parallel MTP heads, P-EAGLE)."""

    def __init__(self, logits: Tensor) -> None:
        """logits: [K, N]; row d is the distribution at depth d + 1."""
        self.logits, self.root = logits, logits[0]
        self._depths: list[int] = []  # of every node

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        depths = [1 if parent < 0 else self._depths[parent] + 1 for parent in parents]
        self._depths += depths
        assert max(depths) < self.logits.shape[0], "no head drafts this deep"
        return self.logits[depths]


@runtime_checkable
class TreeProposer(Protocol):
    """A drafter that can draft trees: it returns distributions, and the decoder (decoding/tree.py) picks the tokens.

    It has `begin` and `draft_ids` beside all of Proposer. On one state `begin` and `propose` may take turns: both
    commit the same positions, and neither leaves a draft token in `state` (scratch rows of a cache after the committed
    positions mean nothing). Following the argmax of `root`, then of every `expand`, gives the tokens of a greedy
    `propose`.
    """

    method: ClassVar[str]
    max_depth: int
    draft_ids: Tensor  # int64 [N], the target ids that the N logits stand for

    @property
    def needs_features(self) -> bool | TapLayers:
        """As Proposer."""

    def new_state(self, capacity: int) -> Any:
        """State for one sequence of at most `capacity` tokens."""

    def begin(self, state: Any, committed: CommittedPositions, depth: int) -> Branches:
        """Commit new positions and compute the distribution of the first draft token.

        depth: the depth of the tree that may be grown, 1 to max_depth.
        """


@runtime_checkable
class BatchProposer(Protocol):
    """A drafter that proposes for many sequences at once; others are called once per sequence."""

    def propose_batch(
        self,
        states: Sequence[Any],
        committed: Sequence[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """As `propose` for every sequence: same proposals, same states afterwards, same draws from each generator."""


class Batch(NamedTuple):
    """A training batch, right-padded: B rows of T tokens, one conversation each or several packed (`documents`)."""

    ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool: x_t is an answer token (False on padding)
    taps: Tensor  # [B, T, N * H], float32 once it is on its device, before that as it is stored
    last: Tensor  # [B, T, H] before the final norm, as taps
    lengths: Tensor  # [B] int64
    step: int = 0  # the optimiser step: the seed of a method's training noise
    documents: Documents | None = None  # None: every row is one document
    divisors: Tensor | None = None
    """Of a part of a larger batch: what the loss of each step is divided by, so that the parts' losses add up."""
    row_seeds: tuple[int, ...] | None = None
    """A number for each row, the same in whatever part of a batch the row is; None: its index."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device, its states in float32: they become so there, since bf16 is half to move."""
        return self._replace(
            ids=self.ids.to(device),
            mask=self.mask.to(device),
            taps=self.taps.to(device).float(),
            last=self.last.to(device).float(),
            lengths=self.lengths.to(device),
            documents=self.documents and Documents(*(part.to(device) for part in self.documents)),
        )

    @property
    def causal(self) -> CausalMask:
        """Positions and visibility of the columns."""
        return CausalMask(self.ids.shape[1], self.ids.device, self.documents)


class Roots(NamedTuple):
    """The columns to draft from, R of each sequence."""

    rows: Tensor  # int64 [B, R]
    valid: Tensor  # bool [B, R]: False on filler rows
    num_steps: Tensor | None = None  # int64 [B, R]: in how many drafting steps each is trained; None: in all


class StepLosses(NamedTuple):
    """The result of one training forward; K = drafting steps."""

    loss: Tensor  # scalar to minimise
    per_step: Tensor  # [K] loss of each step, detached
    accepted: Tensor  # [K] count of positions where the first k+1 teacher-forced drafts are all right (prefix-joint)
    num_reachable: Tensor  # [K] count of positions that M_k allows


class AbstractDraft(nn.Module, ABC):
    """A trained drafter. Subclasses are final; one entry each in components/methods.py."""

    method: ClassVar[str]
    packs: ClassVar[bool] = False  # whether `losses` respects Batch.documents
    settings: Any  # of the method's own class in settings.py
    num_steps: int  # drafting steps it is trained for
    max_depth: int
    kernel: str = "plain"  # set by prepare_decoding; see Drafter
    lr_scales: Mapping[str, float] = MappingProxyType({})  # parameter name -> factor on the learning rate
    draft_ids: Tensor  # int64 [N], the target ids of the draft vocabulary, ascending

    def __init__(self, target: AbstractTarget, draft_ids: Tensor) -> None:
        super().__init__()
        self._target = (target,)  # in a tuple, so that nothing of the target becomes a parameter of the drafter
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    @property
    def target(self) -> AbstractTarget:
        """The target this drafter serves."""
        return self._target[0]

    @property
    def needs_features(self) -> bool | TapLayers:
        """As Proposer: the layers that it was made for, where it reads auxiliary hidden states."""
        return self.target.tap_layers if METHODS[self.method].reads_taps else True

    @property
    def token_tables(self) -> frozenset[str]:
        """Names of parameters with one row per token (LM heads, embeddings), not trained by Muon (loop.py)."""
        return frozenset({"lm_head.weight"})

    @property
    def student_ids(self) -> Tensor | None:
        """The target ids over which it is trained, int64 [N]; None: all."""
        return self.draft_ids

    def scale_to_target_features(self, taps: Tensor) -> None:
        """Scale an untrained drafter to a sample of the target's hidden states, [M, N * H]; may set lr_scales."""

    def training_roots(self, roots: Roots, batch: Batch) -> Roots:
        """The roots that are trained, of all that could be; a row's do not depend on the rest of the batch."""
        return roots

    @classmethod
    @abstractmethod
    def build(cls, target: AbstractTarget, settings: Any, draft_ids: Tensor) -> AbstractDraft:
        """Make an untrained drafter for a target.

        settings: the method's own class in settings.py. draft_ids: int64 [N], its draft vocabulary, ascending.
        """

    @abstractmethod
    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: teacher-forced, all columns at once."""

    @abstractmethod
    def prepare_decoding(self, dtype: torch.dtype = torch.float32, kernel: str = "auto") -> None:
        """Lay the weights out for `propose`, in `dtype`; weights changed afterwards need it again.

        kernel: for its linear layers, as `lay_out` of targets/forward/linear.py takes it; the attribute `kernel` is
        the result.
        """

    @abstractmethod
    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """Greedy proposals at every position at once, each fed its own draft tokens: [T] ids -> T - 1 - first rows.

        Row t - first drafts x_{t+2}, x_{t+3}, ... given columns 0..t, as `propose` would after each column, t >= first.
        """

    @abstractmethod
    def new_state(self, capacity: int) -> Any:
        """State for one sequence of at most `capacity` tokens."""

    @abstractmethod
    def propose(
        self, state: Any, committed: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """Commit new positions, then draft up to `depth` tokens; draft tokens leave no trace in `state`."""
