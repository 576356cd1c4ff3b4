"""A version's facts are in one tag of MLflow and come back as they were; versions of earlier releases are read too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paired_runs import NAME, add, light_versions, release

from components.speedup.comparison.promotion_rule import judge
from storage.record import resync
from storage.registry.fact_tags import FACTS_TAG, FILES, KEEP, OWN_TAGS, as_tags, facts_in, tags_of
from storage.registry.registry import changed_facts, promote
from storage.registry.tracking import open_client
from storage.registry.versions import facts_of

numbers = st.floats().map(repr) | st.integers().map(str)
values = st.text(min_size=1) | numbers | st.lists(st.floats() | st.text(), max_size=3).map(json.dumps)
names = st.sampled_from(OWN_TAGS) | st.text("abc_", min_size=1).map(lambda name: f"draftsmith.{name}")
facts = st.dictionaries(names | st.sampled_from(["gate.checks", "gate.comparison", "team"]), values)


@settings(deadline=None, max_examples=50)
@given(facts, st.booleans())
def test_facts_come_back_as_they_were_and_no_tag_is_longer_than_mlflow_takes(made: dict[str, str], many: bool) -> None:
    made |= {"draftsmith.some": json.dumps(["é"] * 300)} | ({"draftsmith.many": "m" * 7000} if many else {})
    tags = as_tags(made)
    assert facts_in(tags) == made and facts_in(made) == made, "also where every fact has a tag, as it was once"
    assert len(tags[FACTS_TAG]) <= 8000
    assert "draftsmith.some" not in tags and ("draftsmith.many" in tags) is many, "the longest has a tag of its own"
    assert {name for name in made if name in OWN_TAGS or name == "team"} <= tags.keys()


@pytest.fixture
def earlier(home: Path, make: Any, with_mlflow: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose version has a tag for every fact, as earlier releases made it, and two tags of people."""
    light_versions(monkeypatch)
    add(home, make, "k1")
    client = open_client(home)
    for name, fact in {**tags_of(client, NAME, 1), KEEP: "yes", "team": "night shift"}.items():
        client.set_model_version_tag(NAME, "1", name, fact)
    client.delete_model_version_tag(NAME, "1", FACTS_TAG)
    return home


def raw(home: Path) -> dict[str, str]:
    return dict(open_client(home).get_model_version(NAME, "1").tags)


def test_a_version_of_an_earlier_release_is_read_and_comes_into_the_new_form_when_it_is_written(earlier: Path) -> None:
    before = raw(earlier)
    assert tags_of(open_client(earlier), NAME, 1) == before and len(before) > 20
    assert not changed_facts(earlier, NAME)
    for _ in range(2):
        resync(earlier, judge)
        assert raw(earlier).keys() == {*OWN_TAGS, FACTS_TAG, "team"} - {FILES}
        assert tags_of(open_client(earlier), NAME, 1) == before
    assert "champion already" in promote(earlier, NAME, 1, judge=judge).note


def test_newer_evidence_takes_the_place_of_every_older_tag(earlier: Path, make: Any) -> None:
    measured = add(earlier, make, "k1", speedup_meas=1.9, meas_lo=None)
    assert measured.renewed and raw(earlier).keys() == {*OWN_TAGS, FACTS_TAG, "team"} - {FILES}
    told = tags_of(open_client(earlier), NAME, 1)
    assert told["draftsmith.speedup_meas"] == "1.9" and "draftsmith.meas_lo" not in told
    assert facts_of(earlier, release(make, "k1").path).tags.keys() - told.keys() == {"draftsmith.meas_lo"}


def test_what_somebody_writes_into_the_tag_or_beside_it_is_seen_and_a_spoilt_tag_is_mended(
    earlier: Path, make: Any
) -> None:
    add(earlier, make, "k1")
    client = open_client(earlier)
    tag = json.loads(raw(earlier)[FACTS_TAG])
    assert tag["speedup_meas"] == 1.7 and tag["gate.checks"][0]["name"] == "speedup", "a person can read it"
    client.set_model_version_tag(NAME, "1", FACTS_TAG, json.dumps({**tag, "speedup_meas": 9}))
    client.set_model_version_tag(NAME, "1", "draftsmith.al", "8.5")
    said = changed_facts(earlier, NAME)
    assert [line.partition("MLflow says ")[2].split()[0] for line in said] == [
        "draftsmith.al",
        "draftsmith.speedup_meas",
    ]
    for spoilt in ("{", "[1]", ""):
        client.set_model_version_tag(NAME, "1", FACTS_TAG, spoilt)
        assert any(
            f"{FACTS_TAG} is no JSON object any more; `draftsmith resync`" in line
            for line in changed_facts(earlier, NAME)
        )
        resync(earlier, judge)
        assert json.loads(raw(earlier)[FACTS_TAG])["speedup_meas"] == 1.7
