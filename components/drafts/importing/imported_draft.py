"""The step that adopts a drafter which another project wrote: a Draft artifact like those that are trained here.

The format is recognised by config and tensor names; `layout` names one instead. What is read is fitted against the
network that its settings build for this target, under the checkpoint's own names, and everything that does not fit is
said in one line. What names and shapes cannot show is measured (conventions.py): how often its first draft token is the
target's, with a warning in the step's log and in the Draft's info. The drafter then is a Draft like any other:
measured, compared, tuned (`start_from`), exported.
"""

from __future__ import annotations

import torch
from pydantic import ValidationError

from components.contract import Context, Draft, Target, UserError
from components.drafts.importing.checkpoint import FoundCheckpoint, find_checkpoint, require_room
from components.drafts.importing.conventions import measure_agreement, prompts_of
from components.drafts.importing.dflash import DFlashReader
from components.drafts.importing.eagle import Eagle1Reader, Eagle3Reader, PEagleReader, SpeculatorsReader
from components.drafts.importing.heads import MedusaReader
from components.drafts.importing.language_model import LanguageModelReader
from components.drafts.importing.mtp import MimoReader, MtpReader, OwnMtpReader, SpeculatorsMtpReader
from components.drafts.importing.reader import AbstractReader, Faults, Imported, check_fit
from components.drafts.interface import AbstractDraft
from components.drafts.methods.draft_model import resolve_model
from components.drafts.settings import DraftModelSettings, settings_class
from components.drafts.storage.files import build_draft, own_taps, read_record, save_draft, save_untrained, write_record
from components.drafts.storage.quantisation import QUANTIZATION
from components.methods import MethodName
from components.outside_json import JsonObject
from components.targets.interface import AbstractTarget, tapping
from components.targets.load import open_target
from components.targets.source import TOKENIZERS, find_folder

READERS: tuple[AbstractReader, ...] = (
    *(DFlashReader(), SpeculatorsMtpReader(), SpeculatorsReader(), PEagleReader(), Eagle3Reader(), MedusaReader()),
    *(Eagle1Reader(), OwnMtpReader(), MimoReader(), MtpReader(), LanguageModelReader()),
)
"""Every reader; a checkpoint is tried against them in this order."""


def import_draft(target: Target, *, model: str, method: MethodName, layout: str, ctx: Context) -> Draft:
    """The step `drafts.import_draft`; its settings are explained in components/drafts/steps.py."""
    torch.set_num_threads(ctx.num_threads)
    checkpoint = find_checkpoint(find_folder(model), model)
    reader = reader_of(checkpoint, layout)
    require_room(checkpoint.num_elements(reader.stored(checkpoint)), ctx.out, model)
    prompts = prompts_of(target)
    opened = open_target(target, device=ctx.device, kernel="plain")
    imported = read_drafter(checkpoint, reader, opened)
    if imported.method != method:
        raise UserError(
            f"{model}: this drafter is of method {imported.method}, not {method}; set method: {imported.method}"
        )
    for remark in imported.remarks:
        ctx.note(f"{model}: {remark}")
    origin: JsonObject = {"imported_from": model, "imported_layout": reader.layout, "import_remarks": imported.remarks}
    if imported.method == "draft-model":
        given = _given_model(checkpoint, target, needed=imported.untrained)
        if imported.untrained:
            facts = save_untrained(ctx.out, imported.method, given, target)
            write_record(ctx.out, {**read_record(ctx.out), **origin})
            return Draft.of_step(ctx, {**facts, **origin})
    network = fit_network(imported, opened, checkpoint.label)
    weights = network.state_dict()
    measured = measure_agreement(network, network.target, prompts, imported.called)
    origin |= {"import_agreement": measured.facts, "import_warning": measured.text if measured.warns else ""}
    facts = {
        "method": imported.method,
        "num_steps": network.num_steps,
        "max_depth": network.max_depth,
        "target_key": target.key,
        "draft_vocab_size": network.draft_ids.numel(),
        **own_taps(imported.method, network.target),
        **origin,
    }
    settings = settings_class(imported.method).model_validate(imported.settings).model_dump(mode="json")
    save_draft(ctx.out, imported.method, settings, network.target, network.draft_ids, weights, facts)
    num_parameters = sum(weight.numel() for weight in weights.values())
    ctx.note(f"{model}: {imported.method} ({reader.layout}), {num_parameters:,} parameters")
    ctx.note(f"{model}: {'warning: ' if measured.warns else ''}{measured.text}")
    return Draft.of_step(ctx, {**facts, "num_parameters": num_parameters})


def _given_model(checkpoint: FoundCheckpoint, target: Target, *, needed: bool) -> DraftModelSettings:
    """The settings of a language model that is used as it is; raises UserError where its tokenizer is not the target's.

    needed: whether it must have a tokenizer; one whose weights become ours may lack it, and is checked if it has one.
    """
    settings = DraftModelSettings(model=str(checkpoint.folder))
    has_tokenizer = any((checkpoint.folder / name).is_file() for name in TOKENIZERS)
    return resolve_model(target, settings) if needed or has_tokenizer else settings


def reader_of(checkpoint: FoundCheckpoint, layout: str) -> AbstractReader:
    """The reader that `layout` names, "auto" for the one that recognises the checkpoint; raises UserError for none."""
    for reader in READERS:
        if reader.layout == layout or (layout == "auto" and reader.recognises(checkpoint)):
            return reader
    names = ", ".join(reader.layout for reader in READERS)
    raise UserError(f"{checkpoint.label}: no drafter in a format that is read here ({names}); is it one?")


def read_drafter(checkpoint: FoundCheckpoint, reader: AbstractReader, target: AbstractTarget) -> Imported:
    """What the reader finds; raises UserError, one line, for all that does not fit the target or any method here."""
    faults = Faults(checkpoint.label)
    if checkpoint.config.get(QUANTIZATION) and checkpoint.storage is None and reader.layout != "own-mtp":
        faults.add("its weights are quantised; import the checkpoint that it was made from")
        faults.raise_any()
    imported = reader.read(checkpoint, target, faults)
    faults.raise_any()
    if checkpoint.storage is not None:
        imported.remarks.append(f"its weights are stored in {checkpoint.storage.description} and dequantised here")
    return imported


def fit_network(imported: Imported, target: AbstractTarget, label: str) -> AbstractDraft:
    """The network that the settings build, with the weights in float32; raises UserError where the two do not fit."""
    whole = torch.arange(target.shape.vocab_size)
    draft_ids = whole if imported.draft_ids is None else imported.draft_ids
    try:
        settings_class(imported.method).model_validate(imported.settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        fault = f"{'.'.join(map(str, first['loc']))} is {first['input']!r:.40}: {first['msg']}"
        raise UserError(f"{label}: no {imported.method} drafter here can be like it ({fault})") from error
    target = tapping(target, imported.tap_layers or target.tap_layers)
    network: AbstractDraft = build_draft(imported.method, target, imported.settings, draft_ids.to(target.device))
    faults = Faults(label)
    check_fit(imported, network.state_dict(), faults)
    faults.raise_any()
    network.load_state_dict({name: tensor.float() for name, tensor in imported.tensors.items()})
    network.eval().requires_grad_(False)
    return network
