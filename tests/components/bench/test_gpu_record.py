"""The programs of `make gpu-record`, tried where there is no GPU: their parts are small commands, true processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.gpu_record import BUDGET, PARTS
from benchmarks.record import ROOT

PROGRAM = """
import sys
from pathlib import Path
from benchmarks.gpu_record import Part, main
folder = Path(sys.argv.pop())
sys.exit(main([{parts}], device="cpu", folder=folder))
"""
GOOD = """Part("good", "writes a record", ("-c", f"open('{folder}/own.json', 'w').write('{{}}'); print('well')"), 5)"""
BAD = """Part("bad", "fails", ("-c", "print('ill'); raise SystemExit(3)"), 5)"""
LONG = """Part("long", "is over its limit", ("-m", "waiting", f"{folder}/started"), %g)"""
LACKING = """Part("lacking", "is skipped", ("-c", ""), 5, lambda: "needs two GPUs, and this machine has 0")"""
TOO_LONG = """Part("too-long", "does not fit", ("-c", ""), 50)"""
WAITING = """
import os, subprocess, sys, tempfile, time
if sys.argv[2:]:
    time.sleep(600)
else:  # a process of a group of its own, as a worker of a part may be
    other = subprocess.Popen([sys.executable, __file__, "-", "-"], start_new_session=True)
    print("begun", flush=True)
    place = tempfile.mkdtemp()
    open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {other.pid} {place}")
    os.rename(sys.argv[1] + ".part", sys.argv[1])
    time.sleep(600)
