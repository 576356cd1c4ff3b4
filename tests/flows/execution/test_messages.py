"""A step's failure names the step and its log, and the messages to its process are JSON."""

from __future__ import annotations

import json
from pathlib import Path

from flows.execution.messages import ArtifactHandle, StepFailed


def test_a_failure_says_which_step_and_where_its_log_is() -> None:
    error = StepFailed("draft[fern]", "out of memory", Path("logs/draft.log"))
    assert str(error) == "step 'draft[fern]' failed: out of memory" and error.log == Path("logs/draft.log")


def test_a_handle_goes_through_a_pipe_unchanged() -> None:
    handle: ArtifactHandle = {"kind": "Draft", "key": "k", "path": "/store/k", "info": {"num_steps": 4}}
    assert json.loads(json.dumps(handle)) == handle
