"""data.collect_traffic with a planted fault, to show that the campaign finds it."""

from __future__ import annotations

import json
from pathlib import Path

from components.contract import Context, Prompts
from components.data.collect.prompts import prompt_of
from components.data.collect.traffic import digest_of, read_seen, write_seen
from components.data.sources.shapes import read_shape
from components.data.steps import collect_traffic as collect_without_fault


def collect_traffic(
    seen: Prompts | None,
    *,
    source: str,
    num_train: int,
    num_validation: int,
    num_test: int,
    min_new: int,
    evaluation_percent: int,
    ctx: Context,
) -> Prompts:
    """As the real one, but that all which lies there counts as seen, also what waits for the next night."""
    made = collect_without_fault(
        seen,
        source=source,
        num_train=num_train,
        num_validation=num_validation,
        num_test=num_test,
        min_new=min_new,
        evaluation_percent=evaluation_percent,
        ctx=ctx,
    )
    files = sorted(Path(source).glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    write_seen(
        ctx.out, read_seen(made) | {digest_of(prompt_of(read_shape(row), "train", "traffic", "")) for row in rows}
    )
    return made
