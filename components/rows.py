"""The tables of measured facts, one dataclass each: the one place where a column gets its name, type and unit.

A measuring step builds these rows and calls `write_rows`; the store turns them into typed Parquet, and views in
storage/history/views.sql turn counts into every published number. Counts are stored, conventions are views. `None`
means "not measured", never zero.

Rows of comparisons: challenger with champion, then with now, one training mix with another.

They belong to the tables of rows.py; import them from there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar


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


NAMES_OF_CHANGES = {
    "target": "changed target",
    "tuning": "tuning",
    "both": "both together",
    "sampled": "sampled answers",
    "sampled_tuned": "sampled answers, tuned",
}
"""`what` of an AcceptanceChange -> the name of the change, for people."""


@dataclass(frozen=True)
class AcceptanceChange:
    """Acceptance length of a drafter before and after it was tuned, or its target was changed, on the same prompts.

    what: tuning (as it came -> tuned, on the target of now), target (as it came, on the older target -> on that of now)
    or both (as it came on the older target -> tuned on that of now); sampled (as it came) and sampled_tuned: greedy
    answers -> sampled ones, at the depth of the sampled runs. change: al_after - al_before in tokens a round,
    resampled together; intervals are 95 % over prompts. verdict: lower (hi < 0), higher (lo > 0), else undecided.
    came_back: of a tuning, its change as a share of what the changed target cost (1: all of it); None where no cost
    was shown.
    """

    session_id: str
    what: str
    target_key: str  # of now
    before_target_key: str
    draft_key: str  # after
    before_draft_key: str
    method: str
    workload: str  # "all" pools them
    depth_k: int
    num_prompts: int
    al_before: float
    before_lo: float
    before_hi: float
    al_after: float
    after_lo: float
    after_hi: float
    change: float
    lo: float
    hi: float
    verdict: str
    came_back: float | None
    came_back_lo: float | None
    came_back_hi: float | None


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
class AcceptanceByContext:
    """Acceptance length of one drafter over the rounds that begin at context lengths of one bin, from replayed maps.

    The context of a round is what Round.kv_len says: tokens in the target's cache when it begins. context_from,
    context_to: the bin holds lengths above the first up to the second; None: without end. num_prompts: those with
    rounds in it. al: num_tokens / num_rounds; its interval is 95 %, over these prompts.
    """

    selection_id: str
    target_key: str
    draft_key: str
    method: str
    depth_k: int
    context_from: int
    context_to: int | None
    num_prompts: int
    num_rounds: int
    num_tokens: int
    al: float
    al_lo: float
    al_hi: float


@dataclass(frozen=True)
class EngineComparison:
    """A serving engine beside our own numbers: one drafter at one depth, on the prompts of one workload.

    num_compared: answers held against our plain decoding token for token (or as text). Of them num_identical are the
    same, num_ties differ by rounding alone (bench/end_to_end/identity.py), num_divergences by more.
    num_paired: identical answers whose rounds we know as well; rounds and tokens are sums over these, and
    num_different of them took another number of rounds. tokens: emitted by rounds.
    our_rounds_from: end_to_end (our own timed decoding), maps (replayed acceptance maps), "" where there is neither.
    al_engine, al_ours: tokens / rounds of the paired answers; al_pred: what the depth policy replayed for their prompts
    (for all its prompts where none is paired). speedup_pred: of all its prompts. Speedups are over each side's own
    plain decoding.
    verdict: equal (the same rounds for every prompt), close (acceptance length within `tolerance`), mismatch,
    not_compared.
    Imposed acceptance (no draft_key, a method of its own) is held against the speedup model: al_pred is what the server
    was told, al_engine what it counted, speedup_pred the model's from the same server at rate 0, and the verdict is of
    the speedups.
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


@dataclass(frozen=True)
class SampledRun:
    """What a drafter kept of one answer that was sampled while it drafted, at one depth and with a seed.

    Above temperature 0 a draft token is kept with a probability, and other answers follow: a map of a greedy answer
    says nothing of them. num_rounds: of the run; num_tokens: emitted by them, the prefill's left out.
    """

    target_key: str
    draft_key: str
    method: str
    prompt_id: str
    workload: str
    depth_k: int
    temperature: float
    seed: int
    num_rounds: int
    num_tokens: int
    dtype: str


