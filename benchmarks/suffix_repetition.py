"""Suffix decoding beside prompt lookup and plain decoding, on answers that repeat their prompt and on ordinary ones.

Agent-like repetition is made of held-out files of Python's standard library: the prompt shows some functions and asks
for a change; the answer is all of it with a name changed, a line left out and a line added (`edit`). In `again` the
prompt already has such an answer, and the next one changes other places. The built-in target cannot edit, so the
answers are replayed: each pass costs what it costs, and the target then says the next token of the known answer.
Ordinary are functions as they were written, replayed (`functions`), and the target's own greedy answers (`own
answers`).

All arms take turns on every prompt, in random order. Tokens a round come from acceptance maps, which must agree with
the rounds that were run. With --home a trained EAGLE-3 stands among them, alone and with suffix decoding beside it
(drafts.add_suffix); it is that of stop_rule.yaml, trained there first where the home does not have it. Times are those
of decoding alone, over plain decoding's on the same prompt: processor time of one thread, which other work on the
machine disturbs less than the time on the wall. Ends with exit code 1 when a replayed answer comes out otherwise.

    python -m benchmarks.suffix_repetition [--prompts 16] [--reps 1] [--depths 3 7 16] [--home FOLDER] [--dry-run]
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.record import ROOT, write_record
from benchmarks.stop_rule import PIPELINE, run_pipeline
from components.bench.acceptance import acceptance_map
from components.bench.prompts import open_drafter
from components.contract import Draft
from components.data.sources.python_stdlib import functions_in, stdlib_files
from components.decoding.chain import Decoded, decode
from components.decoding.session import Session
from components.drafts.interface import AbstractDraft, Drafter
from components.drafts.methods.ngram import Ngram
from components.drafts.methods.suffix import Suffix
from components.drafts.methods.with_suffix import WithSuffix
from components.drafts.settings import NgramSettings, SuffixSettings
from components.drafts.storage.files import read_record
from components.speedup.prediction.replay import replay
from components.targets.interface import AbstractCache, AbstractTarget, TargetPass, TreeRows, WrappedTarget
from components.targets.load import open_target
from flows.planning.plan import RunOptions, plan_run

BUILTIN = ROOT / "components" / "targets" / "builtin"
CERTAIN = 1e4  # a logit that no other reaches
NAME = re.compile(r"\b[a-z_][a-z0-9_]{3,}\b")
PYTHON_WORDS = {"self", "return", "from", "import", "else", "elif", "None", "True", "False", "pass", "with", "yield"}
SIZES = {"edit": (150, 400), "again": (120, 250), "functions": (40, 250)}
"""Workload -> the fewest and the most tokens of the code that an answer repeats, or is."""


@dataclass(frozen=True)
class Task:
    """A prompt, and its answer where it is known; otherwise the target's own is decoded."""

    prompt: list[int]
    answer: list[int] | None
    num_tokens: int


@dataclass
class Arm:
    """A drafter at a depth, and what it did on one workload; depth 0: plain decoding."""

    name: str
    drafter: Drafter | None
    depth: int
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    ns: list[int] = field(default_factory=list)  # of decoding, one entry a generation


class Replayed(WrappedTarget):
    """A target that does all its work and then says the known text. It decodes one sequence."""

    def __init__(self, inner: AbstractTarget, text: Sequence[int]) -> None:
        super().__init__(inner)
        self.following = torch.tensor([*text[1:], *[0] * 128], device=inner.device)[:, None]

    def forward(
        self,
        ids: Tensor,
        cache: AbstractCache,
        *,
        num_valid: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        features: bool = False,
        tree: TreeRows | None = None,
    ) -> TargetPass:
        stop = int(cache.lengths[0]) + ids.shape[1]
        out = self.inner.forward(ids, cache, num_valid=num_valid, logits=logits, features=features, tree=tree)
        if out.logits is not None:
            rows = out.logits[0]
            rows.scatter_(1, self.following[stop - rows.shape[0] : stop], CERTAIN)
        return out


