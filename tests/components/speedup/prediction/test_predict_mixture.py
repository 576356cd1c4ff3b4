"""One depth for several workloads, with what it loses; a stated mixture is a choice of its own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from simulated_rows import DRAFT_MS, VERIFY_MS, make_cells, two_workloads

from components.contract import UserError
from components.engines.depth_settings import engine_settings
from components.policy import Policy
from components.speedup.policy_markdown import policy_text


def depths(policy: Policy) -> dict[str, int]:
    return {c.workload: c.depth_k for c in policy.choices}


def test_one_depth_for_all_says_what_it_loses(choose: Callable[..., Policy]) -> None:
    policy = choose(two_workloads(), make_cells(10.0, VERIFY_MS, DRAFT_MS))
    assert depths(policy)["chat"] < depths(policy)["all"] <= depths(policy)["code"]
    (mixture,) = policy.mixtures
    assert not mixture.stated and mixture.shares == pytest.approx({"chat": 0.5, "code": 0.5})
    pooled = next(c for c in policy.choices if c.workload == "all")
    # Pooling prompts IS the mixture by their tokens: two ways to one number.
    assert mixture.speedup_pred == pytest.approx(pooled.speedup_pred)
    rows = {(e.workload, e.depth_k): e.speedup_pred for e in policy.evals}
    apart = 1 / sum(0.5 / rows[name, depths(policy)[name]] for name in ("chat", "code"))
    assert mixture.speedup_apart == pytest.approx(apart)
    assert pooled.loss == mixture.loss == pytest.approx(1 - pooled.speedup_pred / apart)
    assert 0.0 < mixture.loss < 0.1
    for choice in policy.choices:
        if choice.workload != "all":
            lost = 1 - rows[choice.workload, pooled.depth_k] / rows[choice.workload, choice.depth_k]
            assert choice.loss == pytest.approx(lost)


def test_a_stated_mixture_is_a_line_of_its_own_and_engines_serve_what_is_measured(
    choose: Callable[..., Policy],
) -> None:
    cells = make_cells(10.0, VERIFY_MS, DRAFT_MS)
    found = {}
    for share in (0.02, 0.98):
        policy = choose(two_workloads(), cells, mixture={"code": share, "chat": 1 - share})
        row = next(c for c in policy.choices if c.workload == "mixture")
        (mixture,) = policy.mixtures
        assert mixture.stated and mixture.depth_k == row.depth_k and mixture.loss == row.loss
        assert policy.winner is not None and policy.winner.depth_k == depths(policy)["all"]
        assert (
            engine_settings(policy, ())["vllm"]["speculative_config"]["num_speculative_tokens"] == depths(policy)["all"]
        )
        assert f"one depth for the mixture stated (chat {1 - share:.0%}, code {share:.0%}) is" in policy_text(policy)
        found[share] = row.depth_k
    assert found[0.02] == depths(policy)["chat"] and found[0.98] == depths(policy)["code"]
    for wrong, said in (
        ({"poems": 1.0}, "poems not measured"),
        ({"code": 0.0}, "not all of them 0"),
        ({"code": math.nan}, "mixture: shares are numbers"),
        ({"code": 1.0, "chat": math.nan}, "mixture: shares are numbers"),
        ({"code": math.inf}, "mixture: shares are numbers"),
    ):
        with pytest.raises(UserError, match=said):
            choose(two_workloads(4), cells, mixture=wrong)