ALL: Final = "all"
"""The value of `workload` and of `language` in a row that pools every prompt."""


@dataclass(frozen=True)
class AcceptanceMap:
    """What a round started at each output position would keep (greedy chain), for every depth at once.

    accepted[i]: how many of k_max drafts made after output token i would be kept; output token 0 comes from prefill.
    proxy_accepted[i]: the same with teacher-forced drafting inputs (the training metric), to show how far it flatters.
    repeated_bigrams: share of the answer's bigrams that occurred before in it; repetition flatters acceptance.
    tree_budget: None for a chain. For a tree, the guesses verified in one pass; accepted[i] is then the length of the
        path kept, and replaying it at k_max (its depth) gives the tree's acceptance length.
    prompt_tokens: tokens before output token 0; None in rows written before it was kept.
    language: of the prompt, "" where it is not known. num_guessable: how many of output tokens 1 .. num_tokens - 1 are
        in the draft vocabulary at all, a bound on what can be kept; None in rows written before it was counted.
    weights: how a drafter whose weights were rounded stores them ("int4, groups of 32"), quantised_from: the drafter
        that it was made from; "" for one as it was trained.
    confidence[i][j]: the probability, at temperature 1, that the drafter gives its draft token j + 1 of that round,
        rounded to four digits; [] for trees, and for methods that find their tokens.
    """

    target_key: str
    draft_key: str
    method: str
    prompt_id: str
    workload: str
    k_max: int
    trained_depth: int
    num_tokens: int
    accepted: list[int]
    proxy_accepted: list[int]
    repeated_bigrams: float
    dtype: str
    tree_budget: int | None = None
    prompt_tokens: int | None = None
    language: str = ""
    num_guessable: int | None = None
    weights: str = ""
    quantised_from: str = ""
    confidence: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class CostCell:
    """The median time of one block of repetitions of one phase; of a drafter whose rounds differ in draft tokens, the
    mean over their medians (bench/measurement/round_kinds.py).

    phase: target_step (1 row), verify (depth_k + 1 rows), draft (all depth_k proposals of a round, feature intake
    included), draft_read (the same where a stop rule reads every confidence and ends no chain), host (the rest of a
    round: sampling, verification, bookkeeping), control (target_step at both ends);
    and once a generation, apart from decoding: prefill (the pass over the prompt, kv_len rows) and draft_prefill (the
    drafter takes the prompt in and makes its first proposal: what a generation pays before its second round).
    batch_size: sequences decoded side by side; a time is that of the whole batch. kv_len: mean tokens in the cache.
    tree_budget: None for a chain; for a tree, the guesses verified in one pass (num_rows is that plus 1).
    """

    target_key: str
    draft_key: str
    method: str
    phase: str
    depth_k: int
    batch_size: int
    num_rows: int
    kv_len: int
    block: int
    reps_in_block: int
    median_ns: float
    mad_ns: float
    dtype: str
    kernel: str
    num_threads: int
    tree_budget: int | None = None
    load_average: float | None = None  # of the machine, one minute, when the block ended
    clock_mhz: float | None = None  # of the processor that computes (a GPU's multiprocessors), when the block ended
    process: int = 0  # the fresh process that timed it, from 1; 0 in rows of measurements in one process


