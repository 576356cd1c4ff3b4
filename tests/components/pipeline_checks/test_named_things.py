"""A name that settings give to nothing, and a vocabulary that the target does not have, are refused before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pipeline_builder import pipeline, step

from components.contract import UserError
from flows.planning.wiring import check_spec
from flows.spec.schema import load_spec

SOURCES: list[Any] = ["ultrachat", {"path": "my/chats.jsonl", "name": "mine"}]


def check(tmp_path: Path, *between: str, given: str = "chats", vocabulary: int = 0, **mixed: object) -> None:
    """Check a pipeline that mixes two sources (or what is given from outside) and trains on the mix."""
    clean = {name: step("data.deduplicate", {"chats": ["chats"]}) for name in between}
    mixing = pipeline(
        "p",
        target=step("targets.load_target", model="builtin"),
        chats=step("data.collect_chats", sources=SOURCES),
        **clean,
        mix=step("data.mix_chats", {"chats": [*between] or [given]}, **mixed),
        answers=step("data.write_answers", "target", {"prompts": "mix"}),
        features=step("data.record_features", "target", "answers"),
        draft=step("drafts.train_draft", "target", "features", draft_vocab_size=vocabulary),
    )
    file = tmp_path / "pipelines.yaml"
    file.write_text(mixing.text)
    check_spec(load_spec(file), outside=lambda name: "Chats")


@pytest.mark.parametrize("between", [(), ("clean",)])
def test_weights_of_the_sources_and_a_vocabulary_within_the_targets_are_right(
    tmp_path: Path, between: tuple[str, ...]
) -> None:
    check(tmp_path, *between, vocabulary=4096, weights={"ultrachat": 1, "mine": 0}, caps={"mine": 10})
    check(tmp_path, *between)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"weights": {"ultrachat": 1, "mien": 1}}, "weights: no source is called 'mien' (did you mean 'mine'?)"),
        ({"weights": {"ultrachat": 1}}, "weights: no weight for 'mine'; give one (0 leaves it out)"),
        ({"caps": {"zzz": 9}}, "caps: no source is called 'zzz' (known: ultrachat, mine)"),
        ({"vocabulary": 4097}, "draft_vocab_size is 4097, and the target has 4096 tokens"),
    ],
)
@pytest.mark.parametrize("between", [(), ("clean",)])
def test_what_is_not_there_is_told_with_what_is(
    tmp_path: Path, between: tuple[str, ...], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as refused:
        check(tmp_path, *between, **settings)
    assert says in str(refused.value)


def test_other_strata_and_other_peoples_chats_are_not_judged(tmp_path: Path) -> None:
    check(tmp_path, strata="language", weights={"en": 1})
    check(tmp_path, given="store:" + "a" * 64, weights={"whatever": 1})
