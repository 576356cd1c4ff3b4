"""A drafter of another project's making, adopted: good as it comes? better tuned? and after the target was changed?

speculators' own trainer makes an EAGLE-3 drafter for the built-in target, on the target's answers to prompts cut from
one installed package, and saves it. Then `adopt` is run as a user would run it, on prompts of another kind (the
standard library): acceptance as it came, after some steps of tuning, depth and verdict. The target is then fine-tuned
on another package's files (adopt_elsewhere.yaml), and `adopt` is run on that one: what was lost on the same prompts,
and what as many steps of tuning bring back. Everything is run once; the record has what these runs say.

    python -m benchmarks.adopt_elsewhere [--work DIR] [--their-steps 200] [--train-steps 200] [--num-prompts 320]

--work keeps what was made there and goes on from it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.record import ROOT, write_record
from benchmarks.speculators_environment import VERSION, python
from components.contract import Features, Target
from components.data.features.format import open_features
from components.data.sources.python_stdlib import functions_in
from components.policy import read_policy
from components.rows import ALL, AcceptanceChange, read_rows
from flows.planning.plan import Plan, RunOptions, plan_run
from storage.artifacts.store import Store

OWN = Path(__file__).with_suffix(".yaml")
WORKER = Path(__file__).with_name("speculators_train_worker.py")
BUILTIN = ROOT / "components" / "targets" / "builtin"
PROMPTS_OF, TEXT_OF = "torch", "sympy"
"""Installed packages: of one the other project's prompts are cut, on the other the target is fine-tuned."""
NUM_FILES = {PROMPTS_OF: 400, TEXT_OF: 200}
MOST_PROMPTS = 4000
KEYS = {"session_id", "target_key", "before_target_key", "draft_key", "before_draft_key"}
"""Columns that name what is in one store only."""
THEIR_FLAGS = (
    *("--speculator-type", "eagle3", "--verifier-name-or-path", str(BUILTIN), "--draft-vocab-size", "1024"),
    *("--full-attention-indices", "0", "--draft-attn-impl", "sdpa", "--hidden-states-dtype", "float32"),
    *("--ttt-steps", "4", "--loss-implementation", "eager", "--lr", "2e-3", "--total-seq-len", "512"),
    *("--train-data-ratio", "0.97", "--num-workers", "0", "--on-missing", "raise", "--log-freq", "50"),
    *("--epochs", "2", "--no-resume-from-checkpoint"),
)
"""What a CPU asks for (no flex attention, no fused loss, float32) and small sizes; all else is theirs by default."""


def files_of(package: str) -> Iterator[str]:
    """Texts of a package's source files, some of them in a fixed random order."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    found = sorted(file for file in Path(spec.origin).parent.rglob("*.py") if 0 < file.stat().st_size <= 400_000)
    random.Random(0).shuffle(found)
    for file in found[: NUM_FILES[package]]:
        with contextlib.suppress(UnicodeError):
            yield file.read_text(encoding="utf-8")


def write_sources(work: Path) -> None:
    """prompts.jsonl: signatures and docstrings with their bodies. text.jsonl: whole files."""
    heads: dict[str, str] = {}
    for text in files_of(PROMPTS_OF):
        for function in functions_in(text):
            if 40 <= len(function.head) <= 400:
                heads.setdefault(function.head, function.body)
    rows = [{"prompt": head, "response": body} for head, body in heads.items()]
    random.Random(0).shuffle(rows)
    documents = [{"text": text} for text in files_of(TEXT_OF)]
    for name, lines in (("prompts", rows[:MOST_PROMPTS]), ("text", documents)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def run(pipeline: str, params: dict[str, Any], file: Path, home: Path) -> tuple[Plan, Store]:
    """Run a pipeline as a user does; its plan, all of whose steps are then in the store."""
    told = [text for name, value in params.items() for text in ("-p", f"{name}={value}")]
    program = Path(sys.executable).with_name("draftsmith")
    environment = {**os.environ, "DRAFTSMITH_HOME": str(home)}
    command = [str(program), "run", pipeline, "--direct", "--file", str(file), *told]
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0:
        raise SystemExit(f"adopt_elsewhere: `draftsmith run {pipeline}` failed, its own message is above")
    return plan_run(pipeline, [f"{name}={value}" for name, value in params.items()], RunOptions(file=file, home=home))


def made_by(plan: Plan, store: Store, step: str) -> Any:
    """The artifact of a step."""
    return store.get(next(one.key for one in plan.steps if one.name == step))


def write_states(features: Features, folder: Path) -> int:
    """Our recorded hidden states as speculators' vLLM connector writes them; the number of tokens."""
    folder.mkdir(parents=True)
    source, number, tokens = open_features(features), 0, 0
    for split in ("train", "validation"):
        for example in source.examples(split):
            length, width = example.last.shape
            states = torch.cat((example.taps.view(length, 3, width), example.last[:, None]), dim=1)
            tensors = {"token_ids": example.ids.long(), "hidden_states": states, "loss_mask": example.mask.long()}
            save_file({n: t.contiguous() for n, t in tensors.items()}, folder / f"hs_{number}.safetensors")
            number, tokens = number + 1, tokens + length
    return tokens


