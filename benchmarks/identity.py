"""Is float32 greedy output token-identical to plain decoding, for every drafter at every depth it is trained for?

Needs a finished `quickstart` run. Every held-out prompt (test split: files that no training prompt comes from) is
decoded plainly and then by each drafter at each depth; outputs are compared token by token. One that differs is read to
its end: where every token is the target's own choice, up to the rounding noise measured there, it is a tie: counted,
listed, and no fault. Plain outputs are read in the same way. Beside it stands
whether the live rounds were those that replaying the acceptance map predicts. Ends with exit code 1 when an output
differs by more than a tie.

    python -m benchmarks.identity [--home DIR] [--draft KEY ...] [--prompts 64] [--tokens 96]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import ROOT, write_record
from components.bench.acceptance import acceptance_map
from components.bench.end_to_end.identity import TIE_FACTOR, IdentityChecker
from components.bench.prompts import EncodedPrompt, fitting_prompts, kept_length, open_drafter
from components.contract import Context, Draft, Target, UserError
from components.data import collect_prompts
from components.decoding.chain import decode
from components.decoding.session import Session
from components.drafts.interface import Drafter
from components.speedup.prediction.replay import replay
from components.targets.interface import AbstractTarget
from components.targets.load import open_target
from storage.artifacts.store import Store


@dataclass
class Tally:
    """One drafter at one depth over all prompts."""

    method: str
    draft_key: str
    depth_k: int
    prompts: int = 0
    identical: int = 0
    ties: int = 0
    tokens: int = 0
    rounds: int = 0
    replayed_exactly: int = 0  # prompts whose live rounds are those of the replayed map
    divergences: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """The plain greedy answer of one prompt. `tokens` goes on past the end, `kept` of them count."""

    prompt: EncodedPrompt
    tokens: list[int]
    kept: int


def find_drafts(store: Store, prefixes: list[str]) -> list[Draft]:
    """The drafts named by the beginnings of their keys; without names the newest of each method, as trained."""
    if prefixes:
        found = [store.get(store.resolve(prefix)) for prefix in prefixes]
        return [draft for draft in found if isinstance(draft, Draft)]
    newest: dict[str, Draft] = {}
    oldest_first = store.keys()
    for key in oldest_first:
        artifact = store.verify_local(key).artifact
        if isinstance(artifact, Draft) and not artifact.info.get("quantised_from"):
            newest[str(artifact.info["method"])] = artifact
    return list(newest.values())


def plain_answers(opened: AbstractTarget, asked: list[EncodedPrompt], tokens: int, spare: int) -> list[Answer]:
    """Plain decoding, one row a pass, a few tokens past the end."""
    session = Session(opened)
    answers = []
    for prompt in asked:
        run = decode(opened, None, prompt.ids, max_new_tokens=tokens + spare, ignore_eos=True, session=session)
        answers.append(Answer(prompt, run.tokens, kept_length(run.tokens[:tokens], opened.shape.eos_token_ids)))
    return answers


def check_drafter(
    opened: AbstractTarget, drafter: Drafter, key: str, answers: list[Answer], tokens: int, judge: IdentityChecker
) -> list[Tally]:
    """Every prompt at every depth up to the trained one."""
    session = Session(opened)
    deepest = drafter.num_steps
    tallies = [Tally(drafter.method, key, depth) for depth in range(1, deepest + 1)]
    for answer in answers:
        expected = answer.tokens[: answer.kept]
        found = acceptance_map(opened, drafter, answer.prompt.ids, answer.tokens, answer.kept, deepest)
        for tally in tallies:
            run = decode(
                opened, drafter, answer.prompt.ids, max_new_tokens=tokens, depth=tally.depth_k, session=session
            )
            verdict = judge.compare(answer.prompt.ids, expected, run.tokens, tally.depth_k + 1)
            tally.prompts += 1
            tally.identical += bool(verdict.identical)
            tally.ties += verdict.tie is True
            tally.tokens += len(run.tokens)
            tally.rounds += len(run.rounds)
            predicted = replay(found.accepted, tally.depth_k)
            tally.replayed_exactly += [tuple(r[:4]) for r in run.rounds] == [tuple(r) for r in predicted]
            if not verdict.identical:
                tally.divergences.append({"prompt_id": answer.prompt.prompt_id, **verdict._asdict()})
    return tallies


def main() -> None:
    """Check every drafter, print the table, write the record."""
    parser = argparse.ArgumentParser(description="fp32 greedy identity of speculative and plain decoding")
    parser.add_argument("--home", default=None, help="the home directory of the run (default: $DRAFTSMITH_HOME)")
    parser.add_argument("--draft", action="append", default=[], help="key of a drafter, or its beginning; repeatable")
    parser.add_argument("--source", default="python-stdlib", help="where held-out prompts come from")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens for each prompt")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch uses")
    asked_for = parser.parse_args()
    torch.set_num_threads(asked_for.threads)
    store = Store(asked_for.home)
    drafts = find_drafts(store, asked_for.draft)
    if not drafts:
        raise SystemExit(f"no drafter in {store.home / 'store'}: run `draftsmith run quickstart` first, or name --home")
    try:
        numbers = check_all(store, drafts, asked_for)
    except UserError as error:
        raise SystemExit(str(error)) from error
    file = write_record("identity", numbers)
    print(f"written: {file.relative_to(ROOT)}")
    if any(row["identical"] + row["ties"] < row["prompts"] for row in numbers["results"]):
        raise SystemExit(1)


def check_all(store: Store, drafts: list[Draft], asked_for: argparse.Namespace) -> dict[str, Any]:
    """The numbers of the record; one line is printed for each drafter and depth."""
    started = time.perf_counter()
    results: list[Tally] = []
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        ctx = Context(key="", out=Path(folder), scratch=Path(folder), num_threads=asked_for.threads)
        prompts = collect_prompts(source=asked_for.source, num_test=asked_for.prompts, ctx=ctx)
        for draft in drafts:
            target = store.get(str(draft.info["target_key"]))
            if not isinstance(target, Target):
                raise UserError(
                    f"draft {draft.key[:12]}: its target is not in {store.home / 'store'}: run the pipeline again"
                )
            opened = open_target(target, dtype="float32")
            drafter = open_drafter(draft, opened)
            spare = drafter.num_steps
            asked = fitting_prompts(target, prompts, "test", asked_for.tokens + spare + 1, ctx)
            answers = plain_answers(opened, asked, asked_for.tokens, spare)
            facts = {"kernel": opened.kernel, "num_prompts": len(asked)}
            for tally in check_drafter(opened, drafter, draft.key, answers, asked_for.tokens, IdentityChecker(opened)):
                results.append(tally)
                print(
                    f"{tally.method:8} k={tally.depth_k}  identical {tally.identical}/{tally.prompts}  "
                    f"ties {tally.ties}  AL {(tally.tokens - tally.prompts) / max(1, tally.rounds):.3f}  "
                    f"rounds as replayed {tally.replayed_exactly}/{tally.prompts}"
                )
    return {
        "dtype": "float32",
        "max_new_tokens": asked_for.tokens,
        "tie": f"every token at most {TIE_FACTOR:g} x the noise of its place below the best",
        "num_threads": asked_for.threads,
        **facts,
        "seconds": round(time.perf_counter() - started, 1),
        "results": [asdict(tally) for tally in results],
    }


if __name__ == "__main__":
    main()
