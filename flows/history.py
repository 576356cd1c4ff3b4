"""The key parts of each step when it was last made, so that a plan can name changes: `home/steps/PIPELINE/STEP.json`.

These files only explain: keys and artifacts do not depend on them. A file that is lost or broken reads as "never run".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.whole_files import replace_file


class StepHistory:
    """The last record of every step of one pipeline."""

    def __init__(self, home: Path, pipeline: str) -> None:
        self.folder = home / "steps" / pipeline

    def last(self, step: str) -> dict[str, Any] | None:
        """The parts of the key of the last artifact made or reused under this name."""
        try:
            content = json.loads((self.folder / f"{step}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return dict(content) if isinstance(content, dict) else None

    def remember(self, step: str, parts: Mapping[str, Any]) -> None:
        """Note what went into the key of an artifact that is now in the store."""
        if self.last(step) == dict(parts):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"{step}.json", json.dumps(parts))
