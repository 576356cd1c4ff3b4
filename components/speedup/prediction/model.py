"""The speedup model: how much faster a depth makes decoding, from counts and times measured separately.

    S(k) = AL(k) * T_target / (T_verify(k) + T_draft(k)),    AL(k) = 1 + sum_{i<=k} prod_{j<=i} p_j

A round of speculative decoding costs one verification pass over k + 1 rows and k drafts, and keeps AL(k) tokens on
average; plain decoding takes T_target for each of them. Leviathan et al. 2023 (arXiv:2211.17192, theorem 3.8)
is the special case p_j = alpha, T_verify = T_target, T_draft = c * k * T_target; we keep each p_j and each time as
measured, because acceptance is not geometric and verification is not free.

Where the rest H of a round (sampling, bookkeeping) was measured, it enters both sides of the ratio:

    S_host(k) = AL(k) * (T_target + H(0)) / (T_verify(k) + T_draft(k) + H(k))
"""

from __future__ import annotations

from collections.abc import Sequence


def acceptance_lengths(p: Sequence[float]) -> list[float]:
    """AL(0), AL(1), ..., AL(K) from conditional acceptance p_1..p_K (each given that all before were accepted)."""
    lengths, survive = [1.0], 1.0
    for p_i in p:
        assert 0.0 <= p_i <= 1.0, f"an acceptance probability lies in [0, 1], not {p_i}"
        survive *= p_i
        lengths.append(lengths[-1] + survive)
    return lengths


def speedup(
    al: float, t_target: float, t_verify: float, t_draft: float, host: float = 0.0, host_plain: float = 0.0
) -> float:
    """S(k), or S_host(k) when host times are given. All times in the same unit."""
    assert t_verify + t_draft + host > 0, "a round takes time"
    return al * (t_target + host_plain) / (t_verify + t_draft + host)


def marginal_gain(al: float, al_before: float) -> float:
    """u_k / AL(k-1): the share of tokens that the k-th draft adds, with u_k = AL(k) - AL(k-1)."""
    return (al - al_before) / al_before


def marginal_cost(cost: float, cost_before: float) -> float:
    """(c(k) - c(k-1)) / c(k-1): the share of time that the k-th draft adds. S rises exactly while gain > cost."""
    return (cost - cost_before) / cost_before
