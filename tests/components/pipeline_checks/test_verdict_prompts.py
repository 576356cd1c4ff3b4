"""What cannot give a verdict its prompts is told before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pipeline_builder import step
from usual_pipeline import usual

from flows.cli import main


def test_too_few_prompts_for_a_verdict_are_told_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the rows of a small file, as the step would split them, and by settings that allow no more."""
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))

    def said(*command: str) -> tuple[int, str, str]:
        return main([*command, "-f", str(file)]), *capfd.readouterr()

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(6)))
    few, file = usual("few").with_setting("prompts", source=str(rows)), tmp_path / "pipelines.yaml"
    file.write_text(few.text)
    told = f"step 'prompts': source: {rows}: a verdict needs 4 test prompts, there "
    for command in (("check",), ("plan", "few")):
        code, out, err = said(*command)
        assert (code, err) == (0, "") and told in out.splitlines()[-1], out
    for more in (
        few.with_setting("prompts", evaluation_percent=100, num_validation=1, num_warm_up=1),
        few.up_to("answers"),
    ):
        file.write_text(more.text)
        assert len(said("check")[1].splitlines()) == 1
    file.write_text(few.with_setting("prompts", num_test=3).text)
    code, _, err = said("check")
    assert code == 2 and "a verdict needs 4 test prompts, there are 3: set num_test to 4 or more" in err
    verdict = step("speedup.confirm_depth", "end_to_end", {"policy": "depth"})
    file.write_text(usual("few").with_setting("end_to_end", num_prompts=1).with_steps(verdict=verdict).text)
    code, _, err = said("check")
    assert code == 2 and "step 'end_to_end': a verdict needs 4" in err and "there is 1: set num_prompts to 4" in err
