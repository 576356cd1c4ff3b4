"""Step `publish.try_release`: the dry run that exports, checks, reads back and decodes with untrained drafters.

It stands at the start of a pipeline: a format fault, a norm that an engine drops, a rotary base that it fixes or an odd
head size then shows within seconds, not after hours of training. Only the record is kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from components.contract import Context, Page, Target
from components.drafts.interface import Drafter
from components.drafts.network.vocabulary import default_size, membership_of, offsets_of
from components.drafts.settings import resolve_settings, settings_of_method
from components.drafts.storage.files import build_draft
from components.engines.profiles import CUT_VOCABULARY, Engine, formats_for, kind_of, profile_of
from components.html_pages import write_html
from components.methods import METHODS, MethodName
from components.outside_json import JsonObject
from components.publish.formats.gguf import CONVERTER, write_gguf
from components.publish.formats.interface import DrafterState
from components.publish.formats.mtp import stitch
from components.publish.formats.registry import reopen_drafter, write_format
from components.publish.release.export import refuse_unserved
from components.publish.release.reopen import Trial, check_stitched, check_unchanged, greedy_drafts
from components.targets.interface import AbstractTarget


@dataclass(frozen=True)
class DryRun:
    """What every method is tried with."""

    trial: Trial
    vocab_size: int  # draft tokens of each drafter
    engines: list[Engine]
    llama_cpp: str
    ctx: Context


def try_release(
    target: Target,
    *,
    methods: list[MethodName],
    settings: dict[str, JsonObject],
    draft_vocab_size: int,
    engines: list[Engine],
    llama_cpp: str,
    ctx: Context,
) -> Page:
    """The step `publish.try_release`; its settings are explained in components/publish/steps.py."""
    torch.set_num_threads(ctx.num_threads)
    trial = Trial.of(target)
    vocab_size = trial.target.shape.vocab_size
    size = min(vocab_size, draft_vocab_size or default_size(vocab_size))
    run = DryRun(trial, size, engines, llama_cpp, ctx)
    tried: dict[str, list[str]] = {}
    for done, method in enumerate(methods):
        tried[method] = _try_method(
            method, resolve_settings(settings_of_method(method, settings), ctx.seed).model_dump(mode="json"), run
        )
        ctx.progress(done + 1, len(methods), "methods")
    _write_page(ctx.out, tried, settings, engines)
    summary = "; ".join(f"{method}: {', '.join(names) or 'no file'}" for method, names in tried.items())
    ctx.note(f"an untrained drafter goes out, comes back and decodes as it should ({summary})")
    return Page.of_step(ctx, {"tried": tried, "engines": list(engines), "target_key": target.key})


def _try_method(method: str, settings: JsonObject, run: DryRun) -> list[str]:
    """Try one method; returns the formats in which its untrained drafter was written and read back."""
    trial, source, ctx = run.trial, run.trial.source, run.ctx
    cut = {CUT_VOCABULARY: run.vocab_size < trial.target.shape.vocab_size}
    refuse_unserved(method, {**settings, **cut}, source, run.engines, method)
    formats = formats_for(method, settings, run.engines)
    if not formats:
        return []
    ids = torch.arange(run.vocab_size)
    before, state = _untrained_drafter(method, settings, ids, trial.target)
    drafts = greedy_drafts(trial, trial.target, before)
    through: list[str] = []
    for format in formats:
        folder = ctx.scratch / f"{method}-{format}"
        shutil.rmtree(folder, ignore_errors=True)
        if format == "gguf":
            if write_gguf(state, source, folder, run.llama_cpp, ctx) is None:
                base = METHODS[method].gguf_base  # export_release writes this folder instead, for the converter
                if base is not None and base not in formats:
                    _round_trip(base, folder, state, ids, trial, drafts)
                    through.append(base)
                shutil.rmtree(folder, ignore_errors=True)
                continue
        elif format == "stitched":
            assert source.folder is not None
            stitch(source.folder, folder, state.tensors, source.shape.num_layers)
            check_stitched(folder, method, settings, ids, trial, drafts)
        else:
            _round_trip(format, folder, state, ids, trial, drafts)
        shutil.rmtree(folder, ignore_errors=True)
        through.append(format)
    return through


def _round_trip(format: str, folder: Path, state: DrafterState, ids: Tensor, trial: Trial, drafts: Tensor) -> None:
    """Write a drafter in a format, reopen it, and check that it decodes as before."""
    write_format(format, state, trial.source, folder)
    again = reopen_drafter(folder, trial.target, trial.source, format, ids)
    check_unchanged(state.method, format, trial, trial.target, again, drafts)


def _untrained_drafter(
    method: str, settings: JsonObject, ids: Tensor, target: AbstractTarget
) -> tuple[Drafter, DrafterState]:
    """A drafter before its first training step. ids: int64 [N], its draft vocabulary."""
    network = build_draft(method, target, settings, ids.to(target.device))
    network.eval().requires_grad_(False)
    tensors = {name: tensor.detach().float().cpu() for name, tensor in network.state_dict().items()}
    tensors |= {"d2t": offsets_of(ids), "t2d": membership_of(ids, target.shape.vocab_size)}
    return network, DrafterState(method, settings, tensors)


def _format_for_engine(readable: Sequence[str], through: Sequence[str], method: str) -> str:
    """The format that an engine gets, in words. readable: those it reads, best first; through: those tried."""
    if not readable:
        return "no file"
    if readable[0] in through:
        return readable[0]
    assert readable[0] == "gguf", "every other format went through, or the step has failed"
    return f"{METHODS[method].gguf_base}, to be made gguf by llama.cpp's {CONVERTER}, which is not installed here"


def _write_page(folder: Path, tried: dict[str, list[str]], settings: JsonObject, engines: list[Engine]) -> None:
    """Write index.html, the format that each engine gets of each method and the evidence for it, and tried.json."""
    rows = []
    for method, formats in tried.items():
        kind = kind_of(method, settings.get(method, {}))
        for engine in engines:
            profile = profile_of(engine)
            served = profile.methods[kind]
            evidence = f"tried with {served.tried}" if served.tried else f"read, {profile.version}"
            depth = f"exact for {served.max_depth} guess a round" if served.max_depth else ""
            rows.append((method, profile.title, _format_for_engine(served.formats, formats, method), evidence, depth))
        if not engines:
            rows.append((method, "none named", ", ".join(formats) or "no file", "", ""))
    write_html(folder, Path(__file__).with_name("dry_run.html.jinja"), {"rows": rows})
    record = {"tried": tried, "engines": list(engines)}
    (folder / "tried.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
