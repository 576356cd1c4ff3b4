"""When is a step new? Its key is a sha256 of everything that can change its result, and of nothing else.

In: address, resolved settings, input keys, the code it reaches, seed, device, what `<step>_fingerprint(settings)` says
of files outside the repository, and for measuring steps the machine. Out: library versions, formatting, paths, time.
What is left out is recorded in artifact.json.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypedDict

from components.contract import Machine
from components.files import digest_of_json
from flows.planning.code_index import reached_symbols
from flows.planning.wiring import PACKAGES, WiredStep
from flows.spec.diagnostics import show
from flows.spec.references import Values


class KeyParts(TypedDict):
    """What a key is made of. Of a step last made by an earlier version of Draftsmith some may be missing.

    code: symbol -> digest, of what the step reaches. outside: facts of files outside the repository. machine: its id
    where the step measures, else None.
    """

    address: str
    settings: Values
    inputs: dict[str, str | list[str]]
    code: dict[str, str]
    outside: dict[str, str]
    seed: int
    device: str
    machine: str | None


def parts_of(
    step: WiredStep,
    keys: Mapping[str, str],
    words: frozenset[str],
    *,
    seed: int,
    device: str,
    machine: Machine,
    packages: tuple[str, ...] = PACKAGES,
) -> KeyParts:
    """Everything that enters the key, as JSON values.

    keys: step name or outside reference -> key. words: texts in the settings of the step and its ancestors.

    Raises:
        UserError: the step's own fingerprint function found its input wrong.
    """
    function = step.function
    return {
        "address": function.address,
        "settings": step.settings,
        "inputs": {
            slot: [keys[name] for name in value] if isinstance(value, list) else keys[value]
            for slot, value in step.inputs.items()
        },
        "code": reached_symbols(function.module, function.name, words, packages),
        "outside": _outside(function.module, function.name, step.settings),
        "seed": seed,
        "device": device.split(":")[0],
        "machine": machine.machine_id if function.measures else None,
    }


def key_of(parts: KeyParts) -> str:
    """sha256 hex digest of the parts in canonical JSON (sorted keys, no spaces).

    Of the code, names and digests of symbols enter and the files they stand in do not: a definition that only moves
    makes no step new.
    """
    code = sorted(f"{_symbol_of(label)} {digest}" for label, digest in parts["code"].items())
    return digest_of_json({**parts, "code": code})


def _symbol_of(label: str) -> str:
    """The label without its path: "Eagle3.losses" of "components/drafts/methods/eagle3.py: Eagle3.losses"."""
    return label.rpartition(": ")[2].rpartition("/")[2]


def changes(last: KeyParts, now: KeyParts) -> list[str]:
    """What differs between two sets of parts, in words, the most telling first."""
    differences = []
    if last.get("address") != now["address"]:
        differences.append(f"uses {last.get('address')} -> {now['address']}")
    for name, old, new in _differences(last.get("settings", {}), now["settings"]):
        differences.append(f"setting {name} {_shown(old)} -> {_shown(new)}")
    for symbol, old, new in _differences(last.get("code", {}), now["code"]):
        verb = "changed" if old is not None and new is not None else ("new" if old is None else "removed")
        differences.append(f"code {verb}: {symbol}")
    differences += [f"{name} changed" for name, _, _ in _differences(last.get("outside", {}), now["outside"])]
    differences += [f"input {name} changed" for name, _, _ in _differences(last.get("inputs", {}), now["inputs"])]
    for part in ("seed", "device", "machine"):
        if last.get(part) != now[part]:
            differences.append(f"{part} {_shown(last.get(part))} -> {_shown(now[part])}")
    return differences


def _outside(module: str, name: str, settings: Values) -> dict[str, str]:
    """What `<step>_fingerprint(settings)` in the step's module says, {} when there is none."""
    fingerprint = getattr(importlib.import_module(module), f"{name}_fingerprint", None)
    return dict(fingerprint(dict(settings))) if fingerprint is not None else {}


def _differences(old: Values, new: Values) -> list[tuple[str, Any, Any]]:
    names = [*new, *(name for name in old if name not in new)]
    return [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
