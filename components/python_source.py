"""Parses Python source in a process that has other threads."""

from __future__ import annotations

import ast
import gc
import threading

_PARSING = threading.Lock()


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
