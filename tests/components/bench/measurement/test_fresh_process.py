"""A process of its own answers, says what failed, never leaves its owner waiting and never outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.bench.measurement.fresh_process import ROOT, FreshProcess
from components.contract import UserError

TOY = "fresh_toys:Toy"
HERE = str(Path(__file__).parents[1])
DEADLINE_S = 120


@pytest.fixture(autouse=True)
def toys_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)


def is_gone(pid: int) -> bool:
    """Ended; who reaps an orphan is not ours to say."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.02)


def test_it_answers_what_it_is_asked_and_goes_on_after_a_refusal_and_a_failure() -> None:
    with FreshProcess(TOY, {"text": "ä\n\u2028"}) as process:
        pid = process.reply_at_start["pid"]
        assert pid != os.getpid() and process.reply_at_start["order"] == {"text": "ä\n\u2028"}
        assert process.ask({"numbers": [1, 2.5, None]}) == {"numbers": [1, 2.5, None]}
        assert len(process.ask({"do": "long", "length": 300_000})) == 300_000, "longer than a pipe holds"
        with pytest.raises(UserError, match="batch_sizes: too many: ask for fewer"):
            process.ask({"do": "refuse"})
        with pytest.raises(UserError, match=r"CUDA out of memory: ask for smaller batch sizes or contexts"):
            process.ask({"do": "fill"})
        with pytest.raises(RuntimeError, match=r"failed:(?s:.*)fresh_toys\.py(?s:.*)ValueError: our own mistake"):
            process.ask({"do": "fail"})
        assert process.ask({"after": 1}) == {"after": 1}
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("die", -signal.SIGKILL)])
def test_one_that_ends_in_the_middle_is_an_error_that_says_so(how: str, code: int) -> None:
    with (
        pytest.raises(RuntimeError, match=f"ended with exit code {code} and without an answer"),
        FreshProcess(TOY, {}) as process,
    ):
        process.ask({"do": how})


@pytest.mark.parametrize("length", [1, 300_000], ids=["a word", "more than a pipe holds"])
def test_one_that_was_gone_before_it_was_asked_is_the_same_error(length: int) -> None:
    """The request is never read; that it could not be sent must not hide why."""
    process = FreshProcess(TOY, {})
    os.kill(process.reply_at_start["pid"], signal.SIGKILL)
    wait_until(lambda: is_gone(process.reply_at_start["pid"]))
    with pytest.raises(RuntimeError, match="ended with exit code -9"), process:
        process.ask({"much": "x" * length})


@pytest.mark.parametrize(
    ("order", "error"), [({"do": "refuse"}, UserError), ({"do": "fail"}, RuntimeError), ({"do": "die"}, RuntimeError)]
)
def test_one_that_cannot_be_opened_leaves_nothing_running(order: dict[str, Any], error: type[Exception]) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(error):
        FreshProcess(TOY, order)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_failure_of_its_owner_ends_it() -> None:
    with pytest.raises(KeyError), FreshProcess(TOY, {}) as process:
        pid = process.reply_at_start["pid"]
        raise KeyError
    assert not psutil.pid_exists(pid)


def test_it_ends_when_its_owner_is_killed() -> None:
    program = (
        "import time\nfrom components.bench.measurement.fresh_process import FreshProcess\n"
        f"process = FreshProcess('{TOY}', {{}})\n"
        "print(process.reply_at_start['pid'], flush=True)\ntime.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    with owner.stdout:
        pid = int(owner.stdout.readline())
    assert psutil.pid_exists(pid)
    owner.kill()
    owner.wait()
    wait_until(lambda: is_gone(pid))


def test_it_runs_from_a_folder_that_holds_a_package_of_our_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "components").mkdir()
    (tmp_path / "components" / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    with FreshProcess(TOY, {}) as process:
        assert process.reply_at_start["folder"] == str(tmp_path)
