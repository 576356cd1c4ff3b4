"""Steps that write numbers into files, slowly enough to be killed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from components.contract import Context, Corpus, Draft, Machine, Measurements, Page, Prompts, UserError
from toybox.toys.methods import METHODS, build


def plant(
    *,
    num_rows: Annotated[int, Field(ge=1, le=1000)] = 10,
    fast: bool = False,
    share: Annotated[float, Field(ge=0, le=1)] = 0.5,
    where: Path | None = None,
    source: Literal["seed", "cutting"] = "seed",
    ctx: Context,
) -> Corpus:
    """Write `num_rows` rows."""
    rows = "\n".join(str(number * ctx.seed + number) for number in range(num_rows))
    (ctx.out / "train.jsonl").write_text(rows)
    ctx.note(f"{num_rows} rows from {source}")
    return Corpus.of_step(ctx, {"num_rows": num_rows})


def grow(corpus: Corpus, *, method: str = "fern", num_steps: int = 20, pause_s: float = 0.0, ctx: Context) -> Draft:
    """One line for each step, resumed from where a killed run was: the state is the file itself."""
    file = ctx.out / "growth.txt"
    done = len(file.read_text().splitlines()) if file.exists() else 0
    _count(ctx, "grow")
    state = build(METHODS[method])
    with file.open("a") as stream:
        for step in range(done, num_steps):
            stream.write(f"{step} {state.at(step)} {corpus.info['num_rows']}\n")
            stream.flush()
            ctx.progress(step + 1, num_steps, "growing")
            time.sleep(pause_s)
    return Draft.of_step(ctx, {"method": method, "num_steps": num_steps})


def judge(draft: Draft, corpus: Corpus, *, ctx: Context) -> Measurements:
    """How many lines a draft has."""
    lines = len((draft.path / "growth.txt").read_text().splitlines())
    (ctx.out / "height.txt").write_text(str(lines))
    ctx.record(1, height=float(lines))
    return Measurements.of_step(ctx, {"lines": lines, "method": draft.info["method"]})


def measure(draft: Draft, *, pause_s: float = 0.0, ctx: Context, machine: Machine) -> Measurements:
    """A measuring step: notes when it ran, so that a test can see that it ran alone."""
    started = time.time()
    time.sleep(pause_s)
    (ctx.out / "span.txt").write_text(f"{started} {time.time()}")
    return Measurements.of_step(ctx, {"machine_id": machine.machine_id})


def judge_all(judged: list[Measurements], prompts: Prompts | None = None, *, title: str = "All", ctx: Context) -> Page:
    """One page over all."""
    (ctx.out / "index.html").write_text(title + " ".join(sorted(str(item.info["method"]) for item in judged)))
    return Page.of_step(ctx, {"num_judged": len(judged)})


def fail(*, how: Literal["user", "crash", "die", "garbage", "once", "full"] = "crash", ctx: Context) -> Page:
    """Fails in one of the ways in which steps fail; full: where 32 MiB find no room."""
    if how == "user":
        raise UserError("data.jsonl:3: no 'text'; give each row one")
    if how == "die":
        os.kill(os.getpid(), 9)
    if how == "garbage":
        return "not a page"  # type: ignore[return-value]
    if how == "full":
        (ctx.out / "flood").write_bytes(bytes(32 << 20))
        return Page.of_step(ctx)
    _count(ctx, "fail")
    if how == "crash" or len((ctx.scratch / "fail.count").read_text()) < 2:
        raise RuntimeError("the pot fell")
    return Page.of_step(ctx)


def hang(*, ctx: Context) -> Page:
    """Never ends, starts a process in a session of its own that never ends either, and writes both pids down."""
    code = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    started = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    (ctx.scratch / "pids.tmp").write_text(f"{os.getpid()} {started.pid}")
    os.rename(ctx.scratch / "pids.tmp", ctx.scratch / "pids")
    time.sleep(600)
    return Page.of_step(ctx)


def leak(*, mib: int = 200, mib_of_child: int = 0, ctx: Context) -> Page:
    """Takes memory, in itself and in a process that ends, and leaves a process and a lock behind, as tqdm does."""
    subprocess.run([sys.executable, "-c", f"b'x' * ({mib_of_child} << 20)"], check=True)
    leak.lock = multiprocessing.get_context("spawn").RLock()  # type: ignore[attr-defined]
    block = bytearray(mib << 20)
    for place in range(0, len(block), 4096):
        block[place] = 1
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    return Page.of_step(ctx, {"pid": started.pid, "bytes": len(block)})


def _count(ctx: Context, name: str) -> None:
    with (ctx.scratch / f"{name}.count").open("a") as file:
        file.write("x")
