"""The usual pipeline as data, for tests that need one of real steps: from a target to the release of its drafter."""

from __future__ import annotations

from pathlib import Path

from pipeline_builder import Pipeline, pipeline, step

USUAL = pipeline(
    "usual",
    target=step("targets.load_target", model="builtin"),
    prompts=step("data.collect_prompts", source="python-stdlib"),
    answers=step("data.write_answers", "target", "prompts"),
    features=step("data.record_features", "target", "answers"),
    draft=step("drafts.train_draft", "target", "features"),
    acceptance=step("bench.measure_acceptance", "target", "draft", "prompts"),
    cost=step("bench.measure_step_cost", "target", "prompts", {"drafts": "draft"}),
    depth=step("speedup.choose_depth", "acceptance", "cost"),
    end_to_end=step("bench.compare_end_to_end", "target", "prompts", {"drafts": "draft", "policy": "depth"}),
    release=step(
        "publish.export_release", "target", "acceptance", "end_to_end", {"drafts": "draft", "policy": "depth"}
    ),
)


def usual(name: str, model: str | Path = "builtin", *, to: str = "release") -> Pipeline:
    """The usual pipeline under a name, over the target at `model`, up to step `to`; every setting its default."""
    return USUAL.named(name).up_to(to).with_setting("target", model=str(model))
