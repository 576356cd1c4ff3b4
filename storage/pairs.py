"""Everything that the history knows of two drafters, for a comparison of them: arms prompt by prompt, acceptance maps.

What is held against what, and the arithmetic, are in components/speedup (pairing.py, paired.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.promotion import ArmPrompt, Measured
from components.rows import AcceptanceMap

_ARMS = Path(__file__).with_name("paired_prompts.sql")
_MAPS = """
SELECT target_key, draft_key, method, prompt_id, workload, k_max, trained_depth, num_tokens, accepted,
       [] AS proxy_accepted, repeated_bigrams, dtype, tree_budget
FROM newest('acceptance_map') WHERE list_contains($drafts, draft_key)
ORDER BY created_at DESC, artifact_key, prompt_id"""


def measured_of(home: Path, *draft_keys: str) -> Measured:
    """What was measured of some drafters. Maps come the newest first; their teacher-forced halves are left out."""
    from storage.results import open_history

    drafts: dict[str, Any] = {"drafts": [key for key in draft_keys if key]}
    with open_history(home) as ask:
        arms, maps = ask(_ARMS.read_text(encoding="utf-8"), drafts), ask(_MAPS, drafts)
    return Measured(
        [ArmPrompt(**dict(zip(arms[0], row, strict=True))) for row in arms[1]],
        [AcceptanceMap(**dict(zip(maps[0], row, strict=True))) for row in maps[1]],
    )
