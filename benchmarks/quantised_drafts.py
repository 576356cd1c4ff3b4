"""What do fewer bits cost in acceptance? The finished drafters, rounded in several ways, on the same held-out prompts.

Needs a finished `quickstart` run. Every drafter is measured as it was trained and as drafts.quantise_draft stores it:
bfloat16, int8 by output channel and in groups of 32, int4 in groups of 32 and by output channel, with and without the
layers that are kept by default. The change in acceptance length is paired by prompt, as the depth policy tells it. No
time is measured: our own loop decodes with the dequantised weights, whatever they are stored in.

    python -m benchmarks.quantised_drafts [--home DIR] [--draft KEY ...] [--prompts 96] [--tokens 96]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.identity import find_drafts
from benchmarks.record import ROOT, write_record
from components.bench.acceptance import acceptance_map
from components.bench.prompts import EncodedPrompt, fitting_prompts, greedy_answers, kept_length, open_drafter
from components.contract import Context, Draft, Prompts, Target, UserError
from components.data import collect_prompts
from components.drafts import quantise_draft
from components.drafts.storage.files import read_record
from components.rows import AcceptanceMap
from components.speedup.acceptance_changes import weights_costs
from components.targets.interface import AbstractTarget
from components.targets.load import open_target
from components.weight_format import Storage, Weights
from storage.artifacts.store import Store

NUM_DRAWS = 4000


@dataclass(frozen=True)
class Way:
    """One way to store a drafter."""

    weights: Weights
    group_size: int = 0
    keep: tuple[str, ...] = ("fc", "lm_head")


WAYS = (
    Way("bf16", keep=()),
    Way("int8"),
    Way("int8", keep=()),
    Way("int8", 32, keep=()),
    Way("int4", 32),
    Way("int4", 32, keep=()),
    Way("int4"),
    Way("int4", keep=()),
)


@dataclass(frozen=True)
class Answered:
    """What every way is measured on: the target, its own greedy answers, and how many of their tokens are kept."""

    target: AbstractTarget
    prompts: list[EncodedPrompt]
    answers: list[list[int]]

    def maps(self, draft: Draft, depth: int) -> list[AcceptanceMap]:
        """The acceptance maps of one drafter, as bench.measure_acceptance makes them, from answers given once."""
        drafter, record = open_drafter(draft, self.target), read_record(draft.path)
        storage = Storage.from_record(record)
        rows = []
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            kept = kept_length(answer[: len(answer) - depth], self.target.shape.eos_token_ids)
            found = acceptance_map(self.target, drafter, prompt.ids, answer, kept, depth)
            rows.append(
                AcceptanceMap(
                    target_key="",
                    draft_key=draft.key,
                    method=drafter.method,
                    prompt_id=prompt.prompt_id,
                    workload=prompt.workload,
                    k_max=depth,
                    trained_depth=drafter.num_steps,
                    num_tokens=kept,
                    accepted=found.accepted,
                    proxy_accepted=found.proxy_accepted,
                    repeated_bigrams=0.0,
                    dtype="float32",
                    weights=storage.description if storage is not None else "",
                    quantised_from=record.get("quantised_from", ""),
                )
            )
        return rows


def context(folder: Path, threads: int, key: str = "") -> Context:
    """A context with directories of its own."""
    (folder / "scratch").mkdir(parents=True)
    (folder / "out").mkdir()
    return Context(key=key, out=folder / "out", scratch=folder / "scratch", num_threads=threads)


def answered(target: Target, prompts: Prompts, depth: int, folder: Path, options: argparse.Namespace) -> Answered:
    """The held-out prompts, answered by the target once."""
    opened = open_target(target, dtype="float32")
    length = options.tokens + depth
    asked = fitting_prompts(target, prompts, "test", length, context(folder, options.threads))
    return Answered(opened, asked, greedy_answers(opened, [prompt.ids for prompt in asked], length, 16))


def of_one(target: Target, draft: Draft, prompts: Prompts, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The lines of one drafter: every way at every depth asked for, and at the deepest."""
    deepest = int(read_record(draft.path)["num_steps"])
    known = answered(target, prompts, deepest, work / "answers", options)
    maps = {draft.key: known.maps(draft, deepest)}
    whole = (draft.path / "model.safetensors").stat().st_size
    sizes, ways, words = {}, {}, {}
    for number, way in enumerate(WAYS):
        key = f"{number:02d}".ljust(64, "0")
        ctx = context(work / f"stored-{number}", options.threads, key)
        made = quantise_draft(draft, weights=way.weights, group_size=way.group_size, keep=list(way.keep), ctx=ctx)
        maps[key] = known.maps(made, deepest)
        sizes[key] = (made.path / "model.safetensors").stat().st_size
        ways[key], words[key] = way, str(made.info["weights"])
    rows = []
    for depth in sorted({min(depth, deepest) for depth in (*options.depths, deepest)}):
        for cost in weights_costs(maps, dict.fromkeys(ways, depth), NUM_DRAWS, 0):
            told = {name: value for name, value in asdict(cost).items() if name not in ("draft_key", "quantised_from")}
            rows.append({**told, **asdict(ways[cost.draft_key]), "stored_as": words[cost.draft_key]})
            rows[-1] |= {"bytes": sizes[cost.draft_key], "share_of_float32": sizes[cost.draft_key] / whole}
            print(f"  {cost.summary_line} ({sizes[cost.draft_key] / 1e6:.2f} of {whole / 1e6:.2f} MB)", flush=True)
    return {"method": str(draft.info["method"]), "draft_key": draft.key, "float32_bytes": whole, "rows": rows}


def main() -> None:
    """Round, measure, compare; print the table and write the record."""
    parser = argparse.ArgumentParser(description="acceptance with drafters stored in fewer bits")
    parser.add_argument("--home", type=Path, help="home of the finished run; by default as `draftsmith` finds it")
    parser.add_argument("--draft", nargs="*", default=[], help="keys, or their beginnings; by default every drafter")
    parser.add_argument("--source", default="python-stdlib", help="of the held-out prompts")
    parser.add_argument("--prompts", type=int, default=96, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens for each prompt")
    parser.add_argument("--depths", type=int, nargs="+", default=[3], help="depths compared beside the deepest")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch uses")
    options = parser.parse_args()
    store = Store(options.home)
    drafts = [draft for draft in find_drafts(store, options.draft) if draft.info.get("trained", True)]
    if not drafts:
        raise SystemExit(f"no drafter in {store.home / 'store'}: run `draftsmith run quickstart` first, or name --home")
    torch.set_num_threads(options.threads)
    started, drafters = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prompts = collect_prompts(
            source=options.source, num_test=options.prompts, ctx=context(work / "prompts", options.threads)
        )
        for draft in drafts:
            target = store.get(str(draft.info["target_key"]))
            if not isinstance(target, Target):
                raise SystemExit(f"draft {draft.key[:12]}: its target is not in {store.home / 'store'}: run it again")
            print(f"{draft.info['method']} ({draft.key[:12]})", flush=True)
            try:
                drafters.append(of_one(target, draft, prompts, work / draft.key[:12], options))
            except UserError as error:
                raise SystemExit(str(error)) from error
    asked = {name: value for name, value in vars(options).items() if name not in ("home", "draft")}
    numbers = {**asked, "num_draws": NUM_DRAWS, "seconds": round(time.perf_counter() - started, 1)}
    file = write_record("quantised-drafts", {**numbers, "drafters": drafters})
    print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
