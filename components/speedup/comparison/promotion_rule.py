"""The rule of promotion: conditions on a challenger, checked on its comparison with the champion.

The challenger need not be shown to be faster; it must be shown not to be slower (by more than `Margins.speed`), and its
text must be that of plain decoding. A loss that was not shown is no evidence of equality: with few prompts an equal
challenger may fail, and more prompts are the remedy. Of a champion of its own method, it must also be shown that its
drafts are not accepted less over all prompts (`Margins.acceptance`) nor in any workload (twice that), and its weights
may not grow beyond a limit; another method has its own acceptance and size, and speed alone tells which is better. The
registry asks `judge`; confirm_depth enters the same comparison into its policy and checks it with the same `is_kept`.

The challenger is compared at its chosen depth, at which it would serve. The champion is compared at the depth it serves
at now, whatever this measurement would choose for it: the registry's gate compares the same two, and a depth chosen by
noise makes no better drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from components.contract import Draft, UserError
from components.definitions import has_decoding
from components.policy import GateCheck, Policy, PromptCounts
from components.promotion import ArmPrompt, Check, Evidence, Margins, ServingSetup
from components.refusals import PROMPTS
from components.rows import ALL, DepthChoice, PairedComparison, QualityFlag, Request
from components.speedup.comparison.paired import Ratio
from components.speedup.comparison.pairing import (
    Comparison,
    Replay,
    compare_replays,
    compare_speeds,
    compare_ways,
    identity_of,
)

MAX_GROWTH = 0.5
"""Allowed growth of the weights, a share of the champion's bytes."""


def is_kept(ratio: Ratio | PairedComparison) -> tuple[bool, str]:
    """(whether a speed or an acceptance length is shown to be not worse, the limit as text).

    Fewer than PROMPTS.decide prompts show nothing: one workload then passes, all workloads together do not.
    """
    limit = f"lower bound >= {1.0 - ratio.margin:g}"
    if ratio.num_prompts >= PROMPTS.decide:
        return ratio.verdict in ("better", "not_worse"), limit
    if ratio.workload == ALL:
        return False, f"{limit} of {PROMPTS.decide} prompts"
    return True, f"not asked of {ratio.num_prompts} prompts"


def judge(evidence: Evidence) -> list[Check]:
    """Every check of the promotion gate against the champion."""
    ways = evidence.challenger, evidence.champion
    comparison = compare_ways(evidence.measured, *ways, Margins(), same_target=evidence.same_target)
    return [
        *_speed_checks(comparison),
        _identity_check(evidence, comparison),
        *_acceptance_checks(evidence, comparison),
        _size_check(evidence),
    ]


def _speed_checks(comparison: Comparison) -> list[Check]:
    speed = next(iter(comparison.of("decode_speed", "speedup")), None)
    runs = "no such runs"
    if comparison.timed_in is not None:
        context_a, context_b = comparison.timed_in
        runs = "both in one run" if context_a.measurement == context_b.measurement else "each in its own run"
    num = speed.num_prompts if speed is not None else 0
    limit = f">= {PROMPTS.decide} prompts on one machine, {runs}"
    both = Check("prompts_measured_for_both", num >= PROMPTS.decide, float(num), None, None, limit)
    if speed is None:
        reason = next((note for note in comparison.notes if note.startswith("speed not")), "")
        return [both, Check("speed_against_champion", False, None, None, None, reason)]
    passed, limit = is_kept(speed)
    return [both, Check("speed_against_champion", passed, speed.ratio, speed.lo, speed.hi, limit)]


def _identity_check(evidence: Evidence, comparison: Comparison) -> Check:
    """Identity in the measurement of speed; differences in older measurements may have been repaired since."""
    compared, differ = (0, 0)
    if comparison.timed_in is not None:
        compared, differ = identity_of(evidence.measured, evidence.challenger, comparison.timed_in[0])
    if not compared:
        return Check("identical_output", False, None, None, None, "0 that differ outside ties")
    limit = f"0 of {compared} outputs differ outside ties"
    return Check("identical_output", differ == 0, float(differ), None, None, limit)


