"""Wrong settings are one line each before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from components.data.settings import WorkloadSource, mix_chats_settings
from flows.planning.step_signature import resolve


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("eaglechatt", "no preset (did you mean 'eaglechat'?), and no path"),
        ({"pth": "a.jsonl"}, "unknown field 'pth' of a source (did you mean 'path'?)"),
        ({}, "name a preset or a path"),
        ({"preset": "sharegpt", "fields": {"text": "t"}}, "a preset knows its fields"),
        ({"path": "a.jsonl", "fields": {"mesages": "m"}}, "must be one of 'messages'"),
        ({"path": "a.jsonl", "language": "english"}, "two letters"),
        ({"path": "a.jsonl", "revision": "main"}, "count by their content"),
        ({"path": "a.jsonl", "max_rows": 0}, "greater than or equal to 1"),
        ({"path": "**"}, "add `name`"),
        (3, "must be an object"),
    ],
)
def test_a_mistyped_source_costs_one_line_before_anything_runs(source: Any, said: str) -> None:
    settings, faults = resolve("data.collect_chats").settings({"sources": [source]})
    assert settings == {} and len(faults) == 1
    assert said in faults[0][1] and "\n" not in faults[0][1]


def test_names_and_patterns_are_checked_before_anything_runs() -> None:
    step = resolve("data.collect_chats")
    given = {"sources": ["eaglechat", "a/x.jsonl"]}
    settings, faults = step.settings(given)
    assert not faults
    assert [source.label for source in step.arguments(settings)["sources"]] == ["eaglechat", "x"]
    _, faults = step.settings({"sources": ["a/x.jsonl", "b/x.json"], "clean": {"also_refusals": ["("]}})
    assert [place for place, _ in faults] == [("clean",), ("sources",)]
    assert "regular expression" in faults[0][1] and "two are called 'x'" in faults[1][1]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({"path": "x.jsonl"}, "need a workload"),
        ({"path": "x.jsonl", "workload": "chat"}, "need a language"),
        ({"workload": "chat"}, "name a preset or a path"),
        ({"preset": "gsm9k"}, "preset"),
        ({"preset": "gsm8k", "paht": "x"}, "paht"),
        ({"preset": "gsm8k", "path": "x.jsonl", "revision": "main"}, "leave one out"),
    ],
)
def test_a_source_that_says_too_little_is_refused(source: dict[str, str], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        WorkloadSource.model_validate(source)


def test_wrong_settings_are_one_line_before_anything_runs() -> None:
    step = resolve("data.mix_chats")
    for given_, said in [
        ({"weights": {"a": 1.0}, "temperature": 2.0}, "'temperature'"),
        ({"weights": {"a": 0.0}}, "one at least must be above 0"),
        ({"too_small": "repeat"}, "needs a limit to reach; give 'limit_tokens'"),
        ({"limit_rows": 9}, "shares are by tokens ('by'), so give 'limit_tokens'"),
        ({"limit": 9}, "unknown setting 'limit' (did you mean 'limit_rows'?)"),
        ({"evaluation_percent": 0}, "nothing for 76 prompts"),
        ({"weights": {"a": -1.0}}, "greater than or equal to 0"),
        ({"order": "long_first"}, "must be one of"),
    ]:
        _, faults = step.settings(given_)
        assert len(faults) == 1 and said in faults[0][1], (given_, faults)
    resolved, faults = step.settings({})
    assert not faults and mix_chats_settings(resolved) == (resolved, [])
