"""Types of the promotion gate: the rows that storage selects, the checks that the rule in components/speedup returns.

They stand here because storage fills them in and keeps the checks, and components/speedup compares; neither imports the
other. Flows, which start the registry, pass the rule to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from components.refusals import measured_and_asked, refusal
from components.rows import AcceptanceMap

MAX_SLOWDOWN = 0.02
"""Share of the champion's decoding speed by which a challenger may lie below it and still count as not worse."""
MAX_ACCEPTANCE_LOSS = 0.05
"""The same of acceptance length over all prompts; it differs more from prompt to prompt than speed does."""
ONE_WORKLOAD = 2.0
"""The factor on the margin of acceptance for one workload, which has fewer prompts than all together."""


@dataclass(frozen=True)
class Margins:
    """Shares by which A may lie below B. speed: of decoding speed. acceptance: of acceptance length, all prompts."""

    speed: float = MAX_SLOWDOWN
    acceptance: float = MAX_ACCEPTANCE_LOSS

    def of(self, quantity: str, *, pooled: bool) -> float:
        """The margin of one comparison. pooled: over all prompts; else over one workload."""
        if quantity != "acceptance_length":
            return self.speed
        return self.acceptance if pooled else ONE_WORKLOAD * self.acceptance


@dataclass(frozen=True)
class ServingSetup:
    """One way to serve: a drafter at a depth, or with a tree. Depth 0 without a tree is plain decoding.

    name: its name in notes. tree_budget: guesses verified in one pass of a tree, whose depth is then the one that was
    measured; None: a chain. measured_in: keys of the artifacts to look at; empty: every measurement.
    """

    name: str
    draft_key: str
    depth_k: int
    tree_budget: int | None = None
    measured_in: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether it decodes without drafting."""
        return self.depth_k == 0 and self.tree_budget is None


@dataclass(frozen=True)
class ArmPrompt:
    """What one arm did with one prompt in one process of a measurement: a row of storage/history/paired_prompts.sql.

    All rows are of our own loop at temperature 0. requests: repetitions; tokens (those that came within decode_ns),
    decode_ns and rounds are their sums, ns_per_token the time of a token in each of them. Rows may share an arm, prompt
    and process, and are then repetitions too. compared, divergences: outputs held against plain decoding, and those
    that differ outside ties.
    """

    artifact_key: str
    session_id: str
    machine_id: str
    created_at: datetime
    target_key: str
    dtype: str
    batch_size: int
    method: str  # "none" for plain decoding
    draft_key: str
    depth_k: int
    tree_budget: int | None
    kernel: str
    process: int
    prompt_id: str
    workload: str
    requests: int
    tokens: int
    decode_ns: int
    ns_per_token: Sequence[float]
    rounds: int
    compared: int
    divergences: int


@dataclass(frozen=True)
class MeasuredRows:
    """The measured rows of two serving setups.

    arms: of every measurement that timed one of their drafters, its plain decoding included. maps: acceptance maps of
    their drafters, the newest first.
    """

    arms: Sequence[ArmPrompt]
    maps: Sequence[AcceptanceMap]


@dataclass(frozen=True)
class Evidence:
    """The measurements of two versions, by which the promotion gate decides.

    same_target: both targets are of one revision, whatever their keys. same_method: both drafters are of one method.
    bytes: of the drafters' weights, None where they are not known.
    """

    challenger: ServingSetup
    champion: ServingSetup
    measured: MeasuredRows
    same_target: bool
    same_method: bool
    challenger_bytes: int | None
    champion_bytes: int | None


@dataclass(frozen=True)
class Check:
    """One condition of promotion. value, with its 95 % interval where it has one; asked: the limit, in words."""

    name: str
    passed: bool
    value: float | None
    lo: float | None
    hi: float | None
    asked: str

    def measured(self) -> str:
        """The value with its interval."""
        interval = "" if self.lo is None or self.hi is None else f" [{self.lo:.3f}, {self.hi:.3f}]"
        return "not measured" if self.value is None else f"{self.value:.4g}{interval}"

    def summary(self) -> str:
        """What was measured and what is asked, in one clause."""
        return measured_and_asked(self.name, self.measured(), self.asked)

    def refusal(self) -> str:
        """The same, and what to do where it fails."""
        return refusal(self.name, self.measured(), self.asked)


Judge = Callable[[Evidence], Sequence[Check]]
"""The rule of the promotion gate: components/speedup/comparison/promotion_rule.py, or a test's."""
