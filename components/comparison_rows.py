"""Rows of comparisons: challenger with champion, then with now, one training mix with another.

They belong to the tables of rows.py; import them from there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PairedComparison:
    """A challenger against the champion on the same prompts of one session; ratio > 1: the challenger is better.

    quantity: decode_speed (kept tokens a second, each at the depth it serves, the challenger's is that chosen for it)
    or acceptance_length (tokens a round, both replayed at one depth, the challenger's). lo, hi: 95 % interval of the
    ratio over prompts, resampled together.
    margin: share by which the challenger may lie below. verdict: better (lo > 1), not_worse (lo >= 1 - margin), worse
    (hi < 1 - margin), else undecided; undecided too on prompts that are worth fewer than 4 of equal length.
    """

    session_id: str
    selection_id: str
    target_key: str
    challenger_key: str
    champion_key: str
    method: str
    champion_method: str
    workload: str
    quantity: str
    challenger_depth: int
    champion_depth: int
    num_prompts: int
    challenger_value: float
    champion_value: float
    ratio: float
    lo: float
    hi: float
    margin: float
    verdict: str


@dataclass(frozen=True)
class Drift:
    """Acceptance length of one drafter on new traffic against that on the prompts it was released with.

    then: the prompts of the release; now: the new ones. change: al_now - al_then in tokens a round; intervals are 95 %
    over prompts, the two sets resampled apart, since they share none. drifted: the interval of change excludes zero.
    """

    session_id: str
    target_key: str
    draft_key: str
    method: str
    workload: str  # of the new prompts; "all" pools them
    workload_then: str  # what it is held against: the same workload where the release had it, else "all"
    depth_k: int
    num_prompts_then: int
    num_prompts_now: int
    al_then: float
    then_lo: float
    then_hi: float
    al_now: float
    now_lo: float
    now_hi: float
    change: float
    lo: float
    hi: float
    drifted: bool


@dataclass(frozen=True)
class AcceptanceByLanguage:
    """Acceptance length of one drafter on the prompts of one language, and against a drafter of another training mix.

    language: ISO 639-1; "all" pools every prompt, "unknown" are those without one.
    trained_on: the languages that the drafter's training prompts are in, the most frequent first; num_trained_on: how
    many of these prompts are in this row's language.
    coverage: share of the answers' tokens that are in the draft vocabulary, a bound on what can be kept; None where
    that was not counted. Intervals are 95 %, over prompts.
    change: al - al of `baseline_key` on the same prompts, resampled together, in tokens a round; None for the baseline
    itself. verdict: lower (change_hi < 0), higher (change_lo > 0), undecided, or baseline.
    """

    session_id: str
    target_key: str
    draft_key: str
    method: str
    language: str
    depth_k: int
    num_prompts: int
    trained_on: list[str]
    num_trained_on: int
    al: float
    al_lo: float
    al_hi: float
    coverage: float | None
    baseline_key: str
    change: float | None
    change_lo: float | None
    change_hi: float | None
    verdict: str


@dataclass(frozen=True)
class EngineComparison:
    """A serving engine beside our own numbers: one drafter at one depth, on the prompts of one workload.

    num_compared: answers held against our plain decoding token for token (or as text). Of them num_identical are the
    same, num_ties differ by rounding alone (bench/identity.py), num_divergences by more.
    num_paired: identical answers whose rounds we know as well; rounds and tokens are sums over these, and
    num_different of them took another number of rounds. tokens: emitted by rounds.
    our_rounds_from: end_to_end (our own timed decoding), maps (replayed acceptance maps), "" where there is neither.
    al_engine, al_ours: tokens / rounds of the paired answers; al_pred: what the depth policy replayed for their prompts
    (for all its prompts where none is paired). speedup_pred: of all its prompts. Speedups are over each side's own
    plain decoding.
    verdict: equal (the same rounds for every prompt), close (acceptance length within `tolerance`), mismatch,
    not_compared.
    """

    session_id: str
    target_key: str
    draft_key: str
    method: str
    depth_k: int
    workload: str  # "all" pools every prompt
    engine: str
    engine_version: str
    concurrency: int
    num_prompts: int
    num_compared: int
    num_identical: int
    num_ties: int
    num_divergences: int
    num_paired: int
    num_different: int
    engine_rounds: int
    engine_tokens: int
    our_rounds: int
    our_tokens: int
    our_rounds_from: str
    al_engine: float | None
    al_ours: float | None
    al_pred: float | None
    speedup_engine: float | None
    speedup_ours: float | None
    speedup_pred: float | None
    tolerance: float
    verdict: str
