"""The policy as people read it: the usual depths stand beside the chosen one, and no engine's command is in it."""

from __future__ import annotations

import json
from collections.abc import Callable

from simulated_rows import make_cells, make_maps

from components.contract import Context, Measurements
from components.engines.depth_settings import engine_settings
from components.policy import read_policy
from components.speedup import choose_depth

Rows = Callable[[list[object]], Measurements]
NewCtx = Callable[..., Context]


def test_the_policy_shows_three_and_seven_drafts_beside_the_chosen_depth(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = make_maps([0.8] * 7, num_prompts=64, num_tokens=200, seed=1)
    cells = make_cells(10.0, [10.5 + 0.5 * k for k in range(7)], [0.5 + 0.5 * k for k in range(7)])
    made = choose_depth([measurements(maps)], [measurements(cells)], ctx=new_ctx())
    text = (made.path / "policy.md").read_text()
    policy = read_policy(made.path)
    for e in policy.evals:
        if e.workload == "all" and e.depth_k in (3, 7):
            line = next(
                line for line in text.splitlines() if line.startswith(f"| {e.depth_k} (") and "usual on CPUs" in line
            )
            assert f"{e.speedup_pred:.2f}x" in line
    raw = (made.path / "policy.json").read_text()
    assert "engines" not in json.loads(raw), "what can load the drafter is known to a release"
    assert "--spec-draft-n-max" not in text + raw and "draft_predict_length" not in text + raw
    assert {"vllm", "llama_cpp", "mnn"} <= engine_settings(policy, ()).keys()