def _acceptance_checks(evidence: Evidence, comparison: Comparison) -> list[Check]:
    """Checks of acceptance; none where one of the two decodes plainly, or they draft by different methods."""
    if evidence.challenger.is_plain or evidence.champion.is_plain or not evidence.same_method:
        return []
    ratios = comparison.of("acceptance_length")
    if not ratios or comparison.depths is None:
        reason = next((note for note in comparison.notes if note.startswith("acceptance length not")), "")
        return [Check(f"acceptance[{ALL}]", False, None, None, None, reason)]
    checks = []
    for ratio in ratios:
        passed, limit = is_kept(ratio)
        at = f", at depth {comparison.depths[0]}" if ratio.num_prompts >= PROMPTS.decide else ""
        checks.append(Check(f"acceptance[{ratio.workload}]", passed, ratio.ratio, ratio.lo, ratio.hi, limit + at))
    return checks


def _size_check(evidence: Evidence) -> Check:
    new, old = evidence.challenger_bytes, evidence.champion_bytes
    if not evidence.same_method:
        return Check("size", True, None, None, None, "nothing: the champion drafts by another method")
    if new is None or not old:
        return Check("size", True, None, None, None, "sizes are not known")
    most = 1.0 + MAX_GROWTH
    return Check("size", new <= old * most, new / old, None, None, f"<= {most:.2f}")


def with_comparison(
    policy: Policy, requests: Sequence[Request], drafts: tuple[Draft, Draft], margins: Margins
) -> Policy:
    """The policy with roles and paired comparisons of (challenger, champion).

    Raises:
        UserError: the policy or the requests hold nothing about one of them.
    """
    challenger, champion = drafts
    if challenger.key == champion.key:
        raise UserError(f"challenger, champion: both are {champion.key[:12]}; wire the drafter that was just trained")
    choices = [_choice_of(policy, draft, role) for draft, role in zip(drafts, ("challenger", "champion"), strict=True)]
    depth = policy.served.get(champion.key, choices[1].depth_k)
    ways = ServingSetup("challenger", challenger.key, choices[0].depth_k), ServingSetup("champion", champion.key, depth)
    comparison = Comparison()
    dtypes = {r.dtype for r in requests if has_decoding(r)}
    dtype = policy.dtype if policy.dtype in dtypes else min(dtypes, default="")
    arms = arm_prompts(r for r in requests if (r.batch_size, r.dtype) == (choices[0].batch_size, dtype))
    compare_speeds(comparison, arms, ways, margins, same_target=True)
    if not comparison.ratios:
        raise UserError(
            f"end_to_end: {'; '.join(comparison.notes)} (challenger at depth {ways[0].depth_k}, champion at {depth}); "
            "give both to bench.compare_end_to_end as `drafts`"
        )
    replays = _replays_of(policy.prompts, challenger.key), _replays_of(policy.prompts, champion.key)
    compare_replays(comparison, replays, ways, margins)
    session = next((r.session_id for r in requests), "")
    methods = choices[0].method, choices[1].method
    return replace(
        policy,
        flags=[*policy.flags, *([] if champion.key in policy.served else [_unknown_depth_flag(policy, choices[1])])],
        roles={**policy.roles, challenger.key: "challenger", champion.key: "champion"},
        comparisons=[_comparison_row(ratio, comparison, policy, ways, methods, session) for ratio in comparison.ratios],
    )


def champion_checks(policy: Policy, challenger: Draft) -> list[GateCheck]:
    """Gate checks: speed and acceptance are not worse, by the rule of promotion, and training changed the weights."""
    checks = []
    same_method = all(row.method == row.champion_method for row in policy.comparisons)
    is_compared = any((row.quantity, row.workload) == ("acceptance_length", ALL) for row in policy.comparisons)
    if same_method and not is_compared:
        missing = "maps of both drafters on the same prompts, at one depth"
        checks.append(GateCheck(f"acceptance_against_champion[{ALL}]", False, 0.0, missing))
    for row in policy.comparisons:
        passed, limit = is_kept(row)
        if (row.quantity, row.workload) == ("decode_speed", ALL):
            checks.append(GateCheck("speed_against_champion", passed, row.lo, limit))
        elif row.quantity == "acceptance_length" and same_method:
            checks.append(GateCheck(f"acceptance_against_champion[{row.workload}]", passed, row.lo, limit))
    step = challenger.info.get("best_step")
    if challenger.info.get("continued_from") and step is not None:
        checks.append(GateCheck("differs_from_champion", int(step) > 0, float(step), "best step >= 1"))
    return checks


