"""Acceptance by language: each mix against the first on the same prompts, with intervals that tell loss from luck."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from simulated_rows import make_maps

from components.contract import Context, Measurements, Prompts, UserError
from components.refusals import PROMPTS
from components.rows import AcceptanceByLanguage, AcceptanceMap, QualityFlag, read_rows
from components.speedup import measure_languages
from components.speedup.bootstrap import Estimate

Rows = Callable[[list[object]], Measurements]
NewCtx = Callable[..., Context]


def maps(key: str, english: float, chinese: float, num: int = 64, seed: int = 1) -> list[object]:
    """Chain maps of one drafter: on the same prompts the same luck, at its own skill."""
    made: list[object] = []
    for language, skill, shift in (("en", english, 0), ("zh", chinese, 1000)):
        rows = make_maps([skill] * 3, num_prompts=num, num_tokens=65, seed=seed + shift, spread=0.1, draft_key=key * 64)
        for row in rows:
            assert isinstance(row, AcceptanceMap)
            prompt = f"{language}-{row.prompt_id}"
            made.append(dataclasses.replace(row, prompt_id=prompt, language=language, num_guessable=48))
    return made


@pytest.fixture
def mix(tmp_path: Path) -> Callable[..., Prompts]:
    """A Prompts artifact with so many training prompts by language."""

    def make(**languages: int) -> Prompts:
        path = tmp_path / f"mix{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        asked = [(language, "train") for language, count in languages.items() for _ in range(count)]
        lines = [json.dumps({"split": split, "language": code}) for code, split in [*asked, ("zh", "test")]]
        (path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        return Prompts(key=path.name, path=path)

    return make


def test_a_language_that_a_mix_lacks_is_seen_to_fall_and_the_other_is_not(
    measurements: Rows, new_ctx: NewCtx, mix: Callable[..., Prompts]
) -> None:
    both, english = measurements(maps("b", 0.8, 0.75)), measurements(maps("e", 0.8, 0.4))
    made = measure_languages([both, english], [mix(en=30, zh=20), mix(en=50)], ctx=new_ctx())
    rows = {(row.draft_key[0], row.language): row for row in read_rows(made.path, AcceptanceByLanguage)}
    assert set(rows) == {(key, language) for key in "be" for language in ("all", "en", "zh")}
    lost = rows["e", "zh"]
    assert lost.verdict == "lower" and lost.change_hi is not None and lost.change_hi < 0 < lost.al
    assert lost.change == pytest.approx(lost.al - rows["b", "zh"].al)
    assert rows["e", "en"].verdict == "undecided" and rows["b", "zh"].verdict == "baseline"
    assert rows["b", "zh"].change is None and rows["b", "zh"].al_lo < rows["b", "zh"].al < rows["b", "zh"].al_hi
    assert (lost.trained_on, lost.num_trained_on, rows["b", "zh"].num_trained_on) == (["en"], 0, 20)
    assert rows["b", "all"].trained_on == ["en", "zh"] and rows["b", "all"].num_trained_on == 50
    assert {row.num_prompts for row in rows.values()} == {64, 128} and lost.coverage == 0.75
    assert made.info["lower"] and "acceptance length on zh" in made.info["lower"][0]
    assert not read_rows(made.path, QualityFlag)


def test_pairing_sees_a_difference_that_two_separate_intervals_hide(
    measurements: Rows, new_ctx: NewCtx, mix: Callable[..., Prompts]
) -> None:
    """Prompts differ far more than the drafters: a few tokens lost on every prompt show only prompt by prompt."""
    better = [m for m in maps("b", 0.6, 0.6) if isinstance(m, AcceptanceMap)]
    worse: list[object] = []
    for number, row in enumerate(better):
        fewer = [0 if place % 16 == number % 16 else kept for place, kept in enumerate(row.accepted)]
        worse.append(dataclasses.replace(row, accepted=fewer, draft_key="w" * 64))
    made = measure_languages(
        [measurements(list(better)), measurements(worse)], [mix(en=1, zh=1), mix(en=1)], ctx=new_ctx()
    )
    own, first = (
        next(
            row for row in read_rows(made.path, AcceptanceByLanguage) if (row.draft_key[0], row.language) == (key, "zh")
        )
        for key in "wb"
    )
    assert own.verdict == "lower" and own.al_hi > first.al_lo, "the separate intervals overlap"


def test_only_prompts_that_all_have_count_and_trees_are_no_part(
    measurements: Rows, new_ctx: NewCtx, mix: Callable[..., Prompts]
) -> None:
    full, part = maps("b", 0.8, 0.8), maps("e", 0.8, 0.8)[:70]  # all English, six Chinese
    trees = [dataclasses.replace(m, tree_budget=8) for m in full if isinstance(m, AcceptanceMap)]
    made = measure_languages(
        [measurements([*trees, *full]), measurements(part)], [mix(en=1, zh=1), mix(en=1)], ctx=new_ctx()
    )
    assert made.info["prompts_by_language"] == {"en": 64, "zh": 6} and made.info["depth_k"] == 3
    flags = read_rows(made.path, QualityFlag)
    assert [(flag.code, flag.value) for flag in flags] == [("few_prompts", 6.0)] and "zh" in flags[0].detail


def test_rows_of_an_older_version_have_no_language_and_no_coverage(
    measurements: Rows, new_ctx: NewCtx, mix: Callable[..., Prompts]
) -> None:
    old = [dataclasses.replace(m, language="", num_guessable=None) for m in maps("b", 0.8, 0.8)]  # type: ignore[type-var]
    made = measure_languages([measurements(list(old))], [mix(en=1)], depth_k=2, ctx=new_ctx())
    rows = read_rows(made.path, AcceptanceByLanguage)
    assert [row.language for row in rows] == ["all", "unknown"] and {row.depth_k for row in rows} == {2}
    assert all(row.coverage is None and row.verdict == "baseline" for row in rows)


def test_what_cannot_be_compared_is_told(
    measurements: Rows, new_ctx: NewCtx, mix: Callable[..., Prompts], tmp_path: Path
) -> None:
    one = measurements(maps("b", 0.8, 0.8))
    with pytest.raises(UserError, match="2 drafters and 1 mixes"):
        measure_languages([one, one], [mix(en=1)], ctx=new_ctx())
    with pytest.raises(UserError, match="no usable acceptance maps"):
        measure_languages([measurements([])], [mix(en=1)], ctx=new_ctx())
    with pytest.raises(UserError, match="share no prompt"):
        others = [dataclasses.replace(m, prompt_id=f"x{n}") for n, m in enumerate(maps("e", 0.8, 0.8))]  # type: ignore[type-var]
        measure_languages([one, measurements(list(others))], [mix(en=1), mix(en=1)], ctx=new_ctx())
    with pytest.raises(UserError, match="maps of several drafters"):
        measure_languages([measurements([*maps("b", 0.8, 0.8), *maps("e", 0.8, 0.8)])], [mix(en=1)], ctx=new_ctx())
    with pytest.raises(UserError, match=r"no prompts\.jsonl"):
        measure_languages([one], [Prompts(key="k", path=tmp_path / "nowhere")], ctx=new_ctx())


def test_the_paired_difference_of_a_thing_and_itself_is_exactly_nothing() -> None:
    import numpy as np

    some = Estimate(2.0, np.array([1.9, 2.0, 2.1]), np.array([0.1, -0.1]))
    assert some.minus_paired(some).interval() == (0.0, 0.0)


@pytest.mark.parametrize(("num", "verdict"), [(1, "undecided"), (PROMPTS.decide, "lower")])
def test_so_few_prompts_of_a_language_show_nothing(
    num: int, verdict: str, measurements: Rows, new_ctx: NewCtx, mix: Callable[..., Prompts]
) -> None:
    """The interval of one prompt has no width."""
    both, none = measurements(maps("b", 0.9, 0.9, num)), measurements(maps("e", 0.0, 0.0, num))
    made = measure_languages([both, none], [mix(en=3, zh=2), mix(en=5)], ctx=new_ctx())
    rows = {(row.draft_key[0], row.language): row for row in read_rows(made.path, AcceptanceByLanguage)}
    assert rows["e", "zh"].change_hi is not None and rows["e", "zh"].change_hi < 0
    assert rows["e", "zh"].verdict == verdict


@pytest.mark.parametrize("what", ["target_key", "dtype"])
def test_drafters_of_different_targets_are_not_compared(
    what: str, measurements: Rows, new_ctx: NewCtx, mix: Callable[..., Prompts]
) -> None:
    other = [dataclasses.replace(m, **{what: "another"}) for m in maps("e", 0.8, 0.4)]  # type: ignore[type-var]
    with pytest.raises(UserError, match=f"maps of 2 {what}s .*another"):
        measure_languages(
            [measurements(maps("b", 0.8, 0.7)), measurements(list(other))], [mix(en=3), mix(en=5)], ctx=new_ctx()
        )
