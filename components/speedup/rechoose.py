"""Second choice of depths and drafter, by the posterior of prediction and measurement.

The rule is that of the first choice (`near_best`), over the draws of the posterior, among the measured depths: an
unmeasured depth cannot be confirmed. Where prediction and measurement contradict each other on which depth is better,
beyond both of their intervals, the verdict is open until the measurement alone settles it.

The posterior is that of the speedup of every depth of every drafter. Prediction and measurement are log speedups. The
prediction p has the covariance of its costs (processes) and of the model itself:
    C = cost + MODEL_OWN^2 I + MODEL_SHARED^2 (1 within a drafter)
MODEL_SHARED is the model's error that all depths of a drafter share (work between the timed phases): an offset of the
measured depths thereby carries over to the others. MODEL_OWN is its error of one depth. The measurement y of some
depths, M theta, has the covariance R of its prompts and processes. Each is weighted by its precision, which for normal
errors is the update of Kalman (1960):
    theta = p + G (y - M p),   G = C M^T (M C M^T + R)^-1
Acceptance is common to both: the ratio of acceptance lengths, in the same draws of prompts, carries the measured
speedup from its own prompts to all that have maps, so that the cost of a round is combined. Draws of both that are
updated by the same G are draws of theta (Evensen 1994), in which depths are compared in pairs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from components.policy import Policy, PromptCounts, RoundCost, extended
from components.rows import ALL, DepthChoice, DepthEval, QualityFlag
from components.speedup.bootstrap import Estimate, Floats, draw_weights, losses, near_best, ratio_draws
from components.speedup.measured import ArmEstimate, best_of
from components.speedup.prediction.flags import QualityIssue

Arm = tuple[str, int]  # draft_key, depth
SESSIONS_TO_SETTLE = 3  # processes that a measurement needs to overrule a prediction that contradicts it
SURE_TO_SETTLE = 0.999  # and its confidence in the contradiction, with the differences of processes


class Posterior(NamedTuple):
    """Speedups of the chains at one batch size. draws: [draws, arms]. measured: the arms that were run."""

    arms: list[Arm]
    draws: Floats
    measured: Mapping[Arm, ArmEstimate]

    def of(self, arms: Sequence[Arm]) -> Floats:
        """The columns of these arms."""
        return self.draws[:, [self.arms.index(arm) for arm in arms]]


def choose_again(
    policy: Policy, measured: Sequence[ArmEstimate], num_draws: int, seed: int
) -> tuple[Policy, Posterior | None]:
    """The policy with the depths chosen by prediction and measurement together, over all workloads at every batch size.

    Also returns the posterior at the smallest batch size, which is served; None where no predicted depth was run.
    """
    all_workload_choices = [c for c in policy.choices if c.workload == ALL]
    served_posterior = None
    for batch_size in sorted({c.batch_size for c in all_workload_choices}):
        predicted = _predicted_depths(policy, batch_size, measured, num_draws, seed)
        if not predicted:
            continue
        runs = {
            (p.draft_key, p.depth_k): run for p in predicted if (run := best_of(policy, measured, p[:2], batch_size))
        }
        measured_depths = [
            _as_measured(arm, run, policy.prompts, predicted, num_draws, seed) for arm, run in runs.items()
        ]
        draws = combine(predicted, measured_depths, seed)
        posterior = Posterior([p[:2] for p in predicted], draws, runs)
        again = {
            choice.draft_key: _choose_depth_again(policy, choice, posterior)
            for choice in all_workload_choices
            if choice.batch_size == batch_size
        }
        choices = [
            again[c.draft_key][0] if (c.workload, c.batch_size) == (ALL, batch_size) else c for c in policy.choices
        ]
        policy = extended(
            replace(policy, choices=choices), flags=[flag for _, flags in again.values() for flag in flags]
        )
        if batch_size == min(c.batch_size for c in all_workload_choices) and runs:
            served_posterior = posterior
            policy = extended(policy, flags=_contradictions(policy, predicted, posterior))
    return policy, served_posterior


def _predicted_depths(
    policy: Policy, batch_size: int, measured: Sequence[ArmEstimate], num_draws: int, seed: int
) -> list[PredictedDepth]:
    """Every drafting depth with draws of its acceptance length and cost."""
    evals = [
        e for e in policy.evals if (e.workload, e.batch_size) == (ALL, batch_size) and e.depth_k and not e.tree_budget
    ]
    costs = {(c.draft_key, c.depth_k): c for c in policy.rounds if c.batch_size == batch_size}
    run = max((m.prompts for m in measured), key=len, default=[])
    depths = []
    for e in evals:
        length = _log_lengths(policy.prompts, e, run, num_draws, seed)
        if length is not None:
            cost = costs.get((e.draft_key, e.depth_k))
            depths.append(PredictedDepth(e.draft_key, e.depth_k, length, _cost_draws(e, cost, num_draws, seed)))
    return depths


def _log_lengths(
    prompts: Sequence[PromptCounts], row: DepthEval, run: Sequence[str], num_draws: int, seed: int
) -> Floats | None:
    """[draws] of log AL over all mapped prompts; the prompts that were run share the draws of their arms."""
    drafter_counts = {c.prompt_id: c for c in prompts if c.draft_key == row.draft_key and row.depth_k in c.depths}
    if not drafter_counts:
        return None
    both = [[p for p in run if p in drafter_counts], sorted(drafter_counts.keys() - set(run))]
    streams = ([seed, 3], [seed, 6])
    weights = [
        draw_weights(len(names), num_draws, np.random.default_rng(stream))
        for names, stream in zip(both, streams, strict=True)
        if names
    ]
    counts = [drafter_counts[name] for names in both for name in names]
    return np.log(_length_draws(np.concatenate(weights, axis=1), counts, row.depth_k))


def _length_draws(weights: Floats, counts: Sequence[PromptCounts], depth: int) -> Floats:
    tokens = np.array([float(c.tokens) for c in counts])
    return ratio_draws(weights, tokens, np.array([float(c.rounds[c.depths.index(depth)]) for c in counts]))


def _cost_draws(row: DepthEval, cost: RoundCost | None, num_draws: int, seed: int) -> Floats:
    """[draws] of the log of a round over a plain step."""
    draws = np.full(num_draws, math.log(row.al / row.speedup_pred))
    if cost is None or not cost.process:
        return draws
    shared = np.random.default_rng([seed, 1, cost.session]).standard_normal((num_draws, len(cost.process)))
    own_draws = np.random.default_rng([seed, 7, row.depth_k, zlib.crc32(row.draft_key.encode())]).standard_normal(
        num_draws
    )
    return np.asarray(draws + np.einsum("du,u->d", shared, np.array(cost.process)) + cost.own * own_draws)


def _as_measured(
    arm: Arm,
    run: ArmEstimate,
    prompts: Sequence[PromptCounts],
    predicted: Sequence[PredictedDepth],
    num_draws: int,
    seed: int,
) -> MeasuredDepth:
    """The measured speedup of an arm over the acceptance length of its prompts, in the same draws."""
    draft_key, depth = arm
    drafter_counts = {c.prompt_id: c for c in prompts if c.draft_key == draft_key and depth in c.depths}
    length = next(p.length for p in predicted if p[:2] == arm)
    if all(name in drafter_counts for name in run.prompts):
        weights = draw_weights(len(run.prompts), num_draws, np.random.default_rng([seed, 3]))
        length = np.log(_length_draws(weights, [drafter_counts[name] for name in run.prompts], depth))
    return MeasuredDepth(draft_key, depth, np.log(run.speedup.draws) - length)


def _choose_depth_again(
    policy: Policy, choice: DepthChoice, posterior: Posterior
) -> tuple[DepthChoice, list[QualityFlag]]:
    """The choice of one drafter by the posterior, with a flag where it is another one.

    It stays where none of its depths was run, or where none beats plain decoding and depth 0 or one of them was chosen.
    """
    arms = [arm for arm in posterior.measured if arm[0] == choice.draft_key]
    if not arms:
        return choice, []
    near_best_arms = [arms[i] for i in near_best(posterior.of(arms), policy.tolerance, policy.confidence)]
    eligible = [arm for arm in near_best_arms if is_faster(posterior.measured[arm].speedup)]
    if not eligible and (choice.depth_k == 0 or (choice.draft_key, choice.depth_k) in near_best_arms):
        return choice, []
    depth = min((eligible or near_best_arms), key=lambda arm: arm[1])[1]
    if depth == choice.depth_k:
        return choice, []
    row = next(
        e
        for e in policy.evals
        if (e.draft_key, e.workload, e.batch_size, e.depth_k) == (choice.draft_key, ALL, choice.batch_size, depth)
    )
    reason = f"with what was measured, depth {depth} is taken instead of {choice.depth_k}, predicted to be the best"
    if choice.depth_k == 0:
        reason = f"with what was measured, depth {depth} is taken, where the prediction alone would not have drafted"
    issue = QualityIssue("depth_changed", "info", depth, f"batch {choice.batch_size}: {reason}")
    changed = replace(
        choice,
        depth_k=depth,
        speedup_pred=row.speedup_pred,
        pred_lo=row.pred_lo,
        pred_hi=row.pred_hi,
        reasons=[*choice.reasons, reason],
    )
    return changed, [issue.to_flag(policy.selection_id, choice.draft_key, choice.method)]


def is_faster(speedup: Estimate) -> bool:
    """Whether the whole interval of a measured speedup lies above 1, over enough prompts for a verdict."""
    return speedup.is_decisive and speedup.interval()[0] > 1.0


def _contradictions(policy: Policy, predicted: Sequence[PredictedDepth], posterior: Posterior) -> list[QualityFlag]:
    """Flags where the best measured depth is not the predicted one: for each drafter, and among the best of each."""
    flags = []
    log_pred = {p[:2]: p.length - p.cost for p in predicted}
    methods = {c.draft_key: c.method for c in policy.choices}
    arms = list(posterior.measured)
    groups = [[arm for arm in arms if arm[0] == key] for key in dict.fromkeys(arm[0] for arm in arms)]
    tops = [max(group, key=lambda arm: posterior.measured[arm].speedup.value) for group in groups]
    for group in [*groups, tops]:
        predicted_best = max(group, key=lambda arm: float(log_pred[arm].mean()))
        best = max(group, key=lambda arm: posterior.measured[arm].speedup.value)
        if predicted_best == best or posterior.measured[best].prompts != posterior.measured[predicted_best].prompts:
            continue  # other prompts (a request failed) make no pairs
        ratio = posterior.measured[best].speedup.over(posterior.measured[predicted_best].speedup)
        lo, hi = ratio.interval()
        gap = log_pred[best] - log_pred[predicted_best]
        model_error = MODEL_OWN if predicted_best[0] == best[0] else math.hypot(MODEL_OWN, MODEL_SHARED)
        max_gap = 1.96 * math.hypot(float(gap.std()), math.sqrt(2.0) * model_error)
        pred_hi = math.exp(float(gap.mean()) + max_gap)
        if lo <= max(1.0, pred_hi):
            continue
        detail = (
            f"{_arm_name(best, methods)} measured {ratio.value:.2f} [{lo:.2f}, {hi:.2f}] times as fast as "
            f"{_arm_name(predicted_best, methods)}, predicted {math.exp(float(gap.mean())):.2f} (at most {pred_hi:.2f})"
        )
        num_processes = [posterior.measured[arm].arm.num_processes for arm in (best, predicted_best)]
        code = "prediction_overruled"
        if min(num_processes) < SESSIONS_TO_SETTLE or ratio.interval(SURE_TO_SETTLE)[0] <= max(1.0, pred_hi):
            code, detail = "undecided_contradiction", f"{_missing_measurement(best, predicted_best, methods)}: {detail}"
        issue = QualityIssue(code, "warning", ratio.value, detail)
        flags.append(issue.to_flag(policy.selection_id, best[0], methods.get(best[0], "")))
    return flags


def _arm_name(arm: Arm, methods: Mapping[str, str]) -> str:
    return f"{methods.get(arm[0], arm[0][:12])} at depth {arm[1]}"


def _missing_measurement(best: Arm, predicted_best: Arm, methods: Mapping[str, str]) -> str:
    """The measurement that would settle a contradiction, as text."""
    if best[0] == predicted_best[0]:
        shallow, deep = sorted((best[1], predicted_best[1]))
        return f"measure depths {shallow} and {deep} of {methods.get(best[0], best[0][:12])} more"
    return f"measure {_arm_name(best, methods)} and {_arm_name(predicted_best, methods)} more"


def pick_drafter(policy: Policy, among: Sequence[DepthChoice], posterior: Posterior | None) -> DepthChoice | None:
    """The drafter to serve: the smallest that is as good as the best, of those measured faster than plain decoding (of
    all, where none is). among: measured choices at one batch size."""
    if posterior is None:
        return max(among, key=lambda c: (c.meas_lo or 0.0, c.draft_key), default=None)
    measured = [c for c in among if (c.draft_key, c.depth_k) in posterior.measured]
    eligible = [c for c in measured if is_faster(posterior.measured[c.draft_key, c.depth_k].speedup)] or measured
    if not eligible:
        return None
    draws = posterior.of([(c.draft_key, c.depth_k) for c in eligible])
    lost = losses(draws).mean(axis=0)
    vocab = {c.draft_key: c.draft_vocab for c in policy.ranking}

    def size(i: int) -> tuple[int, float, float, str]:
        vocabulary = vocab.get(eligible[i].draft_key)
        return (
            eligible[i].depth_k,
            math.inf if vocabulary is None else vocabulary,
            float(lost[i]),
            eligible[i].draft_key,
        )

    return eligible[min(near_best(draws, policy.tolerance, policy.confidence), key=size)]


MODEL_SHARED = 0.05
MODEL_OWN = 0.02
LEAST_VARIANCE = 1e-12  # floor for measurements that do not vary at all


class PredictedDepth(NamedTuple):
    """The prediction of one depth of one drafter, on the log scale.

    length: [draws] of AL over all mapped prompts. cost: [draws] of a round over a plain step.
    """

    draft_key: str
    depth_k: int
    length: Floats
    cost: Floats


class MeasuredDepth(NamedTuple):
    """The measurement of one depth. speed_of_round: [draws] of log(speedup / AL) over the measured prompts."""

    draft_key: str
    depth_k: int
    speed_of_round: Floats


def combine(predicted: Sequence[PredictedDepth], measured: Sequence[MeasuredDepth], seed: int) -> Floats:
    """[draws, n] speedups of the predicted depths, given the measurements. measured: some of the predicted depths."""
    rng = np.random.default_rng([seed, 5])
    lengths = np.stack([depth.length for depth in predicted], axis=1)
    cost = np.stack([depth.cost for depth in predicted], axis=1)
    drafters = [depth.draft_key for depth in predicted]
    alike = np.array([[a == b for b in drafters] for a in drafters], dtype=float)
    model = MODEL_SHARED**2 * alike + MODEL_OWN**2 * np.eye(len(drafters))
    error = rng.standard_normal(cost.shape) @ np.linalg.cholesky(model).T
    prior = error - cost
    if not measured:
        return np.exp(lengths + prior)
    index = [next(i for i, p in enumerate(predicted) if p[:2] == m[:2]) for m in measured]
    speed_of_round = np.stack([depth.speed_of_round for depth in measured], axis=1)
    before = model + np.atleast_2d(np.cov(cost, rowvar=False))
    chance = _exchangeable(np.atleast_2d(np.cov(speed_of_round, rowvar=False)))
    observed = speed_of_round.mean(axis=0) + rng.standard_normal(speed_of_round.shape) @ np.linalg.cholesky(chance).T
    gain = np.linalg.solve(before[np.ix_(index, index)] + chance, before[index, :]).T
    return np.exp(lengths + prior + (observed - prior[:, index]) @ gain.T)


def _exchangeable(covariance: Floats) -> Floats:
    """The covariance with one common variance and one common covariance of all arms. Three processes determine no more:
    their covariance has rank two, and weights from it would follow its accidents."""
    num = len(covariance)
    variance = float(np.trace(covariance)) / num
    shared = (float(covariance.sum()) - num * variance) / (num * (num - 1)) if num > 1 else 0.0
    shared = min(max(shared, 0.0), 0.99 * variance)
    return np.asarray(np.full((num, num), shared) + (max(variance - shared, LEAST_VARIANCE)) * np.eye(num))
