"""A fault is one line: short, without a password, said once with the other lines it stands on."""

from __future__ import annotations


def test_a_refused_address_is_shown_without_its_password() -> None:
    from flows.spec.diagnostics import show

    assert show("https://ann:s3cret@host/v1") == "'https://ann:***@host/v1'"
