"""Drafting methods: one file each, one line each below.

Naming a method imports none, and a step imports torch only when it runs.
"""

from __future__ import annotations

from components.drafts.steps import quantise_draft as quantise_draft
from components.drafts.steps import train_draft as train_draft

METHODS: dict[str, str] = {
    "draft-model": "components.drafts.methods.draft_model:DraftModel",
    "eagle1": "components.drafts.methods.eagle1:Eagle1",
    "eagle3": "components.drafts.methods.eagle3:Eagle3",
    "hass": "components.drafts.methods.eagle1:Hass",
    "lookahead": "components.drafts.methods.lookahead:Lookahead",
    "medusa": "components.drafts.methods.medusa:Medusa",
    "mtp": "components.drafts.methods.mtp:Mtp",
    "mtp-parallel": "components.drafts.methods.mtp_parallel:MtpParallel",
    "p-eagle": "components.drafts.methods.p_eagle:PEagle",
    "ngram": "components.drafts.methods.ngram:Ngram",
}

__all__ = ["METHODS", "quantise_draft", "train_draft"]
