"""A disk that is full at any write, or read-only: one line says so, and with room again the same command goes on."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import SEED, draftsmith, recorded
from garden_home import database_template, finished_at, made, new_home, run_garden, write_garden
from pipeline_builder import pipeline, step
from small_disk import ENOUGH, can_mount, change, fill, small_disk, used_bytes
from usual_pipeline import usual

SIZES = int(os.environ.get("DRAFTSMITH_SOAK_DISKS", "150"))
pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting a small disk needs root")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("check",),
    ("plan", "garden"),
    ("query", "SELECT count(*) AS artifacts FROM artifact"),
    ("run", "garden", "--direct"),
    ("run", "garden", "--direct", "--force", "timed"),
    ("resync",),
    ("compact",),
    ("doctor",),
    ("doctor", "--repair"),
    ("status",),
    ("up", "--detach"),
    ("down",),
)


def full_at_every_write(folder: Path, num_sizes: int, seed: int) -> dict[str, Any]:
    """The toy pipeline on disks of sizes between what a home has at first and what it needs in the end."""
    file, chance = write_garden(folder), random.Random(seed)
    template = database_template(folder / "template")
    with small_disk(folder / "enough") as disk:
        home = new_home(disk, template)
        at_first = used_bytes(disk)
        whole = run_garden(home, file)
        assert whole.code == 0, whole.said
        wanted, needed = made(home), used_bytes(disk)
    faults, stopped, said = list[str](), 0, dict[str, int]()
    for number in range(num_sizes):
        size = chance.randrange(at_first, needed + (64 << 10))
        name = f"disk {number} of {size} bytes"
        with small_disk(folder / f"disk-{number}", size) as disk:
            home = new_home(disk, template)
            ended = run_garden(home, file)
            before = finished_at(home)
            if ended.fault:
                faults.append(f"{name}: {ended.fault}")
            elif ended.code != 0:
                stopped += 1
                what = "a step" if "its log:" in ended.said else "the run"
                said[what] = said.get(what, 0) + 1
                if "No space left" not in ended.said and "full" not in ended.said:
                    faults.append(f"{name}: does not say that the disk is full: {ended.said[-400:]}")
            change(disk, f"size={ENOUGH}")
            again = run_garden(home, file)
            now = finished_at(home)
            faults += [f"{name}: with room again: {again.fault or again.said[-400:]}"] * (again.code != 0)
            faults += [f"{name}: {key[:12]} was made again" for key in before if now.get(key) != before[key]]
            faults += [f"{name}: {one} differs" for one in wanted if made(home).get(one) != wanted[one]]
            doctor = draftsmith("doctor", home=home)
            faults += [f"{name}: doctor: {doctor.said[-600:]}"] * ("the promotion log are whole" not in doctor.said)
    sizes = {"at_first_bytes": at_first, "needed_bytes": needed}
    return {"disks": num_sizes, "stopped": stopped, "stopped_in": said, **sizes, "faults": faults}


def commands_on(folder: Path, spoil: Callable[[Path], object], mend: Callable[[Path], object]) -> dict[str, Any]:
    """Every command on a home whose disk is spoilt, and then mended: nothing finished is lost."""
    file = write_garden(folder)
    template = database_template(folder / "template")
    faults, codes = list[str](), dict[str, int | None]()
    with small_disk(folder / "disk", 64 << 20) as disk:
        home = new_home(disk, template)
        assert run_garden(home, file).code == 0
        before = finished_at(home)
        spoil(disk)
        for command in COMMANDS:
            options = ("--file", str(file)) if command[0] in ("check", "plan", "run", "up") else ()
            ended = draftsmith(*command, *options, home=home)
            codes[" ".join(command)] = ended.code
            faults += [f"{' '.join(command)}: {ended.fault}"] * bool(ended.fault)
        draftsmith("down", home=home)
        mend(disk)
        faults += [f"{key[:12]} was lost" for key in before if key not in finished_at(home)]
        again = run_garden(home, file)
        faults += [f"afterwards: {again.fault or again.said[-400:]}"] * (again.code != 0)
        doctor = draftsmith("doctor", home=home)
        faults += [f"doctor: {doctor.said[-600:]}"] * ("the promotion log are whole" not in doctor.said)
    return {"codes": codes, "faults": faults}


def test_a_disk_that_fills_up_stops_a_run_with_one_line_and_costs_nothing(tmp_path: Path) -> None:
    found = full_at_every_write(tmp_path, 5, seed=3)
    assert found["faults"] == []
    assert 0 < found["stopped"] <= found["disks"]


def test_a_step_that_fills_the_disk_fails_in_one_line_and_goes_on_with_room(tmp_path: Path) -> None:
    file = tmp_path / "pipelines.yaml"
    file.write_text(pipeline("flood", page=step("toys.fail", how="full")).text, encoding="utf-8")
    template = database_template(tmp_path / "template")
    needed = sum(one.stat().st_size for one in template.rglob("*"))
    run = ("run", "flood", "--direct", "--file", str(file))
    with small_disk(tmp_path / "disk", needed + (8 << 20)) as disk:
        home = new_home(disk, template)
        ended = draftsmith(*run, home=home)
        told = [line for line in ended.said.splitlines() if "No space left" in line]
        assert (ended.code, ended.fault) == (1, "") and len(told) == 1, ended.said
        assert "step 'page' failed: " in told[0] and "`draftsmith gc` frees some" in told[0]
        change(disk, f"size={ENOUGH}")
        again = draftsmith(*run, home=home)
        assert again.code == 0, again.said


@pytest.mark.parametrize(
    ("spoil", "mend"),
    [
        (fill, lambda disk: (disk / "filler").unlink()),
        (lambda disk: change(disk, "ro"), lambda disk: change(disk, "rw")),
    ],
    ids=["full", "read-only"],
)
def test_every_command_answers_on_a_spoilt_disk(
    tmp_path: Path, spoil: Callable[[Path], object], mend: Callable[[Path], object]
) -> None:
    found = commands_on(tmp_path, spoil, mend)
    assert found["faults"] == []
    assert found["codes"]["check"] == 0 and found["codes"]["query SELECT count(*) AS artifacts FROM artifact"] == 0


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_disk_full_at_every_write(tmp_path: Path) -> None:
    found = recorded("full-disks", lambda: full_at_every_write(tmp_path, SIZES, SEED))
    assert found["faults"] == []


def test_a_disk_that_is_surely_too_small_refuses_a_run_before_its_first_step(tmp_path: Path) -> None:
    file = tmp_path / "pipelines.yaml"
    file.write_text(usual("small").text, encoding="utf-8")
    template = database_template(tmp_path / "template")
    needed = sum(one.stat().st_size for one in template.rglob("*"))
    with small_disk(tmp_path / "disk", needed + (3 << 20)) as disk:
        home = new_home(disk, template)
        ended = draftsmith("run", "small", "--direct", "--file", str(file), home=home)
        assert (ended.code, ended.fault) == (2, ""), ended.said
        assert "MiB of it by draft, and the disk of " in ended.said and finished_at(home) == {}
