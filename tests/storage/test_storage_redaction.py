"""No secret in what is shown or kept, and nothing in it that a terminal would obey."""

from __future__ import annotations

import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.redaction import printable, without_secrets

UNRESERVED = string.ascii_letters + string.digits + "-._~%!$*+,;=:@"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("postgresql://ada:p%40ss@db:5432/x?ssl=require", "postgresql://ada:***@db:5432/x?ssl=require"),
        ("postgresql://ada:a@b:c@db/x", "postgresql://ada:***@db/x"),
        ("https://ghp_0123456789@host/repo.git", "https://***@host/repo.git"),
        ("postgresql://db/x?user=ada&password=hidden", "postgresql://db/x?user=ada&password=***"),
        ("s3://b/k?X-Amz-Signature=abc&x=1 and more", "s3://b/k?X-Amz-Signature=***&x=1 and more"),
        ("no answer at http://a:b@h:1/api: retry", "no answer at http://a:***@h:1/api: retry"),
        ("sqlite:///home/mlflow.db", "sqlite:///home/mlflow.db"),
        ("mail ada@example.org, see https://example.org/@ada", "mail ada@example.org, see https://example.org/@ada"),
    ],
)
def test_an_address_is_shown_without_its_secrets(text: str, said: str) -> None:
    assert without_secrets(text) == said == without_secrets(said)


@given(st.text(UNRESERVED, min_size=1), st.text(string.ascii_lowercase, min_size=1, max_size=8))
def test_no_password_of_an_address_is_left(password: str, user: str) -> None:
    said = without_secrets(f"x postgresql://{user}:{password}@host:5432/db y")
    assert said == f"x postgresql://{user}:***@host:5432/db y"


def test_the_values_of_secret_variables_are_hidden_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "tok-12345")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "draftsmith:tok-12345678")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "disabled")
    monkeypatch.setenv("DB_PASSWORD", "abc")
    said = without_secrets("tok-12345 tok-12345678 draftsmith:tok-12345678 disabled abc")
    assert said == "*** *** *** disabled abc", "a value of three letters would blot out words"


@given(st.text())
def test_what_is_printed_holds_no_control_character(text: str) -> None:
    shown = printable(text)
    assert not any(unicodedata.category(one) in ("Cc", "Cf", "Cs") for one in shown if one not in "\n\t")
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_control_characters_are_spelled_out() -> None:
    assert printable("a\x1b[31m\x00\u202eb\n\tc\U000e0001") == "a\\x1b[31m\\x00\\u202eb\n\tc\\U000e0001"
