"""speculators converts and loads our EAGLE-3 exports: its first-step logits are ours within 1e-4."""

from __future__ import annotations

import pytest

from benchmarks.engine_cases import EngineCases
from benchmarks.engine_speculators import TOLERANCE, largest_difference

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900), pytest.mark.usefixtures("speculators_ready")]


@pytest.mark.parametrize(("form", "convert"), [("eagle3", True), ("speculators", False)])
def test_its_first_step_logits_are_ours(cases: EngineCases, form: str, convert: bool) -> None:
    difference, largest = largest_difference(cases, cases.exported("eagle3", form), convert=convert)
    assert difference <= TOLERANCE < largest
