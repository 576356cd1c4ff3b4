"""The step writes one bounded map for each prompt, in any order of its shards and after a kill."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_subjects import VOCAB

from components.bench import measure_acceptance
from components.contract import Context, Draft, Prompts, Target
from components.drafts.storage.files import build_draft, save_draft
from components.rows import AcceptanceMap, SampledRun, read_rows
from components.targets.interface import AbstractTarget


def test_the_step_writes_one_bounded_map_a_prompt(
    target: Target, drafts: list[Draft], prompts: Prompts, context: Callable[[str], Context]
) -> None:
    ctx = context("acceptance")
    made = measure_acceptance(target, drafts[0], prompts, max_new_tokens=24, max_depth=6, ctx=ctx)
    maps = read_rows(ctx.out, AcceptanceMap)
    assert sorted(m.prompt_id for m in maps) == [f"test-{number}" for number in range(5)]
    for m in maps:
        assert (m.k_max, m.trained_depth, m.method) == (6, 4, "eagle3")
        assert len(m.accepted) == len(m.proxy_accepted) == m.num_tokens - 1 <= 23
        assert all(0 <= a <= 6 for a in m.accepted + m.proxy_accepted)
        assert 0.0 <= m.repeated_bigrams < 1.0
    assert made.info["num_prompts"] == 5


def test_maps_are_the_same_in_whatever_order_their_shards_are_made_and_after_a_kill(
    target: Target, drafts: list[Draft], prompts: Prompts, context: Callable[[str], Context]
) -> None:
    def last_first(function: Callable[..., Any], shards: Sequence[Any]) -> Iterator[Any]:
        return iter([function(copy.deepcopy(shard), float) for shard in reversed(shards)][::-1])

    settings: dict[str, Any] = {"max_new_tokens": 16, "batch_size": 2, "temperature": 1.0}
    here, there, killed = context("here"), context("there"), context("killed")
    there.mapper = last_first
    made = [measure_acceptance(target, drafts[1], prompts, **settings, ctx=ctx) for ctx in (here, there)]
    for rows in ("acceptance_map.jsonl", "sampled_run.jsonl"):
        assert (there.out / rows).read_bytes() == (here.out / rows).read_bytes()
    assert made[0].info == made[1].info
    runs = read_rows(here.out, SampledRun)
    assert [run.prompt_id for run in runs] == [m.prompt_id for m in read_rows(here.out, AcceptanceMap)]
    assert all(run.num_rounds <= run.num_tokens <= 15 and run.temperature == 1.0 for run in runs)
    shutil.copy(here.scratch / "maps-00001.json", killed.scratch)
    again: list[str] = []
    killed.mapper = lambda function, shards: (again.append(s.file.name) or function(s, float) for s in shards)
    assert measure_acceptance(target, drafts[1], prompts, **settings, ctx=killed).info == made[0].info
    assert again == ["maps-00000.json", "maps-00002.json"]
    assert (killed.out / "acceptance_map.jsonl").read_bytes() == (here.out / "acceptance_map.jsonl").read_bytes()


def test_a_loop_of_its_own_is_left_room_for_its_window(
    opened: AbstractTarget, target: Target, tmp_path: Path, context: Callable[[str], Context]
) -> None:
    """A prompt that leaves room for the guesses but not for the window is set aside; it does not fail the step."""
    settings = {"window": 30, "ngram_size": 8}
    drafter = build_draft("lookahead", opened, settings, torch.arange(VOCAB))
    facts = {"num_steps": drafter.num_steps, "max_depth": drafter.max_depth, "target_key": target.key, "trained": False}
    (tmp_path / "draft").mkdir()
    save_draft(tmp_path / "draft", "lookahead", settings, opened, torch.arange(VOCAB), {}, facts)
    draft = Draft(key="l" * 64, path=tmp_path / "draft")
    rows = []
    for number, words in enumerate((20, 192 - 16 - 20)):
        row = {"prompt_id": f"test-{number}", "split": "test", "workload": "w", "source": "s", "reference": ""}
        rows.append(json.dumps({**row, "prompt": " ".join(["w5"] * words)}))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    ctx = context("acceptance")
    made = measure_acceptance(
        target, draft, Prompts(key="p" * 64, path=tmp_path / "prompts"), max_new_tokens=16, max_depth=1, ctx=ctx
    )
    assert made.info["num_prompts"] == 1


def test_the_trained_depth_is_the_default(
    target: Target, drafts: list[Draft], prompts: Prompts, context: Callable[[str], Context]
) -> None:
    ctx = context("acceptance")
    measure_acceptance(target, drafts[1], prompts, max_new_tokens=8, ctx=ctx)
    assert {m.k_max for m in read_rows(ctx.out, AcceptanceMap)} == {2}
