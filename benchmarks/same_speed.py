"""Two trees of Draftsmith are as quick: `python -m benchmarks.same_speed OLD_TREE NEW_TREE`.

Each tree runs in a child process of its own under this interpreter, from its own modules, and both do the same work in
turns: plain decoding, speculative decoding with EAGLE-3 and with MTP, and a training step of each. Target is the
built-in one; both drafters are trained for a few steps on the target's own answers in both trees alike, so that rounds
keep some guesses. The order within a pair changes from turn to turn, and one child waits while the other works. Every
pair gives a ratio of seconds, new to old; the record holds median and quartiles, of wall time and of CPU time.

Both must produce the same tokens and losses, which is checked pair by pair: a difference ends the benchmark with exit
code 1, and so does a median ratio above --most. Kernels are chosen by timing in the old tree and given to the new one.

    python -m benchmarks.same_speed OLD_TREE NEW_TREE [--turns 60] [--tokens 96] [--depth 3] [--most 1.05] [--dry-run]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import write_record
from components.machine import num_usable_cores

METHODS = ("eagle3", "mtp")
WARM_UP_TURNS = 2
CHILD = r"""
import hashlib, importlib, json, sys, time
from pathlib import Path
import torch

def find(name, *modules):
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {modules}")

def new_drafter(method):
    ids = torch.arange(0, target.shape.vocab_size, 2)
    try:
        drafter = find("build_draft", "components.drafts.storage.files")(method, target, {"init_seed": 0}, ids)
    except ImportError:
        of_method = find("method_class", "components.drafts.files")(method)
        drafter = of_method.build(target, {"init_seed": 0}, ids)
    drafter.train()
    scale = getattr(drafter, "scale_to_target_features", None) or drafter.fit_inputs
    scale(batch.taps.flatten(0, 1))
    return drafter, Optimizer(drafter, "muon", weight_decay=0.01, muon_lr_scale=10.0)

def train(drafter, optimizer, steps):
    for _ in range(steps):
        loss = drafter.losses(batch).loss
        optimizer.update(loss, 2e-3, clip_norm=1.0)
    return float(loss.detach())

setup = json.loads(sys.stdin.readline())
torch.set_num_threads(setup["threads"])
open_target = find("open_target", "components.targets.load")
decode, Session = find("decode", "components.decoding.chain"), find("Session", "components.decoding.session")
Batch = find("Batch", "components.drafts.interface", "components.drafts.draft")
places = ("training.loop", "training.optimizer", "optimizer")
Optimizer = find("Optimizer", *(f"components.drafts.{place}" for place in places))
folder = Path(find("__file__", "components.targets")).parent / "builtin"
target = open_target(folder, kernel=setup["kernels"].get("target", "auto"))
tokenizer = find("open_tokenizer", "components.targets.load")(folder)
prompts = [tokenizer(text)["input_ids"] for text in setup["prompts"]]
length = max(map(len, prompts)) + setup["answer"]
ids, mask = torch.zeros(len(prompts), length, dtype=torch.int64), torch.zeros(len(prompts), length, dtype=torch.bool)
for row, prompt in enumerate(prompts):
    answer = decode(target, None, prompt, max_new_tokens=length - len(prompt), ignore_eos=True).tokens
    ids[row], mask[row, len(prompt):] = torch.tensor([*prompt, *answer]), True
out = target.forward(ids, target.new_cache(*ids.shape), logits="none", features=True)
batch = Batch(ids, mask, out.taps.float().clone(), out.last.float().clone(), torch.full((len(prompts),), length))
session, kernels, decoding, training = Session(target, 2 * length), {"target": target.kernel}, {}, {}
for method in setup["methods"]:
    drafter, optimizer = new_drafter(method)
    train(drafter, optimizer, setup["train_steps"])
    drafter.eval().requires_grad_(False)
    drafter.prepare_decoding(target.dtype, setup["kernels"].get(method, "auto"))
    decoding[method], kernels[method], training[method] = drafter, drafter.kernel, new_drafter(method)
