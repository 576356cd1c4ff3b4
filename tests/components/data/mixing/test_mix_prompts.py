"""The mix of a night: the stated share of old prompts, chosen by hash, with nothing trained on that is judged on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.contract import Context, Prompts, UserError
from components.data import mix_prompts
from components.data.collect.traffic import EVALUATION
from components.data.formats.prompts import SPLITS, question_of, read_prompts


def make(root: Path, name: str, sizes: dict[str, int], texts: dict[str, list[str]] | None = None) -> Prompts:
    place = root / name
    place.mkdir()
    lines = []
    for split in SPLITS:
        for text in (texts or {}).get(split) or [f"{name} {split} {n}" for n in range(sizes.get(split, 0))]:
            row = {"prompt_id": f"{name}:{text}", "split": split, "workload": name, "source": name, "prompt": text}
            lines.append(json.dumps(row))
    (place / "prompts.jsonl").write_text("\n".join(lines))
    return Prompts(key=name, path=place)


def mixed(root: Path, new: Prompts, old: Prompts | None, **settings: object) -> Prompts:
    place = root / f"mix{len(list(root.glob('mix*')))}"
    place.mkdir()
    return mix_prompts(new, old, ctx=Context(key="m", out=place, scratch=place), **settings)  # type: ignore[arg-type]


def ids(prompts: Prompts, split: str, workload: str) -> set[str]:
    return {p.prompt_id for p in read_prompts(prompts, split) if p.workload == workload}


SIZES = {"train": 60, "test": 30, "validation": 30, "warm_up": 8}


@pytest.mark.parametrize(("share", "num_old"), [(0.0, 0), (0.25, 20), (0.5, 60), (0.7, 140), (0.9, 200)])
def test_the_share_is_of_the_whole_as_far_as_there_are_enough(tmp_path: Path, share: float, num_old: int) -> None:
    new, old = make(tmp_path, "new", SIZES), make(tmp_path, "old", {**SIZES, "train": 200})
    found = mixed(tmp_path, new, old, old_share=share)
    assert found.info["origin"]["train"] == {"new": 60, "old": num_old}
    assert found.info["old_share"] == pytest.approx(num_old / (60 + num_old))
    assert len(read_prompts(found, "train")) == 60 + num_old


def test_a_larger_share_holds_the_smaller_one(tmp_path: Path) -> None:
    new, old = make(tmp_path, "new", SIZES), make(tmp_path, "old", SIZES)
    few, many = (ids(mixed(tmp_path, new, old, old_share=share), "train", "old") for share in (0.2, 0.4))
    assert few < many


def test_splits_are_mixed_by_the_share_and_filled_from_the_other_side(tmp_path: Path) -> None:
    new, old = make(tmp_path, "new", {"train": 10, "test": 4}), make(tmp_path, "old", SIZES)
    found = mixed(tmp_path, new, old, old_share=0.5, num_test=20, num_validation=10, num_warm_up=4)
    assert found.info["origin"]["test"] == {"new": 4, "old": 16}
    assert found.info["origin"]["validation"] == {"new": 0, "old": 10}
    even = mixed(tmp_path, make(tmp_path, "newer", SIZES), old, old_share=0.5, num_test=20)
    assert even.info["origin"]["test"] == {"new": 10, "old": 10}


def test_old_prompts_that_ask_what_is_judged_on_are_not_trained_on(tmp_path: Path) -> None:
    texts = {"train": ["a", "b", "same  text"], "test": ["judged", "same text"], "validation": ["v"], "warm_up": ["w"]}
    new = make(tmp_path, "new", {}, texts)
    old = make(tmp_path, "old", {}, {**texts, "train": ["judged", "c", "b"], "test": ["t"]})
    found = mixed(tmp_path, new, old, old_share=0.9)
    trained = {question_of(p) for p in read_prompts(found, "train")}
    judged = {question_of(p) for split in EVALUATION for p in read_prompts(found, split)}
    assert trained == {"a", "b", "c"} and judged == {"judged", "same text", "t", "v", "w"}


def test_an_empty_split_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither has a prompt for split validation"):
        mixed(tmp_path, make(tmp_path, "new", {"train": 3, "test": 3}), None)