@dataclass(frozen=True)
class Request:
    """One timed generation. decode_ns: from the first token to the last kept token; prefill ends at ttft_ns.

    Where rounds were timed one by one, in turns with others, each counts in decode_ns as the steady time of its kind
    (tokens drafted) in its arm and process (bench/end_to_end/timed_runs.py steady_share): other work makes a round
    longer, never shorter. elapsed_ns is then what passed.

    A drafter's method and key with depth_k 0: it is loaded and drafts nothing, as an engine does with a request that
    asks for no speculation, but keeps what it needs to go on: the EAGLE family and a draft model take every token in,
    mtp and mtp-parallel only remember it.
    """

    session_id: str
    request_id: str
    target_key: str
    draft_key: str
    method: str  # "none" for plain decoding
    depth_k: int  # 0 for plain decoding
    prompt_id: str
    workload: str
    batch_size: int
    rep: int
    order_index: int  # shows the interleaving actually used
    is_warmup: bool
    status: str  # ok | eos | error
    prompt_tokens: int
    tokens_kept: int
    tokens_raw: int  # kept plus overshoot past the end or the limit
    num_rounds: int
    num_drafted: int
    num_accepted: int
    ttft_ns: int
    decode_ns: int
    output_sha256: str
    identical: bool | None  # against plain decoding of the same prompt; None for plain itself
    first_divergence: int | None
    tie: bool | None  # where they differ: whether every token is the target's own choice, up to rounding noise
    dtype: str
    kernel: str
    num_threads: int
    temperature: float
    tree_budget: int | None = None  # guesses of a tree verified in one pass; None for a chain
    batch_id: str | None = None  # requests decoded side by side share it; None where batch_size is 1
    engine: str | None = None  # a server or program that decoded it ("vllm"); None: Draftsmith's own loop
    engine_version: str | None = None
    concurrency: int | None = None  # requests in flight at most while it ran; batch_size says the same for a server
    first_chunk_tokens: int | None = None  # tokens that came at once at ttft_ns, where the engine tells; else None
    e2e_ns: int | None = None  # from sending to the end of the answer, as the client saw it
    error: str | None = None  # why status is "error", in one line
    process: int = 0  # the fresh process that decoded it, from 1; 0 in rows of measurements in one process
    elapsed_ns: int | None = None  # what passed on the clock instead of decode_ns, other work included; None: the same
    first_wrong: int | None = None  # the first token that is not the target's own choice; None for a tie
    divergence_shortfall: float | None = None  # logits that the token at first_wrong (of a tie: where it parts) lacks
    divergence_noise: float | None = None  # of a logit at that token: its standard deviation between row counts
    tie_chance: float | None = None  # probability that rounding alone parts an output from this prompt's plain one
    rounded_tokens: int | None = None  # tokens of the output beside which the target finds another likelier
    rounded_expected: float | None = None  # how many of them rounding alone makes
    divergence_margin: float | None = None  # plain top-2 margin where they part, in rows that were judged by it

    @property
    def timed_tokens(self) -> int:
        """Tokens that came within decode_ns: all but the first, or but those that an engine sent with it (0: as 1)."""
        return self.tokens_kept - (self.first_chunk_tokens or 1)


@dataclass(frozen=True)
class Round:
    """One verification round of one request. emitted = accepted + 1 unless the tail of the request was cut."""

    request_id: str
    round_no: int
    out_pos: int
    drafted: int
    accepted: int
    emitted: int
    kv_len: int


@dataclass(frozen=True)
class PredictionKey:
    """What a row of the depth policy is about: the first columns of DepthEval and DepthChoice."""

    selection_id: str
    target_key: str
    draft_key: str
    method: str
    workload: str
    batch_size: int


@dataclass(frozen=True)
class DepthEval(PredictionKey):
    """One depth of one drafter on one workload: predicted, and measured where it was. Times in ms, 95 % intervals."""

    depth_k: int
    al: float  # kept tokens a round, bonus included
    al_lo: float
    al_hi: float
    t_target_ms: float
    t_verify_ms: float
    t_draft_ms: float
    cost_ratio: float  # (t_verify + t_draft) / t_target
    speedup_pred: float
    pred_lo: float
    pred_hi: float
    marginal_gain: float | None  # u_k / AL(k-1): relative tokens that the k-th draft adds
    marginal_cost: float | None  # (c(k) - c(k-1)) / c(k-1): relative time that it adds
    p_best: float
    regret: float
    al_meas: float | None
    speedup_meas: float | None
    meas_lo: float | None
    meas_hi: float | None
    tree_budget: int | None = None  # guesses verified in one pass of a tree of this depth; None for a chain
    al_replayed: float | None = None  # al of the very prompts that al_meas is of; al is of all that have a map


