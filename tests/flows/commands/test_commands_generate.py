"""`draftsmith generate` finds the drafter of a policy or a Draft, and says what else it was given."""

from __future__ import annotations

import pytest

from components.contract import UserError
from flows.commands.generate import find_pair
from storage.artifacts.store import Store


def test_without_any_policy_it_says_what_makes_one(store: Store) -> None:
    with pytest.raises(UserError, match="generate: no drafter has been chosen yet; `draftsmith run quickstart`"):
        find_pair(store, None)


def test_a_key_that_is_not_there_is_told(store: Store) -> None:
    with pytest.raises(UserError):
        find_pair(store, "0123456789")
