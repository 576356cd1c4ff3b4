"""transformers' generate(use_mtp=True) reads a stitched checkpoint: the same text, and our rounds one guess deep."""

from __future__ import annotations

import pytest

from benchmarks import engine_transformers
from benchmarks.engine_cases import EngineCases

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def test_the_stitched_module_drafts_in_transformers_as_in_our_loop(glm: EngineCases) -> None:
    line = engine_transformers.serve(glm, glm.stitched, "MTP, GLM-4.5")
    assert line.identical == line.prompts == 12
    assert line.same_rounds, line
    assert 0 < line.engine_accepted[0] < line.engine_rounds
