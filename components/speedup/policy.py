"""The depth policy: `policy.json`, and the same facts as rows that the history can query.

policy.json holds
  selection_id, target_key, dtype, kernel     what was chosen for, and the arithmetic it was measured in
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
  threads      draft_key -> the number of threads that its step costs were timed on
  flags        QualityFlag rows
  winner       Winner or null
  verdict      use | do_not_speculate | undecided | invalid, with `reasons` as text
  gate         Gate; null before confirm_depth

`policy.md` beside it shows the same to people (policy_markdown.py). Settings of serving engines are part of a release,
which knows the engines that can load the drafter (engines/depth_settings.py).

Two records of policy.json: a ranked drafter, and one depth for several workloads.

Policies written before some of their names changed, converted to the current names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from components.contract import UserError
from components.outside_json import read_object
from components.rows import ALL, DepthChoice, DepthEval, PairedComparison, QualityFlag, write_rows
from components.speedup.quantisation_cost import WeightsCost


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
    rounded_tokens: float | None = None  # tokens with a likelier alternative, within the noise; ties.py
    rounded_tokens_limit: float | None = None


@dataclass(frozen=True)
class GateCheck:
    """One condition of promotion. limit: the bound as text, e.g. "> 1.0"."""

    name: str
    passed: bool
    value: float | None
    limit: str


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


@dataclass
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


def write_policy(directory: Path, policy: Policy) -> None:
    """Write policy.json, policy.md and the rows of depth_eval, depth_choice, paired_comparison and quality_flag."""
    from components.speedup.policy_markdown import policy_text

    text = json.dumps(asdict(policy), indent=1, allow_nan=False)
    (directory / "policy.json").write_text(text + "\n", encoding="utf-8")
    (directory / "policy.md").write_text(policy_text(policy), encoding="utf-8")
    rows = [*policy.evals, *policy.trees, *policy.choices, *policy.contexts, *policy.comparisons, *policy.flags]
    write_rows(directory, rows)


def read_policy(directory: Path) -> Policy:
    """The policy that `write_policy` wrote. Raises UserError where the file is missing or no policy."""
    file = directory / "policy.json"
    if not file.is_file():
        raise UserError(f"{file}: no such file; a DepthPolicy is made by speedup.choose_depth")
    try:
        raw = with_current_names(read_object(file))
        lists: dict[str, type[Any]] = {
            "choices": DepthChoice,
            "evals": DepthEval,
            "acceptance": AcceptanceSummary,
            "prompts": PromptCounts,
            "rounds": RoundCost,
            "flags": QualityFlag,
            "arms": MeasuredArm,
            "comparisons": PairedComparison,
            "contexts": DepthChoice,
            "mixtures": Mixture,
            "trees": DepthEval,
            "ranking": RankedDrafter,
            "weights": WeightsCost,
        }
        values: dict[str, Any] = {k: [lists[k](**row) for row in v] if k in lists else v for k, v in raw.items()}
        winner, gate = values.get("winner"), values.get("gate")
        if winner is not None:
            values["winner"] = Winner(**winner)
        if gate is not None:
            values["gate"] = Gate(**{**gate, "checks": [GateCheck(**check) for check in gate.get("checks", ())]})
        return Policy(**values)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: not a depth policy ({error}); run speedup.choose_depth again") from error


def faults_of(policy: Policy, draft_key: str) -> list[QualityFlag]:
    """Faults that concern one drafter: its own, and those of the whole measurement or of plain decoding.

    Prompt lookup has no key either, but its faults concern no drafter.
    """

    faults = [flag for flag in policy.flags if flag.severity == "fault"]
    return [f for f in faults if f.draft_key == draft_key or (f.draft_key == "" and f.method in ("", "none"))]


def served_choices(policy: Policy, draft_key: str | None = None) -> list[DepthChoice]:
    """The choices that are served: over all workloads, at the smallest batch size with a choice.

    draft_key: limits this to one drafter, at its own smallest batch size.
    """
    all_workload_choices = [c for c in policy.choices if c.workload == ALL and draft_key in (None, c.draft_key)]
    smallest = min((c.batch_size for c in all_workload_choices), default=1)
    return [c for c in all_workload_choices if c.batch_size == smallest]


def served_depths(released: Policy) -> dict[str, int]:
    """draft_key -> the depth at which a policy's release serves its drafter; {} without a winner.

    It is the winner's depth, and 0 where the verdict turns drafting off.
    """
    if released.winner is None:
        return {}
    drafting = released.verdict in ("use", "undecided")
    return {released.winner.draft_key: released.winner.depth_k if drafting else 0}


def policy_summary(policy: Policy) -> dict[str, Any]:
    """The facts for an artifact's info, a run's metrics and a summary: of the winner, else the best drafter."""
    facts: dict[str, Any] = {
        "verdict": policy.verdict,
        "reasons": policy.reasons,
        "num_flags": len(policy.flags),
        "gate_passed": policy.gate.passed if policy.gate else None,
        "gate_failed": [check.name for check in policy.gate.checks if not check.passed] if policy.gate else [],
        "depth_k": 0,
    }
    winner_choices = served_choices(policy, policy.winner.draft_key) if policy.winner else []
    all_workload_choices = winner_choices or served_choices(policy)
    if not all_workload_choices:
        return facts
    best = max(all_workload_choices, key=lambda c: (c.pred_lo, c.draft_key))
    facts |= {
        "method": best.method,
        "draft_key": best.draft_key,
        "depth_k": best.depth_k,
        "speedup_pred": best.speedup_pred,
        "speedup_meas": best.speedup_meas,
        "meas_lo": best.meas_lo,
        "meas_hi": best.meas_hi,
        "pred_error": best.pred_error,
    }
    for row in policy.evals:
        best_key = (best.draft_key, ALL, best.depth_k, best.batch_size)
        if (row.draft_key, row.workload, row.depth_k, row.batch_size) == best_key:
            facts |= {"al": row.al, "al_lo": row.al_lo, "al_hi": row.al_hi}
            facts |= {"al_meas": row.al_meas, "al_replayed": row.al_replayed}
    facts["num_prompts"] = len({c.prompt_id for c in policy.prompts if c.draft_key == best.draft_key})
    for pair in policy.comparisons:
        if (pair.quantity, pair.workload) == ("decode_speed", ALL):
            facts |= {"vs_champion": pair.ratio, "vs_champion_lo": pair.lo, "vs_champion_hi": pair.hi}
            facts |= {"champion_key": pair.champion_key, "vs_champion_verdict": pair.verdict}
    drafter_arms = [a for a in policy.arms if a.draft_key == best.draft_key and a.workload == ALL]
    if drafter_arms:
        # Outputs must be identical in all arms of the drafter; speed is that of the arm that is served.
        served = (
            a for a in drafter_arms if (a.depth_k, a.batch_size, a.tree_budget) == (best.depth_k, best.batch_size, None)
        )
        arm = next(served, None)
        facts["speedup_pred_same_prompts"] = arm.speedup_pred if arm is not None else None
        facts["num_prompts_timed"] = arm.num_prompts if arm is not None else None
        facts["identical"] = sum(a.divergences for a in drafter_arms) == 0 and sum(a.checked for a in drafter_arms) > 0
        facts["num_ties"] = sum(a.ties for a in drafter_arms)
        facts["num_checked"] = sum(a.checked for a in drafter_arms)
    return facts


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


RENAMED: Mapping[str, Mapping[str, str]] = {
    "acceptance": {"al_kept": "al", "al_pooled_incl_bonus": "al_uncut", "al_macro_incl_bonus": "al_macro"},
    "arms": {"acceptance_rate": "draft_acceptance_rate"},
}
"""List in policy.json -> former name of a column -> current name."""
DROPPED_PARTS = ("engines",)
"""Former parts of policy.json; settings of engines are now part of a release."""


def with_current_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a policy.json of any age; unknown names stay, for the reader to refuse."""
    return {
        part: [{RENAMED[part].get(name, name): value for name, value in row.items()} for row in rows]
        if part in RENAMED
        else rows
        for part, rows in raw.items()
        if part not in DROPPED_PARTS
    }
