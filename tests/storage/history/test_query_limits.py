"""A question has limits: seconds, rows, memory; and Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.contract import UserError
from storage.history.query import Limits, open_history, query

ENDLESS = "SELECT count(*) FROM range(100000000000000) a WHERE a.range % 7 = 9"  # needs time alone, no memory
MANY = "SELECT range FROM range(100000)"


def test_a_question_without_an_end_is_given_up_in_one_line_and_the_next_is_answered(tmp_path: Path) -> None:
    begun = time.monotonic()
    with open_history(tmp_path, limits=Limits(seconds=0.5)) as ask:
        with pytest.raises(UserError, match=r"no answer within 0\.5 s.*--timeout"):
            ask(ENDLESS, {})
        assert ask("SELECT 1 + 1", {})[1] == [(2,)]
    assert time.monotonic() - begun < 300


def test_an_answer_has_no_more_rows_than_allowed(tmp_path: Path) -> None:
    with open_history(tmp_path, limits=Limits(rows=99_999)) as ask:
        with pytest.raises(UserError, match=r"more than 99,999 rows.*LIMIT.*--max-rows"):
            ask(MANY, {})
        assert ask("SELECT 1 + 1", {})[1] == [(2,)]
    assert len(query(MANY, tmp_path, limits=Limits(rows=100_000))[1]) == 100_000


def test_memory_has_a_limit(tmp_path: Path) -> None:
    greedy = "SELECT count(*) FROM (SELECT DISTINCT range, md5(range::VARCHAR) FROM range(60000000))"
    with pytest.raises(UserError, match="more than 1 GiB of memory"):
        query(greedy, tmp_path, limits=Limits(memory_gib=1, seconds=600))


def test_an_interrupt_ends_a_question_at_once(tmp_path: Path) -> None:
    code = f"import sys\nfrom flows import cli\nprint(1, flush=True)\nsys.exit(cli.main(['query', {ENDLESS!r}]))"
    root = str(Path(__file__).resolve().parents[3])
    environment = os.environ | {"PYTHONPATH": root, "DRAFTSMITH_HOME": str(tmp_path / "home")}
    asking = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert asking.stdout is not None and asking.stdout.readline() == b"1\n"
    time.sleep(1.0)  # it may be anywhere in its work, in an import that drops the interrupt too
    asking.send_signal(signal.SIGINT)
    _, said = asking.communicate(timeout=1500)
    assert asking.returncode == 130 and b"interrupted" in said
