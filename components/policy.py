"""The depth policy: the records of `policy.json`, and the one reader of that file.

policy.json holds
  selection_id, target_key, dtype, kernel     what was chosen for, and the arithmetic it was measured in
  target_model the name of the target, without its folders
  prompt_format "chat" or "text" (to be continued): what the measured prompts were; both "" in older policies
  rule, tolerance, confidence                 how the depth was chosen: as text, as a share, as a probability
  choices      DepthChoice rows, one for each (drafter, batch size, workload), "all" and a stated "mixture" included
  evals        DepthEval rows, one for each depth of each choice; depth 0 is plain decoding
  contexts     DepthChoice rows by context length, over the answers near it; [] where one length was measured
  mixtures     Mixture, one depth for several workloads and its loss; [] where one workload was measured
  trees        DepthEval rows of drafts that branch, over all prompts
  ranking      RankedDrafter, every drafter in every setting at its chosen depth, the least expected loss first
  acceptance   AcceptanceSummary, the other conventions of acceptance length and the counts behind them
  prompts      PromptCounts, replayed counts prompt by prompt, so that a prediction can be made for any choice of them
  rounds       RoundCost, the parts of a round's time that DepthEval has no column for
  arms         MeasuredArm, end to end, after confirm_depth; prompt lookup is one of them
  comparisons  PairedComparison rows, where a challenger was compared with a champion
  roles        draft_key -> "challenger" or "champion", likewise; else the storage of rounded weights
  weights      WeightsCost, the acceptance lost by rounding a drafter's weights, where both were measured
  served       draft_key -> the depth at which a released drafter serves now, whatever was chosen for it here
  stops        StopChoice, after choose_stop: the rule that ends each drafter's chains by confidence, and its gain
  threads      draft_key -> the number of threads that its step costs were timed on
  flags        QualityFlag rows
  winner       Winner or null
  verdict      use | do_not_speculate | undecided | invalid, with `reasons` as text
  judged       the drafter that they are about: the winner, else the one that is nearest to being one
  gate         Gate; null before confirm_depth

speedup/policy_markdown.py writes it, with `policy.md`, which shows the same to people. Settings of serving engines are
part of a release, which knows the engines that can load the drafter (engines/depth_settings.py). A policy from before
some of these names changed is read with the current names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from components.contract import UserError
from components.outside_json import JsonObject, read_object
from components.refusals import limit_in_words, quantity, refusal
from components.rows import ALL, AcceptanceByContext, DepthChoice, DepthEval, PairedComparison, QualityFlag
from components.stop_rule import Calibration, StopRule


@dataclass(frozen=True)
class AcceptanceSummary:
    """Acceptance of one drafter at one depth on one workload, by every convention, from replayed maps."""

    draft_key: str
    method: str
    workload: str
    depth_k: int
    num_prompts: int
    num_rounds: int
    num_cut_rounds: int  # tail rounds that the end of an answer cut
    al: float | None  # the four lengths are those of components/definitions.py; speedups use al
    al_uncut: float | None
    al_macro: float | None
    al_proxy: float | None
    reached: list[int]  # uncut rounds in which draft i was reached, i = 1..depth_k
    kept: list[int]  # those in which it was kept: accept_cond is kept / reached


@dataclass(frozen=True)
class PromptCounts:
    """One prompt replayed at every measured depth. AL over any set of prompts is sum(tokens) / sum(rounds)."""

    draft_key: str
    prompt_id: str
    tokens: int  # emitted by rounds
    depths: list[int]
    rounds: list[int]  # at each of the depths
    workload: str = ""  # "" in policies from before this field


@dataclass(frozen=True)
class RoundCost:
    """Parts of one depth's cost that DepthEval has no column for. host: sampling and bookkeeping of a round, ms.

    process: how far each process of a measurement moves the log of a round over a plain step, as loadings of
    bootstrap.Estimate; drafters of one `session` share the processes. own: standard error of this depth alone.
    """

    draft_key: str
    method: str
    batch_size: int
    depth_k: int
    t_host_ms: float | None
    cost_ratio_with_host: float | None
    num_blocks: int
    num_processes: int = 1  # fresh processes that timed it; 0 where chance is not known
    session: int = 0
    process: list[float] = field(default_factory=list)
    own: float = 0.0


@dataclass(frozen=True)
class RankedDrafter:
    """One drafter in one setting at its chosen depth, as ranked among all drafters."""

    draft_key: str
    method: str
    depth_k: int
    tree_budget: int | None  # draft tokens verified in a pass; None: a chain of depth_k
    draft_vocab: int | None  # tokens that the drafter can propose; None: not known
    speedup_pred: float
    pred_lo: float
    pred_hi: float
    p_best: float
    regret: float
    chosen: bool


@dataclass(frozen=True)
class Mixture:
    """One depth for all workloads of one drafter at one batch size."""

    draft_key: str
    method: str
    batch_size: int
    stated: bool  # whether the shares were stated; otherwise they are those of the measured tokens
    shares: dict[str, float]  # workload -> share of decoded tokens; they add up to 1
    depth_k: int
    speedup_pred: float  # of that depth over the mixture
    pred_lo: float
    pred_hi: float
    depths_apart: dict[str, int]  # workload -> the depth it would choose for itself
    speedup_apart: float  # of the mixture, each workload at its own depth
    loss: float  # 1 - speedup_pred / speedup_apart
    loss_by_workload: dict[str, float]


@dataclass(frozen=True)
class WeightsCost:
    """One rounded drafter against its original at one depth, on their common prompts; 95 % intervals over prompts.

    al, al_before: tokens kept a round, rounded and as trained. change: al - al_before, resampled together.
    verdict: lower (change_hi < 0), higher (change_lo > 0), else undecided; always undecided with fewer prompts than
        PROMPTS.decide, also in effective number.
    """

    draft_key: str
    quantised_from: str
    method: str
    weights: str
    depth_k: int
    num_prompts: int
    al: float
    al_lo: float
    al_hi: float
    al_before: float
    change: float
    change_lo: float
    change_hi: float
    verdict: str

    @property
    def summary_line(self) -> str:
        """The result in one line."""
        conclusion = {"lower": "lower", "higher": "higher"}.get(self.verdict, "no difference shown")
        return (
            f"{self.method} in {self.weights}: acceptance length {self.al:.2f} at depth {self.depth_k}, "
            f"{self.change:+.3f} [{self.change_lo:+.3f}, {self.change_hi:+.3f}] against {self.al_before:.2f} as "
            f"trained, over {self.num_prompts} prompts: {conclusion}"
        )


@dataclass(frozen=True)
class MeasuredArm:
    """One arm of the end-to-end comparison, over the best plain kernel on the same prompts, with a 95 % interval."""

    draft_key: str
    method: str
    workload: str
    depth_k: int
    batch_size: int
    dtype: str
    kernel: str
    num_prompts: int
    num_requests: int
    num_rounds: int
    tokens_per_s: float
    plain_tokens_per_s: float
    al: float | None
    al_replayed: float | None  # from the acceptance maps of these very prompts; None: some have no map
    draft_acceptance_rate: float | None
    speedup: float
    lo: float
    hi: float
    checked: int  # requests compared with plain decoding, token for token
    ties: int  # outputs that differ, though each token is the target's choice up to rounding noise
    divergences: int  # outputs that differ by more
    speedup_pred: float | None = None  # the prediction made for these very prompts
    tree_budget: int | None = None  # draft tokens verified in one pass; None for a chain
    num_processes: int = 1  # fresh processes that it ran in
    is_decisive: bool = False  # whether its prompts are enough for a verdict, also in effective size
    tied_share: float | None = None  # share of prompts whose output parts at a tie; None: nothing compared
    tied_share_limit: float | None = None  # the most that rounding explains; None: not known
    rounded_tokens: float | None = None  # tokens with a likelier alternative, within the noise; speedup/measured.py
    rounded_tokens_limit: float | None = None


@dataclass(frozen=True)
class StopChoice:
    """A rule that ends a drafter's chains by its confidence, against its best fixed depth; 95 % intervals.

    All but the rule itself is of prompts that a rule was not fitted to. gain: speed with the rule over that at the
    fixed depth. p_min: a single threshold on the confidence of every draft token, with a depth of its own, likewise.
    reliability: [predicted, observed acceptance, draft tokens] of bins of equal size. calibration: for every depth the
    confidences and the acceptances of its curve's knots (components/stop_rule.py).
    """

    draft_key: str
    method: str
    batch_size: int
    num_prompts: int
    num_rounds: int
    fixed_depth: int
    speedup_fixed: float  # over plain decoding, predicted
    speedup: float
    gain: float
    gain_lo: float
    gain_hi: float
    chosen: bool  # whether the gain (the measured one, where there is one) is above 1 with the confidence asked for
    al: float  # tokens a round
    drafted: float  # draft tokens verified a round
    share_of_oracle: float  # of the speed of somebody who knows what will be accepted
    p_min: float
    p_min_depth: int
    p_min_gain: float
    p_min_gain_lo: float
    p_min_gain_hi: float
    calibration_error: float
    reliability: list[list[float]]
    calibration: list[list[list[float]]]
    draft_from: list[float]
    verify_from: list[float]
    gain_meas: float | None = None  # while decoding, arms in turns; None: not measured
    meas_lo: float | None = None
    meas_hi: float | None = None
    num_prompts_meas: int = 0
    p_min_gain_meas: float | None = None
    p_min_meas_lo: float | None = None
    p_min_meas_hi: float | None = None
    divergences: int = 0  # outputs that differ from plain decoding beyond a tie
    reading_share: float | None = None  # of a round at the fixed depth, what reading all its confidences would add

    @property
    def rule(self) -> StopRule:
        """The rule, as decoding takes it."""
        curves = tuple(Calibration(tuple(at), tuple(accepted)) for at, accepted in self.calibration)
        return StopRule(curves, tuple(self.draft_from), tuple(self.verify_from))

    @property
    def summary_line(self) -> str:
        """The result in one line."""
        conclusion = "stop by confidence" if self.chosen else f"keep the fixed depth {self.fixed_depth}"
        measured = (
            f", measured {self.gain_meas:.3f}x [{self.meas_lo:.3f}, {self.meas_hi:.3f}] over {self.num_prompts_meas}"
            if self.gain_meas is not None
            else ""
        )
        return (
            f"{self.method}, batch size {self.batch_size}: chains that end by confidence reach {self.gain:.3f}x "
            f"[{self.gain_lo:.3f}, {self.gain_hi:.3f}] the speed of depth {self.fixed_depth}, {self.drafted:.1f} draft "
            f"tokens a round, over {self.num_prompts} prompts{measured}: {conclusion}"
        )


@dataclass(frozen=True)
class GateCheck:
    """One condition of promotion. limit: the bound as text, e.g. "> 1.0"."""

    name: str
    passed: bool
    value: float | None
    limit: str

    def refusal(self) -> str:
        """What was measured, what was asked and what to do where it fails, in one clause."""
        return refusal(self.name, self.measured(), self.limit)

    def measured(self) -> str:
        """The value."""
        return "not measured" if self.value is None else f"{self.value:.3g}"

    def what(self) -> str:
        """What is measured, in words."""
        return quantity(self.name)

    def asked(self) -> str:
        """The bound in words."""
        return limit_in_words(self.limit)


@dataclass(frozen=True)
class Gate:
    """The gate of promotion: passed where every check is."""

    passed: bool
    checks: list[GateCheck]


@dataclass(frozen=True)
class Winner:
    """The drafter to serve and its depth."""

    draft_key: str
    method: str
    depth_k: int


@dataclass(frozen=True)
class Policy:
    """Everything in policy.json; see the head of this file."""

    selection_id: str
    target_key: str
    dtype: str
    kernel: str
    rule: str
    tolerance: float
    choices: list[DepthChoice]
    evals: list[DepthEval]
    acceptance: list[AcceptanceSummary]
    prompts: list[PromptCounts]
    rounds: list[RoundCost]
    flags: list[QualityFlag]
    arms: list[MeasuredArm] = field(default_factory=list)
    comparisons: list[PairedComparison] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    winner: Winner | None = None
    verdict: str = "undecided"
    reasons: list[str] = field(default_factory=list)
    gate: Gate | None = None
    contexts: list[DepthChoice] = field(default_factory=list)
    mixtures: list[Mixture] = field(default_factory=list)
    trees: list[DepthEval] = field(default_factory=list)
    ranking: list[RankedDrafter] = field(default_factory=list)
    weights: list[WeightsCost] = field(default_factory=list)
    threads: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    confidence: float = 0.95
    stops: list[StopChoice] = field(default_factory=list)
    acceptance_by_context: list[AcceptanceByContext] = field(default_factory=list)
    target_model: str = ""
    prompt_format: str = ""
    judged: str = ""  # draft_key; "" in policies from before this field


RENAMED: Mapping[str, Mapping[str, str]] = {
    "acceptance": {"al_kept": "al", "al_pooled_incl_bonus": "al_uncut", "al_macro_incl_bonus": "al_macro"},
    "arms": {"acceptance_rate": "draft_acceptance_rate"},
}
"""List in policy.json -> former name of a column -> current name."""
DROPPED_PARTS = ("engines",)
"""Former parts of policy.json; settings of engines are now part of a release."""


def with_current_names(raw: JsonObject) -> JsonObject:
    """The content of a policy.json of any age; unknown names stay, for the reader to refuse."""
    return {
        part: [{RENAMED[part].get(name, name): value for name, value in row.items()} for row in rows]
        if part in RENAMED
        else rows
        for part, rows in raw.items()
        if part not in DROPPED_PARTS
    }


def read_policy(directory: Path) -> Policy:
    """The policy that `write_policy` wrote. Raises UserError where the file is missing or no policy."""
    file = directory / "policy.json"
    if not file.is_file():
        raise UserError(f"{directory}: no policy.json: not a DepthPolicy artifact; make one with speedup.choose_depth")
    try:
        raw = with_current_names(read_object(file))
        hints = get_type_hints(Policy).items()
        row_types = {name: get_args(hint)[0] for name, hint in hints if get_origin(hint) is list}
        values: JsonObject = {
            name: [row_types[name](**row) for row in value] if is_dataclass(row_types.get(name)) else value
            for name, value in raw.items()
        }
        winner, gate = values.get("winner"), values.get("gate")
        if winner is not None:
            values["winner"] = Winner(**winner)
        if gate is not None:
            values["gate"] = Gate(**{**gate, "checks": [GateCheck(**check) for check in gate.get("checks", ())]})
        return Policy(**values)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: not a depth policy ({error}); run speedup.choose_depth again") from error


def extended(policy: Policy, **rows: Iterable[Any]) -> Policy:
    """The policy with more rows: each argument goes to the end of the list of its name."""
    lists: dict[str, Any] = {name: [*getattr(policy, name), *added] for name, added in rows.items()}
    return replace(policy, **lists)


def policy_in(folder: Path) -> Policy | None:
    """The depth policy of a folder; None where it is gone, or a step of the user's own keeps it in another form."""
    try:
        return read_policy(folder)
    except UserError:
        return None


