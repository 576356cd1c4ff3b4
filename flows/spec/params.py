"""A pipeline's parameters: their types and bounds, checked wherever a value comes from (YAML, `-p`, a schedule)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from components.contract import UserError
from components.outside_json import JsonObject
from components.text import did_you_mean
from flows.spec.diagnostics import show
from flows.spec.references import Values
from flows.spec.yaml_source import CONTROL, LARGEST

ParamType = Literal["int", "float", "bool", "str", "enum", "list"]
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "enum": "one of its choices",
    "list": "a list",
}


class ParamSpec(BaseModel):
    """One entry of `params:`. min and max bound the value (of a list: its length; of text: nothing)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: ParamType
    default: Any
    min: float | None = None
    max: float | None = None
    choices: list[Any] | None = None
    about: str = ""


def declaration_error(param: ParamSpec) -> str:
    """What is wrong with the declaration itself, or ''."""
    if param.type == "enum" and not param.choices:
        return "an enum needs 'choices'"
    for choice in param.choices or []:
        if not _has_type("enum" if param.type == "list" else param.type, choice):
            words = _WORDS[param.type] if param.type not in ("enum", "list") else "a word, a number, true or false"
            return f"each of 'choices' must be {words}, not {show(choice)}"
    if (param.min is not None or param.max is not None) and param.type not in ("int", "float", "list"):
        return f"'min' and 'max' mean nothing for type {param.type}"
    for name, bound in (("min", param.min), ("max", param.max)):
        if param.type in ("int", "list") and bound is not None and math.isfinite(bound) and bound != int(bound):
            return f"'{name}' {show(bound)} is no whole number, and a value of type {param.type} has whole ones"
        if param.type in ("int", "list") and bound is not None and abs(bound) > LARGEST:
            return f"'{name}' {show(bound)} is beyond the largest whole number, {LARGEST}"
        if param.type == "list" and bound is not None and bound < 0:
            return f"'{name}' {show(bound)} is no length of a list"
    if param.min is not None and param.max is not None and param.min > param.max:
        return f"'min' {show(param.min)} is larger than 'max' {show(param.max)}"
    fault = value_error(param, param.default)
    return f"the default {fault}" if fault else ""


def value_error(param: ParamSpec, value: Any) -> str:
    """What is wrong with a value, or ''."""
    if not _has_type(param.type, value):
        return f"must be {_WORDS[param.type]}, not {show(value)}"
    for text in value if param.type == "list" else [value]:
        if isinstance(text, str) and (control := CONTROL.search(text)):
            return f"holds the control character U+{ord(control[0]):04X}"
    if param.choices is not None:
        for item in value if param.type == "list" else [value]:
            if not any(item == choice and _same_type(param, item, choice) for choice in param.choices):
                choices = ", ".join(map(show, param.choices))
                return f"must be one of {choices}, not {show(item)}{did_you_mean(item, map(str, param.choices), 0)}"
    size = len(value) if param.type == "list" else value
    what = " long" if param.type == "list" else ""
    if param.min is not None and size < param.min:
        return f"must be at least {_number(param.min)}{what}, not {show(size)}"
    if param.max is not None and size > param.max:
        return f"must be at most {_number(param.max)}{what}, not {show(size)}"
    return ""


def resolve_params(pipeline: str, declared: Mapping[str, ParamSpec], values: Values) -> JsonObject:
    """Every parameter with its value: given, else its default.

    Raises:
        UserError: a line for each unknown or wrong one.
    """
    wrong = []
    for name in values:
        if name not in declared:
            wrong.append(f"-p {name}: pipeline '{pipeline}' has no such parameter{did_you_mean(name, declared)}")
        elif fault := value_error(declared[name], values[name]):
            wrong.append(f"-p {name}: {fault}")
    if wrong:
        raise UserError("\n".join(wrong))
    return {name: tidy(param, values.get(name, param.default)) for name, param in declared.items()}


def tidy(param: ParamSpec, value: Any) -> Any:
    """One spelling of a right value: a float parameter is a float even when `1` was written."""
    return float(value) if param.type == "float" else value


def parse_params(pipeline: str, declared: Mapping[str, ParamSpec], texts: Iterable[str]) -> JsonObject:
    """Several `name=value`; every wrong one gets its line."""
    values: JsonObject = {}
    wrong = []
    for text in texts:
        try:
            name, value = parse_param(pipeline, declared, text)
            values[name] = value
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("\n".join(wrong))
    return values


def parse_param(pipeline: str, declared: Mapping[str, ParamSpec], text: str) -> tuple[str, Any]:
    """`name=value` from the command line as (name, typed value).

    Raises:
        UserError: no such parameter, or the text cannot be of its type.
    """
    name, equals, word = text.partition("=")
    if not equals:
        raise UserError(f"-p {text}: write it as name=value")
    if name not in declared:
        raise UserError(f"-p {name}: pipeline '{pipeline}' has no such parameter{did_you_mean(name, declared)}")
    param = declared[name]
    if param.type == "str":
        return name, word
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        value = word
        if param.type == "list":
            value = [_word(item.strip()) for item in word.split(",") if item.strip()]
    if param.type == "enum" and param.choices and word in param.choices:
        value = word
    fault = value_error(param, value)
    if fault:
        raise UserError(f"-p {name}: {fault}")
    return name, tidy(param, value)


def _word(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _has_type(kind: ParamType, value: Any) -> bool:
    if isinstance(value, int) and abs(value) > LARGEST:
        return False
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "str":
        return isinstance(value, str)
    if kind == "list":
        return isinstance(value, list) and all(isinstance(item, str | int | float | bool) for item in value)
    return isinstance(value, str | int | float | bool)


def _same_type(param: ParamSpec, value: Any, choice: Any) -> bool:
    """1 is not true, and as a choice not 1.0, unless the parameter is a float: then `tidy` makes one of the other."""
    return type(value) is type(choice) or (param.type == "float" and not isinstance(choice, bool))


def _number(value: float) -> str:
    return f"{value:g}"
