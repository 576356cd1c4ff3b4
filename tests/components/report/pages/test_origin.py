"""What stands under a page's heading: model, machine, time and code, as the measurement recorded them."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path

from components.contract import Measurements, Page
from components.machine import describe_machine
from components.report.pages.origin import origin_of
from storage.artifacts.store import Store


def test_a_measurement_of_a_run_names_model_machine_time_and_code(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open_staging("k")
    machine = describe_machine()
    record = {
        "machine": dataclasses.asdict(machine),
        "git_commit": "1234567890abcdef",
        "git_changed": True,
        "versions": {"torch": "2.13.0"},
    }
    measured = store.commit("k", "Measurements", {}, record)
    facts = dict(origin_of("mine", "t" * 64, measured))
    assert facts["model"] == "mine" and facts["code"] == "commit 1234567890ab with changes, torch 2.13.0"
    assert f"{machine.num_cores} cores" in facts["machine"] and machine.os in facts["machine"]
    assert facts["measured"][:10] in (
        time.strftime("%Y-%m-%d", time.gmtime(at)) for at in (time.time(), time.time() - 60)
    )


def test_what_was_not_recorded_is_not_told(tmp_path: Path) -> None:
    assert origin_of("", "t" * 64, Measurements("k", tmp_path)) == [("model", "target tttttttttttt")]


def test_the_page_begins_with_the_model(page: Callable[..., Page]) -> None:
    source = (page().path / "index.html").read_text()
    assert re.search(r"<h1>A report</h1>\s*<p class=\"origin\"><span><small>model</small> builtin</span>", source)
