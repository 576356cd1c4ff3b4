"""A wide step: every bed is a shard, and tells in a file beside it which process did it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from components.contract import Context, Page, ReportProgress, UserError
from components.files import written_whole


@dataclass(frozen=True)
class Bed:
    """A shard: its file, and how it goes."""

    file: Path
    diary: Path
    text: str
    pause_s: float
    how: str


def weed(
    *, num_beds: int = 3, pause_s: float = 0.0, how: Literal["well", "wrong", "crash", "die"] = "well", ctx: Context
) -> Page:
    """Write a file for each bed; `how` is what becomes of the last one: four deaths, and a fifth attempt works."""
    beds = [
        Bed(
            file=ctx.out / f"bed-{number}.txt",
            diary=ctx.scratch,
            text=f"{number} of {num_beds}\n",
            pause_s=pause_s,
            how=how if number == num_beds else "well",
        )
        for number in range(1, num_beds + 1)
    ]
    lengths = list(ctx.map(weed_bed, beds, what="beds"))
    return Page.of_step(ctx, {"num_done": len(lengths), "letters": sum(lengths)})


def weed_bed(bed: Bed, report_progress: ReportProgress) -> int:
    """One shard."""
    with (bed.diary / "pids").open("a") as diary:
        diary.write(f"{os.getpid()}\n")
    if gpus := os.environ.get("CUDA_VISIBLE_DEVICES"):
        bed.file.with_suffix(".gpus").write_text(gpus)
    if bed.how == "wrong":
        raise UserError("no spade: buy one")
    if bed.how == "crash":
        raise RuntimeError("the spade broke")
    if bed.how == "die" and len((bed.diary / "deaths").read_text() if (bed.diary / "deaths").exists() else "") < 4:
        with (bed.diary / "deaths").open("a") as deaths:
            deaths.write("x")
        os._exit(9)
    time.sleep(bed.pause_s)
    report_progress(0.5)
    with written_whole(bed.file) as beside:
        beside.write_text(bed.text)
    return len(bed.text)
