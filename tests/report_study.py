"""A finished study, made by the real steps from simulated measurements, for tests that need a whole report page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from components.contract import Context, Measurements, Release
from components.rows import QualityFlag, write_rows
from components.speedup import choose_depth, confirm_depth

# The simulated measurements of the speedup tests serve here too; each test folder is a search path of its own.
sys.path.append(str(Path(__file__).parent / "components" / "speedup"))


def make_ctx(path: Path, key: str) -> Context:
    """A context with a new directory."""
    path.mkdir(parents=True)
    return Context(key=key, out=path, scratch=path)


def make_report_study(root: Path) -> dict[str, Any]:
    """Everything that write_page takes, and the policy before it was confirmed ("chosen")."""
    from simulated_rows import make_study

    rows = make_study(num_prompts=16, seed=5)
    drift = QualityFlag("s", "", "", "drift", "warning", 0.031, "the control arm drifted <by> 3.1 % & more")

    def measured(name: str, some: list[Any]) -> Measurements:
        (root / name).mkdir()
        write_rows(root / name, some)
        return Measurements(key=name.ljust(64, "0"), path=root / name)

    methods = ("eagle3", "mtp")
    acceptance = [measured(f"acceptance-{m}", [r for r in rows["maps"] if r.method == m]) for m in methods]
    cost = [measured(f"cost-{m}", [r for r in rows["cells"] if r.method == m]) for m in methods]
    end_to_end = measured("end-to-end", [*rows["requests"], drift])
    chosen = choose_depth(acceptance, cost, ctx=make_ctx(root / "chosen", "c" * 64))
    policy = confirm_depth(chosen, end_to_end, ctx=make_ctx(root / "policy", "p" * 64))
    release = Release(key="r" * 64, path=root, info={"formats": ["eagle3"]})
    return {
        "acceptance": acceptance,
        "cost": cost,
        "end_to_end": end_to_end,
        "chosen": chosen,
        "policy": policy,
        "release": release,
    }
