"""Drafting methods: one file each, one line each below.

Naming a method imports none, and a step imports torch only when it runs.
"""

from __future__ import annotations

from components.drafts.train import train_draft

METHODS: dict[str, str] = {
    "eagle3": "components.drafts.eagle3:Eagle3",
    "mtp": "components.drafts.mtp:Mtp",
    "ngram": "components.drafts.ngram:Ngram",
}

__all__ = ["METHODS", "train_draft"]
