"""A finished study, made by the real steps from simulated measurements, for tests that need a whole report page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from components.contract import Context, DepthPolicy, Draft, Measurements, Release
from components.engines.depth_settings import engine_settings
from components.policy import Winner, read_policy
from components.rows import DepthChoice, DepthEval, QualityFlag, read_rows, write_rows
from components.speedup import choose_depth, confirm_depth

# The simulated measurements of the speedup tests serve here too; each test folder is a search path of its own.
sys.path.append(str(Path(__file__).parent / "components" / "speedup"))


def make_ctx(path: Path, key: str) -> Context:
    """A context with a new directory."""
    path.mkdir(parents=True)
    return Context(key=key, out=path, scratch=path)


def decided_study(root: Path, *, num_prompts: int, seed: int, flags: Iterable[QualityFlag] = ()) -> dict[str, Any]:
    """Simulated measurements of two methods, the policy chosen from them ("chosen") and the confirmed one ("policy").

    flags: written beside the end-to-end rows.
    """
    from simulated_rows import make_study

    rows = make_study(num_prompts=num_prompts, seed=seed)

    def measured(name: str, some: list[Any]) -> Measurements:
        (root / name).mkdir()
        write_rows(root / name, some)
        return Measurements(key=name.ljust(64, "0"), path=root / name, info={"model": "builtin"})

    methods = ("eagle3", "mtp")
    lengths = {m.prompt_id: 300 * number for number, m in enumerate(rows["maps"][:num_prompts], start=1)}
    rows["maps"] = [replace(m, prompt_tokens=lengths.get(m.prompt_id)) for m in rows["maps"]]
    acceptance = [measured(f"acceptance-{m}", [r for r in rows["maps"] if r.method == m]) for m in methods]
    cost = [measured(f"cost-{m}", [r for r in rows["cells"] if r.method == m]) for m in methods]
    end_to_end = measured("end-to-end", [*rows["requests"], *flags])
    chosen = choose_depth(acceptance, cost, ctx=make_ctx(root / "chosen", "c" * 64))
    policy = confirm_depth(chosen, end_to_end, ctx=make_ctx(root / "policy", "p" * 64))
    return {"acceptance": acceptance, "cost": cost, "end_to_end": end_to_end, "chosen": chosen, "policy": policy}


def make_report_study(root: Path) -> dict[str, Any]:
    """Everything that write_page takes, and the policy before it was confirmed ("chosen")."""
    drift = QualityFlag("s", "", "", "drift", "warning", 0.031, "the control arm drifted <by> 3.1 % & more")
    study = decided_study(root, num_prompts=16, seed=5, flags=[drift])
    told = engine_settings(read_policy(study["policy"].path), ["mnn"])
    (root / "release.json").write_text(json.dumps({"engines": told}))
    return {**study, "release": Release(key="r" * 64, path=root, info={"formats": ["eagle3"]})}


def make_methods_study(root: Path, methods: int) -> tuple[list[Draft], DepthPolicy]:
    """Drafters of many methods with trees, as `compare_methods` takes them; rows like those of the real study."""
    names = [
        "eagle3",
        "mtp",
        "p-eagle",
        "hass",
        "eagle1",
        "medusa",
        "mtp-parallel",
        "draft-model",
        "lookahead",
        "ngram",
    ]
    study = make_report_study(root)
    winner = Winner("0" * 64, names[0], 3)
    evals = [e for e in read_rows(study["policy"].path, DepthEval) if e.method == "eagle3" and e.workload == "all"]
    choice = next(
        c for c in read_rows(study["policy"].path, DepthChoice) if c.method == "eagle3" and c.workload == "all"
    )
    rows: list[Any] = []
    drafts = []
    for i, method in enumerate(names[:methods]):
        key, slower = f"{i}" * 64, 1.0 - 0.04 * i
        new = {"draft_key": key, "method": method}
        for e in evals:
            al = 1.0 + (e.al - 1.0) * slower
            rows.append(
                replace(e, **new, al=al, cost_ratio=e.cost_ratio * (1 + 0.02 * i), speedup_pred=e.speedup_pred * slower)
            )
        tree = next(e for e in evals if e.depth_k == 3)
        rows.append(
            replace(
                tree, **new, al=tree.al * slower * 1.1, tree_budget=12, speedup_pred=tree.speedup_pred * slower * 0.9
            )
        )
        rows.append(
            replace(
                choice,
                **new,
                speedup_pred=choice.speedup_pred * slower,
                speedup_meas=(choice.speedup_meas or 1.0) * slower,
            )
        )
        folder = root / f"draft-{method}"
        folder.mkdir()
        trained = method not in ("lookahead", "ngram")
        (folder / "draft.json").write_text(
            json.dumps({"method": method, "num_parameters": 1_000_000 * (i + 1) if trained else 0})
        )
        (folder / "artifact.json").write_text(json.dumps({"record": {"seconds": 90.0 + i}}))
        drafts.append(Draft(key=key, path=folder, info={"method": method}))
    folder = root / "methods-policy"
    folder.mkdir()
    policy = replace(read_policy(study["policy"].path), winner=winner)
    (folder / "policy.json").write_text(json.dumps(asdict(policy)))
    write_rows(folder, rows)
    return drafts, DepthPolicy(key="q" * 64, path=folder, info=study["policy"].info)
