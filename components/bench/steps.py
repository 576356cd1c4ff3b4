"""The steps of components/bench, as pipelines.yaml names them: what each takes, its settings, and what it makes.

A step imports its implementation when it runs, so that `check` and `plan` read its settings in no time, and hands on
all its arguments; tests/components/test_steps.py holds the two signatures together.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.bench.settings import (
    BatchSizes,
    DepthsToRun,
    DraftDepths,
    Dtype,
    EngineServer,
    KvLengths,
    LookupDepths,
    SpeculationType,
    TreeBudgets,
)
from components.contract import Context, DepthPolicy, Draft, Machine, Measurements, Prompts, Target
from components.outside_json import JsonObject


def measure_acceptance(
    target: Target,
    draft: Draft,
    prompts: Prompts,
    *,
    max_new_tokens: Annotated[int, Field(ge=2)] = 96,
    max_depth: Annotated[int, Field(ge=0, le=64)] = 0,
    dtype: Dtype = "float32",
    batch_size: Annotated[int, Field(ge=1)] = 16,
    trees: TreeBudgets = [],  # noqa: B006 - read, never changed
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0,
    ctx: Context,
) -> Measurements:
    """Acceptance map: for each output position, how many draft tokens a round starting there would accept.

    Args:
        target: the large model whose tokens are drafted.
        draft: the drafter that is measured.
        prompts: its `test` split is answered.
        max_new_tokens: the longest answer, in tokens; the first one comes from the prefill.
        max_depth: deepest chain to draft, in tokens; 0 is the depth the drafter was trained for.
        dtype: arithmetic of target and drafter while measuring.
        batch_size: prompts that the target answers side by side.
        trees: budgets (draft tokens verified in a pass) whose trees are mapped too, position by position; each adds its
            drafting time at every output token. An empty list maps chains only.
        temperature: above 0 each prompt is also answered by sampling at this temperature, with a seed, while the
            drafter drafts at its full depth; maps are of greedy answers.
    """
    arguments = locals().copy()
    from components.bench.acceptance import measure_acceptance as run

    return run(**arguments)


def autotune(
    target: Target,
    prompts: Prompts,
    drafts: list[Draft] | None = None,
    *,
    dtype: Dtype = "float32",
    seconds: Annotated[float, Field(ge=0.0, le=600.0)] = 3.0,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """Time plain decoding on 1 and on all threads, each with its quickest kernels, and choose the faster.

    It writes no rows: the choice and the trials are in its `info`.

    Args:
        target: the large model.
        prompts: after the first prompt of its `test` split that fits, plain decoding is timed.
        drafts: drafters whose kernels are chosen too; without them each process that measures one picks its own.
        dtype: arithmetic of target and drafters.
        seconds: that the thread counts take turns for, at least; 0 takes no more time than a step that chooses for
            itself.
    """
    from components.bench.calibration import autotune as run

    return run(target, prompts, drafts, dtype=dtype, seconds=seconds, ctx=ctx, machine=machine)


def measure_step_cost(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    tuning: Measurements | None = None,
    *,
    max_depth: Annotated[int, Field(ge=0, le=64)] = 0,
    batch_sizes: BatchSizes = [1],  # noqa: B006 - read, never changed
    kv_lengths: KvLengths = [128],  # noqa: B006 - read, never changed
    trees: TreeBudgets = [],  # noqa: B006 - read, never changed
    graphs: bool = False,
    stop_rule: bool = False,
    precision: Annotated[float, Field(gt=0.0, le=1.0)] = 0.03,
    seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] = 120.0,
    num_processes: Annotated[int, Field(ge=1, le=32)] = 3,
    tokens_per_block: Annotated[int, Field(ge=16)] = 64,
    dtype: Dtype = "float32",
    num_threads: Annotated[int, Field(ge=0)] = 0,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """T_target, T_verify(k + 1) and T_draft(k) on this machine, in blocks, in several fresh processes.

    Args:
        target: the large model.
        drafts: the drafters, all measured against the same plain decoding.
        prompts: its `test` split gives the text that is decoded.
        tuning: threads and kernels that bench.autotune chose for this target, dtype and machine; without it this step
            chooses for itself.
        max_depth: deepest chain to time, in tokens; 0 is the depth each drafter was trained for.
        batch_sizes: sequences decoded side by side, of different lengths.
        kv_lengths: lengths of the KV cache to measure at, in tokens; each is the middle of what a block runs through.
        trees: budgets (draft tokens verified in a pass) to time as trees too; an empty list times chains only.
        graphs: record the small passes of target and drafter as CUDA graphs; on a CPU the same static passes run
            without being recorded, which is slower.
        stop_rule: also time trained drafters under a rule that reads every confidence, which speedup.choose_stop needs
            to know what its own decisions cost; one more arm for each drafter.
        precision: half-width of the 95 % interval of a round's cost over a plain step, as a share, at which an arm is
            known well enough (0.03 = 3 %).
        seconds: time budget for measuring; opening the processes comes on top. Precision not reached by then is noted.
        num_processes: fresh processes at least, which take 60 % of the time; more follow while time is left and
            precision is not reached.
        tokens_per_block: tokens decoded for each sequence of one block.
        dtype: arithmetic of target and drafters.
        num_threads: threads that torch uses; 0 times 1 and all, and takes what decodes plainly fastest.
    """
    arguments = locals().copy()
    from components.bench.step_cost import measure_step_cost as run

    return run(**arguments)


def compare_end_to_end(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    policy: DepthPolicy,
    tuning: Measurements | None = None,
    *,
    num_prompts: Annotated[int, Field(ge=1)] = 24,
    max_new_tokens: Annotated[int, Field(ge=2)] = 96,
    precision: Annotated[float, Field(gt=0.0, le=1.0)] = 0.03,
    seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] = 240.0,
    num_processes: Annotated[int, Field(ge=1, le=32)] = 3,
    depths: DepthsToRun = "around",
    lookup_depths: LookupDepths = [4],  # noqa: B006 - read, never changed
    loaded_off: bool = True,
    batch_sizes: BatchSizes = [1],  # noqa: B006 - read, never changed
    trees: TreeBudgets = [],  # noqa: B006 - read, never changed
    num_warm_up: Annotated[int, Field(ge=1)] = 2,
    dtype: Dtype = "float32",
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
        precision: half-width of the 95 % interval of a speed ratio, as a share, at which two ways of decoding are told
            apart well enough (0.03 = 3 %).
        seconds: time for measuring; opening the processes comes on top. A decision that is open by then is measured for
            as long again, once; what is not settled after that is noted.
        num_processes: fresh processes at least, which take 60 % of the time; more follow while time is left and
            the decision is open.
        depths: draft depths to run: around the ones chosen for any batch size (with 1, the trained depth, and the edge
            settings 3 and 7 up to it), all, or a list. A chosen depth beyond the trained one is run too.
        lookup_depths: draft depths of prompt lookup; an empty list leaves it out.
        loaded_off: also run each drafter loaded but off: it keeps what it needs to go on later and drafts nothing.
        trees: budgets (draft tokens verified in a pass) to run as trees too; an empty list runs chains only.
        batch_sizes: sequences decoded side by side; prompts are grouped by workload, and what fills no group is left
            out at that size.
        num_warm_up: warm-up prompts that every arm decodes before time counts.
        dtype: arithmetic of target and drafters.
        num_threads: threads that torch uses; 0 times 1 and all, and takes what decodes plainly fastest.
    """
    arguments = locals().copy()
    from components.bench.end_to_end.compare import compare_end_to_end as run

    return run(**arguments)


