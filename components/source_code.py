"""Source code: the commit of Draftsmith that runs, syntax trees, modules that stay, and which models may run their own.

The commit is recorded beside results and is never part of a key: a commit that changes a README must not train anything
again. The code that a step reaches is part of its key, as digests of its syntax (flows/planning/code_index.py).

A model of the hub may bring Python code of its own, and its author must be trusted. Whoever runs something now gives
the permission: the pipeline (its load_target steps, or its own `trust_remote_code` for targets that come from
elsewhere), or $DRAFTSMITH_REMOTE_CODE for a command. Artifacts, stores and tags cannot give it, since others may have
written them.
"""

from __future__ import annotations

import ast
import atexit
import functools
import gc
import importlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CODE = ("components", "flows", "storage")
TIMEOUT_S = 20
REMOTE_CODE: Final = "DRAFTSMITH_REMOTE_CODE"
"""The environment variable that names the models whose own code may run, joined like a PATH."""
_PARSING = threading.Lock()


class CodeState(NamedTuple):
    """commit: hex, None where neither git nor an image's builder says it.

    changed: whether files under CODE differ from it or are new; None where git cannot say.
    """

    commit: str | None
    changed: bool | None


@functools.cache
def code_state() -> CodeState:
    """The state of the clone around this file at the first call; git runs once.

    An image has no clone: whoever builds it gives the commit as DRAFTSMITH_COMMIT (deploy/Dockerfile).
    """
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return CodeState(os.environ.get("DRAFTSMITH_COMMIT") or None, None)
    command = [git, "-C", str(ROOT), "status", "--porcelain=v2", "--branch", "--", *CODE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return CodeState(None, None)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    if commit in (None, "(initial)"):
        return CodeState(None, None)
    return CodeState(commit, any(not line.startswith("#") for line in lines))


def syntax_tree(source: str | bytes, name: str = "<unknown>") -> ast.Module:
    """The syntax tree of a module's source; `name` stands in messages.

    CPython 3.11 counts the depth of a tree in one counter for the whole process (gh-106905). When garbage is collected
    while a tree is being built, Python code runs, another thread may get its turn, and a second parse there ends the
    first one with "SystemError: AST constructor recursion depth mismatch". Twenty runs at once showed it. Without
    collection nothing can come between.

    Raises:
        SyntaxError, ValueError: this is no Python source.
    """
    with _PARSING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(source, filename=name)
        finally:
            if collects:
                gc.enable()


@contextmanager
def objects_that_stay() -> Iterator[None]:
    """What is made while this lasts stays as long as the process: no garbage is looked for meanwhile, nor among it
    afterwards.

    torch and transformers make a million objects. Looking through these again and again takes a sixth of the time of
    importing them, and a third of a second in every full collection after that.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries complain of what the interpreter does not free at its end


def import_to_stay(*names: str) -> None:
    """Import modules for as long as this process lives."""
    with objects_that_stay():
        for name in names:
            importlib.import_module(name)


def allow_code(models: Iterable[str]) -> None:
    """Let this process, and those that it starts, run the code of these models and of no others."""
    os.environ[REMOTE_CODE] = os.pathsep.join(models)


def may_run_code(model: str) -> bool:
    """Whether code that comes with this model may run in this process."""
    return model != "" and model in os.environ.get(REMOTE_CODE, "").split(os.pathsep)
