"""Drafting methods: one file each, one line each below.

Naming a method imports none, and a step imports torch only when it runs.
"""

from __future__ import annotations

from components.drafts.quantise import quantise_draft
from components.drafts.train import train_draft

METHODS: dict[str, str] = {
    "draft-model": "components.drafts.draft_model:DraftModel",
    "eagle1": "components.drafts.eagle1:Eagle1",
    "eagle3": "components.drafts.eagle3:Eagle3",
    "hass": "components.drafts.hass:Hass",
    "lookahead": "components.drafts.lookahead:Lookahead",
    "medusa": "components.drafts.medusa:Medusa",
    "mtp": "components.drafts.mtp:Mtp",
    "mtp-parallel": "components.drafts.mtp_parallel:MtpParallel",
    "p-eagle": "components.drafts.p_eagle:PEagle",
    "ngram": "components.drafts.ngram:Ngram",
}

__all__ = ["METHODS", "quantise_draft", "train_draft"]
