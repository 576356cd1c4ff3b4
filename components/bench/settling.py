"""placeholder until settled.py is merged"""

from __future__ import annotations
from collections.abc import Collection, Sequence
from components.bench.arms import Arm
from components.bench.timed_runs import GroupRun
from components.contract import DepthPolicy


def open_arms(found: Sequence[GroupRun], policy: DepthPolicy, precision: float) -> tuple[Collection[Arm], str]:
    return [], "placeholder"
