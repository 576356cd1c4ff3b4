"""What commands share: where their words go, how rows are printed, options that several take, how `main` was called."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Sequence
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.contract import UserError
from flows.planning.step_signature import PACKAGES
from storage.redaction import printable, without_secrets

out = Console(highlight=False, emoji=False)

File = Annotated[Path, typer.Option("--file", "-f", help="The pipelines file.", show_default=True)]
Pipeline = Annotated[str, typer.Argument(help="The pipeline's name in pipelines.yaml.")]
Params = Annotated[list[str], typer.Option("--param", "-p", help="NAME=VALUE, typed and checked; may be repeated.")]
From = Annotated[str | None, typer.Option("--from", help="Start here; what stands before must be in the store.")]
To = Annotated[str | None, typer.Option("--to", help="Stop after this step.")]
Force = Annotated[list[str], typer.Option("--force", help="Make this step and what follows anew; may be repeated.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option(help="The only source of randomness.")]
DEFAULT_FILE = Path("pipelines.yaml")


class Invocation:
    """What main() was called with. packages: where step addresses are looked up. debug: show tracebacks.

    page: of docs/, on the command.
    """

    packages: tuple[str, ...] = PACKAGES
    debug: bool = False
    page: str = "index"


def echo(text: str) -> None:
    """A line of the answer, as it is. Not by rich: a line that Ctrl-C interrupts it would say again with the next."""
    typer.echo(printable(without_secrets(text)))


def echo_error(text: str) -> None:
    """A line about what is wrong, to stderr."""
    typer.secho(printable(without_secrets(text)), err=True, fg="red")


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


def cell(value: Any) -> str:
    """A value as a person reads it: numbers to six digits, NULL as nothing, no command to the terminal."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in str(value))


class Format(StrEnum):
    """The output formats: for people, for spreadsheets, for programs."""

    table = "table"
    csv = "csv"
    json = "json"


def print_in(format_: Format, out: Console, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in the given format."""
    if format_ is Format.csv:
        csv.writer(sys.stdout).writerows([columns, *rows])
    elif format_ is Format.json:
        print_json(columns, rows)
    else:
        print_answer(out, columns, rows)


def print_json(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a list of objects, one a row; NULL and non-finite numbers (NaN, infinity) are null, times are ISO texts."""
    answer = [dict(zip(columns, row, strict=True)) for row in rows]
    print_json_object(answer)


def print_json_object(answer: Any) -> None:
    """Print one JSON value; NULL and non-finite numbers are null, times are ISO texts."""
    json.dump(_plain(answer), sys.stdout, indent=1, default=str, allow_nan=False)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    """A value that JSON can hold: DuckDB's decimals are numbers too."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


def print_answer(out: Console, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table for people. Nothing is cut off: an answer too wide for the screen is printed a row at a time."""
    cells = [[cell(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    if out.is_terminal and sum(widths) + 2 * len(widths) > out.width:
        label = max(len(name) for name in columns)
        for number, row in enumerate(cells, 1):
            out.print(Text(f"row {number}", style="bold"))
            for name, text in zip(columns, row, strict=True):
                out.print(Text(f"  {name:<{label}}  {text}"))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(Text(name), no_wrap=True)
    for row in cells:
        table.add_row(*(Text(text) for text in row))
    wide = out if out.is_terminal else Console(width=max(sum(widths) + 2 * len(widths), 20), soft_wrap=True)
    wide.print(table)
