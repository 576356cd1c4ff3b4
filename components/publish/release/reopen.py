"""Step `publish.reopen_release`: every format of a release is opened again, and decodes as the drafter it was made of.

A rehearsal takes it after every release (flows/planning/rehearsal.py). The comparison is that of a dry run, which makes
it with untrained drafters (dry_run.py). A format that is only another program's to open says so in a word.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from components.contract import Context, Draft, Page, Release, Target, UserError
from components.decoding.chain import decode
from components.drafts.interface import AbstractDraft, Drafter
from components.drafts.storage.files import build_draft, open_draft, read_record
from components.outside_json import JsonObject
from components.publish.formats.interface import Source
from components.publish.formats.registry import reopen_drafter
from components.publish.release.export import rounding_remark, source_of
from components.release_record import FormatRecord, read_release
from components.targets.interface import AbstractTarget
from components.targets.load import open_target
from components.weight_format import Storage

PROMPT_TOKENS, NEW_TOKENS, DEPTH = 6, 12, 3
SAME, ROUNDED, UNOPENED = "same", "rounded", "unopened"
"""How a format came back: it drafts the same tokens; its weights are others by a rounding; not opened here."""


@dataclass(frozen=True)
class Trial:
    """A target and a short text of its own, on which what came back is compared with what went out."""

    target: AbstractTarget
    source: Source
    prompt: list[int]
    plain: list[int]  # its greedy continuation without a drafter

    @classmethod
    def of(cls, target: Target) -> Trial:
        """A trial with a target in float32; the plain kernel needs no calibration, and speed does not matter here."""
        opened = open_target(target, kernel="plain", dtype="float32")
        prompt = [7 * place % opened.shape.vocab_size for place in range(PROMPT_TOKENS)]
        plain = decode(opened, None, prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True).tokens
        return cls(opened, source_of(target), prompt, plain)


def reopen_release(target: Target, release: Release, drafts: list[Draft], *, ctx: Context) -> Page:
    """The step `publish.reopen_release`, explained in components/publish/steps.py."""
    torch.set_num_threads(ctx.num_threads)
    trial, by_key = Trial.of(target), {draft.key: draft for draft in drafts}
    formats = read_release(release.path)["formats"]
    went: dict[str, str] = {}
    for name, written in sorted(formats.items()):
        went[name] = _reopen(release.path / name, written, by_key[written["draft_key"]], trial)
        ctx.progress(len(went), len(formats), "formats")
    ctx.note(", ".join(f"{name}: {how}" for name, how in went.items()) or "it has no format that engines load")
    page = f"<!doctype html><title>What came back of a release</title><pre>{json.dumps(went, indent=1)}</pre>\n"
    (ctx.out / "index.html").write_text(page, encoding="utf-8")
    return Page.of_step(ctx, {"reopened": went})


def _reopen(folder: Path, written: FormatRecord, draft: Draft, trial: Trial) -> str:
    """Reopen one format and decode with it; returns how it came back."""
    format, record = written["format"], read_record(draft.path)
    method, dtypes = str(record["method"]), written["dtype"].split(", ")
    if format == "gguf":
        return UNOPENED
    before = open_draft(draft, trial.target, kernel="plain")
    assert isinstance(before, AbstractDraft), "what learns nothing has no format"
    stitched = format == "stitched"
    if stitched:
        same = len(dtypes) == 1
        for weight in before.parameters():  # the module has the dtype of the copy that it is in
            weight.copy_(weight.to(getattr(torch, dtypes[0])))
    else:
        same = not rounding_remark(format, Storage.from_record(record), written["dtype"])
    drafts = greedy_drafts(trial, trial.target, before) if same else None
    if stitched:
        check_stitched(folder, method, record["settings"], before.draft_ids, trial, drafts)
    else:
        again = reopen_drafter(folder, trial.target, trial.source, format, before.draft_ids)
        check_unchanged(method, format, trial, trial.target, again, drafts)
    return SAME if same else ROUNDED


def check_stitched(
    folder: Path, method: str, settings: JsonObject, draft_ids: Tensor, trial: Trial, drafts: Tensor | None
) -> None:
    """Open a copy of the target with the module in it, read its module, and check that it decodes as before."""
    again = open_target(folder, kernel="plain", dtype="float32")
    drafter = build_draft(method, again, settings, draft_ids)
    drafter.eval().requires_grad_(False)
    check_unchanged(method, "stitched", trial, again, drafter, drafts)


def greedy_drafts(trial: Trial, target: AbstractTarget, drafter: Drafter) -> Tensor:
    """Greedy draft tokens from every position of the trial's text, int64 [T - 1, depth]."""
    text = torch.tensor(trial.prompt + trial.plain)
    features = drafter.needs_features or True
    out = target.forward(text[None], target.new_cache(1, len(text)), logits="none", features=features)
    assert out.taps is not None and out.last is not None
    return drafter.propose_at_every_position(text, out.taps[0], out.last[0], min(DEPTH, drafter.max_depth)).tokens


def check_unchanged(
    method: str, format: str, trial: Trial, target: AbstractTarget, drafter: Drafter, before: Tensor | None
) -> None:
    """Raises UserError unless the drafter proposes the tokens `before`, where given, and changes no output."""
    after = greedy_drafts(trial, target, drafter)
    if before is not None and not torch.equal(before, after):
        raise UserError(f"{method}: drafts otherwise after it went through {format}; this is a fault of Draftsmith")
    depth = min(DEPTH, drafter.max_depth)
    decoded = decode(target, drafter, trial.prompt, max_new_tokens=NEW_TOKENS, depth=depth, ignore_eos=True)
    if decoded.tokens != trial.plain:
        raise UserError(f"{method}: decoding with it changed the target's tokens; this is a fault of Draftsmith")