def faults_of(policy: Policy, draft_key: str) -> list[QualityFlag]:
    """Faults that concern one drafter: its own, and those of the whole measurement or of plain decoding.

    Prompt lookup has no key either, but its faults concern no drafter.
    """
    faults = [flag for flag in policy.flags if flag.severity == "fault"]
    return [f for f in faults if f.draft_key == draft_key or (f.draft_key == "" and f.method in ("", "none"))]


def verdict_in_words(facts: Mapping[str, Any]) -> str:
    """The verdict as one sentence. facts: DepthPolicy.info."""
    method, depth, speed = facts.get("method", "?"), facts.get("depth_k", 0), facts.get("speedup_meas")
    verdict = facts.get("verdict", "undecided")
    tokens = "1 token" if depth == 1 else f"{depth} tokens"
    if verdict == "use" and speed is not None:
        return f"Use {method} and draft {tokens} a round: {speed:.2f}x the speed of the best plain decoding."
    if verdict == "use":
        predicted = facts.get("speedup_pred", 1.0)
        return f"Use {method} and draft {tokens} a round; predicted {predicted:.2f}x, not measured."
    if verdict == "do_not_speculate":
        return "Do not speculate: no drafter is reliably faster than plain decoding here."
    if verdict == "invalid":
        return "Invalid: a fault in the measurement or in the output has to be mended before any number counts."
    return "Undecided: the measurement does not separate the drafter from plain decoding; measure more prompts."