print(json.dumps(kernels), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    method, wall, cpu = work["method"], time.perf_counter_ns(), time.process_time_ns()
    if work["do"] == "train":
        result, share = train(*training[method], work["steps"]), work["steps"]
    else:
        run = decode(
            target, decoding.get(method), prompts[work["prompt"]], max_new_tokens=work["tokens"],
            depth=work["depth"] if method in decoding else 0, session=session, ignore_eos=True,
        )
        result, share = [run.tokens, [list(one) for one in run.rounds]], len(run.tokens)
    spans = {"wall": (time.perf_counter_ns() - wall) / share, "cpu": (time.process_time_ns() - cpu) / share}
    digest = hashlib.sha256(json.dumps(result).encode()).hexdigest()
    print(json.dumps({**spans, "result": digest}), flush=True)
"""
PROMPTS = (
    "Write a function that adds two numbers.",
    "def fibonacci(n):",
    "Tell me about the sea.",
    "import json\n\ndef read",
    "What is a list?",
    "class Stack:",
)


class Tree:
    """One tree's child process; it answers one JSON request a line."""

    def __init__(self, folder: Path, options: argparse.Namespace, kernels: dict[str, str]) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        setup = {"threads": options.threads, "methods": METHODS, "prompts": PROMPTS, "kernels": kernels}
        self.kernels = self.ask({**setup, "answer": options.tokens, "train_steps": options.train_steps})
        git = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        self.commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write(json.dumps(request) + "\n")
        self.child.stdin.flush()
        answer: dict[str, Any] = json.loads(self.child.stdout.readline())
        return answer

    def close(self) -> None:
        """End the child."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()


def works(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What is timed, by name; a decoding request gets its prompt turn by turn."""
    shape = {"do": "decode", "tokens": options.tokens, "depth": options.depth}
    found = {"plain decoding": {**shape, "method": "plain"}}
    found |= {f"decoding, {method} at depth {options.depth}": {**shape, "method": method} for method in METHODS}
    return found | {f"training step, {m}": {"do": "train", "method": m, "steps": options.steps} for m in METHODS}


def compare(old: Tree, new: Tree, options: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Time all work in turns: facts by name, and the names of what both trees did not do alike."""
    asked, order, different = works(options), random.Random(0), set[str]()
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {name: [] for name in asked}
    for turn in range(-WARM_UP_TURNS, options.turns):
        for name in order.sample(list(asked), len(asked)):
            request = {**asked[name], "prompt": turn % len(PROMPTS)}
            sides = (old, new) if turn % 2 else (new, old)
            answers = {side: side.ask(request) for side in sides}
            if answers[old]["result"] != answers[new]["result"]:
                different.add(name)
            if turn >= 0:
                pairs[name].append((answers[old], answers[new]))
    facts: dict[str, dict[str, Any]] = {}
    for name, measured in pairs.items():
        facts[name] = {"pairs": len(measured)}
        for clock in ("wall", "cpu"):
            ratios = [theirs[clock] / ours[clock] for ours, theirs in measured]
            low, middle, high = (round(value, 4) for value in statistics.quantiles(ratios, n=4))
            facts[name] |= {f"{clock}_ratio": middle, f"{clock}_quartiles": [low, high]}
            medians = [statistics.median(pair[side][clock] for pair in measured) for side in (0, 1)]
            facts[name] |= {f"{clock}_ms": [round(median / 1e6, 4) for median in medians]}  # a token or step; old, new
    return facts, sorted(different)


def main() -> int:
    """Compare, print a line for each work, and write the record; the exit code is 1 where the new tree is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=96, help="of a generation, and of an answer to train on")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="optimiser steps of a turn")
    parser.add_argument("--train-steps", type=int, default=40, help="that the decoding drafters are trained for")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--most", type=float, default=1.05, help="the largest median ratio of wall time")
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    old = Tree(options.old.resolve(), options, {})
    new = Tree(options.new.resolve(), options, old.kernels)
    facts, different = compare(old, new, options)
    for tree in (old, new):
        tree.close()
    for name, fact in facts.items():
        low, high = fact["wall_quartiles"]
        print(f"{name:32} new/old {fact['wall_ratio']:.3f} ({low:.3f} to {high:.3f}), CPU {fact['cpu_ratio']:.3f}")
    slower = [name for name, fact in facts.items() if fact["wall_ratio"] > options.most]
    for name in different:
        print(f"{name}: the trees did not produce the same")
    if not options.dry_run:
        commits = {"old": old.commit, "new": new.commit}
        settings = {name: getattr(options, name) for name in ("turns", "tokens", "depth", "steps", "threads")}
        record = {"trees": commits, "kernels": old.kernels, "settings": settings, "work": facts, "differ": different}
        print(f"written: {write_record('same-speed', record)}")
    return 1 if different or slower else 0


if __name__ == "__main__":
    sys.exit(main())
