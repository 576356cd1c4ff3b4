"""The command line. Exit codes: 0 done, 1 a run failed, 2 the input is wrong (a line for each fault), 130 interrupted.

The commands themselves are in flows/commands. Heavy things (torch, Prefect, MLflow, DuckDB) are imported only by the
command that needs them, so that `check` and `plan` answer at once.
"""

from __future__ import annotations

import ast
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import Abort, Exit, TyperException

from components.contract import UserError
from flows.commands.terminal import Invocation, echo, echo_error
from flows.execution.messages import StepFailed, disk_fault
from flows.planning.step_signature import named_packages
from flows.spec.diagnostics import with_pages
from storage.artifacts.remote import drain_problems
from storage.artifacts.store import default_home
from storage.home import settle
from storage.redaction import without_secrets

COMMANDS = {
    "demo": ("run", "first-pipeline"),
    "init": ("init", "first-pipeline"),
    "check": ("check", "first-pipeline"),
    "explain": ("explain", "first-pipeline"),
    "plan": ("check", "first-pipeline"),
    "rehearse": ("rehearse", "my-model"),
    "run": ("run", "first-pipeline"),
    "night": ("rehearse", "nightly"),
    "remeasure": ("remeasure", "operate"),
    "validate": ("inspect", "engines"),
    "convert": ("inspect", "engines"),
    "show": ("inspect", "operate"),
    "query": ("inspect", "sql"),
    "diff": ("history", "sql"),
    "lineage": ("history", "sql"),
    "history": ("history", "sql"),
    "compact": ("inspect", "sql"),
    "compare": ("compare", "operate"),
    "trend": ("trend", "sql"),
    "generate": ("generate", "operate"),
    "choose-depth": ("choose_depth", "depth"),
    "promote": ("registry", "operate"),
    "rollback": ("registry", "operate"),
    "resync": ("registry", "operate"),
    "dashboard": ("homes", "operate"),
    "delete": ("removal", "operate"),
    "rename": ("removal", "operate"),
    "du": ("homes", "operate"),
    "gc": ("homes", "operate"),
    "backup": ("homes", "operate"),
    "restore": ("homes", "operate"),
    "up": ("services", "operate"),
    "down": ("services", "operate"),
    "status": ("services", "operate"),
    "doctor": ("services", "operate"),
    "deploy": ("services", "operate"),
}
"""Every command, with its file in flows/commands and the page of docs/ that explains it."""


class _Commands(TyperGroup):
    """The commands. The file of one is imported when it is called: `check` need not wait for what others import."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """A command with its help and no more, to be listed; None where there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        function = cmd_name.replace("-", "_")
        tree = ast.parse(Path(__file__).with_name("commands").joinpath(f"{COMMANDS[cmd_name][0]}.py").read_bytes())
        found = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
        return TyperCommand(cmd_name, help=ast.get_docstring(next(found)), rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str, Any, list[str]]:
        """The command that is called, whole."""
        self.commands = dict.fromkeys(COMMANDS, TyperCommand(None))  # for suggestions
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None, "an unknown command is refused above"
        return name, load_command(name), rest


def load_command(name: str) -> Any:
    """A command as typer builds it; its file is imported now."""
    file, Invocation.page = COMMANDS[name]
    function = getattr(importlib.import_module(f"flows.commands.{file}"), name.replace("-", "_"))
    only = typer.Typer(add_completion=False, rich_markup_mode=None)
    only.command(name, epilog=f"More: docs/{Invocation.page}.md")(function)
    return typer.main.get_command(only)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def settings(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
) -> None:
    """Turn pipelines.yaml into drafters that make a language model answer faster, and prove how much faster."""
    Invocation.debug = debug


def main(arguments: Sequence[str] | None = None, packages: tuple[str, ...] | None = None) -> int:
    """Entry point of `draftsmith`; `packages` are where step addresses are looked up, by default `named_packages()`."""
    os.umask(0o077)  # chats, answers and databases of this home are for nobody else's eyes; children inherit it
    Invocation.packages, Invocation.debug = packages or named_packages(), False
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminated) if in_main_thread else None
    hook, sys.unraisablehook = sys.unraisablehook, _interrupt_again
    try:
        argv = list(sys.argv[1:] if arguments is None else arguments)
        somebody = sys.stdin.isatty() and sys.stderr.isatty()
        if line := settle(default_home(), partial(typer.confirm, err=True) if somebody else None):
            echo_error(line)
        code = app(args=argv, prog_name="draftsmith", standalone_mode=False)
        for line in drain_problems():
            echo_error(line)
        if code == 130:  # typer has turned the interrupt into its exit code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except Exit as error:
        return error.exit_code
    except UserError as error:
        echo_error(with_pages(error, Invocation.page))
        return 2
    except TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            echo(str(error))
            return 0
        describe = getattr(error, "format_message", None)
        echo_error("draftsmith: " + " ".join(str(describe() if describe is not None else error).split()))
        return 2
    except (KeyboardInterrupt, Abort):
        echo_error("interrupted; steps that are done stay done: the same command goes on from there")
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        return _report_failure(error)
    finally:
        sys.unraisablehook = hook
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _report_failure(error: Exception) -> int:
    """A failure that is not the user's: one line and where to look; the traceback with --debug."""
    trace = without_secrets(traceback.format_exc())  # libraries put the address that did not answer into it
    if Invocation.debug:
        echo_error(trace)
    if isinstance(error, StepFailed):
        echo_error(f"{error}\nits log: {error.log}")
        return 1
    if fault := disk_fault(error, default_home()):
        echo_error(f"{fault}; mend that, and the same command goes on from what is done")
        return 1
    summary = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    folder = default_home() / "logs"
    log = folder / f"failure-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log.write_text(trace, encoding="utf-8")
    except OSError as unwritten:
        echo_error(f"{summary}\nits traceback cannot be kept in {folder} ({unwritten.strerror}): see it with --debug")
        return 1
    echo_error(f"{summary}\nits traceback: {log}")
    return 1


def _terminated(*_: Any) -> None:
    raise KeyboardInterrupt


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Python drops a Ctrl-C that arrives in a destructor or in a library's callback: ask the main thread once more."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        again = threading.Timer(0.1, _interrupt_main_thread)
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(ignored)


def _interrupt_main_thread() -> None:
    main_thread = threading.main_thread().ident
    if signal.getsignal(signal.SIGTERM) is _terminated and main_thread is not None:  # the command still goes on
        signal.pthread_kill(main_thread, signal.SIGTERM)  # a real signal, which also ends a wait for a lock


if __name__ == "__main__":
    sys.exit(main())
