"""How pipelines.yaml names an input from outside its pipeline; flows/planning/external_inputs.py finds it.

    registry:NAME@ALIAS     a released version, by alias (champion) or by number; where a step wants not the Release
    registry:NAME@VERSION   but a Draft, Target, DepthPolicy or the data behind it, the one in that release's lineage
    store:KEY               an artifact in the store, by its key or the start of it; KEY.SESSION for an earlier session
    path:DIR                a directory with an `artifact.json`, for example one copied from another machine

Only the form is read here: no service is asked, and a pipeline may name a champion that is still to be made.
"""

from __future__ import annotations

import re
from typing import Final

from components.contract import Artifact
from components.text import did_you_mean

SCHEMES: Final = ("registry", "store", "path")
OFFERED: Final = ("Release", "Draft", "Target", "DepthPolicy", "Features", "Conversations", "Prompts")
"""The kinds that a registered version can provide."""
VERSION: Final = re.compile(r"registry:(?P<name>[^@:/]+)@(?P<which>[A-Za-z0-9_-]+)")
VERSION_OF_KIND: Final = re.compile(VERSION.pattern + r" \((?P<kind>\w+)\)")
"""What `source_name` makes of a registered version."""


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
