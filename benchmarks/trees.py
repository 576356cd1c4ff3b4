"""Trees against chains on the finished drafters: acceptance length and time, from the same prompts and passes.

Needs a finished `quickstart` run. Every held-out prompt is continued greedily by plain decoding, by chains of some
depths and by EAGLE-2's trees of those depths at some budgets (guesses verified in a pass); for mtp also by two-row
validation. Within a prompt all arms take turns in random order, so that the machine's drift meets them alike. A tree
holds the chain of its depth, so at no position can it accept less; what it costs is more rows to verify and more to
draft. Ends with exit code 1 when an output differs from the plain one by more than a tie, or when a tree accepts less
than the chain of its depth at more than one position in two hundred (near-ties of the drafter may fall either way).

    python -m benchmarks.trees [--home DIR] [--draft KEY ...] [--prompts 24] [--tokens 96] [--reps 2]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.identity import find_drafts
from benchmarks.record import ROOT, write_record
from benchmarks.two_row import TwoRowMtp, decode_two_row
from components.bench.acceptance import tree_acceptance
from components.bench.end_to_end.identity import IdentityChecker
from components.bench.prompts import EncodedPrompt, fitting_prompts, open_drafter, spread
from components.contract import Context, Draft, Target, UserError
from components.data import collect_prompts
from components.decoding.batch import decode_tree
from components.decoding.chain import Decoded, decode
from components.decoding.session import Session
from components.decoding.tree_shapes import DynamicShape, StaticShape
from components.drafts.interface import TreeProposer
from components.drafts.methods.mtp import Mtp
from components.targets.interface import AbstractTarget
from components.targets.load import open_target
from storage.artifacts.store import Store

EXTRA_GUESSES = (2, 4, 8, 16)  # budgets beyond the chain's own guesses


@dataclass
class Arm:
    """One way to decode, and what it did. budget 0: a chain; depth 0: plain decoding."""

    depth: int
    budget: int
    two_row: bool = False
    tokens: int = 0
    rounds: int = 0
    different: int = 0  # outputs that are neither the plain one nor tied with it
    below_chain: int = 0  # positions where a tree keeps less than the chain of its depth: ties of the drafter, at most
    ms: list[float] = field(default_factory=list)  # a token, one entry a generation

    @property
    def name(self) -> str:
        """ "plain", "two-row", "chain 3", "tree 3/8" (depth / guesses verified)."""
        if self.two_row:
            return "two-row"
        if not self.depth:
            return "plain"
        return f"tree {self.depth}/{self.budget}" if self.budget else f"chain {self.depth}"

    def shape(self, options: argparse.Namespace) -> DynamicShape:
        """The tree of its depth and budget."""
        return DynamicShape(self.depth, options.top_k, self.budget, width=options.width)

    def run(
        self,
        opened: AbstractTarget,
        drafter: Any,
        prompt: EncodedPrompt,
        session: Session,
        options: argparse.Namespace,
    ) -> Decoded:
        """One generation."""
        tokens = options.tokens
        if self.two_row:
            return decode_two_row(opened, TwoRowMtp(drafter), prompt.ids, max_new_tokens=tokens, session=session)
        if not self.budget:
            return decode(opened, drafter, prompt.ids, max_new_tokens=tokens, depth=self.depth, session=session)
        shape = self.shape(options)
        return decode_tree(opened, drafter, prompt.ids, shape, max_new_tokens=tokens)


def plan_arms(drafter: Any, depths: list[int]) -> list[Arm]:
    """Plain, the chains and the trees."""
    reachable = [depth for depth in depths if 1 < depth <= drafter.num_steps]
    trees = [Arm(depth, depth + extra) for depth in reachable for extra in EXTRA_GUESSES]
    two_row = [Arm(1, 0), Arm(1, 0, two_row=True)] if isinstance(drafter, Mtp) else []
    return [Arm(0, 0), *two_row, *(Arm(depth, 0) for depth in reachable), *trees]


def measure(
    opened: AbstractTarget, drafter: Any, arms: list[Arm], asked: list[EncodedPrompt], options: argparse.Namespace
) -> None:
    """Fill in the arms: one prompt to warm up, then every prompt `reps` times."""
    session, judge, order = Session(opened), IdentityChecker(opened), random.Random(0)
    for rep, prompts in ((-1, asked[:1]), *((rep, asked) for rep in range(options.reps))):
        for prompt in prompts:
            runs = {}
            for arm in order.sample(arms, len(arms)):
                runs[arm.name] = arm.run(opened, drafter, prompt, session, options)
            if rep < 0:
                continue
            for arm in arms:
                run = runs[arm.name]
                arm.tokens += len(run.tokens) - 1
                arm.rounds += len(run.rounds)
                arm.ms.append(run.decode_ns / 1e6 / max(1, len(run.tokens) - 1))
                if rep == 0 and run.tokens != runs["plain"].tokens:
                    verdict = judge.compare(prompt.ids, runs["plain"].tokens, run.tokens, 1 + (arm.budget or arm.depth))
                    arm.different += not verdict.tie


def everywhere(
    opened: AbstractTarget, drafter: Any, arms: list[Arm], asked: list[EncodedPrompt], options: argparse.Namespace
) -> dict[str, float]:
    """Mean guesses kept over every position of a few answers, also where no round starts; counts tree < chain."""
    sums: dict[str, list[int]] = {arm.name: [] for arm in arms if arm.depth}
    deepest = max(arm.depth for arm in arms)
    for prompt in asked[: options.mapped]:
        answer = decode(opened, None, prompt.ids, max_new_tokens=options.tokens + deepest, ignore_eos=True).tokens
        maps = {
            arm.name: tree_acceptance(
                opened,
                drafter,
                prompt.ids,
                answer,
                options.tokens,
                arm.shape(options) if arm.budget else StaticShape.chain(arm.depth),
            )
            for arm in arms
            if arm.depth
        }
        for arm in arms:
            if arm.budget:
                chain = maps[f"chain {arm.depth}"]
                arm.below_chain += sum(t < c for t, c in zip(maps[arm.name], chain, strict=True))
            if arm.depth:
                sums[arm.name] += maps[arm.name]
    return {name: round(statistics.fmean(kept), 4) for name, kept in sums.items() if kept}


def table(arms: list[Arm], kept: dict[str, float]) -> list[dict[str, Any]]:
    """One row an arm; times are medians over generations, speedups of the same prompts and repetitions, paired."""
    plain = arms[0].ms
    rows = []
    for arm in arms:
        paired = statistics.median(p / ms for p, ms in zip(plain, arm.ms, strict=True))
        row = {
            "arm": arm.name,
            **{name: value for name, value in asdict(arm).items() if name != "ms"},
            "acceptance_length": round(arm.tokens / max(1, arm.rounds), 4),
            "kept_everywhere": kept.get(arm.name),
            "ms_per_token": round(statistics.median(arm.ms), 4),
            "speedup": round(paired, 4),
        }
        rows.append(row)
        print(
            f"  {arm.name:12} AL {row['acceptance_length']:.3f}  {row['ms_per_token']:.3f} ms/token  "
            f"{row['speedup']:.2f}x  different {arm.different}"
        )
    return rows


def main() -> None:
    """Measure every drafter that branches, print the tables, write the record."""
    parser = argparse.ArgumentParser(description="trees of guesses against chains")
    parser.add_argument("--home", default=None, help="the home directory of the run (default: $DRAFTSMITH_HOME)")
    parser.add_argument("--draft", action="append", default=[], help="key of a drafter, or its beginning; repeatable")
    parser.add_argument("--source", default="python-stdlib", help="where held-out prompts come from")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts")
    parser.add_argument("--mapped", type=int, default=6, help="of these, prompts drafted from every position")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens for each prompt")
    parser.add_argument("--reps", type=int, default=2, help="times that every prompt is decoded by every arm")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 3, 5], help="depths of chains and trees")
    parser.add_argument("--top-k", type=int, default=4, help="children of an expanded node")
    parser.add_argument("--width", type=int, default=1, help="nodes expanded a level; EAGLE-2 expands top-k")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="arithmetic")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch uses")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    store = Store(options.home)
    drafts = find_drafts(store, options.draft)
    if not drafts:
        raise SystemExit(f"no drafter in {store.home / 'store'}: run `draftsmith run quickstart` first, or name --home")
    try:
        numbers = measure_all(store, drafts, options)
    except UserError as error:
        raise SystemExit(str(error)) from error
    file = write_record(f"trees-{options.dtype}", numbers)
    print(f"written: {file.relative_to(ROOT)}")
    rows = [row for draft in numbers["drafters"] for row in draft["arms"]]
    few = options.mapped * options.tokens / 200
    if any(row["different"] or row["below_chain"] > few for row in rows):
        raise SystemExit(1)


def measure_all(store: Store, drafts: list[Draft], options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of the record."""
    started, drafters = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        ctx = Context(key="", out=Path(folder), scratch=Path(folder), num_threads=options.threads)
        prompts = collect_prompts(source=options.source, num_test=max(64, options.prompts), ctx=ctx)
        for draft in drafts:
            target = store.get(str(draft.info["target_key"]))
            if not isinstance(target, Target):
                raise UserError(f"draft {draft.key[:12]}: its target is not in {store.home / 'store'}: run it again")
            opened = open_target(target, dtype=options.dtype)
            drafter = open_drafter(draft, opened)
            if not isinstance(drafter, TreeProposer):
                print(f"{drafter.method}: its guesses do not branch")
                continue
            print(f"{drafter.method} ({draft.key[:12]}), {options.dtype}")
            spare = max(options.depths) + 2
            asked = spread(fitting_prompts(target, prompts, "test", options.tokens + spare, ctx), options.prompts)
            arms = plan_arms(drafter, options.depths)
            measure(opened, drafter, arms, asked, options)
            rows = table(arms, everywhere(opened, drafter, arms, asked, options))
            best = max(rows, key=lambda row: row["speedup"])
            drafters.append(
                {
                    "method": drafter.method,
                    "draft_key": draft.key,
                    "kernel": opened.kernel,
                    "quickest": best["arm"],
                    "arms": rows,
                }
            )
    return {
        **{name: value for name, value in vars(options).items() if name not in ("home", "draft")},
        "seconds": round(time.perf_counter() - started, 1),
        "drafters": drafters,
    }


if __name__ == "__main__":
    main()
