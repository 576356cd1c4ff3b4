"""Commands that look: at an artifact, at anybody's checkpoint, at the history in SQL, at what a drafter writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from components.contract import UserError
from flows.commands.terminal import Device, Params, echo, out
from flows.console.query_output import Format, print_in
from storage.artifacts.store import Store, default_home


def show(
    key: Annotated[str, typer.Argument(help="A key, or the beginning of one; or the name of a registered model.")],
    as_json: Annotated[bool, typer.Option("--json", help="artifact.json as it is.")] = False,
) -> None:
    """One artifact: what it is, what it was made from, where it lies. Or a registered model: who moved which alias."""
    from flows.console.inspect_output import is_model, print_artifact, print_model

    store = Store()
    if is_model(store.home, key):
        print_model(store.home, key, out)
        return
    full_key = store.resolve(key)
    if as_json:
        echo(json.dumps(store.record_of(full_key), indent=1))
    else:
        print_artifact(store, full_key, out)


def validate(
    folder: Annotated[Path, typer.Argument(help="A drafter's folder: config.json and *.safetensors; or a GGUF file.")],
    target: Annotated[
        str, typer.Option(help="Its target: builtin, or a folder in Hugging Face format; compared with it.")
    ] = "",
) -> None:
    """Is a drafter's checkpoint exactly what engines expect? Names, shapes, dtypes, vocabulary, numbers, config."""
    from components.publish.release.validate import validate_folder

    for line in validate_folder(folder, target):
        echo(line)


def query(
    question: Annotated[
        str, typer.Argument(help="The name of a query (--list), or one SELECT; SHOW TABLES lists the views.")
    ] = "",
    param: Params = [],  # noqa: B006 typer copies it
    format_: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.table,
    list_: Annotated[bool, typer.Option("--list", help="List the named queries and their parameters.")] = False,
    all_sessions: Annotated[
        bool, typer.Option("--all-sessions", help="Views show every session of what was measured again.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a SELECT may take.")] = 120.0,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows that the answer to a SELECT may have.")] = 500_000,
) -> None:
    """Every number ever measured: by the name of a question, or in SQL."""
    from storage.history import query as history

    if list_ or not question:
        print_in(format_, out, *history.list_rows())
        return

    values = named_values(param)
    if history.is_name(question):
        columns, rows = history.run_named_query(default_home(), question, values, all_sessions=all_sessions)
    elif values:
        raise UserError("query: -p is for named queries; a SELECT says its values itself")
    else:
        limits = history.Limits(seconds=timeout, rows=max_rows)
        columns, rows = history.query(question, default_home(), all_sessions=all_sessions, limits=limits)
    print_in(format_, out, columns, rows)
    if format_ is Format.table:
        echo(f"{len(rows)} rows")


def compact() -> None:
    """Merge the small files of the history into few large ones; runs do so by themselves past a few hundred."""
    from storage.history.files import compact as merge

    merged = merge(default_home(), 0, whole=True)
    echo(", ".join(f"{table}: {count} files" for table, count in merged.items()) or "nothing to merge")


def named_values(param: list[str]) -> dict[str, str]:
    """NAME=VALUE options as a dictionary.

    Raises:
        UserError: one is not NAME=VALUE.
    """
    pairs = [text.partition("=") for text in param]
    for name, sign, _ in pairs:
        if not sign:
            raise UserError(f"-p {name}: give it as NAME=VALUE")
    return {name.strip(): value for name, _, value in pairs}


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
    from flows.analysis.generate import generate as continue_twice
    from flows.console.run_summary import print_side_by_side
    from flows.planning.device import resolve_device

    answer = continue_twice(
        Store(), prompt, key=key, depth_k=depth_k, max_new_tokens=max_new_tokens, device=resolve_device(device)
    )
    print_side_by_side(answer, out)
