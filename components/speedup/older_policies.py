"""Policies written before some of their names changed, converted to the current names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, Mapping[str, str]] = {
    "acceptance": {"al_kept": "al", "al_pooled_incl_bonus": "al_uncut", "al_macro_incl_bonus": "al_macro"},
    "arms": {"acceptance_rate": "draft_acceptance_rate"},
}
"""List in policy.json -> former name of a column -> current name."""
DROPPED_PARTS = ("engines",)
"""Former parts of policy.json; settings of engines are now part of a release."""


def with_current_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a policy.json of any age; unknown names stay, for the reader to refuse."""
    return {
        part: [{RENAMED[part].get(name, name): value for name, value in row.items()} for row in rows]
        if part in RENAMED
        else rows
        for part, rows in raw.items()
        if part not in DROPPED_PARTS
    }