def edited(code: str, dice: random.Random) -> str:
    """The code with a name changed everywhere, a line left out and a line added."""
    counts = [(name, len(re.findall(rf"\b{name}\b", code))) for name in sorted(set(NAME.findall(code)) - PYTHON_WORDS)]
    often = [name for name, count in counts if count >= 3] or [name for name, _ in counts]
    old = dice.choice(often)
    lines = re.sub(rf"\b{old}\b", dice.choice(("new_", "the_", "inner_")) + old, code).splitlines(keepends=True)
    del lines[dice.randrange(len(lines) // 2, len(lines))]
    place = dice.randrange(1, max(2, len(lines) // 2))
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    lines.insert(place, f"{indent}# {dice.choice(('checked', 'see the issue', 'was slow', 'not thread-safe'))}\n")
    return "".join(lines)


def make_tasks(workload: str, count: int, tokenizer: Tokenizer, positions: int) -> list[Task]:
    """The first `count` tasks of a workload; the same ones on every machine with the same Python."""
    dice, tasks = random.Random(workload), list[Task]()
    fewest, most = SIZES["functions" if workload == "own answers" else workload]

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    files = [file for file in stdlib_files() if file.held_out]
    dice.shuffle(files)
    for file in files:
        functions = list(functions_in(file.read()))
        if not functions:
            continue
        first = dice.randrange(len(functions))
        if workload in ("functions", "own answers"):
            head, body = encode(functions[first].head), encode(functions[first].body)
            if fewest <= len(body) <= most and len(head) + most < positions:
                known = body if workload == "functions" else None
                tasks.append(Task(head, known, len(body) if known else 128))
        else:
            code = ""
            for function in functions[first:]:
                code += function.head + function.body + "\n"
                if len(encode(code)) >= fewest:
                    break
            if not fewest <= len(encode(code)) <= most:
                continue
            text = f"# {file.relative_path}\n{code}\n# The same with a change:\n"
            answer = edited(code, dice)
            if workload == "again":
                text += f"{answer}\n# That is not all. The same with one more change:\n"
                answer = edited(answer, dice)
            ids, reply = encode(text), encode(answer)
            if len(ids) + len(reply) + 40 < positions:
                tasks.append(Task(ids, reply, len(reply)))
        if len(tasks) == count:
            break
    return tasks


def trained_draft(home: Path, steps: int, prompts: int) -> Draft:
    """The EAGLE-3 that stop_rule.yaml trains for the built-in target, made where `home` does not have it."""
    params = [f"train_steps={steps}", f"num_prompts={prompts}"]
    run_pipeline(home, params, to="draft")
    plan, store = plan_run("stop-rule", params, RunOptions(file=PIPELINE, home=home))
    drafts = [store.get(step.key) for step in plan.steps if step.uses == "drafts.train_draft"]
    found = next(one for one in drafts if one.info["method"] == "eagle3")
    return Draft(key=found.key, path=found.path, info=found.info)


def trained_arms(model: AbstractTarget, draft: Draft, depths: Sequence[int], chain_depth: int) -> list[Arm]:
    """A trained drafter alone at its usual depth, and beside copies as long as each of the depths."""
    drafter, expected = open_drafter(draft, model), float(read_record(draft.path)["held_out_al"]) - 1.0
    assert isinstance(drafter, AbstractDraft)
    beside = WithSuffix(drafter, Suffix(SuffixSettings(min_score=expected)), chain_depth)
    both = [Arm(f"eagle3 k={chain_depth} with suffix", beside, depth) for depth in depths]
    return [Arm("eagle3", drafter, chain_depth), *both]


def make_arms(depths: Sequence[int]) -> list[Arm]:
    """Plain decoding, prompt lookup with short and with long n-grams, suffix decoding."""
    drafters: dict[str, Drafter] = {
        "ngram": Ngram(),
        "ngram, 2 to 8 tokens": Ngram(NgramSettings(min_ngram=2, max_ngram=8)),
        "suffix": Suffix(),
    }
    return [Arm("plain", None, 0), *(Arm(name, one, depth) for depth in depths for name, one in drafters.items())]


def check_map(target: AbstractTarget, arm: Arm, task: Task, answer: Sequence[int], run: Decoded) -> None:
    """The acceptance map of the answer gives the rounds that were run."""
    assert arm.drafter is not None
    longer = [*answer, *[0] * arm.depth]
    found = acceptance_map(target, arm.drafter, task.prompt, longer, len(answer), arm.depth)
    mapped = [r.emitted for r in replay(found.accepted, arm.depth)]
    if mapped != [r.emitted for r in run.rounds]:
        raise SystemExit(f"{arm.name}, depth {arm.depth}: the rounds are not those of its acceptance map")


def measure(model: AbstractTarget, arms: list[Arm], tasks: Sequence[Task], reps: int, dice: random.Random) -> None:
    """Fill in the arms: the first task to warm up, then every task `reps` times."""
    session = Session(model, model.shape.max_position_embeddings)
    for rep, some in ((-1, tasks[:1]), *((rep, tasks) for rep in range(reps))):
        for task in some:
            target = model if task.answer is None else Replayed(model, [*task.prompt, *task.answer])
            runs = {}
            for arm in dice.sample(arms, len(arms)):
                runs[id(arm)] = run = decode(
                    target,
                    arm.drafter,
                    task.prompt,
                    max_new_tokens=task.num_tokens,
                    depth=arm.depth,
                    ignore_eos=True,
                    session=session,
                    clock=time.thread_time_ns,
                )
                if task.answer is not None and run.tokens != task.answer:
                    raise SystemExit(f"{arm.name}, depth {arm.depth}: a replayed answer came out otherwise")
            if rep < 0:
                continue
            for arm in arms:
                run = runs[id(arm)]
                arm.tokens += len(run.tokens) - 1
                arm.rounds += len(run.rounds)
                arm.drafted += sum(r.drafted for r in run.rounds)
                arm.ns.append(run.decode_ns)
                if rep == 0 and arm.drafter is not None and not arm.drafter.needs_features and task.answer is not None:
                    check_map(model, arm, task, task.answer, run)


def table(workload: str, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """One row an arm; time over plain decoding's: of all together, and quartiles over generations."""
    plain, rows = arms[0], []
    for arm in arms:
        ratios = [ns / of_plain for ns, of_plain in zip(arm.ns, plain.ns, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        row = {
            "workload": workload,
            "arm": arm.name,
            "depth": arm.depth,
            "generations": len(arm.ns),
            "tokens": arm.tokens,
            "rounds": arm.rounds,
            "drafted_a_round": round(arm.drafted / arm.rounds, 3),
            "tokens_a_round": round(arm.tokens / arm.rounds, 4),
            "ms_a_token": round(sum(arm.ns) / 1e6 / arm.tokens, 4),
            "time_over_plain": round(sum(arm.ns) / sum(plain.ns), 4),
            "time_over_plain_quartiles": [round(low, 4), round(median, 4), round(high, 4)],
        }
        rows.append(row)
        print(
            f"  {workload:12} {arm.name:22} k={arm.depth:<3} {row['tokens_a_round']:7.3f} tokens a round, "
            f"{row['drafted_a_round']:6.2f} drafted  {row['ms_a_token']:.3f} ms a token  "
            f"{row['time_over_plain']:.3f} of plain, median {median:.3f} [{low:.3f}, {high:.3f}]",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure every workload, print the tables, write the record."""
    parser = argparse.ArgumentParser(description="suffix decoding on repetition")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of each workload")
    parser.add_argument("--reps", type=int, default=1, help="times that every prompt is decoded by every arm")
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 7, 16], help="draft tokens a round, at most")
    parser.add_argument("--workloads", nargs="+", default=["edit", "again", "functions", "own answers"])
    parser.add_argument("--home", type=Path, help="with a trained drafter, kept in this folder")
    parser.add_argument("--train-steps", type=int, default=450, help="optimiser steps of that drafter")
    parser.add_argument("--train-prompts", type=int, default=832, help="prompts that it is trained on")
    parser.add_argument("--chain-depth", type=int, default=3, help="draft tokens of its own chains")
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    torch.set_num_threads(1)  # all work is the measured thread's
    model = open_target(Path(BUILTIN), dtype="float32", kernel="thorough")  # as the pipeline measures
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    draft = trained_draft(options.home, options.train_steps, options.train_prompts) if options.home else None
    rows, dice = [], random.Random(0)
    for workload in options.workloads:
        arms = make_arms(options.depths)
        arms += trained_arms(model, draft, options.depths, options.chain_depth) if draft else []
        tasks = make_tasks(workload, options.prompts, tokenizer, model.shape.max_position_embeddings)
        measure(model, arms, tasks, options.reps, dice)
        rows += table(workload, arms)
    settings = {name: value for name, value in vars(options).items() if name not in ("dry_run", "home")}
    if not options.dry_run:
        name = "suffix-repetition-trained" if draft else "suffix-repetition"
        file = write_record(name, {**settings, "kernel": model.kernel, "rows": rows})
        print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
