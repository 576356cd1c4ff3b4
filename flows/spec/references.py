"""What values of pipelines.yaml may refer to: parameters and matrix axes, and inputs from outside the pipeline.

`${params.x}` and `${matrix.y}` may stand inside values, nothing else; a value that is one insert keeps its type.

    registry:NAME@ALIAS     a released version, by alias (champion) or by number; where a step wants not the Release
    registry:NAME@VERSION   but a Draft, Target, DepthPolicy or the data behind it, the one in that release's lineage
    store:KEY               an artifact in the store, by its key or the start of it; KEY.SESSION for an earlier session
    path:DIR                a directory with an `artifact.json`, for example one copied from another machine

Of these inputs only the form is read here: no service is asked, and a pipeline may name a champion that is still to be
made. flows/planning/external_inputs.py finds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from components.contract import Artifact
from components.text import did_you_mean

Values = Mapping[str, Any]
"""Names and plain values, as YAML and JSON have them, only to be read."""
INSERT = re.compile(r"\$\{([^{}]*)\}")
NAME = re.compile(r"^\s*(params|matrix)\.([A-Za-z_][A-Za-z0-9_]*)\s*$")


def inserts_in(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """(place, what stands between the braces) of every insert in a nested value."""
    if isinstance(value, str):
        for match in INSERT.finditer(value):
            yield place, match.group(1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from inserts_in(item, (*place, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from inserts_in(item, (*place, index))


def params_in(value: Any) -> list[str]:
    """The names of the parameters that are inserted into a value."""
    matches = (NAME.match(inside) for _, inside in inserts_in(value))
    return [name.group(2) for name in matches if name and name.group(1) == "params"]


def params_at(value: Any, place: tuple[str | int, ...]) -> list[str]:
    """The names of the parameters that are inserted into the text at a place of a nested value, as it is written."""
    for part in place:
        if isinstance(value, Mapping):
            value = value.get(part, value)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
    return params_in(value) if isinstance(value, str) else []


def fill(value: Any, scopes: Mapping[str, Values]) -> Any:
    """The value with every insert replaced. `scopes`: {"params": {...}, "matrix": {...}}; names must be known."""
    if isinstance(value, str):
        whole = INSERT.fullmatch(value)
        if whole:
            return _look_up(whole.group(1), scopes)
        return INSERT.sub(lambda match: text_of(_look_up(match.group(1), scopes)), value)
    if isinstance(value, Mapping):
        return {key: fill(item, scopes) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, scopes) for item in value]
    return value


def _look_up(inside: str, scopes: Mapping[str, Values]) -> Any:
    match = NAME.match(inside)
    assert match, f"spec.py lets no such insert through: {inside}"
    return scopes[match.group(1)][match.group(2)]


def text_of(value: Any) -> str:
    """A value as it stands within a text: true and false as YAML has them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


SCHEMES: Final = ("registry", "store", "path")
OFFERED: Final = ("Release", "Draft", "Target", "DepthPolicy", "Features", "Conversations", "Prompts")
"""The kinds that a registered version can provide."""
NAMED_VERSION: Final = re.compile(r"(?:registry:)?(?P<name>[^@:/]+)@(?P<which>[A-Za-z0-9_-]+)")
"""A version as commands take it; in pipelines.yaml it begins with "registry:"."""
VERSION: Final = re.compile(NAMED_VERSION.pattern.replace("(?:registry:)?", "registry:"))
VERSION_OF_KIND: Final = re.compile(VERSION.pattern + r" \((?P<kind>\w+)\)")
"""What `source_name` makes of a registered version."""


def flat(inputs: Mapping[str, Any]) -> list[str]:
    """All names that fill the inputs of a step, where one input may take a list."""
    return [str(name) for value in inputs.values() for name in (value if isinstance(value, list) else [value])]


def is_outside(reference: str) -> bool:
    """Whether a reference names something outside the pipeline (it has a colon; step names have none)."""
    return ":" in reference


def reference_error(reference: str) -> str:
    """What is wrong with the form of an outside reference, or ''."""
    scheme, _, rest = reference.partition(":")
    if scheme == "query":
        return "'query:' is no input: an answer changes with the history, a key must not; give the artifact: store:KEY"
    if scheme not in SCHEMES:
        return f"'{reference}' is neither a step nor an outside input{did_you_mean(scheme, SCHEMES)}"
    if not rest.strip():
        return f"'{reference}' names nothing after the colon"
    if scheme == "registry" and not VERSION.fullmatch(reference):
        return f"'{reference}': write registry:NAME@champion, or registry:NAME@3 for a version"
    return ""


def source_name(reference: str, kind: type[Artifact]) -> str:
    """The name of an outside input in a plan: its reference, with the kind for a registered version."""
    return f"{reference} ({kind.__name__})" if reference.startswith("registry:") else reference


def source_misfit(reference: str, kind: type[Artifact]) -> str:
    """Why a registered version can never provide this kind, or ''."""
    if not reference.startswith("registry:") or kind.__name__ in OFFERED:
        return ""
    return f"wants {kind.__name__}, but '{reference}' gives a {', '.join(OFFERED[:-1])} or {OFFERED[-1]}"
