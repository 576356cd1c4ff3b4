"""Policies that champions were released with before every number had one name: read under the names of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, Mapping[str, str]] = {
    "acceptance": {"al_kept": "al", "al_pooled_incl_bonus": "al_uncut", "al_macro_incl_bonus": "al_macro"},
    "arms": {"acceptance_rate": "draft_acceptance_rate"},
}
"""List in policy.json -> what its columns were called -> what they are called."""
GONE = ("engines",)
"""Parts that no policy has any more: a release says what engines are told."""


def in_names_of_today(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a policy.json of any age; what is not known under either name is left for its reader to refuse."""
    return {
        part: [{RENAMED[part].get(name, name): value for name, value in row.items()} for row in rows]
        if part in RENAMED
        else rows
        for part, rows in raw.items()
        if part not in GONE
    }
