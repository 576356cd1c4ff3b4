"""The standard library as a source: its Python files, those held out from training, and prompts from its functions.

The corpus step, the prompts step and the quality check share the list of files, so a file held out for one is held out
for all. The files are those of the running interpreter (`sysconfig`), under the PSF licence.

Of a function, decorators, signature and docstring are the prompt, the body is the reference. A method keeps its
indentation. The prompt ends at the end of the docstring (or signature) without a line break, so that the first token to
predict can be the usual "newline and indentation" token.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import itertools
import json
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from components.source_code import syntax_tree

STDLIB: Final = "python-stdlib"
"""The name of this source in settings and keys."""
HELD_OUT_PERCENT: Final = 8
"""Expected percentage of files that are held out."""

MAX_FILE_BYTES: Final = 400_000
"""Larger files are generated tables, not written code."""

MIN_BODY_LINES: Final = 2
"""Functions with shorter bodies are stubs and are skipped."""
_SKIPPED_FOLDERS: Final = frozenset(
    {
        "site-packages",
        "dist-packages",
        "ensurepip",  # bundled wheels
        "pydoc_data",  # one 700 kB table
        "encodings",  # generated code pages
        "config",
        "__pycache__",
        "lib2to3/tests/data",  # broken on purpose: odd encodings, Python 2 syntax
        "test/encoded_modules",
        "test/cjkencodings",
        "test/tokenizedata",
    }
)
_SKIPPED_PREFIXES: Final = ("test/bad_coding", "test/badsyntax_", "test/test_source_encoding", "lib2to3/pgen2/tables")


@dataclass(frozen=True)
class StdlibFile:
    """A source file of the standard library.

    source: its name in a corpus: "stdlib/json/decoder.py", or "stdlib-tests/test/test_json/test_decode.py".
    path:   its path on this machine.
    """

    source: str
    path: Path

    @property
    def relative_path(self) -> str:
        """The path below the library folder, with forward slashes: "json/decoder.py"."""
        return self.source.partition("/")[2]

    @property
    def held_out(self) -> bool:
        """Whether the file is for evaluation only."""
        return is_held_out(self.relative_path)

    def read(self) -> str:
        """The text, decoded as Python decodes it; raises UnicodeError or SyntaxError."""
        with tokenize.open(self.path) as file:
            return file.read()


def is_test_code(relative_path: str) -> bool:
    """Whether the file belongs to a test suite ("test/test_json.py", "unittest/test/...", "idlelib/idle_test/...")."""
    folders = relative_path.split("/")[:-1]
    return any(folder in {"test", "tests", "idle_test"} for folder in folders)


def is_held_out(relative_path: str) -> bool:
    """Whether the file is for evaluation only. This depends on the path alone, so it never changes.

    relative_path: below the library folder, with forward slashes: "json/decoder.py".
    """
    digest = hashlib.sha256(relative_path.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def stdlib_files(root: Path | None = None) -> list[StdlibFile]:
    """The library's source files without generated and broken ones, sorted by path.

    root: the library folder; by default that of the running interpreter.
    """
    folder = root if root is not None else Path(sysconfig.get_path("stdlib"))
    files: list[StdlibFile] = []
    for directory, subfolders, names in os.walk(folder):
        relative_folder = Path(directory).relative_to(folder).as_posix()
        prefix = "" if relative_folder == "." else f"{relative_folder}/"
        subfolders[:] = sorted(name for name in subfolders if not _skipped_folder(prefix + name))
        for name in names:
            relative = prefix + name
            path = Path(directory) / name
            if name.endswith(".py") and not relative.startswith(_SKIPPED_PREFIXES) and _sensible_size(path):
                group = "stdlib-tests" if is_test_code(relative) else "stdlib"
                files.append(StdlibFile(source=f"{group}/{relative}", path=path))
    return sorted(files, key=lambda file: file.source)


def _skipped_folder(relative: str) -> bool:
    name = relative.rsplit("/", 1)[-1]
    return relative in _SKIPPED_FOLDERS or name in _SKIPPED_FOLDERS or name.startswith("config-")


def _sensible_size(path: Path) -> bool:
    return path.is_file() and 0 < path.stat().st_size <= MAX_FILE_BYTES


@dataclass(frozen=True)
class FunctionPrompt:
    """A function in two parts: `head` + `body` is its source."""

    name: str
    head: str
    body: str


def functions_in(text: str) -> Iterator[FunctionPrompt]:
    """The functions and methods of a module in the order of their lines; none if it is not valid Python 3."""
    tree = _tree_of(text)
    if tree is None:
        return
    lines = io.StringIO(text).readlines()  # str.splitlines also splits at form feeds, which the parser does not count
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(functions, key=lambda node: node.lineno):
        prompt = _split_function(node, lines)
        if prompt is not None:
            yield prompt


def _tree_of(text: str | bytes) -> ast.Module | None:
    """The syntax tree of a module; None if it is not valid Python 3."""
    try:
        with warnings.catch_warnings(action="ignore"):  # old sources have invalid escapes in their strings
            return syntax_tree(text)
    except (SyntaxError, ValueError):
        return None


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


def write_module_chats(file: Path, num_chats: int = 96) -> Path:
    """Write what modules say of themselves as conversations, JSONL of one question and one answer; returns the file.

    They stand for data that are elsewhere when a pipeline is rehearsed: on every machine, as varied as people's text.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = itertools.islice(_module_chats(), num_chats)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def _module_chats() -> Iterator[dict[str, list[dict[str, str]]]]:
    for source in stdlib_files():
        words = _docstring_of(source.path)
        if len(words) > 80:
            question = {"role": "user", "content": f"What is Python's {source.source} good for?"}
            yield {"messages": [question, {"role": "assistant", "content": words[:1500]}]}


def _docstring_of(path: Path) -> str:
    """The docstring of a module, which is read no further than that: parsing the whole library takes seconds."""
    try:
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.STRING:
                    words = ast.literal_eval(token.string)
                    return inspect.cleandoc(words) if isinstance(words, str) else ""
                if token.type not in (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL):
                    break
    except (SyntaxError, ValueError, tokenize.TokenError):  # not valid Python 3, or an f-string
        pass
    return ""
