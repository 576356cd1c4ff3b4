"""What a step, a method or a pipeline can be told, in words: from signatures, docstrings and `params:`.

`draftsmith explain` prints it and the documentation's reference is made of it, so that both say what `check` reads.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from components.drafts.settings import settings_class
from flows.planning.step_signature import resolve
from flows.spec.params import ParamSpec


@dataclass(frozen=True)
class Entry:
    """An input, a setting or a parameter. default: as pipelines.yaml would have it, None where one must be given."""

    name: str
    kind: str
    meaning: str
    default: str | None = None


@dataclass(frozen=True)
class Mapped:
    """A mapping that a setting takes, such as one source of chats."""

    name: str
    about: str
    keys: tuple[Entry, ...]


@dataclass(frozen=True)
class StepExplanation:
    """A step: its purpose, what it takes and what it makes."""

    address: str
    about: str
    makes: str
    measures: bool
    inputs: tuple[Entry, ...]
    settings: tuple[Entry, ...]
    mappings: tuple[Mapped, ...]


def explain_step(address: str, packages: tuple[str, ...]) -> StepExplanation:
    """All that a step can be told.

    Raises:
        UserError: there is no such step.
    """
    step = resolve(address, packages)
    about, arguments = split_docstring(inspect.getdoc(step.function) or "")
    inputs = [
        Entry(
            name,
            f"{slot}{', optional' if slot.optional else ''}",
            arguments.get(name) or first_paragraph(inspect.getdoc(slot.kind) or ""),
        )
        for name, slot in step.slots.items()
    ]
    schema = step.adapter.json_schema()
    settings = [
        Entry(name, type_words(declared), arguments.get(name, ""), _default(step.defaults, name))
        for name, declared in schema["properties"].items()
    ]
    mappings = tuple(map(_mapping, schema.get("$defs", {}).values()))
    makes = step.kind.__name__
    return StepExplanation(address, about, makes, step.measures, tuple(inputs), tuple(settings), mappings)


def _mapping(definition: Mapping[str, Any]) -> Mapped:
    about, meanings = split_docstring(definition.get("description", ""), flat=True)
    keys = tuple(
        Entry(
            name,
            type_words(declared),
            meanings.get(name) or declared.get("description", ""),
            _default(declared, "default"),
        )
        for name, declared in definition["properties"].items()
    )
    return Mapped(definition["title"], about, keys)


def explain_method(method: str) -> tuple[str, tuple[Entry, ...]]:
    """What a drafting method is, and what `settings:` of drafts.train_draft takes for it.

    Raises:
        UserError: there is no such method.
    """
    settings = settings_class(method)
    meanings = _attribute_docstrings(settings)
    entries = (
        Entry(name, type_words(declared), meanings[name], _default(declared, "default"))
        for name, declared in settings.model_json_schema()["properties"].items()
    )
    return first_paragraph(inspect.getdoc(settings) or ""), tuple(entries)


def explain_params(params: Mapping[str, ParamSpec]) -> Iterator[Entry]:
    """The parameters of a pipeline."""
    for name, param in params.items():
        kind = {"str": "text", "bool": "true or false", "enum": "one of"}.get(param.type, param.type)
        choices = f" {', '.join(map(as_yaml, param.choices))}" if param.choices else ""
        bounds = _bounds({"minimum": param.min, "maximum": param.max})
        yield Entry(name, kind + choices + bounds, param.about, as_yaml(param.default))


def split_docstring(text: str, *, flat: bool = False) -> tuple[str, dict[str, str]]:
    """The paragraphs before the arguments, and argument -> what it says.

    flat: the arguments are not under "Args:" but are the lines "name: meaning" after the first paragraph.
    """
    if flat:
        about, _, rest = text.partition("\n\n")
    else:
        about, _, rest = text.partition("\nArgs:\n")
        rest = textwrap.dedent(rest.split("\nRaises:")[0].split("\nReturns:")[0])
    arguments: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        if begins := re.match(r"([a-z]\w*)(?:\[\w\])?: (.*)", line):
            name = begins[1]
            arguments[name] = begins[2]
        elif name and line.strip():
            arguments[name] += " " + line.strip()
    return "\n\n".join(" ".join(part.split()) for part in about.strip().split("\n\n")), arguments


def _attribute_docstrings(cls: type) -> dict[str, str]:
    """Field -> the string under it, of a class and its bases; a subclass that says nothing leaves the base's words."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] not in ("components", "flows", "storage"):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                meanings[field.target.id] = " ".join(str(after.value.value).split())
    return meanings


def type_words(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words: "int, 1 to 64", "list of `cpu`, `cuda`", "text or null"."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_words(part) for part in schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "enum" in schema:
        return ", ".join(f"`{as_yaml(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{as_yaml(schema['const'])}`"
    kind = schema.get("type")
    if kind == "array":
        items = type_words(schema.get("items", {}))
        return f"list of {items}" if items else "list"
    if kind == "object":
        values = schema.get("additionalProperties")
        inner = type_words(values) if isinstance(values, Mapping) else ""
        return f"mapping to {inner}" if inner else "mapping"
    word = {"integer": "int", "number": "float", "boolean": "true or false", "string": "text", "null": "null"}
    return word.get(str(kind), "") + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f", {low:g} to {high:g}"
    words = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most", "exclusiveMaximum": "under"}
    return "".join(f", {word} {schema[key]:g}" for key, word in words.items() if schema.get(key) is not None)


def _default(defaults: Mapping[str, Any], name: str) -> str | None:
    return as_yaml(defaults[name]) if name in defaults else None


def as_yaml(value: Any) -> str:
    """A value as pipelines.yaml would have it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items()) + "}"
    return str(value)


def first_paragraph(text: str) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(text.split("\n\n")[0].split())
