"""The steps of components/speedup, as pipelines.yaml names them: what each takes, its settings, and what it makes.

A step imports its implementation when it runs, so that `check` and `plan` read its settings in no time, and hands on
all its arguments; tests/components/test_steps.py holds the two signatures together.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.contract import Context, DepthPolicy, Draft, Measurements, Prompts
from components.promotion import MAX_ACCEPTANCE_LOSS, MAX_SLOWDOWN


def choose_depth(
    acceptance: list[Measurements],
    cost: list[Measurements],
    champion: DepthPolicy | None = None,
    *,
    tolerance: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.01,
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.95,
    mixture: dict[str, float] | None = None,
    num_draws: Annotated[int, Field(ge=200, le=50_000)] = 2000,
    include_host: bool = True,
    ctx: Context,
) -> DepthPolicy:
    """Predict the speedup of every measured depth, per drafter, workload, batch size and context, and pick.

    Args:
        acceptance: acceptance maps, one measurement for each drafter.
        cost: step times of the same drafters on the machine that will serve them.
        champion: the policy that the drafter which serves now was released with: that drafter is run and compared at
            the depth it serves, whatever is chosen for it here.
        tolerance: share of speed that the depth which is taken may lose to the best one.
        confidence: probability with which the taken depth must lose no more than that, and must beat plain decoding;
            where none beats it that surely, depth 0 is chosen.
        mixture: workload -> its share of the tokens that will be decoded, for a line that says which one depth would
            serve them all; without it the shares are those of the measured prompts. What is served stays the depth
            over all measured prompts, the one that is measured end to end.
        num_draws: draws of prompts and processes behind each interval.
        include_host: count measured sampling and bookkeeping time on both sides of the ratio.
    """
    arguments = locals().copy()
    from components.speedup.choose import choose_depth as run

    return run(**arguments)


def choose_stop(
    policy: DepthPolicy,
    acceptance: list[Measurements],
    cost: list[Measurements],
    *,
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.95,
    num_draws: Annotated[int, Field(ge=200, le=50_000)] = 2000,
    include_host: bool = True,
    ctx: Context,
) -> DepthPolicy:
    """Fit the rule that ends chains of draft tokens by the drafter's confidence, and compare it with a fixed depth.

    Args:
        policy: the depths that the speedup model chose; the result is the same policy with the rules.
        acceptance: acceptance maps with confidences, one measurement for each drafter.
        cost: step times of the same drafters, as choose_depth takes them, with `stop_rule: true`; every batch size gets
            a rule of its own.
        confidence: probability with which the rule must be faster than the best fixed depth to be chosen.
        num_draws: draws of prompts and processes behind each interval.
        include_host: count measured sampling and bookkeeping time.
    """
    arguments = locals().copy()
    from components.speedup.stop_choice import choose_stop as run

    return run(**arguments)


def confirm_stop(
    policy: DepthPolicy,
    measured: Measurements,
    *,
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.95,
    num_draws: Annotated[int, Field(ge=200, le=50_000)] = 2000,
    ctx: Context,
) -> DepthPolicy:
    """Add what the rules that end chains gained while decoding; a rule stays chosen where that gain is sure.

    Args:
        policy: with the rules of choose_stop.
        measured: chains that the rules end beside chains of the best fixed depth, by bench.compare_stop.
        confidence: probability with which a rule must have been faster than the best fixed depth to be chosen.
        num_draws: draws of prompts and processes behind each interval.
    """
    arguments = locals().copy()
    from components.speedup.stop_choice import confirm_stop as run

    return run(**arguments)


def confirm_depth(
    policy: DepthPolicy,
    end_to_end: Measurements,
    challenger: Draft | None = None,
    champion: Draft | None = None,
    *,
    min_speedup: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0,
    max_prediction_gap: Annotated[float, Field(gt=0.0, le=10.0)] = 0.15,
    min_over_lookup: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0,
    max_loss: Annotated[float, Field(ge=0.0, lt=0.5)] = MAX_SLOWDOWN,
    max_acceptance_loss: Annotated[float, Field(ge=0.0, lt=0.5)] = MAX_ACCEPTANCE_LOSS,
    num_draws: Annotated[int, Field(ge=200, le=50_000)] = 2000,
    ctx: Context,
) -> DepthPolicy:
    """Add measured speedups to a policy, name the winning drafter, and check the promotion gate.

    Args:
        policy: the depths that the speedup model chose.
        end_to_end: timed requests of plain and speculative decoding on the same prompts; with step costs of the same
            moment, where it has them, which predictions are then judged with.
        challenger: the drafter to judge; without it the best of those measured.
        champion: the drafter that serves now, measured in the same session; the challenger must not be worse than it is
            at the depth it serves, which the policy knows when speedup.choose_depth was given `champion`.
        min_speedup: what the lower 95 % bound of measured speedup must exceed (1.0 = plain decoding).
        max_prediction_gap: largest |predicted / measured - 1| that the gate lets through (0.15 = 15 %); beyond 10 % it
            is flagged in any case.
        min_over_lookup: what measured speedup over prompt lookup must exceed (1.0 = faster than it); 0 does not ask.
        max_loss: share of the champion's decoding speed by which a challenger may lie below it and still count as not
            worse (0.02 = 2 %): the lower end of the 95 % interval of its speed ratio must reach 1 - max_loss.
        max_acceptance_loss: the same of acceptance length over all prompts; of one workload it is twice that.
        num_draws: draws of prompts and processes behind each interval.
    """
    arguments = locals().copy()
    from components.speedup.confirm import confirm_depth as run

    return run(**arguments)


def measure_drift(
    then: Measurements,
    now: Measurements,
    policy: DepthPolicy | None = None,
    *,
    depth_k: Annotated[int, Field(ge=0, le=64)] = 0,
    num_draws: Annotated[int, Field(ge=200, le=50_000)] = 2000,
    ctx: Context,
) -> Measurements:
    """Acceptance length of one drafter on new prompts against that on the prompts of its release, with intervals.

    Args:
        then: its acceptance maps on the prompts it was released with.
        now: its acceptance maps on new traffic.
        policy: the release's depth policy, which says at what depth it is served.
        depth_k: the depth to compare at instead; 0 takes the policy's, or without one the deepest that was measured.
        num_draws: resamples of prompts behind each interval.
    """
    from components.speedup.acceptance_changes import measure_drift as run

    return run(then, now, policy, depth_k=depth_k, num_draws=num_draws, ctx=ctx)


def measure_tuning(
    acceptance: Measurements,
    tuned: Measurements,
    older: Measurements | None = None,
    policy: DepthPolicy | None = None,
    *,
    depth_k: Annotated[int, Field(ge=0, le=64)] = 0,
    num_draws: Annotated[int, Field(ge=200, le=50_000)] = 2000,
    ctx: Context,
) -> Measurements:
    """Say what tuning brought to a drafter in acceptance length, and what a change of its target had cost, prompt by
    prompt with intervals.

    Args:
        acceptance: acceptance maps of the drafter as it came.
        tuned: acceptance maps of the drafter that was tuned from it, on the same prompts.
        older: acceptance maps of the drafter as it came, on the older target that it was trained for and the same
            prompts; with them the loss by the changed target, what came back and what is still missing are told.
        policy: the depths that were chosen: all are compared at that of the tuned drafter.
        depth_k: the depth to compare at instead; 0 takes the policy's, or without one the deepest that all have.
        num_draws: resamples of prompts behind each interval.
    """
    arguments = locals().copy()
    from components.speedup.acceptance_changes import measure_tuning as run

    return run(**arguments)


def compare_engines(
    engines: list[Measurements],
    end_to_end: Measurements | None = None,
    acceptance: list[Measurements] | None = None,
    policy: DepthPolicy | None = None,
    *,
    tolerance: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.02,
    out_of_phase: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1,
    ctx: Context,
) -> Measurements:
    """Do engines keep our tokens and our rounds? One row for each engine, drafter, depth and workload.

    Servers with imposed acceptance are held against the speedup model instead: predicted beside measured speedup.

    Args:
        engines: what bench.measure_server and bench.measure_llama_cpp measured, with num_compared and draft_key given.
        end_to_end: our own timed decoding of the same drafters.
        acceptance: acceptance maps of the same drafters on the same prompts.
        policy: the depth policy, for what was predicted.
        tolerance: share by which an engine's acceptance length may lie off ours.
        out_of_phase: the same for llama.cpp's programs, which draft one token out of phase.
    """
    from components.speedup.engine_comparison import compare_engines as run

    return run(engines, end_to_end, acceptance, policy, tolerance=tolerance, out_of_phase=out_of_phase, ctx=ctx)


def measure_languages(
    acceptance: list[Measurements],
    mixes: list[Prompts],
    *,
    depth_k: Annotated[int, Field(ge=0, le=64)] = 0,
    num_draws: Annotated[int, Field(ge=200, le=50_000)] = 2000,
    ctx: Context,
) -> Measurements:
    """Acceptance length by language of drafters that learned from different mixes, with paired differences.

    Args:
        acceptance: the acceptance maps of each drafter, on the same prompts; the first is the baseline.
        mixes: what each of these drafters learned from, in the same order.
        depth_k: the depth to compare at; 0 is the deepest that all were measured at.
        num_draws: resamples of prompts behind each interval.
    """
    from components.speedup.acceptance_changes import measure_languages as run

    return run(acceptance, mixes, depth_k=depth_k, num_draws=num_draws, ctx=ctx)
