"""Command that chooses a draft depth from rows measured anywhere, with the same model, rule and flags as a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.terminal import Seed, echo, out


def choose_depth(
    rows: Annotated[
        list[Path], typer.Argument(help="Files of rows: .csv, .tsv, .txt, .md (tables), .json, .jsonl or .parquet.")
    ],
    mixture: Annotated[
        str, typer.Option(help="WORKLOAD=SHARE,...: shares of decoded tokens, for one depth that serves them all.")
    ] = "",
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=0.49, help="Share of speed to give up for a shallower depth.")
    ] = 0.01,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="Probability of beating plain decoding that is asked.")
    ] = 0.95,
    draws: Annotated[int, typer.Option(min=200, max=50_000, help="Resamples behind each interval.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="The whole policy as JSON, for programs.")] = False,
    seed: Seed = 0,
) -> None:
    """Choose a draft depth from numbers that you measured elsewhere.

    A row tells acceptance, cost or both. The least that is needed:

    \b
      k,p,t_target,t_verify,t_draft
      1,0.80,76,90,8
      2,0.74,76,104,14
      3,0.67,76,117,22

    Acceptance, one of:

    \b
      k,p                           position k is kept, given all before it
      k,al                          tokens a round, bonus token included
      k,tokens,rounds               kept tokens (bonus included) and rounds
      k,num_drafts,accepted_per_pos vLLM's counters: 3,1000,800 592 397
      prompt,accepted,k_max         drafts kept from every output position:
                                    a,3 0 1 2 0,3

    Cost, one of:

    \b
      k,t_verify,t_draft            and t_target once: a pass, k drafts, a
                                    plain step; t_host for the rest of a round
      k,tpot                        time per output token; k = 0 is plain
      k,speedup                     end to end: 1.43

    Times are ms, or what the column's name says: t_verify_us, t_draft_s,
    tpot_ns, "T_verify (ms)". A column prompt gives intervals, block or rep
    numbers repetitions; drafter, method, workload, batch_size, kv_len,
    draft_vocab and tree_budget tell cases apart; trained_depth is warned of
    where it is passed.

    Several al of prompts, without tokens or rounds beside them, count as if
    every prompt had decoded the same number of tokens: a macro mean
    (harmonic), and a flag says so. With tokens or rounds they are pooled.

    Tables may be delimited by commas, semicolons (decimal commas too), tabs
    or bars, in UTF-8 or UTF-16; empty, NaN, None, null and - mean not told.

    \b
    Exit codes: 0 a choice (also: do not speculate, or undecided), 1 the
    numbers are invalid, 2 a row or an option is wrong.
    """
    from flows.analysis.choose_from_rows import choose_from_rows, policy_as_json, print_policy

    policy = choose_from_rows(rows, mixture, tolerance, confidence, draws, seed)
    if as_json:
        echo(policy_as_json(policy))
    else:
        print_policy(policy, out)
    if policy.verdict == "invalid":
        raise typer.Exit(1)
