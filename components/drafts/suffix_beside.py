"""The step that sets suffix decoding beside a trained drafter; drafts/methods/with_suffix.py is how they take turns."""

from __future__ import annotations

import shutil

from pydantic import ValidationError

from components.contract import Context, Draft, Features, UserError
from components.drafts.quantise import INFO_FIELDS, OF_TRAINED_WEIGHTS
from components.drafts.settings import SuffixBeside, SuffixSettings
from components.drafts.storage.files import DraftRecord, read_record, save_answers, write_record
from components.drafts.training.from_features import latest_answers

STEP = "drafts.add_suffix"


def add_suffix(
    draft: Draft,
    features: Features | None,
    *,
    min_score: float | None,
    depth: int,
    max_draft_tokens: int,
    cached_tokens: int,
    ctx: Context,
) -> Draft:
    """The step `drafts.add_suffix`; its settings are explained in components/drafts/steps.py."""
    record = read_record(draft.path)
    label = f"{STEP}: {record['method']} ({draft.key[:12]})"
    if not record.get("trained", True):
        raise UserError(f"{label} is not trained: set suffix decoding beside a drafter of drafts.train_draft")
    if record.get("with_suffix"):
        raise UserError(f"{label} has suffix decoding beside it already; wire the one it was made from")
    depth = depth or record["num_steps"]
    if depth > record["max_depth"]:
        raise UserError(f"{label}: depth {depth} is deeper than it drafts ({record['max_depth']})")
    least = _expected(record, depth) if min_score is None else min_score
    try:
        settings = SuffixSettings(max_draft_tokens=max_draft_tokens, min_score=least, cached_tokens=cached_tokens)
    except ValidationError as error:
        raise UserError(f"{label}: {error.errors(include_url=False)[0]['msg']}") from error
    answers = latest_answers(record.get("target_key", ""), features, cached_tokens, STEP) if cached_tokens else []
    shutil.copyfile(draft.path / "model.safetensors", ctx.out / "model.safetensors")
    save_answers(ctx.out, answers)
    beside = SuffixBeside(settings=settings, depth=depth, drafter=draft.key).model_dump(mode="json")
    facts = {
        **{name: value for name, value in record.items() if name not in OF_TRAINED_WEIGHTS},
        "max_depth": max(depth, max_draft_tokens),
        "with_suffix": beside,
        **({"cached_answers": len(answers)} if answers else {}),
    }
    write_record(ctx.out, facts)
    ctx.note(f"{record['method']}: a copy drafts where it promises {least:.2f} right tokens, else {depth} of its own")
    info = {name: facts[name] for name in INFO_FIELDS if name in facts}
    return Draft.of_step(ctx, {**info, "with_suffix": beside})


def _expected(record: DraftRecord, depth: int) -> float:
    """Tokens of its own that a trained drafter is expected to have accepted a round."""
    held_out = record.get("held_out_al")
    return held_out - 1.0 if held_out else depth / 2
