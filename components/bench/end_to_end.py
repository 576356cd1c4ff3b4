"""Step `bench.compare_end_to_end`: plain decoding against speculative decoding, measured as a user would feel it.

Same prompts, same engine, same dtype, same threads, same kept tokens; arms interleaved prompt by prompt in random
order and repeated. Every output is compared with plain decoding token by token. Prompt lookup, which needs no training,
runs on the same engine: a drafter has to beat it too. Each drafter also runs loaded but off: what speculation costs
those who do not use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from components.contract import Context, DepthPolicy, Draft, Machine, Measurements, Prompts, Target, UserError
from components.definitions import al_of, best_plain, counts, speedup, tokens_per_s
from components.rows import Request, write_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from components.bench.arms import Arm
    from components.bench.calibration import Engine
    from components.bench.subjects import EncodedPrompt
    from components.bench.timed_runs import TimedRun

ROOM_FOR_GUESSES = 65  # tokens past the limit that the deepest tail round may compute
NOISE_TEXTS = 4  # answers over which row-count noise is measured


def compare_end_to_end(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    policy: DepthPolicy,
    tuning: Measurements | None = None,
    *,
    num_prompts: Annotated[int, Field(ge=1)] = 12,
    max_new_tokens: Annotated[int, Field(ge=2)] = 96,
    reps: Annotated[int, Field(ge=1, le=100)] = 2,
    depths: Literal["around", "all"] | list[Annotated[int, Field(ge=1)]] = "around",
    lookup_depths: list[Annotated[int, Field(ge=1, le=16)]] = [4],  # noqa: B006 - read, never changed
    loaded_off: bool = True,
    batch_sizes: list[Annotated[int, Field(ge=1, le=1024)]] = [1],  # noqa: B006 - read, never changed
    trees: list[Annotated[int, Field(ge=1, le=256)]] = [],  # noqa: B006 - read, never changed
    num_warm_up: Annotated[int, Field(ge=1)] = 2,
    dtype: Literal["float32", "bfloat16"] = "float32",
    num_threads: Annotated[int, Field(ge=0)] = 0,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """Time plain decoding, prompt lookup and every drafter on the same prompts, and check that they say the same.

    Args:
        target: the large model.
        drafts: the drafters to compare.
        prompts: its `test` split is timed, its `warm_up` split runs first and does not count.
        policy: the depth chosen for each drafter.
        tuning: threads and kernels that bench.autotune chose for this target, dtype and machine; without it this step
            chooses for itself.
        num_prompts: test prompts to use, evenly over the split.
        max_new_tokens: the longest answer, in tokens; the first one comes from the prefill.
        reps: times that every arm decodes every prompt.
        depths: draft depths to run: around the ones chosen for any batch size (with 1, the trained depth, and the edge
            settings 3 and 7 up to it), all, or a list. A chosen depth beyond the trained one is run too.
        lookup_depths: draft depths of prompt lookup; an empty list leaves it out.
        loaded_off: also run each drafter loaded but off: it keeps what it needs to go on later and drafts nothing.
        trees: budgets (guesses verified in a pass) to run as trees too; an empty list runs chains only.
        batch_sizes: sequences decoded side by side; prompts are grouped by workload, and what fills no group is left
            out at that size.
        num_warm_up: warm-up prompts that every arm decodes before time counts.
        dtype: arithmetic of target and drafters.
        num_threads: threads that torch uses; 0 times 1 and all, and takes what decodes plainly fastest.
    """
    from components.bench import clock
    from components.bench.calibration import fastest_engine
    from components.bench.subjects import encoded_prompts, spread
    from components.bench.timed_runs import run_arms
    from components.bench.tuning import read_tuning
    from components.targets.load import open_target

    tuned = read_tuning(tuning, target, dtype, num_threads, ctx, machine)
    for draft in drafts:
        refuse_what_a_loop_cannot(draft, batch_sizes, trees)
    with clock.threads(ctx.num_threads):
        plain = open_target(target, device=ctx.device, dtype=dtype, kernel="plain")
    room = max_new_tokens + ROOM_FOR_GUESSES
    asked = spread(encoded_prompts(target, plain, prompts, "test", room, ctx), num_prompts)
    if max(batch_sizes) > len(asked):
        raise UserError(
            f"batch_sizes: {max(batch_sizes)} side by side need as many prompts, and there are {len(asked)}"
        )
    warm_up = only_untimed(encoded_prompts(target, plain, prompts, "warm_up", room, ctx), asked)[:num_warm_up]
    engine = fastest_engine(
        target,
        asked[0].ids,
        dtype=dtype,
        device=ctx.device,
        max_threads=ctx.num_threads,
        num_threads=num_threads,
        tuning=tuned,
    )
    with clock.threads(engine.num_threads):
        arms = _arms(engine, drafts, policy, depths, lookup_depths, loaded_off, trees)
        ctx.note(f"{len(arms)} arms x {len(asked)} prompts x {reps}: {', '.join(arm.label for arm in arms)}")
        with clock.quiet_interpreter():
            runs = run_arms(
                engine.target,
                arms,
                warm_up,
                asked,
                batch_sizes=sorted(set(batch_sizes)),
                max_new_tokens=max_new_tokens,
                reps=reps,
                seed=ctx.seed,
                progress=lambda done, total: ctx.progress(done, total, "generations"),
            )
        facts = _write(runs, engine, target.key, dtype, machine, ctx)
    return Measurements.made(ctx, {"num_prompts": len(asked), **facts})


def only_untimed(warm_up: Sequence[EncodedPrompt], asked: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
    """The warm-up prompts that are not timed as well; raises UserError when none is left."""
    timed = {tuple(prompt.ids) for prompt in asked}
    found = [prompt for prompt in warm_up if tuple(prompt.ids) not in timed]
    if not found:
        raise UserError("prompts: every warm_up prompt is also a test prompt: give warm-up prompts of their own")
    return found


def refuse_what_a_loop_cannot(draft: Draft, batch_sizes: Sequence[int], trees: Sequence[int]) -> None:
    """Raises UserError for a method with a decoding loop of its own where batches or trees are asked of it."""
    from components.decoding.chain import LOOPS
    from components.drafts.files import read_record

    method = read_record(draft.path)["method"]
    if method not in LOOPS:
        return
    if max(batch_sizes, default=1) > 1:
        raise UserError(
            f"batch_sizes: {method} ({draft.key[:12]}) decodes one sequence at a time: set batch_sizes [1], or leave "
            "the drafter out"
        )
    if trees:
        raise UserError(f"trees: {method} ({draft.key[:12]}) decodes chains alone: set trees [], or leave it out")


def _write(
    runs: Sequence[TimedRun], engine: Engine, target_key: str, dtype: str, machine: Machine, ctx: Context
) -> dict[str, Any]:
    """Turn runs into rows: compare every output with plain decoding, note what is to be doubted. Returns the facts."""
    from components.bench.clock import conditions
    from components.bench.request_rows import Conditions, request_rows, round_rows
    from components.bench.run_flags import run_flags
    from components.targets.row_noise import row_count_noise

    around = conditions(engine.target.device)
    texts = [[*run.prompt.ids, *run.decoded.tokens] for run in runs if run.arm.is_baseline and not run.is_warmup]
    noise = row_count_noise(engine.target, texts[:NOISE_TEXTS])
    shared = Conditions(ctx.key[:16], target_key, dtype, engine.num_threads)
    requests = request_rows(runs, engine.target, noise, shared)
    flags = run_flags(runs, shared.session_id, around["load_average"], machine.num_cores)
    write_rows(ctx.out, [*requests, *round_rows(runs, shared), *flags])
    return {
        "num_threads": engine.num_threads,
        "kernel": engine.target.kernel,
        "engines_tried": engine.tried,
        "row_count_noise": noise,
        "machine_id": machine.machine_id,
        **around,
        "arms": summary(requests),
    }


def _arms(
    engine: Engine,
    drafts: Sequence[Draft],
    policy: DepthPolicy,
    depths: Literal["around", "all"] | list[int],
    lookup_depths: Sequence[int],
    loaded_off: bool,
    trees: Sequence[int],
) -> list[Arm]:
    """Plain, the rival baseline if there is one, prompt lookup, and every drafter off, at its depths and as trees."""
    from components.bench.arms import PLAIN, Arm, chosen_depths, depths_to_run
    from components.bench.loaded_off import kept_off
    from components.bench.subjects import open_drafter
    from components.bench.trees import check_branching, tree_shape
    from components.decoding.chain import LOOPS
    from components.drafts.ngram import Ngram

    arms = [PLAIN]
    if engine.rival is not None:
        arms.append(Arm("none", "", 0, None, engine.rival))
    lookup = Ngram()
    arms += [Arm("ngram", "", depth, lookup) for depth in lookup_depths]
    chosen = chosen_depths(policy)
    for draft in drafts:
        drafter = open_drafter(draft, engine.target)
        deepest = max(depths) if isinstance(depths, list) and depths else drafter.num_steps
        within_reach = [depth for depth in chosen.get(draft.key, ()) if depth <= drafter.max_depth]
        wanted = depths_to_run(depths, within_reach, min(deepest, drafter.max_depth))
        if loaded_off and drafter.method not in LOOPS:  # a loop of its own guesses by passes of the target: no drafter
            arms.append(Arm(drafter.method, draft.key, 0, kept_off(drafter)))
        arms += [Arm(drafter.method, draft.key, depth, drafter) for depth in wanted]
        check_branching(drafter, trees)
        shapes = [tree_shape(drafter.num_steps, budget) for budget in sorted(set(trees))]
        arms += [Arm(drafter.method, draft.key, shape.depth, drafter, shape=shape) for shape in shapes]
    return arms


def summary(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """One line an arm, pooled over prompts: decode tokens a second, speedup over plain, AL, identity."""
    from components.bench.request_rows import rounded

    timed = [r for r in requests if counts(r)]
    groups: dict[tuple[str, str, int, str, int, int], list[Request]] = {}
    for row in timed:
        key = (row.method, row.draft_key, row.depth_k, row.kernel, row.tree_budget or 0, row.batch_size)
        groups.setdefault(key, []).append(row)
    plain = {size: best_plain(r for r in timed if r.batch_size == size) for size in {key[5] for key in groups}}
    return [
        {
            "method": key[0],
            "draft_key": key[1],
            "depth_k": key[2],
            "kernel": key[3],
            "tree_budget": key[4] or None,
            "batch_size": key[5],
            "tokens_per_s": rounded(tokens_per_s(rows), 2),
            "speedup": rounded(speedup(rows, plain[key[5]]), 4),
            "al": rounded(al_of(rows), 4),
            "identical": None if key[0] == "none" else sum(r.identical is True for r in rows),
            "ties": sum(r.tie is True for r in rows),
            "requests": len(rows),
        }
        for key, rows in sorted(groups.items(), key=lambda item: (item[0][0] != "none", item[0]))
    ]
