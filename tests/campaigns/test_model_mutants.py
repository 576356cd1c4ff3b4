"""A damaged folder of a model, a drafter or a checkpoint is refused in one line that names it, or it works.

Each case is a folder that works, damaged in one of the ways of model_mutants.py, and what a run does with it, in a
child of its own with a limit of time and of memory. An accepted one gives finite numbers; where nothing that matters
was changed, the same tokens. DRAFTSMITH_SOAK_MODELS and DRAFTSMITH_SOAK_SEED choose another number and other damage.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import SEED, Ended, forked, recorded
from model_bases import Base, make_bases
from model_mutants import KINDS, Done, NotHere

from components.contract import UserError

MODELS = int(os.environ.get("DRAFTSMITH_SOAK_MODELS", "2000"))
LIMIT_S, LIMIT_BYTES = 900.0, 3 << 30
SLICE = 36
WITHOUT_A_FILE = ("the target's chat template", "decoding: prompt and new tokens need")
"""Refusals of a chat, of which the target is one part."""


def damage(bases: list[Base], number: int, seed: int, folder: Path) -> tuple[Base, str, Done]:
    """Case `number`: a damaged copy in `folder` of one of the bases; every kind comes by once in len(KINDS) cases."""
    chance = random.Random(f"{seed}-{number}")
    kinds = list(KINDS)
    random.Random(f"{seed}-{number // len(kinds)}").shuffle(kinds)
    kind = kinds[number % len(kinds)]
    while True:
        base = chance.choice(bases)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base.folder, folder)
        try:
            return base, kind, KINDS[kind](folder, chance)
        except NotHere:
            continue


def used(base: Base, folder: Path, work: Path) -> Ended:
    """What a run does with it, in a child that says "made: ..." or "refused: ..."."""

    def act() -> int:
        torch.set_num_threads(1)
        try:
            made = base.use(folder, work)
        except UserError as error:
            sys.stdout.write(f"\nrefused: {json.dumps(str(error))}\n")
            return 1
        sys.stdout.write(f"\nmade: {json.dumps(made)}\n")
        return 0

    return forked(act, limit_s=LIMIT_S, memory_bytes=LIMIT_BYTES, environment={"DRAFTSMITH_HOME": str(work)})


def said_after(ended: Ended, word: str) -> Any:
    return next(
        (json.loads(line.removeprefix(word)) for line in ended.said.splitlines() if line.startswith(word)), None
    )


def fault_of(base: Base, done: Done, ended: Ended, folder: Path, undamaged: Any) -> str:
    """What is wrong with how it ended; "" where all is well."""
    if ended.fault:
        return ended.fault
    if "root:" in ended.said:
        return f"told what a file outside says: {ended.said[-300:]}"
    refused, made = said_after(ended, "refused: "), said_after(ended, "made: ")
    if refused is not None:
        named = str(folder) in refused or done.file in refused or refused.startswith(WITHOUT_A_FILE)
        if done.wanted == "same":
            return f"refused though nothing was changed: {refused}"
        return "" if named and "\n" not in refused else f"a refusal that names no file: {refused!r}"
    if made is None:
        return f"neither made nor refused: {ended.said[-300:]}"
    if not made["finite"]:
        return f"accepted, and what came out is no number: {made}"
    unread = base.name == "pretraining" and done.file == "stable.safetensors" and made == undamaged
    if done.wanted == "refused" and not unread:
        return f"accepted: {made}"
    if (base.exact or done.wanted == "same") and made != undamaged:
        return f"other tokens: {made}, undamaged {undamaged}"
    return ""


def undamaged_of(base: Base, folder: Path) -> Any:
    """What an untouched copy gives; it has to give something."""
    copy = folder / "undamaged" / base.name
    shutil.copytree(base.folder, copy / "model")
    ended = used(base, copy / "model", copy / "work")
    made = said_after(ended, "made: ")
    assert ended.fault == "" and made is not None and made["finite"], (base.name, ended)
    return made


def campaign(folder: Path, num_cases: int, seed: int) -> dict[str, Any]:
    """Cases 0 .. num_cases - 1 of a seed: how each ended, by kind and by base, and every fault with its number."""
    bases = make_bases(folder / "bases")
    undamaged = {base.name: undamaged_of(base, folder) for base in bases}
    outcomes: dict[str, Counter[str]] = {}
    by_base: dict[str, Counter[str]] = {}
    faults = []
    started = time.monotonic()
    for number in range(num_cases):
        model, work = folder / "model", folder / "work"
        base, kind, done = damage(bases, number, seed, model)
        ended = used(base, model, work)
        if fault := fault_of(base, done, ended, model, undamaged[base.name]):
            faults.append(f"case {number} of seed {seed} ({base.name}, {kind}, {done.file}, {done.what}): {fault}")
        outcome = "fault" if fault else "accepted" if ended.code == 0 else "refused"
        outcomes.setdefault(kind, Counter())[outcome] += 1
        by_base.setdefault(base.name, Counter())[outcome] += 1
        shutil.rmtree(work, ignore_errors=True)
    return {
        "cases": num_cases,
        "case_seconds": round(time.monotonic() - started, 1),
        "outcomes": dict(sum(outcomes.values(), Counter())),
        "by_kind": {kind: dict(outcomes[kind]) for kind in sorted(outcomes)},
        "by_base": {name: dict(by_base[name]) for name in sorted(by_base)},
        "faults": faults,
    }


def test_a_slice_of_damaged_models_is_refused_in_one_line_or_works(tmp_path: Path) -> None:
    found = campaign(tmp_path, SLICE, seed=4)
    assert found["faults"] == []
    assert found["outcomes"]["accepted"] > 5 and found["outcomes"]["refused"] > 15
    assert len(found["by_kind"]) == min(SLICE, len(KINDS)) and len(found["by_base"]) > 6


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_two_thousand_damaged_models_are_refused_in_one_line_or_work(tmp_path: Path) -> None:
    found = recorded("models", lambda: campaign(tmp_path, MODELS, SEED))
    assert sum(found["outcomes"].values()) == MODELS and set(found["by_kind"]) == set(KINDS)
    assert found["faults"] == []