def compare_stop(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    policy: DepthPolicy,
    tuning: Measurements | None = None,
    *,
    num_prompts: Annotated[int, Field(ge=1)] = 32,
    max_new_tokens: Annotated[int, Field(ge=2)] = 128,
    precision: Annotated[float, Field(gt=0.0, le=0.5)] = 0.02,
    seconds: Annotated[float, Field(gt=0.0)] = 120.0,
    num_processes: Annotated[int, Field(ge=1, le=100)] = 3,
    num_warm_up: Annotated[int, Field(ge=1)] = 2,
    dtype: Dtype = "float32",
    num_threads: Annotated[int, Field(ge=0)] = 0,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """Time chains that end by the drafter's confidence against chains of its best fixed depth, in turns.

    Args:
        target: the large model.
        drafts: the drafters to compare.
        prompts: its `test` split is timed, its `warm_up` split runs first and does not count.
        policy: with the rules of speedup.choose_stop; each is measured at the batch size it was fitted for.
        tuning: threads and kernels that bench.autotune chose; without it this step chooses for itself.
        num_prompts: test prompts to use, evenly over the split.
        max_new_tokens: the longest answer, in tokens; the first one comes from the prefill.
        precision: half-width of the 95 % interval of a speed ratio at which two ways are told apart well enough.
        seconds: time for measuring, shared by the batch sizes; what is open by then gets as much again, once.
        num_processes: fresh processes at least.
        num_warm_up: warm-up prompts that every arm decodes before time counts.
        dtype: arithmetic of target and drafters.
        num_threads: threads that torch uses; 0 times 1 and all, and takes what decodes plainly fastest.
    """
    arguments = locals().copy()
    from components.bench.end_to_end.stop_arms import compare_stop as run

    return run(**arguments)


def measure_llama_cpp(
    target: Target,
    prompts: Prompts,
    draft: Draft | None = None,
    *,
    model: Annotated[str, Field(min_length=1)],
    draft_model: str = "",
    speculation: SpeculationType = "draft-eagle3",
    draft_key: str = "",
    depths: DraftDepths = [3, 7],  # noqa: B006 - read, never changed
    programs: str = "",
    num_prompts: Annotated[int, Field(ge=1)] = 12,
    max_new_tokens: Annotated[int, Field(ge=2)] = 96,
    reps: Annotated[int, Field(ge=1, le=100)] = 1,
    num_warm_up: Annotated[int, Field(ge=0)] = 1,
    num_threads: Annotated[int, Field(ge=0)] = 0,
    num_compared: Annotated[int, Field(ge=0)] = 0,
    timeout_s: Annotated[float, Field(gt=0.0)] = 600.0,
    dtype: str = "unknown",
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """Time llama.cpp's programs, plain and with a drafter at each depth.

    Args:
        target: the model in Hugging Face format; its tokenizer encodes the prompts.
        prompts: its `test` split is timed, its `warm_up` split runs first and does not count.
        draft: the drafter that `draft_model` was made from; its key stands in the rows.
        model: the same model as a GGUF file.
        draft_model: the drafter as a GGUF file; empty where the model holds it (draft-mtp).
        speculation: llama.cpp's --spec-type.
        draft_key: the artifact key of the drafter, where it is one of ours and `draft` is not given.
        depths: draft tokens a round (--spec-draft-n-max); 3 and 7 are common on a CPU. Empty measures plain only.
        programs: the folder with llama-completion and llama-speculative-simple; empty looks on the PATH.
        num_prompts: test prompts of each workload, evenly over the split.
        max_new_tokens: the longest answer, tokens.
        reps: times that every depth answers every prompt.
        num_warm_up: warm-up prompts that every depth answers before time counts.
        num_threads: threads of the programs; 0 takes all that this step may use.
        num_compared: test prompts of each workload whose text is compared with Draftsmith's own greedy decoding.
        timeout_s: how long one process may take, seconds; then it counts as failed.
        dtype: the arithmetic of the GGUF files, for the record.
    """
    arguments = locals().copy()
    from components.bench.engines.llama_cpp import measure_llama_cpp as run

    return run(**arguments)


def measure_server(
    target: Target,
    prompts: Prompts,
    draft: Draft | None = None,
    *,
    servers: Annotated[list[EngineServer], Field(min_length=1)],
    label: str = "",
    num_prompts: Annotated[int, Field(ge=1)] = 32,
    max_new_tokens: Annotated[int, Field(ge=2)] = 128,
    concurrency: Annotated[BatchSizes, Field(min_length=1)] = [1],  # noqa: B006
    reps: Annotated[int, Field(ge=1, le=100)] = 1,
    num_warm_up: Annotated[int, Field(ge=0)] = 2,
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0,
    num_compared: Annotated[int, Field(ge=0)] = 0,
    wait_s: Annotated[float, Field(gt=0.0)] = 30.0,
    timeout_s: Annotated[float, Field(gt=0.0)] = 600.0,
    dtype: str = "unknown",
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """Time every server on the same prompts, and count what it accepted.

    Args:
        target: the model they serve; its tokenizer encodes the prompts and counts tokens where a server does not.
        prompts: its `test` split is timed, its `warm_up` split runs first and does not count.
        draft: the drafter that servers of its method serve; its key is their draft_key where they state none.
        servers: base_url of each, with engine, model, method, depth_k, draft_key, imposed and api_key_variable where
            they say more than the server itself does.
        label: what is behind the addresses, in words; it is part of the step's key, which a server is not: change it,
            or use --force, when the server has changed.
        num_prompts: test prompts of each workload, evenly over the split.
        max_new_tokens: the longest answer, tokens.
        concurrency: requests in flight at most, one sweep through the prompts for each.
        reps: times that every server answers every prompt at every concurrency.
        num_warm_up: warm-up prompts that every server answers before time counts.
        temperature: 0 is greedy.
        num_compared: test prompts of each workload whose answers are compared token for token with Draftsmith's own
            plain greedy decoding of the target on this machine (needs temperature 0); 0 compares none.
        wait_s: how long a server may take to answer for the first time, seconds.
        timeout_s: how long a request may go without news from the server before it counts as failed, seconds.
        dtype: the arithmetic of the server, for the record; our own answers are decoded in bfloat16 where it is that.
    """
    arguments = locals().copy()
    from components.bench.engines.server import measure_server as run

    return run(**arguments)


def measure_llama_cpp_fingerprint(settings: JsonObject) -> dict[str, str]:
    """The GGUF files, programs and libraries that the settings name, for the step's key: file -> sha256."""
    from components.bench.engines.llama_cpp import measure_llama_cpp_fingerprint as fingerprint

    return fingerprint(settings)
