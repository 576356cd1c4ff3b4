"""`draftsmith choose-depth FILES`: a policy from rows measured anywhere, by the model, rule and flags of a pipeline."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from components.contract import UserError
from components.engines.depth_settings import engine_lines, engine_settings, engines_without_method
from components.outside_json import JsonObject
from components.policy import Policy
from components.rows import ALL
from components.speedup.imported.policy import policy_from
from components.speedup.imported.rows import read_imported_rows
from components.speedup.policy_markdown import choice_cells, depth_cells, flag_cells, mixture_line, ranking_cells
from components.speedup.prediction.predict import Rule
from components.tables import Table
from flows.commands.terminal import Seed, echo, out, print_answer


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
    rule = Rule(tolerance, confidence, draws, include_host=True)
    policy = policy_from(read_imported_rows(rows), rule, _shares(mixture), seed)
    if as_json:
        whole = {**asdict(policy), "engines": _engines_of(policy)}
        echo(json.dumps(whole, indent=1, allow_nan=False))
    else:
        print_policy(policy, out)
    if policy.verdict == "invalid":
        raise typer.Exit(1)


def _engines_of(policy: Policy) -> JsonObject:
    return engine_settings(policy, engines_without_method(policy.winner.method) if policy.winner else ())


def _shares(text: str) -> dict[str, float]:
    """code=0.7,chat=0.3 as a dictionary."""
    shares = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, share = part.rpartition("=")
        try:
            shares[name.strip()] = float(share)
        except ValueError:
            sign = ""
        if not sign:
            raise UserError(f"--mixture {part}: expected WORKLOAD=SHARE, as in code=0.7,chat=0.3")
    return shares


def print_policy(policy: Policy, console: Console) -> None:
    """The verdict, the choices, every depth, the engines' settings, and the reasons to doubt."""
    settings = _engines_of(policy)

    def show(title: str, cells: Table) -> None:
        echo(f"\n{title}")
        print_answer(console, cells.header, cells.rows)

    echo(f"{policy.verdict.replace('_', ' ')}: {'; '.join(policy.reasons)}")
    if policy.verdict == "invalid":
        echo("nothing is chosen: the numbers contradict each other; mend what the flags name and ask again")
    else:
        show(f"choices ({policy.rule})", choice_cells([*policy.choices, *policy.contexts]))
        for mixture in policy.mixtures:
            echo(mixture_line(mixture))
        for choice in policy.choices:
            if choice.workload == ALL and choice.verdict != "invalid":
                evals = [e for e in policy.evals if (e.draft_key, e.workload) == (choice.draft_key, ALL)]
                show(
                    f"{choice.draft_key}, batch {choice.batch_size}: every depth",
                    depth_cells([e for e in evals if e.batch_size == choice.batch_size], choice.depth_k),
                )
        if len(policy.ranking) > 1:
            show("drafters against each other", ranking_cells(policy.ranking))
    if settings:
        echo("\nwhat the engines are told")
        for line in engine_lines(settings):
            echo(line)
    if policy.flags:
        show("reasons to doubt", flag_cells(policy.flags))
