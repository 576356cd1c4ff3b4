"""A challenger meets the champion: what the promotion gate asks for beyond what it asks of a first drafter."""

from __future__ import annotations

from collections.abc import Sequence

from components.contract import Draft, UserError
from components.rows import DepthChoice, PairedComparison, Request
from components.speedup.bootstrap import LEAST_PROMPTS
from components.speedup.paired import Pair, compare
from components.speedup.policy import ALL, GateCheck, Policy


def challenge(
    policy: Policy,
    requests: Sequence[Request],
    drafts: tuple[Draft, Draft],
    max_loss: float,
    num_draws: int,
    seed: int,
) -> None:
    """Enter roles and paired comparisons of (challenger, champion) into the policy.

    Raises:
        UserError: the policy or the requests hold nothing about one of them.
    """
    challenger, champion = drafts
    if challenger.key == champion.key:
        raise UserError(f"challenger, champion: both are {champion.key[:12]}; wire the drafter that was just trained")
    pair = Pair(
        _choice(policy, challenger, "challenger"), _choice(policy, champion, "champion"), max_loss, num_draws, seed
    )
    policy.roles |= {challenger.key: "challenger", champion.key: "champion"}
    policy.comparisons = compare(policy, requests, pair)
    if not any(row.quantity == "decode_speed" for row in policy.comparisons):
        raise UserError(
            "end_to_end: challenger and champion share no prompt at their chosen depths; "
            "give both to bench.compare_end_to_end as `drafts`"
        )


def champion_checks(policy: Policy, challenger: Draft) -> list[GateCheck]:
    """Speed not worse with 95 % confidence, no workload's acceptance shown to be worse, and something was learned."""
    checks = []
    if not any((row.quantity, row.workload) == ("acceptance_length", ALL) for row in policy.comparisons):
        asked_for = "maps of both drafters on the same prompts, at one depth"
        checks.append(GateCheck(f"acceptance_against_champion[{ALL}]", False, 0.0, asked_for))
    for row in policy.comparisons:
        asked = 1.0 - row.margin
        if (row.quantity, row.workload) == ("decode_speed", ALL):
            passed = row.verdict in ("better", "not_worse")
            checks.append(GateCheck("speed_against_champion", passed, row.lo, f"lower bound >= {asked:g}"))
        elif row.quantity == "acceptance_length":
            name = f"acceptance_against_champion[{row.workload}]"
            checks.append(GateCheck(name, *_kept(row, f"upper bound >= {asked:g}")))
    step = challenger.info.get("best_step")
    if challenger.info.get("continued_from") and step is not None:
        checks.append(GateCheck("differs_from_champion", int(step) > 0, float(step), "best step >= 1"))
    return checks


def _kept(row: PairedComparison, asked: str) -> tuple[bool, float, str]:
    """Whether acceptance is kept, its upper bound, and what is asked of it. Fewer than LEAST_PROMPTS prompts show
    nothing: then nothing is asked of a workload, but all of them together must show it."""
    if row.num_prompts >= LEAST_PROMPTS:
        return row.verdict != "worse", row.hi, asked
    if row.workload == ALL:
        return False, row.hi, f"{asked} of {LEAST_PROMPTS} prompts"
    return True, row.hi, f"not asked of {row.num_prompts} prompts"


def _choice(policy: Policy, draft: Draft, role: str) -> DepthChoice:
    """The depth chosen for a drafter over all workloads, at the smallest batch size."""
    mine = [c for c in policy.choices if (c.draft_key, c.workload) == (draft.key, ALL)]
    if not mine:
        raise UserError(
            f"policy: nothing about the {role} ({draft.key[:12]}); give speedup.choose_depth its measurements"
        )
    return min(mine, key=lambda c: c.batch_size)
