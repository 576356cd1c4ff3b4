"""`draftsmith choose-depth FILES`: a policy from rows measured anywhere, printed with what engines are told of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

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
from flows.commands.terminal import echo
from flows.console.query_output import print_answer


def choose_from_rows(
    files: list[Path], mixture: str, tolerance: float, confidence: float, draws: int, seed: int
) -> Policy:
    """The policy that the rows in these files lead to. mixture: WORKLOAD=SHARE,...; "" for none.

    Raises:
        UserError: a row or the mixture is wrong.
    """
    rule = Rule(tolerance, confidence, draws, include_host=True)
    return policy_from(read_imported_rows(files), rule, _shares(mixture), seed)


def policy_as_json(policy: Policy) -> str:
    """The whole policy, with the settings of each engine."""
    return json.dumps({**asdict(policy), "engines": _engines_of(policy)}, indent=1, allow_nan=False)


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
