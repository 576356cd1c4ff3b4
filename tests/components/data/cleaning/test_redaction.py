"""Personal data leave a text by kind and counted; what is none stays; a missing library is one line."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.contract import UserError
from components.data.cleaning.redaction import redact, require_redaction

pytest.importorskip("phonenumbers", reason="draftsmith[redaction] is not installed")
pytest.importorskip("detect_secrets", reason="draftsmith[redaction] is not installed")


@pytest.mark.parametrize(
    ("text", "redacted", "kinds"),
    [
        ("Write to jane.doe+x@example.co.uk.", "Write to [EMAIL].", {"email": 1}),
        ("我的邮箱是zhang3@qq.com，谢谢", "我的邮箱是[EMAIL]，谢谢", {"email": 1}),
        ("Call (212) 555-0123 or +44 20 7946 0958!", "Call [PHONE] or [PHONE]!", {"phone": 2}),
        ("电话13812345678。", "电话[PHONE]。", {"phone": 1}),
        ("Pay with 4111 1111 1111 1111.", "Pay with [CARD].", {"card": 1}),
        ("From 10.1.2.3，地址是192.168.1.20吗 and fe80::1.", "From [IP]，地址是[IP]吗 and [IP].", {"ip": 3}),
        ("aws AKIAIOSFODNN7EXAMPLE", "aws [KEY]", {"key": 1}),
        ("token ghp_abcdefghijklmnopqrstuvwxyz0123456789", "token [KEY]", {"key": 1}),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "[KEY]", {"key": 1}),
    ],
)
def test_what_is_personal_is_replaced_and_counted(text: str, redacted: str, kinds: dict[str, int]) -> None:
    assert redact(text) == (redacted, kinds)


@pytest.mark.parametrize(
    "text",
    [
        "On 2023-10-11 we sold 1,234,567 units; pi is 3.14159265358979.",
        "Not a card: 4111 1111 1111 1112",
        "std::vector, a::b, 12:30:45, version 1.2.3.4.5, localhost 127.0.0.1",
        "@decorator, user@host, and/or",
        "圆周率约为3.14159，2023年10月11日，共1234567件。",
    ],
)
def test_what_is_not_personal_stays(text: str) -> None:
    assert redact(text) == (text, {})


@given(st.text(max_size=300))
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once, _ = redact(text)
    assert redact(once) == (once, {})


def test_a_missing_library_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phonenumbers", None)
    with pytest.raises(UserError, match=r"redact: true needs phonenumbers.*draftsmith\[redaction\]"):
        require_redaction()
