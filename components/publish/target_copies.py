"""Which folders of a release hold weights of the target itself, so that who may not read it may not read them.

Whole copies: `stitched` of all of it, `mimo` of embedding and LM head, `speculators` of the embedding (P-EAGLE's but
for one row), Medusa heads with `head: tied` of the LM head, once each. A draft model of the target's width starts from
its embedding, and rows of tokens that training never met stay the target's but for the weight decay.

Not counted is what starts as the target's and is trained in every row: the LM heads of EAGLE-3, P-EAGLE and Medusa with
heads of their own, the last norms. EAGLE-1, EAGLE-3 and MTP name what they share with the target, and hold none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FACT = "holds_target"
"""What release.json says of every format."""
ALWAYS = ("stitched", "mimo", "speculators")
"""Formats that hold weights of the target whatever the drafter."""
BY_SETTINGS = {"medusa": "train with head: own", "draft-model": "train with a hidden_size of its own"}
"""Methods whose settings decide, with the remedy."""


def holds_target(format: str, method: str, settings: Mapping[str, Any], target_width: int) -> bool:
    """Whether a drafter written in a format holds weights of its target. settings: the method's own."""
    if format in ALWAYS:
        return True
    if method == "draft-model":
        return int(settings.get("hidden_size") or target_width) == target_width
    return method == "medusa" and settings.get("head") == "tied"


def holding(formats: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """folder -> what to do about it, for every folder with weights of the target. formats: release.json's.

    A release that is too old to say is taken to hold them where settings decide.
    """
    found: dict[str, str] = {}
    for name, facts in sorted(formats.items()):
        if facts["format"] in ALWAYS:
            found[name] = "export other formats"
        elif facts.get(FACT, facts["method"] in BY_SETTINGS):
            found[name] = BY_SETTINGS.get(facts["method"], "export other formats")
    return found
