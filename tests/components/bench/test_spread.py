"""A target that one GPU does not hold: divided among processes it answers, shows and accepts what one process does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import dispatch_model  # type: ignore[import-untyped]
from safetensors.torch import load_file
from shards_together import Fault, meet
from transformers import AutoModelForCausalLM

from components.bench import measure_acceptance
from components.contract import Context, Conversations, Draft, Features, Prompts, Target, UserError
from components.data import record_features, write_answers
from components.rows import AcceptanceMap, read_rows
from components.targets import load_target
from components.targets.forward.transformers_model import TransformersTarget
from components.targets.load import open_target
from components.targets.spread import spread_shards

Make = Callable[[str], Context]


def loaded(target: Target, ctx: Context, **settings: Any) -> Target:
    """The same model as another artifact, whose key the drafters of the first one accept."""
    return replace(load_target(model=str(target.path), dtype="float32", **settings, ctx=ctx), key=target.key)


def test_two_processes_that_divide_a_target_answer_show_and_accept_what_one_does(
    target: Target, prompts: Prompts, drafts: list[Draft], context: Make
) -> None:
    made: dict[str, tuple[Conversations, Features, list[AcceptanceMap]]] = {}
    for name, tp_size in (("whole", 1), ("divided", 2)):
        of = loaded(target, context(f"{name}-target"), tp_size=tp_size)
        settings: dict[str, Any] = {"max_new_tokens": 12, "shard_size": 9}
        answers = write_answers(of, prompts, **settings, ctx=context(f"{name}-answers"))
        features = record_features(of, made["whole"][0] if made else answers, ctx=context(f"{name}-features"))
        ctx = context(f"{name}-acceptance")
        measure_acceptance(of, drafts[0], prompts, max_new_tokens=12, max_depth=3, batch_size=3, ctx=ctx)
        made[name] = (answers, features, read_rows(ctx.out, AcceptanceMap))
        assert not list(ctx.scratch.glob("tmp*")), "what the other processes wrote is gone"
    (answers, features, maps), (answers_2, features_2, maps_2) = made["whole"], made["divided"]
    for shard in ("shard-00000.safetensors", "shard-00001.safetensors"):
        assert (answers.path / shard).read_bytes() == (answers_2.path / shard).read_bytes()
        ours, theirs = load_file(features.path / shard), load_file(features_2.path / shard)
        for states in ("taps", "last"):
            rounding = ours[states].float().abs() * 2**-7  # a bfloat16 at most beside it
            assert bool(((ours[states].float() - theirs[states].float()).abs() <= rounding + 1e-5).all())
    assert [(row.prompt_id, row.accepted) for row in maps] == [(row.prompt_id, row.accepted) for row in maps_2]
    assert sum(sum(row.accepted) for row in maps) > 0


@pytest.mark.parametrize(
    ("kind", "kind_of_error", "said"),
    [
        ("refused", UserError, "^the second one does not like it$"),
        ("killed", Exception, "^process 2 of the 2 that hold the target has ended"),
    ],
)
def test_what_one_of_the_processes_meets_ends_all(
    kind: str, kind_of_error: type[Exception], said: str, target: Target, context: Make
) -> None:
    of, ctx = loaded(target, context("target"), tp_size=2), context("step")
    spread_shards(ctx, of)
    with pytest.raises(kind_of_error, match=said):
        list(ctx.map(meet, [Fault(ctx.out / "shard", kind)]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device_map": "auto"}, "device_map: auto spreads layers over GPUs, and this step runs on a CPU"),
        ({"device_map": "auto", "tp_size": 2}, "device_map: auto and tp_size: 2 are two ways; take one"),
        ({"tp_size": 3}, "its 4 query heads cannot be divided by tp_size: 3; set tp_size"),
    ],
)
def test_a_way_that_cannot_work_is_refused_in_one_line(
    settings: dict[str, Any], said: str, target: Target, context: Make
) -> None:
    with pytest.raises(UserError) as refused:
        loaded(target, context("target"), **settings)
    assert str(refused.value).endswith(said)


def test_a_divided_target_is_refused_where_one_process_would_open_it_but_for_three_tensors(
    target: Target, context: Make
) -> None:
    of, ctx = loaded(target, context("target"), tp_size=2), context("step")
    with pytest.raises(UserError, match="tp_size: 2 divides it among processes that only"):
        open_target(of)
    assert open_target(of, layers=False).embedding.shape == (64, 32)

    def elsewhere(function: Callable[..., Any], shards: Sequence[Any]) -> Iterator[Any]:
        raise AssertionError

    ctx.mapper = elsewhere
    with pytest.raises(UserError, match="a cluster gives it one: take device_map: auto"):
        spread_shards(ctx, of)


def test_a_model_under_the_hooks_of_a_device_map_gives_the_same_features(target: Target) -> None:
    """On a CPU all layers are in one place; what differs between places is for test_on_gpu.py."""
    whole = open_target(target, dtype="float32", kernel="transformers")
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    places = {"model.embed_tokens": "cpu", **{f"model.layers.{n}": "cpu" for n in range(7)}, "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    hooked = TransformersTarget(dispatch_model(model, places, force_hooks=True).eval(), whole.shape, location="tiny")
    ids = torch.arange(3, 40)[None]
    passes = [one.forward(ids, one.new_cache(1, 40), features=True) for one in (whole, hooked)]
    for ours, theirs in zip(*passes, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
    assert json.loads((target.path / "config.json").read_text())["num_hidden_layers"] == 7
