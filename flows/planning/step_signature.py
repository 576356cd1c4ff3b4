"""Resolves an address to a function and its inputs: `drafts.train_draft` -> components.drafts:train_draft -> its slots.

Before the `*` stand artifacts, after it settings; `ctx` and `machine` are injected. The settings are checked by a
pydantic model built from the signature, with nothing unknown let through.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict, TypeIs

from components.contract import Artifact, UserError
from components.outside_json import JsonObject
from components.text import did_you_mean, shorten
from flows.spec.diagnostics import show
from flows.spec.references import Values

PACKAGES: tuple[str, ...] = ("components",)
INJECTED = ("ctx", "machine")


def named_packages() -> tuple[str, ...]:
    """Where step addresses are looked up: $DRAFTSMITH_PACKAGES (comma-separated), else Draftsmith's own components."""
    named = os.environ.get("DRAFTSMITH_PACKAGES", "")
    return tuple(filter(None, (name.strip() for name in named.split(",")))) or PACKAGES


@dataclass(frozen=True)
class Slot:
    """A parameter that takes an artifact. many: it takes a list; optional: it may be left out."""

    kind: type[Artifact]
    many: bool = False
    optional: bool = False

    def __str__(self) -> str:
        return f"list[{self.kind.__name__}]" if self.many else self.kind.__name__


@dataclass(frozen=True)
class StepFunction:
    """A step as its signature describes it. module and name: where the function really stands."""

    address: str
    function: Callable[..., Artifact]
    module: str
    name: str
    kind: type[Artifact]
    slots: Mapping[str, Slot]
    defaults: Values
    setting_names: tuple[str, ...]
    wants_ctx: bool
    measures: bool
    adapter: TypeAdapter[Any]

    def settings(self, values: Values) -> tuple[JsonObject, list[tuple[tuple[str | int, ...], str]]]:
        """(resolved settings as JSON values, [(place, what is wrong)]). Strict: '400' is not 400, true is not 1."""
        try:
            parsed = self.adapter.validate_json(json.dumps({**self.defaults, **values}), strict=True)
        except ValidationError as error:
            return {}, [self._setting_fault(fault) for fault in error.errors(include_url=False)]
        resolved = dict(self.adapter.dump_python(parsed, mode="json"))
        # What no type can say, a setting that only goes with another, the step itself says: `<step>_settings`.
        further = getattr(sys.modules[self.module], f"{self.name}_settings", None)
        return further(resolved) if further is not None else (resolved, [])

    def arguments(self, settings: Values) -> JsonObject:
        """Resolved settings as the values that the function takes (a Path, a tuple ...)."""
        return dict(self.adapter.validate_json(json.dumps(settings), strict=True))

    def _setting_fault(self, fault: Any) -> tuple[tuple[str | int, ...], str]:
        place = tuple(fault["loc"])
        name, kind, value = _dotted_path(place), fault["type"], fault["input"]
        if kind == "extra_forbidden":  # its name is any text
            around, last = _dotted_path(place[:-1]), str(place[-1])
            names = self.setting_names if len(place) == 1 else self._names_in_mappings()
            suggestion = did_you_mean(last, names, len(names))
            return place, f"unknown setting {show(f'{around}.{last}' if around else last)}{suggestion}"
        if kind == "missing" and len(place) == 1:
            return (), f"the setting '{name}' is missing"
        if kind == "literal_error":
            expected = fault["ctx"]["expected"].replace(" or ", ", ")
            choices = [word.strip("'") for word in expected.split(", ")]
            suggestion = did_you_mean(value, choices, 0) if isinstance(value, str) else ""
            return place, f"setting '{name}' must be one of {expected}, not {show(value)}{suggestion}"
        if kind == "value_error":  # the type's own words
            return place, f"setting '{name}': {shorten(fault['msg']).removeprefix('Value error, ')}"
        return place, f"setting '{name}': {shorten(fault['msg'])}, not {show(value)}".replace(
            "Input should be", "must be", 1
        )

    def _names_in_mappings(self) -> list[str]:
        """The keys of every mapping that a setting takes, such as one source of chats."""
        mappings = self.adapter.json_schema().get("$defs", {}).values()
        return sorted({name for mapping in mappings for name in mapping.get("properties", {})})


