"""Tables of times: a pass by batch size and context length, and the prefill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from components.report.tables import Table, distinct_names
from components.rows import CostCell


def cost_grid(cells: Sequence[CostCell], depths_to_show: Mapping[str, int]) -> Table | None:
    """One line for each drafter, batch size and context length; None where only one pair of these was measured.

    depths_to_show: draft_key -> the chosen depth; where that was not measured, the shallowest measured depth is shown.
    """
    chains = [c for c in cells if c.tree_budget is None]
    sizes = sorted({(c.batch_size, c.kv_len) for c in chains if c.phase == "verify"})
    if len(sizes) < 2:
        return None
    times: dict[tuple[str, str, int, int, int], list[float]] = defaultdict(list)
    for c in chains:
        times[c.draft_key, c.phase, c.depth_k, c.batch_size, c.kv_len].append(c.median_ns / 1e6)
    drafters = sorted({(c.method, c.draft_key) for c in chains if c.phase == "verify"})
    rows = []
    for method, key in drafters:
        depths = sorted({c.depth_k for c in chains if c.draft_key == key and c.phase == "verify"})
        depth = depths_to_show.get(key) if depths_to_show.get(key) in depths else depths[0]
        assert depth is not None
        for batch, kv_len in sizes:
            cell = [times.get((key, phase, k, batch, kv_len)) for phase, k in (("verify", depth), ("draft", depth))]
            plain = times.get((key, "target_step", 0, batch, kv_len)) or times.get(
                ("", "target_step", 0, batch, kv_len)
            )
            if cell[0] is None or cell[1] is None or plain is None:
                continue
            verify, draft, target = median(cell[0]), median(cell[1]), median(plain)
            ratio = (verify + draft) / target
            numbers = [f"{target:.3g}", f"{verify:.3g}", f"{draft:.3g}", f"{ratio:.2f}"]
            rows.append([method, str(batch), str(kv_len), str(depth), *numbers])
    return (
        Table(["drafter", "batch", "context", "depth", "T_target", "T_verify", "T_draft", "cost"], rows)
        if rows
        else None
    )


def prefill_table(cells: Sequence[CostCell]) -> Table | None:
    """Time of the prefill by prompt length; None where it was not measured."""
    groups: dict[tuple[str, str, str, int, int], list[float]] = defaultdict(list)
    for c in cells:
        if c.phase in ("prefill", "draft_prefill"):
            groups[c.method, c.draft_key, c.phase, c.batch_size, c.num_rows].append(c.median_ns / 1e6)
    names = distinct_names((method, key) for method, key, *_ in groups)
    words = {"prefill": "the target's pass over the prompt", "draft_prefill": "the drafter's intake and first proposal"}
    rows = [
        [
            names[method, key] or "-",
            words[phase],
            str(batch),
            str(length),
            f"{median(times):.3g}",
            str(len(times)),
        ]
        for (method, key, phase, batch, length), times in sorted(groups.items(), key=lambda item: (item[0][2], item[0]))
    ]
    return Table(["drafter", "what", "batch", "prompt tokens", "median ms", "blocks"], rows) if rows else None