def trained_elsewhere(work: Path, home: Path, options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """(the other project's checkpoint, facts about it); trained now unless it is there."""
    params = {"prompts": work / "prompts.jsonl", "num_prompts": options.their_prompts}
    plan, store = run("theirs", params, OWN, home)
    features = made_by(plan, store, "features")
    folder, saved = work / "states", work / "their-drafter"
    if not (saved / "checkpoint_best" / "model.safetensors").is_file():
        tokens = write_states(features, folder / "hidden_states")
        flags = (*THEIR_FLAGS, "--max-steps", str(options.their_steps), "--save-path", str(saved))
        began = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([str(python()), str(WORKER), str(folder), *flags], env=environment, check=False)
        if done.returncode != 0:
            raise SystemExit("adopt_elsewhere: speculators' trainer failed, its own message is above")
        facts = {"tokens": tokens, "seconds": round(time.monotonic() - began, 1)}
        (work / "their-facts.json").write_text(json.dumps(facts), encoding="utf-8")
    facts = json.loads((work / "their-facts.json").read_text(encoding="utf-8"))
    told = {"project": "speculators", "version": VERSION, "steps": options.their_steps, "prompts_of": PROMPTS_OF}
    return saved / "checkpoint_best", {**told, "num_prompts": options.their_prompts, **facts}


def adopted(drafter: Path, extra: dict[str, Any], home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What `adopt` says of a drafter: changes of acceptance by workload, the verdict, each drafter at its depth."""
    sizes = ("train_steps", "num_prompts", "num_test_prompts", "cost_seconds", "measure_seconds")
    params = {"drafter": drafter, **{name: getattr(options, name) for name in sizes}, **extra}
    plan, store = run("adopt", params, ROOT / "pipelines.yaml", home)
    gain, verdict = made_by(plan, store, "gain"), made_by(plan, store, "verdict")
    policy = read_policy(verdict.path)
    names = {made_by(plan, store, step).key: step for step in ("imported", "tuned")}
    columns = ("depth_k", "speedup_pred", "pred_lo", "pred_hi", "speedup_meas", "meas_lo", "meas_hi", "verdict")
    changes = [asdict(row) for row in read_rows(gain.path, AcceptanceChange)]
    return {
        "changes": [{name: value for name, value in row.items() if name not in KEYS} for row in changes],
        "lines": gain.info["change_lines"],
        "verdict": policy.verdict,
        "reasons": policy.reasons,
        "winner": names.get(policy.winner.draft_key) if policy.winner is not None else None,
        "drafters": {
            names[choice.draft_key]: {column: getattr(choice, column) for column in columns}
            for choice in policy.choices
            if choice.workload == ALL and choice.draft_key in names
        },
        "import_remarks": made_by(plan, store, "imported").info["import_remarks"],
    }


def said(name: str, found: dict[str, Any]) -> None:
    """Print what was found."""
    print(f"{name}: {found['verdict']}; {'; '.join(found['reasons'])}")
    for what, line in found["lines"].items():
        print(f"  {what:8} {line}")


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All of it, in order."""
    home = work / "home"
    if not (work / "prompts.jsonl").is_file():
        write_sources(work)
    drafter, theirs = trained_elsewhere(work, home, options)
    before = adopted(drafter, {}, home, options)
    said("on the target it was trained for", before)
    told = {"text": work / "text.jsonl", "steps": options.target_steps}
    plan, store = run("changed", told, OWN, home)
    changed: Target = made_by(plan, store, "changed")
    extra = {"model": changed.path, "compare_older": "true", "older_model": "builtin"}
    after = adopted(drafter, extra, home, options)
    said("on the changed target", after)
    losses = {name: changed.info[name] for name in ("num_steps", "held_out_loss_before", "held_out_loss")}
    return {"theirs": theirs, "adopted": before, "target": {"text_of": TEXT_OF, **losses}, "after_change": after}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, write the record."""
    parser = argparse.ArgumentParser(description="a drafter of another project's making, adopted")
    parser.add_argument("--work", type=Path, help="a folder to keep everything in; by default a temporary one")
    parser.add_argument("--their-steps", type=int, default=200, help="optimiser steps of the other project")
    parser.add_argument("--their-prompts", type=int, default=480, help="prompts that it trains on")
    parser.add_argument("--target-steps", type=int, default=200, help="optimiser steps that change the target")
    parser.add_argument("--train-steps", type=int, default=200, help="optimiser steps of tuning")
    parser.add_argument("--num-prompts", type=int, default=320, help="prompts that are answered for tuning")
    parser.add_argument("--num-test-prompts", type=int, default=64, help="held-out prompts that are measured")
    parser.add_argument("--cost-seconds", type=float, default=30, help="time budget for the costs of every depth")
    parser.add_argument("--measure-seconds", type=float, default=60, help="time budget for decoding end to end")
    options = parser.parse_args(arguments)
    asked = {name: value for name, value in vars(options).items() if name != "work"}
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        found = measure(options.work.resolve(), options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), options)
    file = write_record("adopt-foreign", {"asked": asked, **found})
    print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
