"""Nightly retraining at tiny size: a first drafter, and nights over a folder of served traffic."""

from __future__ import annotations

import json
import random
from pathlib import Path

from pipeline_builder import Pipeline, pipeline, step
from tiny_targets import make_tiny_target
from usual_pipeline import usual

TRAINED = {"method": "mtp", "draft_vocab_size": 128, "settings": {"mtp": {"mtp_modules": 2}}}
ANSWERED = {"max_new_tokens": 24, "batch_size": 8, "shard_size": 8}
BLOCKS = {"tokens_per_block": 16, "num_threads": 1, "seconds": 1, "num_processes": 1}


def first(folder: Path, model: Path) -> Pipeline:
    """A first drafter at tiny size."""
    sizes = {"num_train": 16, "num_validation": 6, "num_test": 6, "num_warm_up": 2}
    return (
        usual("first", model, to="depth")
        .with_keys(about="A first drafter at tiny size.")
        .with_setting("prompts", source=f"{folder}/first.jsonl", **sizes)
        .with_setting("answers", **ANSWERED)
        .with_setting("draft", **TRAINED, num_steps=30)
        .with_setting("acceptance", max_new_tokens=16)
        .with_setting("cost", **BLOCKS)
    )


def night(name: str, traffic: Path, target: str, prompts: str, champion: str) -> Pipeline:
    """A night at tiny size that goes on from a champion and the target and prompts that it was trained with."""
    taken = {"num_train": 16, "num_validation": 4, "num_test": 6, "min_new": 12, "evaluation_percent": 40}
    mixed = {"old_share": 0.5, "num_validation": 6, "num_test": 6, "num_warm_up": 2}
    given = {"target": target, "start_from": champion}
    judged = {"target": target, "draft": champion}
    return pipeline(
        name,
        keys={"about": "A night at tiny size."},
        traffic=step("data.collect_traffic", {"seen": prompts}, source=str(traffic), **taken),
        now=step("bench.measure_acceptance", judged, {"prompts": "traffic"}, max_new_tokens=16),
        then=step("bench.measure_acceptance", judged, {"prompts": prompts}, max_new_tokens=16),
        drift=step("speedup.measure_drift", "then", "now"),
        mix=step("data.mix_prompts", {"new": "traffic", "old": prompts}, **mixed),
        answers=step("data.write_answers", {"target": target, "prompts": "mix"}, **ANSWERED),
        features=step("data.record_features", "answers", {"target": target}),
        draft=step("drafts.train_draft", "features", given, **TRAINED, num_steps=10, peak_lr=5.0e-4, eval_every=2),
    )


def decided(night: Pipeline, target: str, champion: str, served: str) -> Pipeline:
    """A night that also measures its drafter beside the champion, decides, releases and reports."""
    seen = {"acceptance": ["acceptance", "champion_acceptance"]}
    mix = {"target": target, "prompts": "mix"}
    both = {**mix, "drafts": ["draft", champion]}
    timed = {"max_new_tokens": 16, "num_prompts": 6, "seconds": 4, "num_processes": 2, "num_threads": 1}
    rivals = {"policy": "depth", "challenger": "draft", "champion": champion}
    released = {"target": target, "drafts": ["draft"], "acceptance": ["acceptance"], "policy": "verdict"}
    return night.with_steps(
        acceptance=step("bench.measure_acceptance", "draft", mix, max_new_tokens=16),
        champion_acceptance=step("bench.measure_acceptance", mix, {"draft": champion}, max_new_tokens=16),
        cost=step("bench.measure_step_cost", both, **BLOCKS),
        depth=step("speedup.choose_depth", "cost", seen, {"champion": served}),
        end_to_end=step("bench.compare_end_to_end", both, {"policy": "depth"}, **timed),
        verdict=step("speedup.confirm_depth", "end_to_end", rivals),
        release=step("publish.export_release", "end_to_end", released),
        report=step("report.write_page", "cost", "end_to_end", "release", "drift", seen, {"policy": "verdict"}),
    )


WORDS = ("read", "write", "queue", "path", "item", "value", "sorted", "list", "open", "line", "name", "size", "folder")


def write_first(folder: Path) -> Path:
    """A tiny target, the prompts of a first drafter and its pipelines.yaml; returns the file."""
    model = make_tiny_target("llama", folder / "model")
    write_chats(folder / "first.jsonl", 60, seed=0)
    (folder / "traffic").mkdir()
    file = folder / "pipelines.yaml"
    file.write_text(first(folder, model).text, encoding="utf-8")
    return file


def add_night(file: Path, name: str, keys: dict[str, str], *, decide: bool) -> None:
    """Add a night over `folder/traffic` that goes on from the artifacts of these keys (target, prompts, ...)."""
    named = {kind: f"store:{key}" for kind, key in keys.items()}
    added = night(name, file.parent / "traffic", named["target"], named["prompts"], named["champion"])
    if decide:
        added = decided(added, named["target"], named["champion"], named["served"])
    with file.open("a", encoding="utf-8") as out:
        out.write("\n".join([*added.lines, ""]))


def write_chats(file: Path, count: int, *, seed: int, strange: bool = False) -> None:
    """Chats of a few words of code; strange: of digits and signs instead, which a drafter has never seen."""
    source = random.Random(seed)
    with file.open("w", encoding="utf-8") as out:
        for number in range(count):
            words = (
                [source.choice(WORDS) for _ in range(6)] if not strange else [str(source.random()) for _ in range(4)]
            )
            text = f"{' '.join(words)} {seed}-{number}"
            out.write(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n")
