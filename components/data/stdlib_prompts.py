"""Prompts from Python functions: decorators, signature and docstring are the prompt, the body is the reference.

A method keeps its indentation. The prompt ends at the end of the docstring (or signature) without a line break, so that
the first token to predict can be the usual "newline and indentation" token.
"""

from __future__ import annotations

import ast
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from components.python_source import syntax_tree

MIN_BODY_LINES: Final = 2
"""Functions with shorter bodies are stubs and are skipped."""


@dataclass(frozen=True)
class FunctionPrompt:
    """A function in two parts: `head` + `body` is its source."""

    name: str
    head: str
    body: str


def functions_in(text: str) -> Iterator[FunctionPrompt]:
    """The functions and methods of a module in the order of their lines; none if it is not valid Python 3."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old sources have invalid escapes in their strings
            tree = syntax_tree(text)
    except (SyntaxError, ValueError):
        return
    lines = io.StringIO(text).readlines()  # str.splitlines also splits at form feeds, which the parser does not count
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(functions, key=lambda node: node.lineno):
        prompt = _split_function(node, lines)
        if prompt is not None:
            yield prompt


def _split_function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> FunctionPrompt | None:
    statements = node.body
    first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    if ast.get_docstring(node, clean=False) is not None:
        docstring, statements = statements[0], statements[1:]
        head_end = docstring.end_lineno
    elif statements:
        head_end = statements[0].lineno - 1
    if not statements or head_end is None or node.end_lineno is None:
        return None
    if node.end_lineno - head_end < MIN_BODY_LINES or statements[0].lineno <= head_end:
        return None  # a stub, or the body shares a line with the head
    head = "".join(lines[first_line - 1 : head_end])
    body = "".join(lines[head_end : node.end_lineno])
    stripped = head.rstrip()
    return FunctionPrompt(name=node.name, head=stripped, body=head[len(stripped) :] + body)