@dataclass(frozen=True)
class DepthChoice(PredictionKey):
    """The depth to serve with, and the verdict: use | do_not_speculate | undecided | invalid.

    workload: "all" pools every prompt, "mixture" weighs workloads by the shares that were stated.
    kv_len: the context length that the cost is of, in tokens; None: the mean over all that were measured.
    loss: share of predicted speed that one depth for all workloads loses against each at its own; on a workload's own
        row what that workload loses. The one depth is the mixture's, without a stated mixture that of "all".
    """

    depth_k: int
    rule: str
    tolerance: float
    p_beats_no_spec: float | None  # None: nothing tells how far chance could move it
    speedup_pred: float
    pred_lo: float
    pred_hi: float
    speedup_meas: float | None
    meas_lo: float | None
    meas_hi: float | None
    pred_error: float | None  # speedup_pred / speedup_meas - 1
    verdict: str
    reasons: list[str]
    kv_len: int | None = None
    loss: float | None = None


@dataclass(frozen=True)
class StopRun:
    """One timed generation beside others of the same prompt: does ending chains by confidence pay while decoding?

    arm: plain (decoding without a drafter) | fixed (chains of depth_k) | stop (chains of at most depth_k that end by
    confidence) | p_min (those that end before the first draft token below one threshold). tokens and elapsed_ns are
    those after the first token, as the clock had them; arms took turns.
    """

    session_id: str
    target_key: str
    draft_key: str
    method: str
    arm: str
    depth_k: int
    prompt_id: str
    workload: str
    batch_size: int
    process: int
    rep: int
    tokens: int
    elapsed_ns: int
    num_rounds: int
    num_drafted: int
    num_accepted: int
    identical: bool | None  # against plain decoding; None for plain itself
    tie: bool | None  # where they differ: whether every token is the target's own choice, up to rounding noise
    dtype: str
    kernel: str
    num_threads: int


@dataclass(frozen=True)
class QualityFlag:
    """A named reason to doubt a number, with its value. severity: info | warning | fault."""

    session_id: str
    draft_key: str
    method: str
    code: str
    severity: str
    value: float
    detail: str


@dataclass(frozen=True)
class EngineAcceptance:
    """What an engine counted about its own speculation over one group of requests: counters after minus before.

    Server-wide: requests by others meanwhile are in it. num_rounds: verification rounds that drafted anything.
    accepted_per_position[i]: rounds that accepted draft i + 1 (unconditional; the denominator is num_rounds).
    drafted_per_position[i]: rounds that drafted that far, where the engine tells; else None.
    source: where it was read: prometheus | responses | program.
    """

    session_id: str
    target_key: str
    draft_key: str
    method: str
    depth_k: int
    workload: str
    concurrency: int
    engine: str
    engine_version: str
    source: str
    num_requests: int
    num_rounds: int
    num_drafted: int
    num_accepted: int
    accepted_per_position: list[int]
    drafted_per_position: list[int] | None
    imposed: list[float] | None = None  # the share of rounds that it was told to accept draft i + 1 in; None: not told


TABLES: dict[str, type[Any]] = {
    "acceptance_map": AcceptanceMap,
    "sampled_run": SampledRun,
    "cost_cell": CostCell,
    "request": Request,
    "round": Round,
    "depth_eval": DepthEval,
    "depth_choice": DepthChoice,
    "paired_comparison": PairedComparison,
    "drift": Drift,
    "acceptance_change": AcceptanceChange,
    "acceptance_by_language": AcceptanceByLanguage,
    "acceptance_by_context": AcceptanceByContext,
    "stop_run": StopRun,
    "quality_flag": QualityFlag,
    "engine_acceptance": EngineAcceptance,
    "engine_comparison": EngineComparison,
}

Row = TypeVar("Row")
Key = TypeVar("Key")


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Rows by a key of theirs: keys and rows in the order in which they come."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def table_of(row_type: type[Any]) -> str:
    """The table a row type belongs to."""
    return next(name for name, type_ in TABLES.items() if type_ is row_type)


def write_rows(directory: Path, rows: Iterable[Any]) -> None:
    """Write rows (of any of the types above) to `TABLE.jsonl` files in `directory`; a file is replaced whole."""
    for table, of_table in grouped(rows, lambda row: table_of(type(row))).items():
        lines = [json.dumps(dataclasses.asdict(row)) for row in of_table]
        (directory / f"{table}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_rows(directory: Path, row_type: type[Row]) -> list[Row]:
    """The rows of one type under `directory`; an absent table is an empty list."""
    file = directory / f"{table_of(row_type)}.jsonl"
    if not file.is_file():
        return []
    return [row_type(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines() if line]