"""


def start(tmp_path: Path, *parts: str) -> subprocess.Popen[str]:
    """The program over such parts, whose records lie in the folder."""
    (tmp_path / "waiting.py").write_text(WAITING)
    command = [sys.executable, "-c", PROGRAM.replace("{parts}", ", ".join(parts)), str(tmp_path)]
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    )


def record_in(folder: Path, name: str) -> dict[str, Any]:
    """The record of that name, which is the only one."""
    (file,) = folder.glob(f"{name}-20*.json")
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def wait_until_gone(pid: int) -> None:
    """Wait until a process has ended, a minute at most."""
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.05)


def test_a_part_that_fails_or_does_not_end_stops_no_other_and_each_is_in_the_record(tmp_path: Path) -> None:
    process = start(tmp_path, BAD, LONG % 0.15, LACKING, TOO_LONG, GOOD)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    record = record_in(tmp_path, "gpu")
    parts = {part["name"]: part for part in record["parts"]}
    states = {name: part["state"] for name, part in parts.items()}
    assert states == {
        "bad": "failed",
        "long": "not ended",
        "lacking": "skipped",
        "too-long": "left out",
        "good": "passed",
    }
    assert record["remaining"] == [] and record["machine"]["device"] == "cpu"
    assert (parts["bad"]["output"], parts["good"]["output"]) == ("ill\n", "well\n")
    assert parts["long"]["output"] == "begun\n" and parts["long"]["seconds"] >= 9
    assert parts["good"]["records"] == ["own.json"] and parts["bad"]["records"] == []
    assert "skipped: needs two GPUs, and this machine has 0\n" in output
    assert re.search(r"left out: its limit is 50 min, and \d+ s were left\n", output)
    *pids, place = (tmp_path / "started").read_text().split()
    for pid in pids:
        wait_until_gone(int(pid))
    assert not Path(place).exists(), "what a part wrote for itself is in the way of the next"


def test_a_part_that_is_not_run_is_no_failure(tmp_path: Path) -> None:
    process = start(tmp_path, GOOD, LACKING, TOO_LONG)
    process.communicate(timeout=300)
    assert process.returncode == 0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_leaves_the_record_of_what_was_done(tmp_path: Path, end: signal.Signals) -> None:
    process, started = start(tmp_path, GOOD, LONG % 20, BAD), tmp_path / "started"
    deadline = time.monotonic() + 300
    while not started.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(end)
    process.communicate(timeout=60)
    pids = [int(pid) for pid in started.read_text().split()[:2]]
    if end is signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
    else:  # nobody is left to end the part
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_until_gone(pid)
    record = record_in(tmp_path, "gpu")
    assert [(part["name"], part["state"]) for part in record["parts"]] == [("good", "passed")]
    assert record["remaining"] == ["long", "bad"]


def test_the_limits_leave_a_minute_of_half_an_hour_and_the_documentation_names_each() -> None:
    assert sum(part.minutes for part in PARTS) <= BUDGET - 1 and BUDGET <= 30
    table = (ROOT / "docs" / "scale.md").read_text().partition("## What only a GPU can show")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\S+)` \| (\d+) min \|", table, re.MULTILINE)
    assert rows == [(part.name, f"{part.minutes:g}") for part in PARTS]


def test_two_processes_are_tried_where_there_are_two_gpus() -> None:
    (part,) = (part for part in PARTS if part.name == "processes")
    number = torch.cuda.device_count()
    assert part.lacks() == ("" if number > 1 else f"needs two GPUs, and this machine has {number}")


def test_without_a_gpu_it_says_so_in_a_line() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_record"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "gpu-record: there is no CUDA device here; --list says what would run\n"


TESTS = """
import pytest, time
pytestmark = getattr(pytest.mark, "gpu")  # this file is not one of those that name it
def test_good(): pass
def test_bad(): assert "black" == "white"
@pytest.mark.skip(reason="needs two GPUs")
def test_skipped(): pass
def test_long(): time.sleep(600)
def test_later(): pass
"""


def test_tests_that_are_ended_at_the_limit_leave_what_passed_failed_and_did_not_run(tmp_path: Path) -> None:
    """The limit comes when the fourth test runs: it is seen in the record, and then the tests are ended."""
    (tmp_path / "test_some.py").write_text(TESTS)
    program = "import sys; from pathlib import Path; from benchmarks.gpu_tests import main; sys.exit(main(Path('.')))"
    tests = subprocess.Popen(
        [sys.executable, "-c", program, "-p", "no:cacheprovider", "-n", "1", "test_some.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DRAFTSMITH_TEST_DEVICE": "cpu"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    try:
        while not list(tmp_path.glob("gpu-tests-*.json")) or states(tmp_path).get("test_long") != "not ended":
            assert tests.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()
    record = record_in(tmp_path, "gpu-tests")
    assert record["counts"] == {"passed": 1, "failed": 1, "skipped": 1, "not ended": 1, "not run": 1}
    assert states(tmp_path) == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_skipped": "skipped",
        "test_long": "not ended",
        "test_later": "not run",
    }
    failures = [result["failure"] for result in record["tests"].values() if result["state"] in ("passed", "failed")]
    assert failures[0] == "" and "black" in failures[1]


def states(folder: Path) -> dict[str, str]:
    """How each test went so far, by its name."""
    tests = record_in(folder, "gpu-tests")["tests"]
    return {name.partition("::")[2]: result["state"] for name, result in tests.items()}


def test_tests_of_every_file_that_names_the_marker_are_collected() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_tests", "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    marker = "mark" + ".gpu"
    named = {file for file in (ROOT / "tests").rglob("test_*.py") if marker in file.read_text(encoding="utf-8")}
    assert found == {str(file.relative_to(ROOT)) for file in named} and len(found) > 1


def test_a_training_step_is_timed_and_its_attention_beside_torchs_own() -> None:
    """Attention is timed where steps are, and once for both ways of keeping activations."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"head_dim": 16, "vocab_size": 512, "draft_vocab_size": 128, "ttt_steps": 3}
    case = {"shape": shape, "tokens": 64, "threads": 1, "optimizer": "adamw", "estimate": True}
    for steps, recompute in ((3, False), (2, True)):
        text = json.dumps({**case, "steps": steps, "recompute": recompute})
        command = [sys.executable, "-m", "benchmarks.training_memory_worker", text]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert 0 < answer["held_bytes"] <= answer["peak_bytes"] and answer["step_seconds"] > 0
        timed = {way: found["seconds"] > 0 for way, found in answer.get("attention", {}).items()}
        assert timed == ({} if recompute else {"ours": True, "fused": True})
