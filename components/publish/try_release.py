"""The dry run at the start of a pipeline: an untrained drafter of each method, exported, checked, read back, used.

A format fault, a norm that an engine drops, a rotary base that it fixes, an odd head size: all of them show in seconds
on a drafter that was never trained, and otherwise after hours on one that was. Nothing of it is kept but the record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from components.contract import Context, Page, Target, UserError
from components.drafts.settings import Place, checked, filled, own_settings
from components.drafts.train import Method
from components.publish.profiles import GGUF_BASES, Engine, formats_for

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from components.drafts.draft import Drafter
    from components.publish.layout import OwnForm, Source
    from components.targets.model import AbstractTarget

PROMPT_TOKENS, NEW_TOKENS, DEPTH = 6, 12, 3


@dataclass(frozen=True)
class Trial:
    """What every method is tried on: the target, and a short text that it wrote itself."""

    target: AbstractTarget
    source: Source
    prompt: list[int]
    plain: list[int]  # its plain greedy answer
    vocab_size: int  # of the drafters
    engines: list[Engine]
    llama_cpp: str
    ctx: Context


def try_release(
    target: Target,
    *,
    methods: Annotated[list[Method], Field(min_length=1)] = ["eagle3"],  # noqa: B006 - read, never changed
    settings: dict[str, dict[str, Any]] = {},  # noqa: B006 - read, never changed
    draft_vocab_size: Annotated[int, Field(ge=0)] = 0,
    engines: list[Engine] = [],  # noqa: B006 - read, never changed
    llama_cpp: str = "",
    ctx: Context,
) -> Page:
    """Export an untrained drafter of each method for the engines, read it back and decode with it.

    The tokens must be those of plain decoding and the drafts those of the drafter before it was exported; the first
    fault ends the run, before anything is trained. The page says what each engine will be given.

    Args:
        target: the model that the drafters will serve.
        methods: the methods that the pipeline trains.
        settings: what they are told, as in drafts.train_draft.
        draft_vocab_size: tokens a drafter can guess, as in drafts.train_draft; here the first ones of the vocabulary.
        engines: who will serve them, as in publish.export_release.
        llama_cpp: the folder with llama.cpp's converter, as in publish.export_release.
    """
    import torch

    from components.decoding.chain import decode
    from components.drafts.vocabulary import default_size
    from components.publish.export import source_of
    from components.targets.load import open_target

    torch.set_num_threads(ctx.num_threads)
    # A kernel that fits no row count best, but is there at once: what is looked for is not speed.
    opened = open_target(target, kernel="plain", dtype="float32")
    vocab_size = opened.shape.vocab_size
    size = min(vocab_size, draft_vocab_size or default_size(vocab_size))
    prompt = [7 * place % vocab_size for place in range(PROMPT_TOKENS)]
    plain = decode(opened, None, prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True).tokens
    trial = Trial(opened, source_of(target), prompt, plain, size, engines, llama_cpp, ctx)
    tried: dict[str, list[str]] = {}
    for done, method in enumerate(methods):
        tried[method] = _tried(method, filled(own_settings(method, settings), ctx.seed), trial)
        ctx.progress(done + 1, len(methods), "methods")
    _write_page(ctx.out, tried, settings, engines)
    told = "; ".join(f"{method}: {', '.join(names) or 'no file'}" for method, names in tried.items())
    ctx.note(f"an untrained drafter goes out, comes back and decodes as it should ({told})")
    return Page.made(ctx, {"tried": tried, "engines": list(engines), "target_key": target.key})


def try_release_settings(given: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Place, str]]]:
    """The settings as they enter the step's key, of `settings` only what the methods need; and faults."""
    faults: list[tuple[Place, str]] = []
    kept: dict[str, Any] = {}
    for method in given["methods"]:
        own, found = checked(method, given["settings"])
        faults += [fault for fault in found if fault not in faults]
        if own is not None:
            kept[method] = own.model_dump(mode="json")
    return {**given, "settings": kept}, faults


def _tried(method: str, settings: dict[str, Any], trial: Trial) -> list[str]:
    """One method: the formats that its untrained drafter went through."""
    import shutil

    from components.publish.export import refuse_unserved
    from components.publish.gguf_file import write_gguf
    from components.publish.mtp_stitch import stitch

    source, ctx = trial.source, trial.ctx
    refuse_unserved(method, settings, source, trial.engines, method)
    formats = formats_for(method, settings, trial.engines)
    if not formats:
        return []
    before, own = _untrained(method, settings, trial.vocab_size, trial.target)
    drafts = _drafts(trial, trial.target, before)
    through: list[str] = []
    for format in formats:
        folder = ctx.scratch / f"{method}-{format}"
        shutil.rmtree(folder, ignore_errors=True)
        if format == "gguf":
            if write_gguf(own, source, folder, trial.llama_cpp, ctx) is None:
                base = GGUF_BASES[method]  # what export_release gives instead: the folder that the converter reads
                if base not in formats:
                    _go_through(base, folder, own, trial, drafts)
                    through.append(base)
                shutil.rmtree(folder, ignore_errors=True)
                continue
        elif format == "stitched":
            assert source.folder is not None
            stitch(source.folder, folder, own.tensors, source.shape.num_layers)
            _look_at_stitched(folder, method, settings, trial, drafts)
        else:
            _go_through(format, folder, own, trial, drafts)
        shutil.rmtree(folder, ignore_errors=True)
        through.append(format)
    return through


