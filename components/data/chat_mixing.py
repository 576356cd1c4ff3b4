"""Step `data.mix_chats`: conversations of any sources as one mix with declared shares, split so that nothing leaks.

Two readings of the rows: the first keeps a few numbers of each, the second writes those that were chosen. What is
chosen depends on the rows' content, the settings and the seed alone: neither on the order of the rows nor on the number
of their files or workers, and a larger limit holds all of a smaller one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from components.contract import Chats, Context, Prompts, Target, UserError
from components.data.chat_mixing_plan import Chosen, Order, Plan, Strata, Unit, left_out, line_places
from components.data.chat_mixing_shares import TooSmall, mixed_bits
from components.data.chat_mixing_splits import EVALUATION, Shares, Sides, deal_sides

if TYPE_CHECKING:
    from components.data.chat_mixing_lines import Lines
    from components.data.chat_mixing_rows import Rows

Weight = Annotated[float, Field(ge=0.0)]
Amount = Annotated[int, Field(ge=1)]
Place = tuple[str | int, ...]


def mix_chats(
    chats: list[Chats],
    target: Target | None = None,
    *,
    strata: Strata = "source",
    weights: dict[str, Weight] = {},  # noqa: B006 - settings, never written to
    by: Unit = "tokens",
    temperature: Annotated[float, Field(ge=0.1, le=100.0)] = 1.0,
    caps: dict[str, Amount] = {},  # noqa: B006
    limit: Amount | None = None,
    too_small: TooSmall = "shrink",
    max_turns: Annotated[int, Field(ge=1, le=100)] = 4,
    order: Order = "random",
    ask_once: bool = True,
    num_validation: Annotated[int, Field(ge=0)] = 48,
    num_test: Annotated[int, Field(ge=0)] = 24,
    num_warm_up: Annotated[int, Field(ge=0)] = 4,
    evaluation_percent: Annotated[int, Field(ge=0, le=90)] = 5,
    evaluation_weights: dict[str, Weight] = {},  # noqa: B006
    workload: Strata = "source",
    chars_per_token: dict[str, Annotated[float, Field(gt=0.0)]] = {},  # noqa: B006
    ctx: Context,
) -> Prompts:
    """Write `prompts.jsonl` (train, validation, test, warm_up), `mix.json` (asked and got) and `dropped.parquet`.

    Args:
        chats: what to mix; each may hold several sources.
        target: whose tokenizer counts the tokens; without one they are estimated from the characters.
        strata: what weights, caps and temperature are about: the rows' source, language or domain.
        weights: the share of each of them in training, in any scale; all must be named, 0 leaves one out. Without
            weights the shares are sizes**(1/temperature).
        by: whether shares, caps and limit count tokens or rows.
        temperature: without weights: 1 takes everything as it is, 2 favours small strata, 100 makes all alike.
        caps: at most so much of one of them; the others fill up for it.
        limit: at most so much training data in all; null is as much as there is. A larger limit holds a smaller one.
        too_small: what happens when one of them has too little for its share. shrink: the mix ends there, the shares
            hold. fill: the others go on, the shares do not hold. repeat: it is gone through again. refuse: an error.
        max_turns: with too_small: repeat, how often one may be gone through before that is an error.
        order: in which a drafter is trained on them. random: shuffled anew every epoch. Every other is a curriculum
            that each epoch follows, unless drafts.train_draft is told `order: shuffled`: short_first; easy_first, the
            short ones of every source first; by_source; by_domain.
        ask_once: of conversations that begin with the same prompt keep one, since a target answers them alike; false
            for data.write_given_answers.
        num_validation: prompts at most that choose a drafter's checkpoint.
        num_test: prompts at most for the benchmarks.
        num_warm_up: prompts at most that warm a benchmark up.
        evaluation_percent: of a hundred questions, how many are for test, warm-up and validation and never trained on.
        evaluation_weights: shares of the strata in test, warm-up and validation, by rows; empty is those of training.
        workload: what results are grouped by.
        chars_per_token: characters of a token by language, for estimates; "" is every language not named (4.0; Chinese
            and Japanese 1.6, Korean 1.8).
    """
    from components.data.chat_mixing_lines import write_lines

    plan = Plan(strata, weights, by, temperature, caps, limit, too_small, max_turns)
    wanted = {"test": num_test, "warm_up": num_warm_up, "validation": num_validation}
    rows = _read(chats, target, chars_per_token, ctx)
    keys = mixed_bits(rows.row, f"choose:{ctx.seed}")
    judged_by = Shares(rows.labels[strata], plan.shares(rows, slice(None), evaluation_weights or weights))
    sides = deal_sides(rows, keys, wanted, evaluation_percent, judged_by, ask_once)
    _check_evaluation(sides, wanted, ctx)
    chosen = plan.chosen(rows, keys, sides)
    lines = _lines(rows, sides, chosen, order, ctx.seed)
    total, characters = len(rows.row), int(rows.characters[lines.rows].sum())
    dropped = write_lines(
        chats, lines, chosen.why, characters, workload, ctx, lambda done: ctx.progress(total + done, 2 * total, "rows")
    )
    return _made(rows, plan, sides, chosen, dropped, target is not None, ctx)


def mix_chats_settings(given: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Place, str]]]:
    """The settings, and what no type can say of them; flows/signature.py asks when it reads pipelines.yaml."""
    faults: list[tuple[Place, str]] = []
    if given["weights"] and given["temperature"] != 1.0:
        said = "setting 'temperature': it makes shares out of sizes, and 'weights' give the shares; keep one of the two"
        faults.append((("temperature",), said))
    for name in ("weights", "evaluation_weights"):
        if given[name] and not any(given[name].values()):
            faults.append(((name,), f"setting '{name}': one at least must be above 0"))
    if given["too_small"] in ("repeat", "refuse") and given["limit"] is None:
        faults.append(
            (("too_small",), f"setting 'too_small': {given['too_small']} needs a limit to reach; give 'limit'")
        )
    wanted = given["num_validation"] + given["num_test"] + given["num_warm_up"]
    if wanted and not given["evaluation_percent"]:
        said = f"setting 'evaluation_percent': with 0 there is nothing for {wanted} prompts to judge by; give 1 or more"
        faults.append((("evaluation_percent",), said))
    return given, faults


def _read(chats: Sequence[Chats], target: Target | None, chars_per_token: Mapping[str, float], ctx: Context) -> Rows:
    from components.data.chat_mixing_rows import counted_by_characters, counted_by_target, read_rows
    from components.data.chats import read_manifest

    total = sum(int(read_manifest(one)["num_rows"]) for one in chats)
    if not total:
        raise UserError("chats: there are no rows in them; collect some, or clean less strictly")
    counted = counted_by_target(target) if target is not None else counted_by_characters(chars_per_token)
    return read_rows(chats, counted, lambda done: ctx.progress(done, 2 * total, "rows"))


def _check_evaluation(sides: Sides, wanted: Mapping[str, int], ctx: Context) -> None:
    for split, need in wanted.items():
        got = len(sides.judged_on[split])
        if need and not got:
            raise UserError(
                f"num_{split}: no row is left for split {split} ({left_out(sides.why)}); raise evaluation_percent, "
                f"give more rows, or num_{split}: 0"
            )
        if got < need:
            ctx.note(f"{got} {split.replace('_', ' ')} prompts of the {need} asked for; evaluation_percent gives more")


def _lines(rows: Rows, sides: Sides, chosen: Chosen, order: Order, seed: int) -> Lines:
    """Every line of the file: test, warm-up and validation first, as in data.collect_prompts."""
    import numpy

    from components.data.chat_mixing_lines import Lines

    judged = numpy.concatenate([sides.judged_on[split] for split in EVALUATION])
    places = line_places(rows, chosen.rows, chosen.turns, order, seed)
    return Lines(
        numpy.concatenate([judged, chosen.rows[places]]),
        numpy.concatenate([numpy.zeros(len(judged), dtype=numpy.int64), chosen.turns[places]]),
        [split for split in EVALUATION for _ in sides.judged_on[split]] + ["train"] * len(places),
        None if order == "random" else len(judged),
    )


def _made(
    rows: Rows, plan: Plan, sides: Sides, chosen: Chosen, dropped: dict[str, int], exact: bool, ctx: Context
) -> Prompts:
    """Write mix.json and say what became of the mix."""
    from components.data.chat_mixing_report import sentences, strata_table

    table = strata_table(rows, chosen, sides.judged_on, plan.strata, plan.unit(rows))
    tokens = int(rows.tokens[chosen.rows].sum())
    kept = len(rows.row) - sum(dropped.values())
    mix = {
        "num_read": len(rows.row),
        "num_kept": kept,
        "num_train": len(chosen.rows),
        **{f"num_{split}": len(sides.judged_on[split]) for split in EVALUATION},
        "num_train_tokens": tokens,
        "tokens_are": "counted by the target" if exact else "estimated from characters",
        "by": plan.by,
        "strata": plan.strata,
        "seed": ctx.seed,
        "dropped": dropped,
        "said": list(chosen.said),
        "mix": table,
    }
    assert kept == int((chosen.why == 0).sum()), "a row was lost"
    (ctx.out / "mix.json").write_text(json.dumps(mix, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    about = "" if exact else " (estimated)"
    repeats = len(chosen.rows) - len(set(chosen.rows.tolist()))
    again = f", {repeats:,} of them repeats" if repeats else ""
    ctx.note(f"{len(chosen.rows):,} rows to train on{again}, {tokens:,} tokens{about}, of {len(rows.row):,} read")
    for sentence in (*chosen.said, *sentences(table, plan.strata, plan.by)):
        ctx.note(sentence)
    if dropped:
        ctx.note(f"left out: {left_out(chosen.why)}")
    return Prompts.made(ctx, mix)
