"""Chats, prompts, answers and features made in processes that are killed at random moments until all is done.

A program of its own (`python killed_data.py FOLDER KILLS SEED`), since it forks: every attempt is a child that has the
libraries loaded already and is killed by SIGKILL, which nothing can catch. As under the engine, a finished step is not
made again, and a killed one finds its directories as it left them. Prints one JSON object: kills, faults, files.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401 - what a child needs is loaded before it is forked, not in each of them
from tiny_targets import make_tiny_target

from components.contract import Artifact, Chats, Context, Conversations, Features, Prompts, Target
from components.data import (
    collect_chats,
    deduplicate,
    features_on_the_fly,
    mix_chats,
    record_features,
    write_answers,
)
from components.data.settings import ChatSource
from components.targets import load_target

WORDS = ["sort", "rows", "of", "a", "table", "by", "name", "then", "read", "every", "file", "print", "what", "differs"]


class Home:
    """A directory of steps; `once` makes a step unless it is finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def once(self, kind: type[Artifact], name: str, step: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
        """The artifact `name`: made now, or by an attempt before."""
        out, scratch, finished = (self.folder / (name + ending) for ending in ("", ".scratch", ".json"))
        if finished.is_file():
            shutil.rmtree(scratch, ignore_errors=True)
            return kind(key=name, path=out, info=json.loads(finished.read_text()))
        out.mkdir(parents=True, exist_ok=True)
        scratch.mkdir(exist_ok=True)
        made = step(*inputs, **settings, ctx=Context(key=name, out=out, scratch=scratch, num_threads=1))
        beside = finished.with_suffix(".tmp")
        beside.write_text(json.dumps(made.info, sort_keys=True, default=str))
        beside.replace(finished)
        shutil.rmtree(scratch)
        return made


def write_sources(folder: Path) -> None:
    """Conversations in files of two sources, a third of them said before in the same or nearly the same words."""
    folder.mkdir()
    chance = random.Random(0)
    for source in ("one", "two"):
        asked: list[str] = []
        lines = []
        for _ in range(120):
            question = " ".join(chance.choices(WORDS, k=14))
            if asked and chance.random() < 0.35:
                question = chance.choice(asked) + chance.choice(["", " again"])
            asked.append(question)
            answer = " ".join(chance.choices(WORDS, k=20))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"messages": messages}) + "\n")
        (folder / f"{source}.jsonl").write_text("".join(lines))


def make(folder: Path) -> None:
    """Every step that is not finished, in order."""
    torch.set_num_threads(1)
    once, given = Home(folder).once, folder.parent
    sources = [ChatSource(path=str(given / "chats" / f"{name}.jsonl"), name=name) for name in ("one", "two")]
    target = once(Target, "target", load_target, model=str(given / "model"))
    chats = once(Chats, "chats", collect_chats, sources=sources)
    different = once(Chats, "different", deduplicate, [chats])
    splits = {"num_validation": 8, "num_test": 4, "evaluation_percent": 20}
    prompts = once(Prompts, "prompts", mix_chats, [different], target, limit_tokens=1500, **splits)
    asked = {"max_new_tokens": 24, "batch_size": 8, "sampled_share": 0.5}
    answers = once(Conversations, "answers", write_answers, target, prompts, **asked)
    once(Features, "features", record_features, target, answers, tokens_per_pass=256)
    once(Features, "features-fp8", record_features, target, answers, tokens_per_pass=256, storage="fp8")
    once(Features, "features-live", features_on_the_fly, target, answers)


def attempt(folder: Path, kill_after_s: float | None) -> int:
    """One child; its exit code, negative where a signal ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            make(folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if kill_after_s is not None:
        deadline = time.monotonic() + kill_after_s
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under it, by its path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def campaign(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Homes one after the other, killed until `num_kills` are spent; each must end as the undisturbed one."""
    make_tiny_target("llama", folder / "model")
    write_sources(folder / "chats")
    begun = time.monotonic()
    assert attempt(folder / "undisturbed", None) == 0, "the undisturbed run failed, its own message is above"
    undisturbed_s = time.monotonic() - begun
    wanted = contents(folder / "undisturbed")
    chance, faults, homes = random.Random(seed), list[str](), 0
    kills: list[dict[str, Any]] = []
    while len(kills) < num_kills:
        place, code = folder / f"home-{homes}", -signal.SIGKILL
        homes += 1
        while code == -signal.SIGKILL and len(kills) < num_kills:
            after_s = chance.uniform(0.0, undisturbed_s)
            code = attempt(place, after_s)
            if code == -signal.SIGKILL:
                finished = len(list(place.glob("*.json")))
                kills.append({"home": homes, "after_s": round(after_s, 3), "finished_steps": finished})
        if code == -signal.SIGKILL:
            code = attempt(place, None)
        if code != 0:
            faults.append(f"home {homes}: ended with {code}")
        found = contents(place)
        faults += [f"home {homes}: {name} differs" for name in wanted if found.get(name) != wanted[name]]
        faults += [f"home {homes}: {name} is left behind" for name in found if name not in wanted]
    compared = {"files": len(wanted), "bytes": sum(map(len, wanted.values()))}
    return {"kills": kills, "homes": homes, "faults": faults, "undisturbed_s": round(undisturbed_s, 2), **compared}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(campaign(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))) + "\n")
