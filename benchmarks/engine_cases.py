"""What every engine is given: the built-in target, prompts, and a drafter of each method trained on them in a minute.

The drafters are right now and then at every depth, on purpose: one that always or never hits would hide an engine that
numbers positions otherwise. Everything is made once a process; tests/engines and the table use the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from components.bench.prompts import open_drafter
from components.contract import Context, Conversations, Draft, Features, Machine, Prompts, Target
from components.data import collect_prompts, record_features, write_answers
from components.data.formats.prompts import encode_prompt, read_prompts
from components.decoding.chain import decode
from components.decoding.session import Session
from components.drafts import train_draft
from components.drafts.storage.files import read_draft
from components.machine import describe_machine
from components.publish.formats.interface import Source
from components.publish.formats.mtp import stitch
from components.publish.formats.registry import read_drafter_state, write_format
from components.targets import load_target
from components.targets.interface import AbstractTarget
from components.targets.load import open_target, open_tokenizer
from components.targets.source import open_record

DEPTH = 3
MAX_NEW_TOKENS = 48
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": DEPTH},
    "eagle1": {"chain_depth": DEPTH, "fc_bias": False},
    "medusa": {"num_heads": DEPTH},
    "draft-model": {"chain_depth": DEPTH, "num_layers": 1},
    "mtp": {"mtp_modules": 1},
    "p-eagle": {"parallel_depth": DEPTH, "num_layers": 1},
    # vLLM 0.32.0 on a CPU norms the context's keys of every DFlash layer by the weights of the first.
    "dflash": {"block_size": DEPTH + 1, "num_layers": 1},
    "dspark": {"block_size": DEPTH, "markov_rank": 64},
    "ngram": {},
}
STEPS = {"dflash": 240, "dspark": 120}
"""Optimiser steps of drafters that learn slowly; 60 for the others."""
OWN_MODULE = {"start": "own", "recursive_steps": DEPTH}
"""Settings of `mtp` for a target that brings a module."""
SHOWN_FIRST = "ours with the text's first token shown to the draft model, as engines do"
WHOLE_VOCABULARY = ("eagle1", "medusa", "draft-model", "mtp")
"""Their formats have no draft vocabulary: they are trained, and decode here, with all of the target's."""


def make_context(folder: Path) -> Context:
    """A context with directories of its own; one thread, since an engine computes beside it."""
    folder.mkdir(parents=True)
    return Context(key=(folder.name.encode().hex() + "0" * 64)[:64], out=folder, scratch=folder, num_threads=1)


@dataclass(frozen=True)
class Served:
    """One format in one engine: a line of the table. state: tried | refused | checked only.

    ties: texts that differ first at a tie. Counts of rounds are over `compared` answers, those whose text is ours;
    accepted[i]: rounds that kept draft i + 1, () where the engine tells it of all answers together only.
    """

    format: str
    engine: str
    version: str
    method: str
    depth_k: int = DEPTH
    state: str = "tried"
    prompts: int = 0
    identical: int = 0
    ties: int = 0
    compared: int = 0
    different: int = 0
    our_rounds: int = 0
    our_accepted: tuple[int, ...] = ()
    engine_rounds: int = 0
    engine_accepted: tuple[int, ...] = ()
    note: str = ""

    @property
    def same_text(self) -> bool:
        """Whether no answer differs but at a tie."""
        return self.prompts > 0 and self.identical + self.ties == self.prompts

    @property
    def same_rounds(self) -> bool:
        """Whether every compared answer took our rounds, position by position."""
        ours, theirs = (self.our_rounds, self.our_accepted), (self.engine_rounds, self.engine_accepted)
        return self.compared > 0 and self.different == 0 and ours == theirs

    def lengths(self) -> tuple[float | None, float | None]:
        """Acceptance length, ours and the engine's: accepted a round, and the bonus token."""
        sides = ((self.our_rounds, self.our_accepted), (self.engine_rounds, self.engine_accepted))
        ours, theirs = (1 + sum(accepted) / rounds if rounds and accepted else None for rounds, accepted in sides)
        return ours, theirs


def by_position(accepted: list[int], depth: int) -> tuple[int, ...]:
    """How many rounds kept at least draft 1, 2, ... of those that kept so many."""
    return tuple(sum(kept > at for kept in accepted) for at in range(depth))


