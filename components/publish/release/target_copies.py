"""Which folders of a release hold weights of the target, and are therefore as private as the target.

Copies: `stitched` has the whole target, `mimo` its embedding and LM head, `speculators` its embedding (P-EAGLE's except
for one row), and Medusa with `head: tied` the LM head once a head. A draft model of the target's width starts from its
embedding, and rows of tokens that training never saw stay the target's except for weight decay.

Not counted are weights that start as the target's and are trained in every row: the last norms, and the LM heads of
EAGLE-3, P-EAGLE and Medusa with heads of their own. EAGLE-1, EAGLE-3 and MTP hold no weights that they share.
"""

from __future__ import annotations

from collections.abc import Mapping

from components.engines.profiles import Settings
from components.release_record import FormatRecord

ALWAYS = ("stitched", "mimo", "speculators")
"""Formats that hold weights of the target for every drafter."""
BY_SETTINGS = {"medusa": "train with head: own", "draft-model": "train with a hidden_size of its own"}
"""Methods for which it depends on the settings -> the remedy."""


def holds_target(format: str, method: str, settings: Settings, target_width: int) -> bool:
    """Whether a drafter written in a format holds weights of its target. settings: the method's own."""
    if format in ALWAYS:
        return True
    if method == "draft-model":
        return int(settings.get("hidden_size") or target_width) == target_width
    return method == "medusa" and settings.get("head") == "tied"


def formats_with_target_weights(formats: Mapping[str, FormatRecord]) -> dict[str, str]:
    """Folder -> remedy, for every folder with weights of the target. formats: release.json's.

    In a release without the fact, methods whose settings decide count as holding them.
    """
    remedies: dict[str, str] = {}
    for name, facts in sorted(formats.items()):
        if facts["format"] in ALWAYS:
            remedies[name] = "export other formats"
        elif facts.get("holds_target", facts["method"] in BY_SETTINGS):
            remedies[name] = BY_SETTINGS.get(facts["method"], "export other formats")
    return remedies
