"""YAML into plain values plus the line of every one of them; what YAML would silently reinterpret is refused.

Only the safe loader's tags are known. Scalars are read as YAML 1.2 does (`no` and `on` are words, `1e-4` is a number,
dates are text). Duplicate keys, tabs, merge keys, unknown tags, deep nesting and alias bombs are refused; aliases are
counted in the event stream, before anything is expanded.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from components.contract import UserError
from components.outside_json import JsonObject
from components.text import shorten
from flows.spec.diagnostics import Problems

MAX_BYTES = 1_000_000
MAX_ALIASES = 8
MAX_DEPTH = 30

Place = tuple[str | int, ...]

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What no text may hold: it becomes a part of paths, names and what a terminal shows."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""What YAML does not take, and what it takes for the end of a line where an editor shows none."""
_ROWS = re.compile(r"\r\n|[\n\r]")
LARGEST = 2**63 - 1  # of a whole number: databases and numpy hold no larger ones

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _PlainLoader(_Loader):
    """The safe loader with YAML 1.2 scalars."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
):
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


class Lines:
    """Line numbers by place, where a place is a path of keys: ("pipelines", "quickstart", "steps")."""

    def __init__(self) -> None:
        self._of: dict[Place, int] = {}

    def put(self, place: Place, line: int, *, again: bool = True) -> None:
        """Note the line of a place; without `again` only if it has none yet (a key's line stands over its value's)."""
        if again or place not in self._of:
            self._of[place] = line

    def at(self, *place: str | int) -> int:
        """The line of a place, or of the nearest place around it that is known."""
        for length in range(len(place), -1, -1):
            line = self._of.get(tuple(place[:length]))
            if line is not None:
                return line
        return 1


def read_yaml(file: Path) -> tuple[JsonObject, Lines]:
    """A YAML mapping as plain values, and the line of each.

    Raises:
        UserError: one line for each thing that is wrong.
    """
    problems = Problems(file.name)
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise UserError(
            f"{file}: no such file; name another with --file, or have one written: draftsmith init"
        ) from error
    except OSError as error:
        raise UserError(f"{file}: {(error.strerror or 'cannot be read').lower()}") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{file}: is larger than {MAX_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = _ROWS.split(content[: error.start].decode("utf-8-sig", "replace"))
        what = f"the byte 0x{content[error.start]:02X} at column {len(before[-1]) + 1} is not UTF-8 text"
        problems.add(len(before), what)
        problems.stop()
    _refuse_control_characters(text, problems)
    _refuse_bombs(text, problems)
    try:
        node = _PlainLoader(text).get_single_node()
    except yaml.YAMLError as error:  # an alias to nowhere
        problems.add(*_syntax_error(text, error))
        problems.stop()
    if node is None:
        problems.add(1, "the file is empty")
        problems.stop()
    lines = Lines()
    value = _plain(node, (), lines, problems, ())
    if not isinstance(value, dict):
        problems.add(node.start_mark.line + 1, "the file must be a mapping that starts with 'pipelines:'")
    problems.stop()
    return value, lines


def _refuse_control_characters(text: str, problems: Problems) -> None:
    """Characters that no line may hold, each line with one once."""
    for number, line in enumerate(_ROWS.split(text), start=1):
        if match := _UNPRINTABLE.search(line):
            problems.add(number, f"the character U+{ord(match[0]):04X} at column {match.start() + 1}: take it out")
    problems.stop()


def _refuse_bombs(text: str, problems: Problems) -> None:
    """Go through the events (nothing is built, aliases stay names) and stop at syntax errors, depth and aliases."""
    aliases = depth = documents = 0
    loader = _PlainLoader(text)
    try:
        while loader.check_event():
            event = loader.get_event()
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent):
                aliases += 1
                if aliases > MAX_ALIASES:
                    problems.add(line, f"more than {MAX_ALIASES} aliases (*name): write the values out")
                    break
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            documents += isinstance(event, yaml.DocumentStartEvent)
            if depth > MAX_DEPTH or documents > 1:
                problems.add(
                    line, f"nested deeper than {MAX_DEPTH}" if depth > MAX_DEPTH else "a second document (---)"
                )
                break
    except yaml.YAMLError as error:
        line, what = _syntax_error(text, error)
        problems.add(line, what)
    finally:
        loader.dispose()
    problems.stop()


def _syntax_error(text: str, error: yaml.YAMLError) -> tuple[int, str]:
    """(line, what is wrong): a quote or a bracket that is not closed is told where it was opened."""
    problem_mark, context = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    mark = problem_mark or context
    what, around = str(getattr(error, "problem", None) or error), str(getattr(error, "context", None) or "")
    rows = _ROWS.split(text.rstrip())
    line = min(mark.line + 1, len(rows)) if mark is not None else 1
    for number in range(line, 0, -1):  # the scanner may stop a line after the tab
        row = rows[number - 1]
        if "\t" in row[: len(row) - len(row.lstrip())]:
            return number, "a tab indents this line: use spaces"
        if row.strip() and number < line:
            break
    if "quoted scalar" in around and "found unexpected" in what and context is not None:
        return context.line + 1, f"the quote at column {context.column + 1} is not closed"
    if mark is not None:
        brackets, quoted = _open_before(text, (mark.line, mark.column))
        if quoted is not None and quoted.end_mark.line + 1 >= line:
            start = quoted.start_mark
            message = f"the quote at column {start.column + 1} is closed only on line {quoted.end_mark.line + 1}"
            return start.line + 1, f"{message}: close it where its text ends"
        if brackets:
            start = brackets[-1].start_mark
            sign = "[" if isinstance(brackets[-1], yaml.FlowSequenceStartToken) else "{"
            if (mark.line + 1, mark.column) >= (len(rows), len(rows[-1])):
                return start.line + 1, f"the {sign} at column {start.column + 1} is not closed"
            what += f", inside the {sign} of line {start.line + 1}" if start.line + 1 < line else ""
        elif "simple key" in around and context is not None:
            line = context.line + 1
    return line, f"not YAML: {shorten(what)}"


def _open_before(text: str, place: tuple[int, int]) -> tuple[list[Any], Any]:
    """(the brackets that are open at a place, the last quoted text before it if that goes over several lines)."""
    brackets: list[Any] = []
    quoted = None
    loader = _PlainLoader(text)
    try:
        while loader.check_token():
            token = loader.get_token()
            if (token.start_mark.line, token.start_mark.column) >= place:
                break
            if isinstance(token, yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken):
                brackets.append(token)
            elif isinstance(token, yaml.FlowSequenceEndToken | yaml.FlowMappingEndToken):
                del brackets[-1:]
            elif isinstance(token, yaml.ScalarToken) and token.style in ("'", '"'):
                quoted = token if token.end_mark.line > token.start_mark.line else None
    except yaml.YAMLError:
        pass  # it is the one that is being told
    finally:
        loader.dispose()
    return brackets, quoted


def _plain(node: yaml.Node, place: Place, lines: Lines, problems: Problems, open_nodes: tuple[int, ...]) -> Any:
    """A node as plain values. `open_nodes`: ids of the nodes around it, to refuse an alias to one of them."""
    line = node.start_mark.line + 1
    lines.put(place, line, again=False)
    if id(node) in open_nodes:
        problems.add(line, "an alias (*name) that contains itself")
        return None
    inside = (*open_nodes, id(node))
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        return _mapping(node, place, lines, problems, inside)
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_plain(item, (*place, index), lines, problems, inside) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode) and node.tag.startswith("tag:yaml.org,2002:"):
        return _scalar(node, line, problems)
    problems.add(line, f"the tag {shorten(node.tag, 60)} means nothing here")
    return None


def _mapping(
    node: yaml.MappingNode, place: Place, lines: Lines, problems: Problems, inside: tuple[int, ...]
) -> JsonObject:
    result: JsonObject = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == "tag:yaml.org,2002:merge":
            problems.add(line, "merge keys (<<) are not read here: write the values out")
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            problems.add(line, "a key must be a plain word")
            continue
        key = str(key_node.value)
        if match := CONTROL.search(key):
            problems.add(line, f"a key holds the control character U+{ord(match[0]):04X}")
            continue
        if key in result:
            problems.add(line, f"'{shorten(key, 60)}' is given twice (first on line {lines.at(*place, key)})")
            continue
        lines.put((*place, key), line)
        result[key] = _plain(value_node, (*place, key), lines, problems, inside)
    return result


def _scalar(node: yaml.ScalarNode, line: int, problems: Problems) -> Any:
    kind = node.tag.rpartition(":")[2]
    text = str(node.value)
    if kind == "str":
        if match := CONTROL.search(text):
            problems.add(line, f"a text holds the control character U+{ord(match[0]):04X}")
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    try:
        if kind == "int":
            if abs(whole := int(text.replace("_", ""))) <= LARGEST:
                return whole
            raise ValueError("too large")
        if kind == "float":
            if math.isfinite(number := float(text.replace("_", ""))):
                return number
            raise ValueError("too large")
    except ValueError:
        problems.add(line, f"'{shorten(text, 60)}' is no number that can be worked with")
        return None
    problems.add(line, f"the tag !!{kind} means nothing here")
    return None