class EngineCases:
    """Target, prompts and drafters, made when they are first asked for, under one folder."""

    def __init__(
        self,
        work: Path,
        *,
        model: str = "builtin",
        num_prompts: int = 24,
        num_train: int = 64,
        settings: Mapping[str, dict[str, Any]] = SETTINGS,
    ) -> None:
        self.work, self.model, self.num_prompts, self.num_train = work, model, num_prompts, num_train
        self.settings = settings
        self._drafts: dict[str, Draft] = {}
        self._exported: dict[tuple[str, str], Path] = {}
        torch.set_num_threads(1)

    @cached_property
    def machine(self) -> Machine:
        """This machine."""
        return describe_machine()

    @cached_property
    def target(self) -> Target:
        """The target, in float32."""
        return load_target(model=self.model, dtype="float32", ctx=make_context(self.work / "target"))

    @cached_property
    def target_folder(self) -> Path:
        """The folder with the target's own files, as engines take it."""
        return open_record(self.target.path)[0]

    @cached_property
    def prompts(self) -> Prompts:
        """Test prompts, two for warm-up, and enough to train a little on."""
        return collect_prompts(
            num_train=self.num_train,
            num_validation=8,
            num_test=self.num_prompts,
            num_warm_up=2,
            workload="code",
            ctx=make_context(self.work / "prompts"),
        )

    @cached_property
    def opened(self) -> AbstractTarget:
        """The target in our own loop, with the kernel that computes as engines do."""
        return open_target(self.target, dtype="float32", kernel="plain")

    @cached_property
    def source(self) -> Source:
        """The target as layouts take it."""
        return Source(self.opened.shape, "builtin", self.target_folder, self.opened)

    @cached_property
    def _answers(self) -> Conversations:
        return write_answers(self.target, self.prompts, max_new_tokens=64, ctx=make_context(self.work / "answers"))

    @cached_property
    def _features(self) -> Features:
        return record_features(self.target, self._answers, ctx=make_context(self.work / "features"))

    def draft(self, method: str, num_steps: int = 0) -> Draft:
        """A drafter of a method, trained a little; num_steps 0: as many steps as it needs."""
        if method not in self._drafts:
            num_steps = num_steps or STEPS.get(method, 60)
            self._drafts[method] = train_draft(
                self.target,
                self._features,
                method=method,  # type: ignore[arg-type]
                settings={method: self.settings[method]},
                num_steps=num_steps,
                batch_tokens=512,
                draft_vocab_size=self.opened.shape.vocab_size if method in WHOLE_VOCABULARY else 2048,
                eval_every=num_steps,
                eval_rows=8,
                ctx=make_context(self.work / f"draft-{method}"),
            )
        return self._drafts[method]

    def exported(self, method: str, layout: str) -> Path:
        """The drafter of a method in a format, as releases hold it."""
        if (method, layout) not in self._exported:
            folder = self.work / f"exported-{method}-{layout}"
            write_format(layout, read_drafter_state(self.draft(method).path), self.source, folder)
            self._exported[method, layout] = folder
        return self._exported[method, layout]

    @cached_property
    def stitched(self) -> Path:
        """A copy of the target's checkpoint with its own MTP module fine-tuned."""
        _, tensors = read_draft(self.draft("mtp").path)
        folder = self.work / "stitched"
        stitch(self.target_folder, folder, tensors, self.opened.shape.num_layers)
        return folder

    @cached_property
    def encoded(self) -> dict[str, list[int]]:
        """prompt_id -> token ids, of the test prompts."""
        tokenizer = open_tokenizer(self.target)
        return {one.prompt_id: encode_prompt(tokenizer, one) for one in read_prompts(self.prompts, "test")}

    def our_rounds(
        self,
        method: str,
        prompt_ids: list[str],
        max_new_tokens: int = MAX_NEW_TOKENS,
        depth: int = DEPTH,
        *,
        shown_first: bool = True,
    ) -> dict[str, list[int]]:
        """prompt_id -> accepted drafts of every round of our own loop.

        shown_first: put a text's first token into a draft model's cache, as engines do and our loop never does.
        """
        drafter, session = open_drafter(self.draft(method), self.opened), Session(self.opened)
        found = {}
        for name in prompt_ids:
            prompt = self.encoded[name]
            if method == "draft-model" and shown_first:
                chosen = drafter.settings  # type: ignore[union-attr]
                drafter.settings = chosen.model_copy(update={"first_token": prompt[0]})  # type: ignore[union-attr]
            asked = {"max_new_tokens": max_new_tokens, "depth": depth, "session": session}
            rounds = decode(self.opened, drafter, prompt, **asked).rounds  # type: ignore[arg-type]
            found[name] = [one.accepted for one in rounds]
        return found


def as_record(line: Served) -> dict[str, Any]:
    """A line as JSON holds it."""
    ours, theirs = line.lengths()
    return {**dataclasses.asdict(line), "al_ours": ours, "al_engine": theirs}
