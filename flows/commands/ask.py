"""Commands that ask: one artifact, the history in SQL, a text from the drafter."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flows.commands.terminal import Device, out, say
from storage.artifacts import Store, default_home


def show(
    key: Annotated[str, typer.Argument(help="A key, or the beginning of one; or the name of a registered model.")],
    as_json: Annotated[bool, typer.Option("--json", help="artifact.json as it is.")] = False,
) -> None:
    """One artifact: what it is, what it was made from, where it lies. Or a registered model: who moved which alias."""
    from flows.show_artifact import print_artifact
    from flows.show_model import is_model, print_model

    store = Store()
    if is_model(store.home, key):
        print_model(store.home, key, out)
        return
    found = store.resolve(key)
    if as_json:
        say(json.dumps(store.record_of(found), indent=1))
    else:
        print_artifact(store, found, out)


def query(
    sql: Annotated[str, typer.Argument(help="One SELECT over the history views; SHOW TABLES lists them.")],
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values instead of a table.")] = False,
) -> None:
    """Every number ever measured, in SQL."""
    from storage.results import query as ask

    columns, rows = ask(sql, default_home())
    from flows.answer import print_answer, print_csv

    if csv:
        print_csv(columns, rows)
        return
    print_answer(out, columns, rows)
    say(f"{len(rows)} rows")


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    key: Annotated[
        str | None, typer.Option(help="A Release, DepthPolicy or Draft; default: the newest winner.")
    ] = None,
    depth_k: Annotated[int | None, typer.Option("--depth", min=1, help="Draft depth; default: the chosen one.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens to write.")] = 96,
    device: Device = "auto",
) -> None:
    """Continue a prompt twice, plain and speculative, side by side."""
    from flows.device import resolve_device
    from flows.ending import print_side_by_side
    from flows.generate import generate as continue_twice

    answer = continue_twice(
        Store(), prompt, key=key, depth_k=depth_k, max_new_tokens=max_new_tokens, device=resolve_device(device)
    )
    print_side_by_side(answer, out)
