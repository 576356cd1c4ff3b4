"""Two machines, as far as one can be two, train a drafter together."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_pipeline import DRAFTSMITH
from tiny_targets import make_tiny_target
from two_machines import may_be_two, two_machines
from usual_pipeline import usual

from components.drafts.training.processes import RENDEZVOUS

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not may_be_two(), reason="this process may not make network namespaces"),
]


def test_two_machines_learn_what_two_processes_do_though_the_wire_is_pulled(tmp_path: Path) -> None:
    """To the last bit. The wire is out until there has been no checkpoint for a while."""
    model, home, file = make_tiny_target("llama", tmp_path / "model"), tmp_path / "home", tmp_path / "pipelines.yaml"
    environment = {"DRAFTSMITH_HOME": str(home), "TMPDIR": str(tmp_path), RENDEZVOUS: "leader.example:29400"}
    tiny = (
        usual("two", model, to="draft")
        .with_setting("prompts", num_train=24, num_validation=6, num_test=4, num_warm_up=2)
        .with_setting("answers", max_new_tokens=24, batch_size=8, shard_size=8)
        .with_setting("draft", num_steps=60, batch_tokens=160, draft_vocab_size=128, checkpoint_minutes=1e-9)
    )
    with two_machines({"leader.example": 0}) as (first, second):

        def run(**spread: int) -> subprocess.Popen[str]:
            file.write_text(tiny.with_setting("draft", **spread).text, encoding="utf-8")
            command = [DRAFTSMITH, "run", "two", "--direct", "--file", str(file)]
            return first.start(command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

        agent = second.start([sys.executable, "-m", "components.drafts.training.node"], environment)
        together = run(nodes=2)
        try:
            while not (saved := [*home.rglob("checkpoint.safetensors")]):
                assert together.poll() is None, together.communicate()[0]
                time.sleep(0.05)
            second.plug("down")
            before, newest = 0.0, saved[0].stat().st_mtime
            while before != newest:
                time.sleep(3)
                before, newest = newest, saved[0].stat().st_mtime
            assert together.poll() is None, "neither machine goes on alone"
            second.plug("up")
            said = together.communicate(timeout=1800)[0]
            assert together.returncode == 0, said
            assert agent.poll() is None, "it waits for the next training"
        finally:
            for process in (agent, together):
                process.terminate()
                process.wait()
        alone = run(processes=2)
        said = alone.communicate(timeout=1800)[0]
        assert alone.returncode == 0, said
    drafts = [path.read_bytes() for path in home.glob("store/*/model.safetensors")]
    assert len(drafts) == 2 and drafts[0] == drafts[1]