NOISE = ("disturbed", "loaded_machine", "undecided_contradiction")
"""Codes of flags that other work on the machine raises, or that a quiet machine would settle."""


def noise_of(policy: Policy) -> str:
    """What disturbed a measurement that the gate refused, in one line; "" where it passed, or nothing did."""
    if policy.gate is None or policy.gate.passed:
        return ""
    return "; ".join(dict.fromkeys(f"{flag.detail} ({flag.value:.3g})" for flag in policy.flags if flag.code in NOISE))


def served_choices(policy: Policy, draft_key: str | None = None) -> list[DepthChoice]:
    """The choices that are served: over all workloads, at the smallest batch size with a choice.

    draft_key: limits this to one drafter, at its own smallest batch size.
    """
    all_workload_choices = [c for c in policy.choices if c.workload == ALL and draft_key in (None, c.draft_key)]
    smallest = min((c.batch_size for c in all_workload_choices), default=1)
    return [c for c in all_workload_choices if c.batch_size == smallest]


def judged_choice(policy: Policy) -> DepthChoice | None:
    """The choice that verdict and reasons are about; None without any choice.

    Where a policy names no drafter, the surest prediction stands for all; of equal ones the smallest key, as in ranks.
    """
    key = policy.winner.draft_key if policy.winner is not None else policy.judged
    choices = (served_choices(policy, key) if key else []) or served_choices(policy)
    return min(choices, key=lambda c: (-c.pred_lo, c.draft_key), default=None)


def served_depths(released: Policy) -> dict[str, int]:
    """draft_key -> the depth at which a policy's release serves its drafter; {} without a winner.

    It is the winner's depth, and 0 where the verdict turns drafting off.
    """
    if released.winner is None:
        return {}
    drafting = released.verdict in ("use", "undecided")
    return {released.winner.draft_key: released.winner.depth_k if drafting else 0}
