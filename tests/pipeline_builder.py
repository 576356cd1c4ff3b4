"""Pipelines of tests as data: a change names what it changes and fails when that is absent; YAML is written here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
ONE_LINE = 120
"""A step of at most so many columns is written on one line, a longer one with each of its keys on a line."""


@dataclass(frozen=True)
class Step:
    """One step: its function, its inputs, its settings, and other keys (matrix, if, retries, runs_on, ...)."""

    uses: str
    inputs: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, object] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, object]:
        """The step as the file has it."""
        given = {"in": self.inputs, **self.keys, "with": self.settings}
        return {"uses": self.uses, **{key: value for key, value in given.items() if value != {}}}


def step(uses: str, /, *inputs: str | Mapping[str, object], keys: Any = None, **settings: object) -> Step:
    """A step of a function. An input that is a word comes from the step of its own name, others are given as they
    stand in the file, and so are `keys`; settings are keywords."""
    wired: dict[str, object] = {}
    for given in inputs:
        wired.update({given: given} if isinstance(given, str) else given)
    return Step(uses, wired, settings, keys or {})


@dataclass(frozen=True)
class Pipeline:
    """One pipeline; a change of it is another one. What a change names must be there, or the change is a KeyError."""

    name: str
    steps: Mapping[str, Step]
    params: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    keys: Mapping[str, object] = field(default_factory=dict)

    def named(self, name: str) -> Pipeline:
        """The pipeline under another name."""
        return replace(self, name=name)

    def up_to(self, name: str) -> Pipeline:
        """The pipeline without the steps after one."""
        _there(self.steps, name)
        names = list(self.steps)
        return replace(self, steps={left: self.steps[left] for left in names[: names.index(name) + 1]})

    def with_steps(self, **added: Step) -> Pipeline:
        """The pipeline with more steps, after those it has; there must be none of their names."""
        if twice := set(added) & set(self.steps):
            raise KeyError(f"there is a step {min(twice)!r} already")
        return replace(self, steps={**self.steps, **added})

    def without_step(self, name: str) -> Pipeline:
        """The pipeline without a step; others may still name it."""
        _there(self.steps, name)
        return replace(self, steps={other: made for other, made in self.steps.items() if other != name})

    def with_step_named(self, old: str, new: str) -> Pipeline:
        """The pipeline with another name for a step at its place; what names it says still the old one."""
        _there(self.steps, old)
        return replace(self, steps={new if name == old else name: made for name, made in self.steps.items()})

    def with_other_step(self, name: str, other: Step) -> Pipeline:
        """The pipeline with another step in the place of one."""
        _there(self.steps, name)
        return replace(self, steps={**self.steps, name: other})

    def with_function(self, name: str, uses: str) -> Pipeline:
        """The pipeline with another function for a step."""
        return self.with_other_step(name, replace(_there(self.steps, name), uses=uses))

    def with_inputs(self, name: str, /, **inputs: object) -> Pipeline:
        """The pipeline with these inputs of a step besides or instead of those it has."""
        made = _there(self.steps, name)
        return self.with_other_step(name, replace(made, inputs={**made.inputs, **inputs}))

    def with_setting(self, name: str, /, **settings: object) -> Pipeline:
        """The pipeline with these settings of a step besides or instead of those it has."""
        made = _there(self.steps, name)
        return self.with_other_step(name, replace(made, settings={**made.settings, **settings}))

    def without_setting(self, name: str, setting: str) -> Pipeline:
        """The pipeline without a setting that a step has."""
        made = _there(self.steps, name)
        _there(made.settings, setting)
        left = {other: value for other, value in made.settings.items() if other != setting}
        return self.with_other_step(name, replace(made, settings=left))

    def with_step_keys(self, name: str, keys: Mapping[str, object]) -> Pipeline:
        """The pipeline with these keys of a step (matrix, if, retries, runs_on, ...), as they stand in the file."""
        made = _there(self.steps, name)
        return self.with_other_step(name, replace(made, keys={**made.keys, **keys}))

    def with_param(self, name: str, /, **facts: object) -> Pipeline:
        """The pipeline with other facts (default, min, ...) of a parameter that it has."""
        return self.with_other_param(name, **{**_there(self.params, name), **facts})

    def with_other_param(self, name: str, /, **facts: object) -> Pipeline:
        """The pipeline with another parameter of this name in the place of one."""
        _there(self.params, name)
        return replace(self, params={**self.params, name: facts})

    def with_param_named(self, old: str, new: str) -> Pipeline:
        """The pipeline with another name for a parameter at its place; what inserts it says still the old one."""
        _there(self.params, old)
        return replace(self, params={new if name == old else name: facts for name, facts in self.params.items()})

    def with_keys(self, **keys: object) -> Pipeline:
        """The pipeline with these keys of its own: about, schedules, triggers, overlap, approval, runs_on."""
        return replace(self, keys={**self.keys, **keys})

    @property
    def text(self) -> str:
        """A pipelines.yaml with this pipeline alone."""
        return written(self)

    @property
    def lines(self) -> list[str]:
        """A line for each key and parameter, and for each step or, where that is too long, each of its keys."""
        lines = [f"  {self.name}:", *(f"    {_pair(key, value)}" for key, value in self.keys.items())]
        if self.params:
            lines += ["    params:", *(f"      {_pair(name, facts)}" for name, facts in self.params.items())]
        lines.append("    steps:")
        for name, made in self.steps.items():
            line = f"      {_pair(name, made.content)}"
            if len(line) <= ONE_LINE:
                lines.append(line)
            else:
                lines += [f"      {name}:", *(f"        {_pair(key, value)}" for key, value in made.content.items())]
        return lines


def pipeline(
    name: str, params: Mapping[str, Mapping[str, object]] | None = None, /, *, keys: Any = None, **steps: Step
) -> Pipeline:
    """A pipeline of its parameters and steps, and its other keys as they stand in the file."""
    return Pipeline(name, steps, params or {}, keys or {})


def only(uses: str, *, keys: Any = None, **settings: object) -> Pipeline:
    """Pipeline `p` of one step, `only`."""
    return pipeline("p", only=step(uses, keys=keys, **settings))


def written(*pipelines: Pipeline) -> str:
    """A pipelines.yaml with these pipelines."""
    return "\n".join(["pipelines:", *(line for one in pipelines for line in one.lines)]) + "\n"


def edited(text: str, *edits: tuple[str, str]) -> str:
    """A text with each old passage, which must stand in it exactly once, replaced by a new one."""
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the text"
        text = text.replace(old, new)
    return text


def _there(named: Mapping[str, T], name: str) -> T:
    """What has a name that must be there."""
    if name not in named:
        raise KeyError(f"there is no {name!r} (there are: {', '.join(named)})")
    return named[name]


def _pair(key: str, value: object) -> str:
    """A key and its value on one line of YAML."""
    said = yaml.dump({key: value}, Dumper=_Dumper, default_flow_style=True, width=sys.maxsize, sort_keys=False)
    return said.strip()[1:-1]


class _Dumper(yaml.SafeDumper):
    """Writes a value out wherever it stands, without aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True
