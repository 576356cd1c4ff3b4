"""A step is what its signature says: slots before the `*`, settings after it, checked strictly and told in one line."""

from __future__ import annotations

import pytest

from components.contract import UserError
from flows.planning.step_signature import named_packages, resolve, step_addresses

PACKAGES = ("components", "toybox")


def test_slots_settings_and_what_is_injected_are_read_from_the_signature() -> None:
    step = resolve("toys.grow", PACKAGES)
    assert (step.kind.__name__, str(step.slots["corpus"]), step.wants_ctx, step.measures) == (
        "Draft",
        "Corpus",
        True,
        False,
    )
    assert {"method", "num_steps"} <= set(step.setting_names)
    assert resolve("toys.measure", PACKAGES).measures


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("toys.grwo", "did you mean 'grow'?"),
        ("toyz.grow", "there is no room 'toyz' (did you mean 'toys'?)"),
        ("grow", "there is no room 'grow'"),
    ],
)
def test_an_address_that_is_none_is_told_with_its_neighbour(address: str, message: str) -> None:
    with pytest.raises(UserError) as told:
        resolve(address, PACKAGES)
    assert message in str(told.value)


def test_settings_are_strict_and_every_fault_names_its_place() -> None:
    step = resolve("toys.grow", PACKAGES)
    resolved, faults = step.settings({"method": "fern", "num_steps": 4})
    assert not faults and resolved["num_steps"] == 4
    _, faults = step.settings({"method": "fern", "num_steps": "4", "nosuch": 1})
    assert sorted(place for place, _ in faults) == [("nosuch",), ("num_steps",)]


def test_packages_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTSMITH_PACKAGES", raising=False)
    assert named_packages() == ("components",)
    monkeypatch.setenv("DRAFTSMITH_PACKAGES", "components, toybox,")
    assert named_packages() == PACKAGES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_stepz": 4}, "(did you mean 'num_steps'?)"),
        ({"zzz": 4}, "(known: method, settings, num_steps, optimizer, "),  # 24 of them: no step has too many to name
    ],
)
def test_a_wrong_setting_of_a_step_with_many_is_told_with_those_it_has(settings: dict[str, int], message: str) -> None:
    ((_, fault),) = resolve("drafts.train_draft").settings(settings)[1]
    assert message in fault


def test_a_wrong_key_in_a_mapping_is_told_with_its_neighbour() -> None:
    settings = {"sources": ["chats.jsonl"], "clean": {"role_ordr": True}}
    ((place, fault),) = resolve("data.collect_chats").settings(settings)[1]
    assert place == ("clean", "role_ordr")
    assert fault == "unknown setting 'clean.role_ordr' (did you mean 'role_order'?)"


def test_the_steps_of_all_rooms_are_found_and_nothing_else() -> None:
    addresses = step_addresses(PACKAGES)
    assert {"drafts.train_draft", "report.write_page", "toys.grow"} <= set(addresses)
    assert {resolve(address, PACKAGES).address for address in addresses} == set(addresses)
