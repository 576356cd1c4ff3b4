"""Selects the measured rows of two drafters for a comparison: arms prompt by prompt, acceptance maps.

The comparison itself is in components/speedup (pairing.py, paired.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.promotion import ArmPrompt, MeasuredRows
from components.rows import AcceptanceMap
from storage.history.query import open_history

_ARMS = Path(__file__).with_name("paired_prompts.sql")
_MAPS = """
SELECT target_key, draft_key, method, prompt_id, workload, k_max, trained_depth, num_tokens, accepted,
       [] AS proxy_accepted, repeated_bigrams, dtype, tree_budget
FROM newest('acceptance_map') WHERE list_contains($drafts, draft_key)
ORDER BY created_at DESC, artifact_key, prompt_id"""


def measured_of(home: Path, *draft_keys: str) -> MeasuredRows:
    """The measured rows of some drafters. Maps come the newest first; their proxy_accepted is left out (empty)."""

    drafts: dict[str, Any] = {"drafts": [key for key in draft_keys if key]}
    with open_history(home) as run_query:
        arms, maps = run_query(_ARMS.read_text(encoding="utf-8"), drafts), run_query(_MAPS, drafts)
    return MeasuredRows(
        [ArmPrompt(**dict(zip(arms[0], row, strict=True))) for row in arms[1]],
        [AcceptanceMap(**dict(zip(maps[0], row, strict=True))) for row in maps[1]],
    )