def arm_prompts(requests: Iterable[Request]) -> list[ArmPrompt]:
    """Requests of one measurement as rows of the history: those of our own loop, timed, at temperature 0."""
    return [
        ArmPrompt(
            artifact_key="",
            session_id=r.session_id,
            machine_id="",
            created_at=datetime.fromtimestamp(0, UTC),
            target_key=r.target_key,
            dtype=r.dtype,
            batch_size=r.batch_size,
            method=r.method,
            draft_key=r.draft_key,
            depth_k=r.depth_k,
            tree_budget=r.tree_budget,
            kernel=r.kernel,
            process=r.process,
            prompt_id=r.prompt_id,
            workload=r.workload,
            requests=1,
            tokens=r.timed_tokens,
            decode_ns=r.decode_ns,
            ns_per_token=[r.decode_ns / r.timed_tokens],
            rounds=r.num_rounds,
            compared=int(r.identical is not None),
            divergences=int(r.identical is False and not r.tie),
        )
        for r in requests
        if has_decoding(r) and r.temperature == 0.0 and r.engine is None
    ]


def _replays_of(prompts: Sequence[PromptCounts], draft_key: str) -> Mapping[str, Replay]:
    """prompt_id -> replayed counts of one drafter."""
    return {
        c.prompt_id: Replay(
            c.workload, {k: (float(c.tokens), float(n)) for k, n in zip(c.depths, c.rounds, strict=True)}
        )
        for c in prompts
        if c.draft_key == draft_key
    }


def _comparison_row(
    ratio: Ratio,
    comparison: Comparison,
    policy: Policy,
    ways: tuple[ServingSetup, ServingSetup],
    methods: tuple[str, str],
    session: str,
) -> PairedComparison:
    depths = ways[0].depth_k, ways[1].depth_k
    if ratio.quantity == "acceptance_length" and comparison.depths is not None:
        depths = comparison.depths
    return PairedComparison(
        session_id=session,
        selection_id=policy.selection_id,
        target_key=policy.target_key,
        challenger_key=ways[0].draft_key,
        champion_key=ways[1].draft_key,
        method=methods[0],
        champion_method=methods[1],
        workload=ratio.workload,
        quantity=ratio.quantity,
        challenger_depth=depths[0],
        champion_depth=depths[1],
        num_prompts=ratio.num_prompts,
        challenger_value=ratio.a,
        champion_value=ratio.b,
        ratio=ratio.ratio,
        lo=ratio.lo,
        hi=ratio.hi,
        margin=ratio.margin,
        verdict=ratio.verdict,
    )


def _unknown_depth_flag(policy: Policy, champion: DepthChoice) -> QualityFlag:
    """The flag for a champion whose serving depth is not known."""
    detail = (
        f"compared at depth {champion.depth_k}, which was chosen for it now: at which depth it serves is not known; "
        "give speedup.choose_depth the policy it was released with as `champion`"
    )
    code, depth = "champion_depth_not_known", float(champion.depth_k)
    return QualityFlag(policy.selection_id, champion.draft_key, champion.method, code, "warning", depth, detail)


def _choice_of(policy: Policy, draft: Draft, role: str) -> DepthChoice:
    """The depth chosen for a drafter over all workloads, at the smallest batch size."""
    choices = [c for c in policy.choices if (c.draft_key, c.workload) == (draft.key, ALL)]
    if not choices:
        raise UserError(
            f"policy: nothing about the {role} ({draft.key[:12]}); give speedup.choose_depth its measurements"
        )
    return min(choices, key=lambda c: c.batch_size)
