"""The command line. Exit codes: 0 done, 1 a run failed, 2 the input is wrong (a line for each fault), 130 interrupted.

Heavy things (torch, Prefect, MLflow, DuckDB) are imported only by the command that needs them, so that `check` and
`plan` answer at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from components.contract import UserError
from flows.signature import PACKAGES
from storage.artifacts import Store, default_home

if TYPE_CHECKING:
    from flows.direct import RunOptions

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False, soft_wrap=True)

File = Annotated[Path, typer.Option("--file", "-f", help="The pipelines file.", show_default=True)]
Pipeline = Annotated[str, typer.Argument(help="The pipeline's name in pipelines.yaml.")]
Params = Annotated[list[str], typer.Option("--param", "-p", help="NAME=VALUE, typed and checked; may be repeated.")]
From = Annotated[str | None, typer.Option("--from", help="Start here; what stands before must be in the store.")]
To = Annotated[str | None, typer.Option("--to", help="Stop after this step.")]
Force = Annotated[list[str], typer.Option("--force", help="Make this step and what follows anew; may be repeated.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option(help="The only source of randomness.")]
DEFAULT_FILE = Path("pipelines.yaml")


class _Settings:
    """What main() was called with, for the commands."""

    packages: tuple[str, ...] = PACKAGES
    debug: bool = False


@app.callback()
def settings(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
) -> None:
    """Turn pipelines.yaml into drafters that make a language model answer faster, and prove how much faster."""
    _Settings.debug = debug


@app.command()
def check(file: File = DEFAULT_FILE) -> None:
    """Is pipelines.yaml right? Every fault in one line, with its line number."""
    from flows.sources import find_source
    from flows.spec import load_spec
    from flows.wiring import check_spec

    store = Store()
    wired = check_spec(load_spec(file), outside=lambda name: find_source(name, store), packages=_Settings.packages)
    counts = ", ".join(f"{name} ({len(wiring.steps)} steps)" for name, wiring in wired.items())
    _say(f"{file.name} is right: {counts}")


@app.command()
def plan(
    pipeline: Pipeline,
    param: Params = [],  # noqa: B006 (typer copies it)
    from_step: From = None,
    to_step: To = None,
    force: Force = [],  # noqa: B006
    mermaid: Annotated[bool, typer.Option("--mermaid", help="As a drawing in Mermaid.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    device: Device = "auto",
    seed: Seed = 0,
    file: File = DEFAULT_FILE,
) -> None:
    """What would run, what is reused, and why. Changes nothing."""
    from flows.direct import plan_run
    from flows.show_plan import as_mermaid, plan_as_json, print_plan

    options = _options(file, device, seed, from_step, to_step, force)
    made, _ = plan_run(pipeline, _typed(file, pipeline, param), options)
    if as_json:
        _say(plan_as_json(made))
    elif mermaid:
        _say(as_mermaid(made))
    else:
        print_plan(made, out)


@app.command()
def run(
    pipeline: Pipeline,
    param: Params = [],  # noqa: B006
    direct: Annotated[bool, typer.Option("--direct", help="The engine alone, without Prefect.")] = False,
    from_step: From = None,
    to_step: To = None,
    force: Force = [],  # noqa: B006
    online: Annotated[bool, typer.Option("--online", help="Steps may download from model hubs.")] = False,
    device: Device = "auto",
    seed: Seed = 0,
    file: File = DEFAULT_FILE,
) -> None:
    """Run a pipeline; finished steps are reused. Killed, the same command goes on where it was."""
    from dataclasses import replace

    from flows.direct import plan_run, run_direct
    from flows.display import Display
    from flows.ending import print_ending

    if online:
        os.environ["HF_HUB_OFFLINE"] = "0"
    options = _options(file, device, seed, from_step, to_step, force)
    params = _typed(file, pipeline, param)
    first_plan, _ = plan_run(pipeline, params, options)  # wrong input ends here, before anything is started
    width = max(len(step.name) for step in first_plan.steps)
    left = len(first_plan.steps) - first_plan.num_reused
    _say(f"{pipeline}: {len(first_plan.steps)} steps, {first_plan.num_reused} reused, {left} to run")
    with Display(out, width) as display:
        options = replace(options, on_event=display.on_event)
        if direct:
            outcome = run_direct(pipeline, params, options)
        else:
            from flows.run import run_with_prefect

            outcome = run_with_prefect(pipeline, params, options=options)
    print_ending(outcome, out)


@app.command()
def show(
    key: Annotated[str, typer.Argument(help="A key, or the beginning of one.")],
    as_json: Annotated[bool, typer.Option("--json", help="artifact.json as it is.")] = False,
) -> None:
    """One artifact: what it is, what it was made from, where it lies."""
    from flows.show_artifact import print_artifact

    store = Store()
    found = store.resolve(key)
    if as_json:
        _say(json.dumps(store.record_of(found), indent=1))
    else:
        print_artifact(store, found, out)


@app.command()
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
    _say(f"{len(rows)} rows")


@app.command()
def promote(
    name: Annotated[str, typer.Argument(help="The registered model.")],
    version: Annotated[str, typer.Argument(help="A version number, or an alias such as challenger.")],
    why: Annotated[str, typer.Option(help="The reason; the promotion log keeps it.")],
) -> None:
    """Make a model version the champion; the one before becomes `previous`."""
    from storage.registry import promote as move

    _say(move(default_home(), name, int(version) if version.isdigit() else version, why).note)


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="The registered model.")],
    why: Annotated[str, typer.Option(help="The reason; the promotion log keeps it.")],
) -> None:
    """Make the previous champion the champion again."""
    from storage.registry import rollback as move

    _say(move(default_home(), name, why).note)


@app.command()
def resync() -> None:
    """Tell MLflow, the registry and the history what they missed while they were down."""
    from storage.keep import resync as catch_up

    done = catch_up(default_home())
    _say(", ".join(f"{count} {what}" for what, count in done.items()) + " compared: all of them are known now")


@app.command()
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


def main(arguments: Sequence[str] | None = None, packages: tuple[str, ...] = PACKAGES) -> int:
    """Entry point of `draftsmith`; `packages` are where step addresses are looked up."""
    from typer.exceptions import Abort, Exit, TyperException

    _Settings.packages, _Settings.debug = packages, False
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminated) if in_main_thread else None
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        code = app(args=given, prog_name="draftsmith", standalone_mode=False)
        if code == 130:  # typer has turned the interrupt into its exit code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except Exit as error:
        return error.exit_code
    except UserError as error:
        _complain(str(error))
        return 2
    except TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            _say(str(error))
            return 0
        describe = getattr(error, "format_message", None)
        _complain("draftsmith: " + " ".join(str(describe() if describe is not None else error).split()))
        return 2
    except (KeyboardInterrupt, Abort):
        _complain("interrupted; the same command goes on where it was")
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        return _failed(error)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _failed(error: Exception) -> int:
    """A failure that is not the user's: one line and where to look; the traceback with --debug."""
    from flows.engine import StepFailed

    if _Settings.debug:
        traceback.print_exc()
    if isinstance(error, StepFailed):
        _complain(f"{error}\nits log: {error.log}")
        return 1
    folder = default_home() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"failure-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    log.write_text(traceback.format_exc(), encoding="utf-8")
    _complain(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}\nits traceback: {log}")
    return 1


def _terminated(*_: Any) -> None:
    raise KeyboardInterrupt


def _typed(file: Path, pipeline: str, given: Sequence[str]) -> dict[str, Any]:
    from flows.params import parse_params
    from flows.spec import load_spec, pipeline_of

    return parse_params(pipeline, pipeline_of(load_spec(file), pipeline).params, given) if given else {}


def _options(
    file: Path, device: str, seed: int, from_step: str | None, to_step: str | None, force: Sequence[str]
) -> RunOptions:
    from flows.direct import RunOptions

    return RunOptions(
        file=file,
        device=device,
        seed=seed,
        from_step=from_step,
        to_step=to_step,
        force=tuple(force),
        packages=_Settings.packages,
    )


def _say(text: str) -> None:
    out.print(text, markup=False, soft_wrap=True)


def _complain(text: str) -> None:
    err.print(text, markup=False, style="red" if err.is_terminal else None)


if __name__ == "__main__":
    sys.exit(main())
