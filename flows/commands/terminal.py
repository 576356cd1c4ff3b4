"""What every command shares: where its words go, the options that several take, and how `main` was called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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
    """What main() was called with. packages: where step addresses are looked up. debug: show tracebacks."""

    packages: tuple[str, ...] = PACKAGES
    debug: bool = False


def echo(text: str) -> None:
    """A line of the answer, as it is. Not by rich: a line that Ctrl-C interrupts it would say again with the next."""
    typer.echo(printable(without_secrets(text)))


def echo_error(text: str) -> None:
    """A line about what is wrong, to stderr."""
    typer.secho(printable(without_secrets(text)), err=True, fg="red")
