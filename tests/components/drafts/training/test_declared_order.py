"""An order that a mix declares is the order in which a drafter is trained, whatever sorts the rows on the way.

Over the whole chain, with real steps: chats, mix, answers (which are sorted by length), features, batches.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_drafts import new_context
from tiny_targets import make_tiny_target, make_tiny_tokenizer

from components.contract import Chats, Context, Conversations, Features, Prompts, Target
from components.data import (
    features_on_the_fly,
    mix_chats,
    mix_prompts,
    record_features,
    write_answers,
    write_given_answers,
)
from components.data.features.format import FeatureRow, open_features
from components.data.formats.chats import Chat, ChatWriter
from components.data.formats.prompts import read_prompts
from components.drafts import train_draft
from components.drafts.training.batches import BatchOrder, Packing
from components.drafts.training.from_features import DataChoice, batch_order

WORDS = ("sort", "rows", "of", "a", "table", "by", "name", "then", "read", "every", "file")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PACKINGS: tuple[Packing, ...] = ("none", "bucket", "pack")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = make_tiny_target("llama", tmp_path_factory.mktemp("target") / "model")
    make_tiny_tokenizer(folder, chat_template=TEMPLATE)
    return Target(key="", path=folder)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Chats:
    """Questions and answers whose lengths have nothing to do with each other, in two sources."""
    folder, chance = tmp_path_factory.mktemp("chats") / "chats", random.Random(0)
    with ChatWriter(folder) as writer:
        for number in range(48):
            question = f"{number}: {' '.join(chance.choices(WORDS, k=chance.randint(2, 25)))}?"
            answer = " ".join(chance.choices(WORDS, k=chance.randint(2, 25)))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            writer.write(Chat.of(source="ab"[number % 2], where=f"x:{number}", messages=messages))
    return Chats(key="c", path=folder)


def mixed(chats: Chats, root: Path, order: Any) -> Prompts:
    few = {"num_test": 2, "num_warm_up": 1, "num_validation": 4, "evaluation_percent": 20}
    return mix_chats([chats], order=order, **few, ctx=new_context(root / "mix"))  # type: ignore[arg-type]


def answered(target: Target, prompts: Prompts, root: Path, by: str) -> Conversations:
    ctx = new_context(root / "answers")
    if by == "source":
        return write_given_answers(target, prompts, shard_size=7, ctx=ctx)
    return write_answers(target, prompts, max_new_tokens=8, batch_size=4, shard_size=7, ctx=ctx)


def trained_on(features: Features, packing: Packing = "bucket", order: Any = "given") -> BatchOrder:
    """The batches that `train_draft` takes from these features."""
    rows = [row for row in open_features(features).rows("train") if row.num_answer_tokens >= 2]
    return batch_order(rows, DataChoice(0, 256, 2048, 4, packing, order), seed=3)


def ids_of(batches: list[list[FeatureRow]]) -> list[str]:
    return [row.row_id for batch in batches for row in batch]


@pytest.mark.parametrize(("order", "by"), [("short_first", "target"), ("by_source", "source")])
def test_batches_follow_the_declared_order_through_every_step(
    order: str, by: str, target: Target, chats: Chats, tmp_path: Path
) -> None:
    prompts = mixed(chats, tmp_path, order)
    wanted = [prompt.prompt_id for prompt in read_prompts(prompts, "train")]
    answers = answered(target, prompts, tmp_path, by)
    stored = record_features(target, answers, ctx=new_context(tmp_path / "stored"))
    live = features_on_the_fly(target, answers, ctx=new_context(tmp_path / "live"))
    if by == "target":
        assert [row.row_id for row in open_features(stored).rows("train")] != wanted  # answers were sorted by length
    for features in (stored, live):
        assert {row.place for row in open_features(features).rows("validation")} == {None}
        for packing in PACKINGS:
            found = trained_on(features, packing)
            seen = set(ids_of(found.epoch(0)))
            assert ids_of(found.epoch(0)) == [prompt_id for prompt_id in wanted if prompt_id in seen]
            assert len(seen) > 0.8 * len(wanted) and len(found.epoch(0)) > 3
            assert found.epoch(1) == found.epoch(0)
            assert next(found.from_step(len(found.epoch(0)) + 2)) == found.epoch(0)[2]


def test_without_a_declared_order_and_where_told_so_rows_are_shuffled_as_ever(
    target: Target, chats: Chats, tmp_path: Path
) -> None:
    features = {}
    for order in ("random", "short_first"):
        answers = answered(target, mixed(chats, tmp_path / order, order), tmp_path / order, "target")
        features[order] = record_features(target, answers, ctx=new_context(tmp_path / order / "features"))
    for packing in PACKINGS:
        plain = trained_on(features["random"], packing)
        rows = tuple(open_features(features["random"]).rows("train"))
        assert plain.epoch(0) == BatchOrder(rows, 256, 2048, seed=3, packing=packing).epoch(0)
        assert plain.epoch(1) != plain.epoch(0)
        # the same conversations lie in the same shards, so the same shuffle deals them alike
        told = trained_on(features["short_first"], packing, "shuffled")
        assert [ids_of(told.epoch(number)) for number in (0, 1)] == [ids_of(plain.epoch(number)) for number in (0, 1)]


@pytest.mark.parametrize("packing", PACKINGS)
def test_batches_in_order_keep_their_size_and_pack_well(packing: Packing) -> None:
    chance = random.Random(1)
    rows = tuple(FeatureRow(str(n), "w", "train", "s", n, chance.randint(4, 300), 4) for n in range(300))
    order = BatchOrder(rows, batch_tokens=1024, max_tokens=256, seed=0, packing=packing, shuffled=False)
    assert ids_of(order.epoch(0)) == [row.row_id for row in rows]
    for batch in order.epoch(0):
        lengths = [order.length(row) for row in batch]
        width = order.lane_width if packing == "pack" else max(-(-length // 32) * 32 for length in lengths)
        assert sum(lengths) <= 1024 and width * (1 if packing == "pack" else len(batch)) <= 1024
    assert len(order.epoch(0)) <= 1.4 * sum(map(order.length, rows)) / 1024 or packing != "pack"


def test_prompts_mixed_with_old_ones_have_no_declared_order(chats: Chats, tmp_path: Path) -> None:
    """An order of some of the rows is none of all."""
    new, old = (mixed(chats, tmp_path / order, order) for order in ("short_first", "random"))
    both = mix_prompts(new, old, num_warm_up=1, num_validation=2, num_test=2, ctx=new_context(tmp_path / "both"))
    assert {prompt.place for prompt in read_prompts(new, "train")} != {None}
    assert {prompt.place for prompt in read_prompts(both, "train")} == {None}


def test_training_says_that_it_keeps_to_the_order_and_what_it_never_comes_to(
    target: Target, chats: Chats, tmp_path: Path
) -> None:
    answers = answered(target, mixed(chats, tmp_path, "short_first"), tmp_path, "target")
    features = record_features(target, answers, ctx=new_context(tmp_path / "features"))

    def notes(**settings: Any) -> list[str]:
        said: list[str] = []

        def send(event: Mapping[str, Any]) -> None:
            if event["event"] == "note":
                said.append(event["message"])

        place = new_context(tmp_path / f"draft-{len(list(tmp_path.iterdir()))}")
        ctx = Context(key="k", out=place.out, scratch=place.scratch, num_threads=1, send=send)
        few = {"num_steps": 2, "batch_tokens": 96, "eval_rows": 2, "draft_vocab_size": 128}
        train_draft(target, features, **few, **settings, ctx=ctx)  # type: ignore[arg-type]
        return said

    given = notes()
    assert any("keep to the order that data.mix_chats declared" in note for note in given)
    assert any(note.startswith("num_steps: 2 ends before the last ") for note in given)
    assert not any("order" in note for note in notes(order="shuffled"))
