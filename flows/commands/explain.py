"""`draftsmith explain`: what a step, a drafting method or a pipeline can be told, from the code and pipelines.yaml."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Annotated

import typer

from components.contract import UserError
from components.methods import METHODS
from components.text import did_you_mean, one_line
from flows.commands.terminal import DEFAULT_FILE, File, Invocation, echo, out
from flows.planning.explanation import Entry, explain_method, explain_params, explain_step
from flows.planning.step_signature import step_addresses
from flows.spec.schema import PipelineSpec, load_spec

WIDEST = 120


def explain(
    name: Annotated[
        str, typer.Argument(help="A step (drafts.train_draft), a method (eagle3) or a pipeline; left out: all steps.")
    ] = "",
    file: File = DEFAULT_FILE,
) -> None:
    """A step's purpose, inputs and settings; a method's settings; a pipeline's parameters; or the list of all steps."""
    addresses = step_addresses(Invocation.packages)
    of_bare_name = {address.rpartition(".")[2]: address for address in addresses}
    if not name:
        for address in addresses:
            about = explain_step(address, Invocation.packages).about.split("\n\n")[0]
            _paragraph(f"{address}: {about}", hanging=4)
    elif name in addresses:
        _print_step(name)
    elif name in METHODS:
        about, settings = explain_method(name)
        _paragraph(about)
        _section(f"settings: {{{name}: ...}} of drafts.train_draft", settings)
    else:
        pipelines = load_spec(file).pipelines if file != DEFAULT_FILE or file.exists() else {}
        if name in pipelines:
            _print_pipeline(name, pipelines[name])
        elif name in of_bare_name:
            _print_step(of_bare_name[name])
        else:
            suggestion = did_you_mean(name, [*addresses, *METHODS, *pipelines, *of_bare_name])
            raise UserError(
                f"explain {one_line(name)}: no step, method or pipeline has this name{suggestion}; "
                "`draftsmith explain` lists the steps"
            )


def _print_step(address: str) -> None:
    step = explain_step(address, Invocation.packages)
    _paragraph(f"{address} makes {step.makes}{', and measures: it runs alone' if step.measures else ''}")
    for paragraph in step.about.split("\n\n"):
        echo("")
        _paragraph(paragraph)
    _section("in:", step.inputs)
    _section("with:", step.settings, must_be_given=True)
    for mapping in step.mappings:
        _section(f"{mapping.name}: {mapping.about}", mapping.keys, must_be_given=True)
    if address == "drafts.train_draft":
        echo("")
        _paragraph(f"`draftsmith explain METHOD` lists what `settings` takes for {', '.join(METHODS)}.")


def _print_pipeline(name: str, pipeline: PipelineSpec) -> None:
    _paragraph(f"{name}: {pipeline.about}" if pipeline.about else name)
    _section("-p NAME=VALUE:", explain_params(pipeline.params))
    echo("\nsteps:")
    for step, declared in pipeline.steps.items():
        echo(f"  {step}: {declared.uses}")


def _section(head: str, entries: Iterable[Entry], *, must_be_given: bool = False) -> None:
    """Entries under a heading: name, type and default on one line, the meaning below."""
    lines = list(entries)
    if lines:
        echo("")
        _paragraph(head)
    for entry in lines:
        default = f" = {entry.default}" if entry.default is not None else ", must be given" if must_be_given else ""
        _paragraph(f"{entry.name}: {entry.kind.replace('`', '')}{default}", indent=2, hanging=8)
        if entry.meaning:
            _paragraph(entry.meaning, indent=6)


def _paragraph(text: str, *, indent: int = 0, hanging: int | None = None) -> None:
    """Text broken into lines that fit. hanging: the indent of all lines but the first."""
    first, others = " " * indent, " " * (indent if hanging is None else hanging)
    width = min(out.width, WIDEST)
    echo(
        textwrap.fill(
            text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
        )
    )