def _go_through(format: str, folder: Path, own: OwnForm, trial: Trial, drafts: Tensor) -> None:
    """Out in a format of one folder and back again, decoding as before."""
    import torch

    from components.publish.formats import reopened, write_format

    write_format(format, own, trial.source, folder)
    again = reopened(folder, trial.target, trial.source, format, torch.arange(trial.vocab_size))
    _compare(own.method, format, trial, trial.target, again, drafts)


def _look_at_stitched(folder: Path, method: str, settings: dict[str, Any], trial: Trial, drafts: Tensor) -> None:
    """A copy of the target that holds the module: opened as a target, its own module taken out of it again."""
    from components.targets.load import open_target

    again = open_target(folder, kernel="plain", dtype="float32")
    drafter, _ = _untrained(method, settings, trial.vocab_size, again)
    _compare(method, "stitched", trial, again, drafter, drafts)


def _untrained(
    method: str, settings: dict[str, Any], vocab_size: int, target: AbstractTarget
) -> tuple[Drafter, OwnForm]:
    """A drafter as it is before its first training step, over the first tokens of the vocabulary."""
    import torch

    from components.drafts.files import method_class
    from components.drafts.vocabulary import membership_of, offsets_of
    from components.publish.layout import OwnForm

    ids = torch.arange(vocab_size)
    network = method_class(method).build(target, settings, ids.to(target.device))
    network.eval().requires_grad_(False)
    tensors = {name: tensor.detach().float().cpu() for name, tensor in network.state_dict().items()}
    tensors |= {"d2t": offsets_of(ids), "t2d": membership_of(ids, target.shape.vocab_size)}
    return network, OwnForm(method, settings, tensors)


def _drafts(trial: Trial, target: AbstractTarget, drafter: Drafter) -> Tensor:
    """Its greedy drafts from every column of the trial's text, int64 [T - 1, depth]."""
    import torch

    text = torch.tensor(trial.prompt + trial.plain)
    out = target.forward(text[None], target.new_cache(1, len(text)), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    return drafter.draft_everywhere(text, out.taps[0], out.last[0], min(DEPTH, drafter.max_depth))


def _compare(method: str, format: str, trial: Trial, target: AbstractTarget, drafter: Drafter, before: Tensor) -> None:
    """Raises UserError unless the drafter drafts as before it was exported, and changes no token."""
    import torch

    from components.decoding.chain import decode

    after = _drafts(trial, target, drafter)
    if before.shape != after.shape or not torch.equal(before, after):
        raise UserError(f"{method}: drafts otherwise after it went through {format}; this is a fault of Draftsmith")
    depth = min(DEPTH, drafter.max_depth)
    decoded = decode(target, drafter, trial.prompt, max_new_tokens=NEW_TOKENS, depth=depth, ignore_eos=True)
    if decoded.tokens != trial.plain:
        raise UserError(f"{method}: decoding with it changed the target's tokens; this is a fault of Draftsmith")


def _given(readable: Sequence[str], through: Sequence[str], method: str) -> str:
    """What an engine is given of a drafter, of what really went through; readable: the best first."""
    from components.publish.gguf_file import CONVERTER

    if not readable:
        return "no file"
    if readable[0] in through:
        return readable[0]
    assert readable[0] == "gguf", "every other format went through, or the step has failed"
    return f"{GGUF_BASES[method]}, to be made gguf by llama.cpp's {CONVERTER}, which is not installed here"


def _write_page(folder: Path, tried: dict[str, list[str]], settings: dict[str, Any], engines: list[Engine]) -> None:
    """index.html: method by engine, what each is given and how well that is known; and the same as JSON."""
    from pathlib import Path

    import jinja2

    from components.publish.profiles import kind_of, profile_of

    rows = []
    for method, formats in tried.items():
        kind = kind_of(method, settings.get(method, {}))
        for engine in engines:
            profile = profile_of(engine)
            served = profile.methods[kind]
            known = f"tried with {served.tried}" if served.tried else f"read, {profile.version}"
            depth = f"exact for {served.max_depth} guess a round" if served.max_depth else ""
            rows.append((method, profile.title, _given(served.formats, formats, method), known, depth))
        if not engines:
            rows.append((method, "none named", ", ".join(formats) or "no file", "", ""))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, autoescape=True
    )
    text = environment.get_template("dry_run.html.jinja").render(rows=rows)
    (folder / "index.html").write_text(text, encoding="utf-8")
    record = {"tried": tried, "engines": list(engines)}
    (folder / "tried.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