@functools.lru_cache(maxsize=256)
def resolve(address: str, packages: tuple[str, ...] = PACKAGES) -> StepFunction:
    """The step function of an address.

    Raises:
        UserError: no such room or function, or it is not a step.
    """
    room, _, name = address.rpartition(".")
    rooms = _rooms(packages)
    if not room or room not in rooms:
        suggestion = did_you_mean(room or name, rooms)
        raise UserError(f"unknown step function {show(address)}: there is no room '{room or name}'{suggestion}")
    module = _import_room(rooms[room], room)
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        raise UserError(f"unknown step function {show(address)}{did_you_mean(name, _exports(module))}")
    return _describe(address, function)


def step_addresses(packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """The addresses of all steps: the functions of all rooms that make an artifact.

    Raises:
        UserError: a room or the annotations of a function cannot be read.
    """
    addresses = []
    for room, package in _rooms(packages).items():
        module = _import_room(package, room)
        for name in sorted(_exports(module)):
            address = f"{room}.{name}"
            if _is_kind(_read_hints(address, getattr(module, name)).get("return")):
                addresses.append(address)
    return addresses


def _rooms(packages: tuple[str, ...]) -> dict[str, str]:
    """room -> the package it stands in."""
    rooms: dict[str, str] = {}
    for package in packages:
        for folder in importlib.import_module(package).__path__:
            for path in sorted(Path(folder).iterdir()):
                if (path / "__init__.py").is_file():
                    rooms.setdefault(path.name, package)
    return rooms


def _import_room(package: str, room: str) -> types.ModuleType:
    try:
        return importlib.import_module(f"{package}.{room}")
    except UserError:
        raise
    except Exception as error:  # a room that does not even import is the reader's to mend
        raise UserError(f"{package}.{room} cannot be imported: {type(error).__name__}: {shorten(error)}") from error


def _exports(module: types.ModuleType) -> list[str]:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return [name for name in names if inspect.isfunction(getattr(module, name, None))]


def _describe(address: str, function: Callable[..., Any]) -> StepFunction:
    hints = _read_hints(address, function)
    kind = hints.get("return")
    if not _is_kind(kind):
        raise UserError(f"'{address}' is not a step: it must return one of the kinds in components/contract.py")
    slots: dict[str, Slot] = {}
    annotations: JsonObject = {}
    defaults: JsonObject = {}
    signature = inspect.signature(function)
    for name, parameter in signature.parameters.items():
        if name in INJECTED:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            annotations[name] = hints.get(name, Any)
            if parameter.default is not parameter.empty:
                defaults[name] = parameter.default
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            slots[name] = _slot(address, name, hints.get(name), parameter)
        else:
            raise UserError(f"'{address}' is not a step: *args and **kwargs say nothing about what it takes")
    make: Any = TypedDict  # a type made at run time is beyond what a type checker follows
    settings = make(f"SettingsOf_{function.__name__}", annotations)
    settings.__pydantic_config__ = ConfigDict(extra="forbid")
    adapter: TypeAdapter[Any] = TypeAdapter(settings)
    return StepFunction(
        address=address,
        function=function,
        module=function.__module__,
        name=function.__name__,
        kind=kind,
        slots=slots,
        defaults=dict(adapter.dump_python(defaults, mode="json", warnings=False)),
        setting_names=tuple(annotations),
        wants_ctx="ctx" in signature.parameters,
        measures="machine" in signature.parameters,
        adapter=adapter,
    )


def _read_hints(address: str, function: Callable[..., Any]) -> JsonObject:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise UserError(f"{address}: its annotations cannot be read: {shorten(error)}") from error


def _is_kind(hint: Any) -> TypeIs[type[Artifact]]:
    return isinstance(hint, type) and issubclass(hint, Artifact)


def _slot(address: str, name: str, hint: Any, parameter: inspect.Parameter) -> Slot:
    inner = hint
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (Union, types.UnionType) and type(None) in arguments and len(arguments) == 2:
        inner = next(item for item in arguments if item is not type(None))
    many = typing.get_origin(inner) is list
    kind = typing.get_args(inner)[0] if many else inner
    if not _is_kind(kind):
        raise UserError(f"'{address}' is not a step: '{name}' stands before the * and is no artifact kind")
    return Slot(kind=kind, many=many, optional=parameter.default is not parameter.empty)


def _dotted_path(place: tuple[str | int, ...]) -> str:
    """Where in a setting: "sources[0].max_rows"; without the names of types, which pydantic puts among them."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool", "none"):
            text += f".{part}"
    return text.removeprefix(".")
