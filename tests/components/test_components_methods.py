"""The table of methods names each once, and every address in it leads to what bears that name."""

from __future__ import annotations

from typing import get_args

from components.drafts.settings import Settings
from components.methods import METHODS, MethodName, decoding_loop_of, gguf_base_of, is_trained, load_object


def test_the_table_and_the_names_that_a_step_takes_are_the_same() -> None:
    assert set(METHODS) == set(get_args(MethodName))


def test_every_address_leads_to_its_class() -> None:
    for name, method in METHODS.items():
        assert load_object(method.draft_class).method == name
        assert issubclass(load_object(method.settings_class), Settings)
        assert load_object(method.settings_class)().trained == method.trained == is_trained(name)
        assert not method.decoding_loop or callable(load_object(method.decoding_loop))


def test_what_rows_name_and_the_table_does_not_is_taken_for_a_trained_method() -> None:
    assert is_trained("somebody's") and is_trained(None)
    assert decoding_loop_of("somebody's") == "" and gguf_base_of("somebody's") is None
