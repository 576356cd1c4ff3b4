"""The depth of every drafter chosen again once depths were measured: by the posterior of prediction and measurement.

The rule is that of the first choice (regret.py), over the posterior's draws (posterior.py), among the depths that were
measured, for a depth that nobody ran cannot be confirmed. Where the two contradict each other on which depth is better,
beyond both of their intervals, nothing is decided until the measurement alone settles it.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from components.rows import DepthChoice, DepthEval, QualityFlag
from components.speedup.bootstrap import Estimate, Floats, draw_weights, ratio_draws
from components.speedup.flags import Doubt
from components.speedup.measured import Measured, best_of
from components.speedup.policy import ALL, Policy, PromptCounts, RoundCost
from components.speedup.posterior import MODEL_OWN, MODEL_SHARED, Depth, Found, combine
from components.speedup.regret import losses, near_best

Arm = tuple[str, int]  # draft_key, depth
SESSIONS_TO_SETTLE = 3  # fresh processes from which a measurement may overrule a prediction that contradicts it
SURE_TO_SETTLE = 0.999  # ... where it contradicts it as surely as this, with how processes differ counted in


class Posterior(NamedTuple):
    """What is known of the chains at one batch size. draws: [draws, arms], speedups; measured: arms that were run."""

    arms: list[Arm]
    draws: Floats
    measured: Mapping[Arm, Measured]

    def of(self, arms: Sequence[Arm]) -> Floats:
        """Their columns."""
        return self.draws[:, [self.arms.index(arm) for arm in arms]]


def choose_again(policy: Policy, measured: Sequence[Measured], num_draws: int, seed: int) -> Posterior | None:
    """Enter the depths that prediction and measurement together choose, over all workloads at every batch size.

    Gives the posterior at the smallest batch size, the one that is served; None where no predicted depth was run.
    """
    pooled = [c for c in policy.choices if c.workload == ALL]
    first = None
    for batch_size in sorted({c.batch_size for c in pooled}):
        predicted = _predicted(policy, batch_size, measured, num_draws, seed)
        if not predicted:
            continue
        runs = {
            (p.draft_key, p.depth_k): run for p in predicted if (run := best_of(policy, measured, p[:2], batch_size))
        }
        found = [_as_found(arm, run, policy.prompts, predicted, num_draws, seed) for arm, run in runs.items()]
        draws = combine(predicted, found, seed)
        posterior = Posterior([p[:2] for p in predicted], draws, runs)
        for i, choice in enumerate(policy.choices):
            if choice.workload == ALL and choice.batch_size == batch_size:
                policy.choices[i] = _chosen(policy, choice, posterior)
        if batch_size == min(c.batch_size for c in pooled) and runs:
            first = posterior
            policy.flags += _contradictions(policy, predicted, posterior)
    return first


def _predicted(policy: Policy, batch_size: int, measured: Sequence[Measured], num_draws: int, seed: int) -> list[Depth]:
    """Every drafting depth with the draws of its acceptance and of its cost."""
    evals = [
        e for e in policy.evals if (e.workload, e.batch_size) == (ALL, batch_size) and e.depth_k and not e.tree_budget
    ]
    costs = {(c.draft_key, c.depth_k): c for c in policy.rounds if c.batch_size == batch_size}
    run = max((m.prompts for m in measured), key=len, default=[])
    found = []
    for e in evals:
        length = _lengths(policy.prompts, e, run, num_draws, seed)
        if length is not None:
            cost = costs.get((e.draft_key, e.depth_k))
            found.append(Depth(e.draft_key, e.depth_k, length, _cost_draws(e, cost, num_draws, seed)))
    return found


def _lengths(
    prompts: Sequence[PromptCounts], row: DepthEval, run: Sequence[str], num_draws: int, seed: int
) -> Floats | None:
    """[draws] of log AL over all mapped prompts; those that were run are drawn as their measured arms are."""
    mine = {c.prompt_id: c for c in prompts if c.draft_key == row.draft_key and row.depth_k in c.depths}
    if not mine:
        return None
    both = [[p for p in run if p in mine], sorted(mine.keys() - set(run))]
    streams = ([seed, 3], [seed, 6])
    weights = [
        draw_weights(len(names), num_draws, np.random.default_rng(stream))
        for names, stream in zip(both, streams, strict=True)
        if names
    ]
    counts = [mine[name] for names in both for name in names]
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
    own = np.random.default_rng([seed, 7, row.depth_k, zlib.crc32(row.draft_key.encode())]).standard_normal(num_draws)
    return np.asarray(draws + np.einsum("du,u->d", shared, np.array(cost.process)) + cost.own * own)


def _as_found(
    arm: Arm, run: Measured, prompts: Sequence[PromptCounts], predicted: Sequence[Depth], num_draws: int, seed: int
) -> Found:
    """The measured speedup of an arm over the acceptance length of the prompts that it ran, in the same draws."""
    draft_key, depth = arm
    mine = {c.prompt_id: c for c in prompts if c.draft_key == draft_key and depth in c.depths}
    length = next(p.length for p in predicted if p[:2] == arm)
    if all(name in mine for name in run.prompts):
        weights = draw_weights(len(run.prompts), num_draws, np.random.default_rng([seed, 3]))
        length = np.log(_length_draws(weights, [mine[name] for name in run.prompts], depth))
    return Found(draft_key, depth, np.log(run.speedup.draws) - length)


def _chosen(policy: Policy, choice: DepthChoice, posterior: Posterior) -> DepthChoice:
    """The choice of one drafter; as it was where none of its depths was run, or none of them beats plain decoding and
    none was chosen."""
    arms = [arm for arm in posterior.measured if arm[0] == choice.draft_key]
    if not arms:
        return choice
    near = [arms[i] for i in near_best(posterior.of(arms), policy.tolerance, policy.confidence)]
    able = [arm for arm in near if faster(posterior.measured[arm].speedup)]
    if not able and (choice.depth_k == 0 or (choice.draft_key, choice.depth_k) in near):
        return choice
    depth = min((able or near), key=lambda arm: arm[1])[1]
    if depth == choice.depth_k:
        return choice
    row = next(
        e
        for e in policy.evals
        if (e.draft_key, e.workload, e.batch_size, e.depth_k) == (choice.draft_key, ALL, choice.batch_size, depth)
    )
    why = f"with what was measured, depth {depth} is taken instead of {choice.depth_k}, predicted to be the best"
    if choice.depth_k == 0:
        why = f"with what was measured, depth {depth} is taken, where the prediction alone would not have drafted"
    doubt = Doubt("depth_changed", "info", depth, f"batch {choice.batch_size}: {why}")
    policy.flags.append(doubt.about(policy.selection_id, choice.draft_key, choice.method))
    return dataclasses.replace(
        choice,
        depth_k=depth,
        speedup_pred=row.speedup_pred,
        pred_lo=row.pred_lo,
        pred_hi=row.pred_hi,
        reasons=[*choice.reasons, why],
    )


def faster(speedup: Estimate) -> bool:
    """Whether a measured speedup lies above 1 as a whole interval, over prompts enough for a verdict."""
    return speedup.is_decisive and speedup.interval()[0] > 1.0


def _contradictions(policy: Policy, predicted: Sequence[Depth], posterior: Posterior) -> list[QualityFlag]:
    """One for each drafter, and one for drafters against each other, whose best measured depth is not the predicted."""
    flags = []
    log_pred = {p[:2]: p.length - p.cost for p in predicted}
    methods = {c.draft_key: c.method for c in policy.choices}
    arms = list(posterior.measured)
    groups = [[arm for arm in arms if arm[0] == key] for key in dict.fromkeys(arm[0] for arm in arms)]
    tops = [max(group, key=lambda arm: posterior.measured[arm].speedup.value) for group in groups]
    for group in [*groups, tops]:
        hoped = max(group, key=lambda arm: float(log_pred[arm].mean()))
        best = max(group, key=lambda arm: posterior.measured[arm].speedup.value)
        if hoped == best or posterior.measured[best].prompts != posterior.measured[hoped].prompts:
            continue  # over other prompts (a request failed) they are no pair
        ratio = posterior.measured[best].speedup.over(posterior.measured[hoped].speedup)
        lo, hi = ratio.interval()
        gap = log_pred[best] - log_pred[hoped]
        alone = MODEL_OWN if hoped[0] == best[0] else math.hypot(MODEL_OWN, MODEL_SHARED)
        far = 1.96 * math.hypot(float(gap.std()), math.sqrt(2.0) * alone)
        pred_hi = math.exp(float(gap.mean()) + far)
        if lo <= max(1.0, pred_hi):
            continue
        said = (
            f"{_named(best, methods)} measured {ratio.value:.2f} [{lo:.2f}, {hi:.2f}] times as fast as "
            f"{_named(hoped, methods)}, predicted {math.exp(float(gap.mean())):.2f} (at most {pred_hi:.2f})"
        )
        runs = [posterior.measured[arm].arm.num_processes for arm in (best, hoped)]
        surely = ratio.interval(SURE_TO_SETTLE)[0] > max(1.0, pred_hi)
        is_settled = min(runs) >= SESSIONS_TO_SETTLE and surely
        doubt = (
            Doubt("prediction_overruled", "warning", ratio.value, said)
            if is_settled
            else Doubt("undecided_contradiction", "warning", ratio.value, f"{_ask(best, hoped, methods)}: {said}")
        )
        flags.append(doubt.about(policy.selection_id, best[0], methods.get(best[0], "")))
    return flags


def _named(arm: Arm, methods: Mapping[str, str]) -> str:
    return f"{methods.get(arm[0], arm[0][:12])} at depth {arm[1]}"


def _ask(best: Arm, hoped: Arm, methods: Mapping[str, str]) -> str:
    """What is missing, in words."""
    if best[0] == hoped[0]:
        shallow, deep = sorted((best[1], hoped[1]))
        return f"measure depths {shallow} and {deep} of {methods.get(best[0], best[0][:12])} more"
    return f"measure {_named(best, methods)} and {_named(hoped, methods)} more"


def pick_drafter(policy: Policy, among: Sequence[DepthChoice], posterior: Posterior | None) -> DepthChoice | None:
    """The drafter to serve: of those measured faster than plain decoding (of all, where none is), the smallest as good
    as the best. among: choices that were measured, at one batch size."""
    if posterior is None:
        return max(among, key=lambda c: (c.meas_lo or 0.0, c.draft_key), default=None)
    known = [c for c in among if (c.draft_key, c.depth_k) in posterior.measured]
    able = [c for c in known if faster(posterior.measured[c.draft_key, c.depth_k].speedup)] or known
    if not able:
        return None
    draws = posterior.of([(c.draft_key, c.depth_k) for c in able])
    lost = losses(draws).mean(axis=0)
    vocab = {c.draft_key: c.draft_vocab for c in policy.ranking}

    def size(i: int) -> tuple[int, float, float, str]:
        words = vocab.get(able[i].draft_key)
        return able[i].depth_k, math.inf if words is None else words, float(lost[i]), able[i].draft_key

    return able[min(near_best(draws, policy.tolerance, policy.confidence), key=size)]
