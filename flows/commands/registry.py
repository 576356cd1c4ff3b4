"""Commands on the model registry: promote a version, roll back, make up for what the services missed."""

from __future__ import annotations

from typing import Annotated

import typer

from components.speedup.comparison.promotion_rule import judge
from flows.commands.terminal import echo, echo_error
from storage import record
from storage.artifacts.store import default_home
from storage.registry import registry


def promote(
    name: Annotated[str, typer.Argument(help="The registered model.")],
    version: Annotated[str, typer.Option(help="A version number, or an alias.")] = "challenger",
    reason: Annotated[str, typer.Option("--why", help="The reason, which the promotion log keeps.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Override the promotion gate; needs --why.")] = False,
) -> None:
    """Make a model version the champion if the promotion gate lets it; the one before becomes `previous`."""
    echo(registry.promote(default_home(), name, version, reason, judge=judge, force=force).note)


def rollback(
    name: Annotated[str, typer.Argument(help="The registered model.")],
    reason: Annotated[str, typer.Option("--why", help="The reason; the promotion log keeps it.")],
) -> None:
    """Make the previous champion the champion again."""
    echo(registry.rollback(default_home(), name, reason).note)


def resync() -> None:
    """Tell MLflow, the registry and the history what they missed while they were down."""
    try:
        done = record.resync(default_home(), judge)
    except record.ArtifactsSkipped as error:
        for line in error.lines:
            echo_error(line)
        echo_error(f"{len(error.lines)} artifacts cannot be read; all else is known now")
        raise typer.Exit(1) from None
    echo(", ".join(f"{count} {what}" for what, count in done.items()) + " compared: all of them are known now")
